"""Compile every Triton program in use for GPUs that need not be here, and read what came out.

    python .ci/ptx.py [--arch 80 90 100] [--only NAME ...] [--table FILE] [--against FILE]
    python .ci/ptx.py --arch 90 --programs FILE

Fails if a program spills registers, divides or exponentiates approximately in float32, or reads
logits in less than 128 bits at a time. The table has registers, and instructions a logit in each
loop over a row, counted in the machine code. `--programs` compiles what a run on the emulated
device has launched (tests/helpers/emulated.py), and prints how long each takes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when Triton is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xentlib.options import DIVERGENCES
from xentlib.torch.triton import class_programs, elementary, pair_programs, programs
from xentlib.torch.triton.launch import (
    ADDING_WARPS,
    BLOCKS_AT_ONCE,
    FURTHER,
    HIDDEN_BLOCK,
    SCALE_BLOCK,
    SCALE_WARPS,
    SUM_COLUMNS,
    SUM_ROWS,
    SUM_WARPS,
    TOKENS_AT_ONCE,
    WARPS,
    WIDE,
    compiled,
    options,
)
from xentlib.torch.triton.pairs import pair_options

DTYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, "fp64": tl.float64}
BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
COLUMNS = 128_256
POINTERS = {
    "y_ptr": "*i64",
    "order_ptr": "*i64",
    "columns_ptr": "*i64",
    "valid_ptr": "*u8",
    "dz_ptr": "*bf16",
    "x_ptr": "*bf16",
    "w_ptr": "*bf16",
    "words_ptr": "*fp64",
    "target_ptr": "*i64",
}
FLOATS = {"softcap", "label_smoothing", "z_loss", "s_softcap", "t_softcap", "beta"}
STRIDES_OF_ONE = {"step_w", "step_acc"}
# Integers that are multiples of 16 in every call: Triton compiles loads of 128 bits for those.
ALIGNED = {"ld", "ld_s", "ld_t", "ld_dz", "ld_dx", "ld_w", "ld_x", "ld_acc"}

OF_BLOCKS = ("sum_ed_ptr", "top_ptr")
SHAPED = ("bias_ptr", "scale_ptr", "softcap", "temperature_ptr")
READ_ROWS = ("loss_rows", "stats_rows", "dz_rows", "pair_")
OF_PAIRS = tuple(f"{whose}_{name}" for whose in "st" for name in SHAPED)
OF_DELTA = ("delta_ptr", "left_out_ptr")
NOT_ROUNDED = {"ROUND_TARGET": False}
FLAGS = {
    "ENTROPY": False,
    "SMOOTHING": False,
    "PREDICTED": False,
    "FIRST": False,
    "TARGET": False,
    "ROUND_TARGET": True,
    "GRADIENT": True,
    "IN_PLACE": True,
    "ROUND": tl.bfloat16,
}
ALL = {"ENTROPY": True, "SMOOTHING": True, "PREDICTED": True}


def variants() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Programs and what each is given: an option that is not named is left out."""
    loss = programs.loss_rows
    everything = {**ALL, "with": (*SHAPED, "weights_ptr", "z_loss")}
    coefficients = ("beta_ptr", "gamma_ptr")
    of_row: dict[str, tuple[Any, dict[str, Any]]] = {
        "loss_rows, plain": (loss, {}),
        "loss_rows, V a multiple of nothing": (loss, {"odd": True}),
        "loss_rows, one class": (loss, {"one": True}),
        "loss_rows, loss alone": (loss, {"GRADIENT": False}),
        "loss_rows, z-loss": (loss, {"with": ("z_loss",)}),
        "loss_rows, entropy": (loss, {"ENTROPY": True}),
        "loss_rows, predicted": (loss, {"PREDICTED": True}),
        "loss_rows, smoothing": (loss, {"SMOOTHING": True}),
        "loss_rows, smoothing and class weights": (
            loss, {"SMOOTHING": True, "with": ("weights_ptr",)},
        ),
        "loss_rows, bias": (loss, {"with": ("bias_ptr",)}),
        "loss_rows, scale": (loss, {"with": ("scale_ptr",)}),
        "loss_rows, softcap": (loss, {"with": ("softcap",)}),
        "loss_rows, temperature": (loss, {"with": ("temperature_ptr",)}),
        "loss_rows, float32": (loss, {"ROUND": tl.float32, "dz_ptr": "*fp32"}),
        "loss_rows, float16": (loss, {"ROUND": tl.float16, "dz_ptr": "*fp16"}),
        "loss_rows, everything": (loss, everything),
        "stats_rows, plain": (programs.stats_rows, {}),
        "stats_rows, entropy": (programs.stats_rows, {"ENTROPY": True}),
        "stats_rows, everything": (programs.stats_rows, everything),
        "stats_rows, given in bfloat16": (programs.stats_rows, {"z_ptr": "*bf16"}),
        "dz_rows, plain": (programs.dz_rows, {}),
        "dz_rows, entropy": (programs.dz_rows, {"with": ("beta_ptr",)}),
        "dz_rows, everything": (
            programs.dz_rows, {"with": (*SHAPED, *coefficients, "weights_ptr")},
        ),
        "dz_rows, given in bfloat16": (
            programs.dz_rows, {"z_ptr": "*bf16", "IN_PLACE": False, "TARGET": True, **NOT_ROUNDED},
        ),
    }  # fmt: skip
    for kind, name in enumerate(DIVERGENCES):
        lanes = pair_options(COLUMNS, name)
        of_kind = {"KIND": kind, "with": OF_DELTA if name == "jsd" else (), **lanes}
        of_row[f"pair_sums, {name}"] = (pair_programs.pair_sums, of_kind)
        of_row[f"pair_dz, {name}"] = (pair_programs.pair_dz, of_kind)
    of_row["pair_sums, first of a jsd"] = (
        pair_programs.pair_sums,
        {"KIND": 2, "FIRST": True, **lanes},
    )
    of_row["pair_dz, everything"] = (
        pair_programs.pair_dz,
        {"KIND": 2, "with": (*OF_PAIRS, *OF_DELTA, "own_ptr", "lse_y_ptr"), **lanes},
    )
    of_nll = {"KIND": 0, "with": ("s_temperature_ptr", "t_temperature_ptr", "own_ptr", "lse_y_ptr")}
    of_row["pair_dz, forward_kl and NLL without its temperature"] = (pair_programs.pair_dz, of_nll)
    given = {"KIND": 0, "s_ptr": "*bf16", "t_ptr": "*bf16"}
    of_row["pair_sums, given in bfloat16"] = (pair_programs.pair_sums, given)
    of_row["pair_dz, given in bfloat16"] = (pair_programs.pair_dz, given)
    found = {}
    for name, (program, more) in of_row.items():
        plain = program is loss and not {"with", *ALL, "GRADIENT"} & set(more)
        wide = plain or more.get("with") == ("z_loss",)
        found[name] = (program, {**options(COLUMNS, WIDE if wide else WARPS), **more})
    tile = {"ROWS": SUM_ROWS, "BLOCK": SUM_COLUMNS, **compiled(SUM_WARPS)}
    found["column_sums, plain"] = (programs.column_sums, {**tile, "with": ("bias_ptr",)})
    found["column_sums, everything"] = (
        programs.column_sums,
        {**tile, "with": (*SHAPED, *coefficients, "weights_ptr")},
    )
    adding = {"K": BLOCKS_AT_ONCE, "TOKENS": TOKENS_AT_ONCE, **compiled(ADDING_WARPS)}
    found["add_blocks, plain"] = (programs.add_blocks, adding)
    found["add_blocks, everything"] = (programs.add_blocks, {**adding, "with": OF_BLOCKS})
    few = {"TOKENS": TOKENS_AT_ONCE, **compiled(1)}
    found["stats_of_tokens, everything"] = (
        programs.stats_of_tokens,
        {**few, "with": (*OF_BLOCKS, "sum_d_ptr", "weight_ptr", "weights_sum_ptr")},
    )
    wide = {"BLOCK": HIDDEN_BLOCK, **compiled(4)}
    found["add_to_hidden"] = (programs.add_to_hidden, wide)
    further = {"TILE": FURTHER, **compiled(1)}
    shaped = {**further, "with": ("bias_ptr", "temperature_ptr")}
    found["take_out_rows"] = (class_programs.take_out_rows, shaped)
    found["put_rows"] = (class_programs.put_rows, further)
    found["add_to_weight"] = (programs.add_to_weight, wide)
    lanes = {"BLOCK": SCALE_BLOCK, **compiled(SCALE_WARPS)}
    found["scale"] = (elementary.scale, {**lanes, "IN_PLACE": False, "out_ptr": "*bf16"})
    found["scale, in place"] = (elementary.scale, {**lanes, "ROUND": tl.float32})
    return found


def compile_for(arch: int, program: Any, given: dict[str, Any]) -> Any:
    """As a call from `launch` is compiled, for a GPU of this compute capability."""
    given = {**FLAGS, "with": (), **given}
    optional = {*SHAPED, *OF_BLOCKS, "weights_ptr", "weight_ptr", "weights_sum_ptr", "sum_d_ptr"}
    optional |= {"beta_ptr", "gamma_ptr", "z_loss", "own_ptr", "lse_y_ptr", *OF_PAIRS, *OF_DELTA}
    if program is programs.dz_rows:
        optional.discard("own_ptr")
    optional -= set(given["with"])
    if "weights_ptr" in given["with"]:
        optional.discard("weights_sum_ptr")
    signature, constants, attributes = {}, {}, {}
    for place, name in enumerate(program.arg_names):
        if name == "V" and given.get("one"):
            signature[name], constants[name] = "constexpr", 1
        elif name in optional or name in STRIDES_OF_ONE or (name.isupper() and name in given):
            signature[name] = "constexpr"
            constants[name] = given.get(name, 1 if name in STRIDES_OF_ONE else None)
        elif name in FLOATS:
            signature[name] = "fp32"
        elif name.endswith("_ptr"):
            signature[name] = given.get(name, POINTERS.get(name, "*fp32"))
        else:
            signature[name] = "i32"
        pointer = name.endswith("_ptr") and name not in optional
        whole = name == "V" and not (given.get("odd") or given.get("one"))
        if pointer or whole or name in ALIGNED:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=attributes)
    names = ("num_warps", "enable_fp_fusion")
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={name: given[name] for name in names}
    )


TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
TYPES |= {"int64": "i64", "int32": "i32", "bool": "i1", "uint8": "u8"}


def compile_launched(arch: int, line: str) -> str:
    """A program as it was launched; returns its name."""
    module, name, warps, arguments = json.loads(line)
    signature, constants, attributes = {}, {}, {}
    for place, (argument, (kind, value)) in enumerate(arguments.items()):
        if kind in ("constexpr", "one"):
            signature[argument] = "constexpr"
            constants[argument] = 1 if kind == "one" else DTYPES.get(value, value)
            continue
        signature[argument] = f"*{TYPES[kind[1:]]}" if kind[0] == "*" else kind
        if value:
            attributes[(place,)] = [["tt.divisibility", 16]]
    program = getattr(importlib.import_module(module), name)
    source = ASTSource(fn=program, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return str(name)


def compile_all(arches: list[int], file: Path) -> None:
    lines = sorted(set(file.read_text(encoding="utf-8").splitlines()))
    ours = [line for line in lines if line.startswith('["xentlib')]
    times = []
    for arch in arches:
        for line in ours:
            start = sum(os.times()[:4])  # ptxas is a process of its own
            name = compile_launched(arch, line)
            times.append((sum(os.times()[:4]) - start, name, arch))
    print(f"{len(ours)} programs, {len(lines) - len(ours)} of tests left out; Triton", end=" ")
    print(f"{triton.__version__}, processor seconds {sum(x[0] for x in times):.0f}; slowest:")
    for seconds, name, arch in sorted(times, reverse=True)[:5]:
        print(f"  {name:20s} sm_{arch} {seconds:.1f} s")


def read(kernel: Any, entries: int) -> dict[str, Any]:
    """Of a compiled program; `entries` is how many logits a thread has in each turn of a loop."""
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = dumped(file.name, "--dump-resource-usage")
        sass = dumped(file.name, "--dump-sass")
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "approximate": len(
            re.findall(
                r"div\.(?:full|approx)|ex2\.approx|lg2\.approx|rcp\.approx\.(?:ftz\.)?f32|tanh\.approx",
                ptx,
            )
        ),
        "loads": sorted(set(re.findall(r"LDG\.E(?:\.[A-Z_]+)*?\.(\d+)\b", sass)), key=int),
        "a logit": loops(sass, entries),
    }


def dumped(path: str, what: str) -> str:
    command = [str(BINARIES / "cuobjdump"), what, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops(sass: str, entries: int) -> list[float]:
    """Instructions a logit of each loop that reads memory."""
    code = []
    for line in sass.splitlines():
        found = re.match(r"\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", line)
        if found:
            code.append((int(found[1], 16), found[2]))
    result = []
    for address, text in code:
        target = re.search(r"BRA.*?0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < address:
            body = [t for a, t in code if int(target[1], 16) <= a <= address]
            if any("LDG" in t for t in body):
                result.append(round(len(body) / entries, 1))
    return result


def defects(row: dict[str, Any], *, reads_rows: bool) -> list[str]:
    """What no program may have."""
    found = []
    if row["spills"]:
        found.append(f"{row['spills']} loads and stores of spilled registers")
    if row["approximate"]:
        found.append(f"{row['approximate']} approximate divisions or exponentials")
    if reads_rows and "128" not in row["loads"]:
        found.append(f"loads of {row['loads']} bits, none of 128")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100])
    parser.add_argument("--only", nargs="+", help="variants whose name begins with one of these")
    parser.add_argument("--table", type=Path, help="to write")
    parser.add_argument("--against", type=Path, help="a table that must say the same")
    parser.add_argument("--programs", type=Path, help="what a run has launched")
    args = parser.parse_args()
    if args.programs:
        compile_all(args.arch, args.programs)
        return 0
    found: dict[str, Any] = {"triton": triton.__version__, "programs": {}}
    wrong = []
    for name, (program, given) in variants().items():
        if args.only and not name.startswith(tuple(args.only)):
            continue
        for arch in args.arch:
            start = time.monotonic()
            lanes = given.get("BLOCK", given.get("K", given.get("TILE", 1)))
            lanes *= given.get("ROWS", 1)
            entries = lanes * given.get("TOKENS", 1) // (32 * given["num_warps"])
            row = read(compile_for(arch, program, given), entries)
            found["programs"].setdefault(name, {})[f"sm_{arch}"] = row
            said = defects(row, reads_rows=name.startswith(READ_ROWS) and not given.get("one"))
            wrong += [f"{name}, sm_{arch}: {text}" for text in said]
            print(f"{name:38s} sm_{arch} {row} {time.monotonic() - start:.1f} s", flush=True)
    if args.against:
        wrong += differences(json.loads(args.against.read_text(encoding="utf-8")), found)
    if args.table:
        args.table.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def differences(table: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Of what was compiled from what is committed; a compiler of its own makes its own code."""
    if table["triton"] != found["triton"]:
        return []
    return [
        f"{name}, {arch}: {row}, in the table {table['programs'].get(name, {}).get(arch)}"
        for name, rows in found["programs"].items()
        for arch, row in rows.items()
        if table["programs"].get(name, {}).get(arch) != row
    ]


if __name__ == "__main__":
    sys.exit(main())
