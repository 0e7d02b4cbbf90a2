"""Compile heads for TPUs that are not there, with libtpu from PyPI, and read what came out.

    python .ci/tpu.py [--chip v5p] [--head llama3-8b ...] [--call nll ...] [--out FILE]

Of each program: products with the vocabulary as a dimension; bytes a logit that all instructions,
products included, read and write in the block that moves most; copies and transpositions of whole
logits or heads; temporaries, and the live peak with arguments and results; the compiler's own model
of time beside that of the three bare products of a chunk. Beside xentlib: optax on full float32
logits, and a tiling by `jax.checkpoint` over eight chunks, as MaxText has one. Nothing runs.

Only the compiler is asked. `cost_analysis` counts the body of a loop once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "build" / "libtpu"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
os.environ["TPU_LIBRARY_PATH"] = f"{sys.path[2]}/libtpu/libtpu.so"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # which asks for a cloud's metadata, for minutes
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xentlib.jax as ours
from helpers.instructions import Instruction, Program
from xentlib.plan import (
    SMALL_TPU_BYTES,
    SMALL_TPUS,
    TPU_ROW_MULTIPLE,
    default_chunk_bytes,
    peak_bytes,
    plan_chunks,
)

GIB, DEVICES, TILES = 2**30, 4, 8
CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}


class Head(NamedTuple):
    tokens: int
    hidden: int
    vocab: int
    options: tuple[tuple[str, Any], ...] = ()
    dtype: str = "bfloat16"
    layout: str = "VH"

    @property
    def weight(self) -> tuple[int, int]:
        shape = self.vocab, self.hidden
        return shape if self.layout == "VH" else shape[::-1]


HEADS = {
    "llama3-8b": Head(8192, 4096, 128_256),
    "llama3-8b HV": Head(8192, 4096, 128_256, layout="HV"),
    "llama3-8b float32": Head(8192, 4096, 128_256, dtype="float32"),
    "gemma2-2b": Head(8192, 2304, 256_000, (("softcap", 30.0),)),
    "gemma3-27b": Head(8192, 5376, 262_208),
    "qwen3-0.6b": Head(8192, 1024, 151_936),
    "gpt2": Head(8192, 768, 50_257),
    "small": Head(8192, 512, 50_001, (("max_chunk_bytes", 2**27),)),
}


# --- what is called: of a head's options, functions of hidden states, a head and labels ----------


def nll(options: dict[str, Any]) -> Any:
    return lambda h, w, y: ours.chunked_nll(h, w, y, **options).loss


def logprobs(options: dict[str, Any]) -> Any:
    return lambda h, w, y: ours.chunked_logprobs(h, w, y, **options).logprobs.sum()


def divergence(options: dict[str, Any]) -> Any:
    def loss(h: Any, w: Any, y: Any) -> Any:
        del y
        layout = options["weight_layout"]
        teacher = ours.TeacherHead(
            *jax.lax.stop_gradient((h, w)), None, 1.0, None, weight_layout=layout
        )
        return ours.chunked_divergence(h * 2, w, teacher, kind="reverse_kl", **options).loss

    return loss


def kept_sets(options: dict[str, Any]) -> Any:
    """Eight classes of each token, and their log-probabilities among 64."""

    def loss(h: Any, w: Any, y: Any) -> Any:
        classes = (y[:, None] + jnp.arange(64)) % 1024
        out = ours.chunked_logprobs(h, w, y, kept=classes, ids=classes[:, :8], **options)
        return out.ids_logprobs.sum()

    return loss


def logits_of(h: Any, w: Any, layout: str) -> Any:
    columns = 1 if layout == "VH" else 0
    return jax.lax.dot_general(
        h, w, (((1,), (columns,)), ((), ())), preferred_element_type=jnp.float32
    )


def full_logits(options: dict[str, Any]) -> Any:
    import optax

    def loss(h: Any, w: Any, y: Any) -> Any:
        z = logits_of(h, w, options["weight_layout"])
        if "softcap" in options:
            z = options["softcap"] * jnp.tanh(z / options["softcap"])
        return optax.softmax_cross_entropy_with_integer_labels(z, y).mean()

    return loss


def tiled(options: dict[str, Any], tiles: int = TILES) -> Any:
    whole = full_logits(options)

    def loss(h: Any, w: Any, y: Any) -> Any:
        @jax.checkpoint
        def tile(total: Any, xs: Any) -> Any:
            return total + whole(xs[0], w, xs[1]), None

        parts = h.reshape(tiles, -1, h.shape[1]), y.reshape(tiles, -1)
        return jax.lax.scan(tile, jnp.float32(0), parts)[0] / tiles

    return loss


def products(options: dict[str, Any]) -> Any:
    """Three, of one chunk: what a gradient takes at least."""

    def step(h: Any, w: Any, y: Any) -> Any:
        del y
        z = logits_of(h, w, options["weight_layout"])
        dz = jax.lax.optimization_barrier(z).astype(h.dtype)
        columns = 0 if options["weight_layout"] == "VH" else 1
        kinds = {"preferred_element_type": jnp.float32}
        of_hidden = jax.lax.dot_general(dz, w, (((1,), (columns,)), ((), ())), **kinds)
        sides = (dz, h) if columns == 0 else (h, dz)
        return of_hidden, jax.lax.dot_general(*sides, (((0,), (0,)), ((), ())), **kinds)

    return step


def gradients(call: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda options: jax.value_and_grad(call(options), (0, 1))


def in_shards(options: dict[str, Any]) -> Any:
    """Of a device: `vocab_parallel` inside `shard_map`."""
    step = gradients(nll)({**options, "vocab_parallel": "x"})
    specs = P(), P("x") if options["weight_layout"] == "VH" else P(None, "x"), P()
    return lambda mesh: jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(P(), (P(), specs[1]))
    )


def precomputed(options: dict[str, Any]) -> Any:
    del options
    return jax.value_and_grad(lambda z, y: ours.vocab_parallel_logprobs(z, y).logprobs.sum())


def precomputed_optax(options: dict[str, Any]) -> Any:
    import optax

    del options
    loss = optax.softmax_cross_entropy_with_integer_labels
    return jax.value_and_grad(lambda z, y: loss(z.astype(jnp.float32), y).sum())


SOFT = "class probabilities"  # in place of labels
LOGITS = ("precomputed logits", "optax of precomputed logits")  # in place of hidden states and head
CALLS = {
    "nll": gradients(nll),
    "nll alone": nll,
    "nll recompute": gradients(lambda options: nll({**options, "recompute": True})),
    "logprobs": gradients(logprobs),
    "logprobs alone": logprobs,
    "divergence": gradients(divergence),
    "kept": gradients(kept_sets),
    SOFT: gradients(nll),
    **dict(zip(LOGITS, (precomputed, precomputed_optax), strict=True)),
    "vocab_parallel": in_shards,
    "mesh auto": gradients(nll),
    "mesh explicit": gradients(nll),
    "optax": gradients(full_logits),
    "optax alone": full_logits,
    "tiling": gradients(tiled),
    "products": products,
}
BESIDE = ("divergence", SOFT)  # whose chunks have another beside them, and half as many tokens
IN_BLOCKS = ("nll alone", "nll recompute", "logprobs", "logprobs alone", "kept")  # of classes
MESHES = {"mesh auto": AxisType.Auto, "mesh explicit": AxisType.Explicit}
PEERS = ("optax", "optax alone", "tiling", "products", LOGITS[1])
OPTIONS_OF_PEERS = ("softcap", "weight_layout")


# --- compiled ------------------------------------------------------------------------------------


def compiled(head: Head, name: str, devices: list[Any]) -> tuple[Any, float]:
    """The program, and the processor seconds that tracing and compiling took."""
    options = {**dict(head.options), "weight_layout": head.layout}
    if name in PEERS:
        options = {x: y for x, y in options.items() if x in OPTIONS_OF_PEERS}
    several = devices if name == "vocab_parallel" or name in MESHES else devices[:1]
    kind = MESHES.get(name, AxisType.Auto)
    mesh = Mesh(np.array(several), ("x",), axis_types=(kind,))
    specs = {
        "vocab_parallel": (P(), P("x") if head.layout == "VH" else P(None, "x"), P()),
        **dict.fromkeys(MESHES, (P("x"), P(None, "x"), P("x"))),  # tokens; the width of the head
    }.get(name, (P(), P(), P()))
    plan = plan_of(head, "nll", devices[0].device_kind)
    tokens = plan.even_tokens if name == "products" else head.tokens
    labels = ((tokens, head.vocab), head.dtype) if name == SOFT else ((tokens,), "int32")
    arrays = [((tokens, head.hidden), head.dtype), (head.weight, head.dtype), labels]
    arrays = [((tokens, head.vocab), head.dtype), labels] if name in LOGITS else arrays
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(arrays, specs[: len(arrays)], strict=True)
    ]
    step = CALLS[name](options)
    start = time.process_time()
    if name == "vocab_parallel":
        step = step(mesh)
    with jax.set_mesh(mesh) if name in MESHES else nullcontext():
        made = jax.jit(step).lower(*shapes).compile()
    return made, time.process_time() - start


def plan_of(head: Head, name: str, kind: str) -> Any:
    """Of what one device has: a part of the classes, or of the tokens of a mesh."""
    default = default_chunk_bytes("tpu", memory=SMALL_TPU_BYTES if kind in SMALL_TPUS else 0)
    asked = dict(head.options).get("max_chunk_bytes", default)
    return plan_chunks(
        head.tokens // (DEVICES if name in MESHES else 1),
        -(-head.vocab // (DEVICES if name == "vocab_parallel" else 1)),
        head.hidden,
        dtype=head.dtype,
        max_chunk_bytes=asked // (2 if name in BESIDE else 1),
    )


# --- read ----------------------------------------------------------------------------------------

MOVES = ("copy", "transpose")


def read(head: Head, name: str, kind: str, made: Any) -> dict[str, Any]:
    program, memory = Program(made.as_text()), made.memory_analysis()
    seconds = made.cost_analysis()["optimal_seconds"]
    plan = plan_of(head, name, kind)
    plan = plan.in_blocks("jax") if name in IN_BLOCKS else plan
    classes, tokens = plan.vocab_size, plan.even_tokens
    tokens += -tokens % TPU_ROW_MULTIPLE if name not in PEERS else 0
    if name in (SOFT, LOGITS[0]):  # rows are in the order of the tokens, in whole chunks
        tokens = next(n for n in range(tokens, 0, -TPU_ROW_MULTIPLE) if head.tokens % n == 0)
    whole = dict.fromkeys(("optax", LOGITS[1], "optax alone"), head.tokens)
    whole["tiling"] = head.tokens // TILES
    logits = whole.get(name, tokens) * classes
    called = {x.called for block in program.blocks.values() for x in block if x.called}
    blocks = [block for label, block in program.blocks.items() if label not in called]
    least = min(logits, classes * head.hidden)
    moved = [traffic(program, block, logits) / logits for block in blocks]
    loops = sorted((round(x, 1) for x in moved if x >= 1), reverse=True)
    copies = [
        x for block in blocks for x in program.inner(block)
        if x.opcode in MOVES and x.results and math.prod(x.result.dims) >= least
    ]  # fmt: skip
    return {
        "products": sum(vocabulary_products(program, block, classes) for block in blocks),
        # Of each block that moves any; not known where a chunk is as large as rows of the head.
        "bytes_a_logit": loops if tokens != head.hidden else None,
        "copies": len(copies),
        "temporary_gib": round(memory.temp_size_in_bytes / GIB, 3),
        "live_gib": round(memory.peak_memory_in_bytes / GIB, 3),
        "model_ms": round(1e3 * seconds, 2) if seconds > 0 else None,
    }


def is_near(entries: int, logits: int) -> bool:
    """Whether an array is of a chunk's logits, in any order and filled up to whole tiles."""
    return 0.9 * logits <= entries <= 1.13 * logits


def traffic(program: Program, block: list[Instruction], logits: int) -> int:
    """Bytes of arrays of logits that instructions read and write, products included."""
    known, total = {x.name: x for x in block}, 0
    passing = ("bitcast", "get-tuple-element", "parameter", "tuple", "constant", "while")
    passing += ("copy-start", "conditional", "call")

    def origin(name: str) -> Instruction | None:
        one = known.get(name)
        while one and one.opcode == "bitcast" and one.operands[0] in known:
            one = known[one.operands[0]]
        return one

    for one in block:
        if one.opcode in passing:
            continue
        total += sum(x.bytes for x in one.results if is_near(math.prod(x.dims), logits))
        for position, name in enumerate(one.operands):
            source = origin(name)
            if source is None or len(source.results) != 1:  # what takes one of several is read
                continue
            array = source.result
            if is_near(math.prod(array.dims), logits) and not program.picks(one, position):
                total += array.bytes
    return total


def vocabulary_products(program: Program, block: list[Instruction], classes: int) -> int:
    """Convolutions, as products are on a TPU, with the vocabulary as a dimension."""
    inner = program.inner(block)
    dims = {x.name: x.result.dims for x in inner if x.results}
    sides = [
        (x.result.dims, *(dims.get(name, ()) for name in x.operands[:2]))
        for x in inner
        if x.opcode == "convolution"
    ]
    near = range(classes, int(1.03 * classes) + 1)
    return sum(any(n in near for one in shapes for n in one) for shapes in sides)


def planned(head: Head, name: str, kind: str) -> float | None:
    """GiB of the plan beside a call's inputs, and them."""
    if name not in ("nll", "nll alone", "nll recompute", "logprobs"):
        return None
    more = {"gradient": name != "nll alone", "recompute": name in ("nll recompute", "logprobs")}
    plan, itemsize = plan_of(head, name, kind), jnp.dtype(head.dtype).itemsize
    total = peak_bytes(plan, backend="jax", dtype=head.dtype, platform="tpu", **more)
    weight = head.hidden * head.vocab
    total += itemsize * (weight + head.hidden * head.tokens)
    # What the formula says that it has not.
    total += itemsize * weight if head.layout == "HV" and name != "nll alone" else 0
    if "softcap" in dict(head.options) and name != "nll alone":
        total += itemsize * plan.even_tokens * head.vocab
    return round(total / GIB, 3)


def main() -> int:
    new = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    new.add_argument("--chip", nargs="*", choices=CHIPS, default=["v5p"])
    new.add_argument("--head", nargs="*", choices=HEADS, default=list(HEADS))
    new.add_argument("--call", nargs="*", choices=CALLS, default=list(CALLS))
    new.add_argument("--out", type=Path, help="a table that it is added to")
    new.add_argument("--column", default="now", help="of the table")
    args = new.parse_args()
    if not Path(os.environ["TPU_LIBRARY_PATH"]).is_file():
        print("libtpu is not in build/libtpu; `make tpu` downloads it, 213 MB")
        return 1
    jax.config.update("jax_enable_compilation_cache", False)
    table = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    column = table.setdefault(args.column, {})
    for chip in args.chip:
        devices = topologies.get_topology_desc(CHIPS[chip], "tpu").devices
        for label in args.head:
            for name in args.call:
                key = f"{chip}, {label}, {name}"
                try:
                    made, seconds = compiled(HEADS[label], name, devices)
                    what = HEADS[label], name, devices[0].device_kind
                    found = {"processor_s": round(seconds, 1), **read(*what, made)}
                    found |= {"planned_gib": x} if (x := planned(*what)) else {}
                except Exception as error:  # noqa: BLE001 - what does not compile is a finding
                    found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
                column[key] = found
                print(key, json.dumps(found), flush=True)
                if args.out:
                    table.setdefault("heads", {})[label] = HEADS[label]._asdict()
                    args.out.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
