"""Triton's programs compiled for GPUs that are not here; `make ptx` compiles all of them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from conftest import HAS_TORCH
from helpers.collected import collected

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not HAS_TORCH or importlib.util.find_spec("triton") is None,
        reason="Triton is not installed",
    ),
]
# Of the sums of a block: what each width and both programs have, but for the number of warps. Then
# a program whose `tl.exp` compiles to an instruction of 22 bits; the interpreter computes it
# exactly. In one process, as the start of one takes seconds.
CHANGED = """
import os, re, runpy, sys
sys.argv = ["ptx.py"]
os.environ.pop("TRITON_INTERPRET", None)
made = runpy.run_path({path!r})
from xentlib.torch.triton import programs
from xentlib.torch.triton.launch import options
for dtype in ("*fp32", "*bf16"):
    layouts = set()
    for columns in (128, 700, 128_256):
        program = programs.loss_rows if columns == 700 else programs.stats_rows
        given = {{**options(columns), "z_ptr": dtype, "PREDICTED": True, "ENTROPY": True}}
        text = made["compile_for"](90, program, given).asm["ttgir"]
        names = dict(re.findall(r"(#blocked\\d*) = #ttg.blocked<(.*?)>", text))
        of_tile = r"\\(tensor<\\d+x\\d+x\\d+xf32, (#\\w+)>\\) -> tensor<\\d+x\\d+xf32"
        of_program = {{names[x] for x in re.findall(of_tile, text)}}
        layouts |= {{re.sub(r"warpsPerCTA = .\\d, \\d, 1., ", "", x) for x in of_program}}
    print(dtype, *layouts)
sys.argv += ["--arch", "90", "--only", "loss_rows, plain"]
import triton.language as tl
from xentlib.torch.triton import row
row.exp = tl.exp
runpy.run_path({path!r}, run_name="__main__")
"""


def compiled(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Without the interpreter, which is chosen when Triton is imported, and without its cache."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_ALWAYS_COMPILE"] = "1"
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )


PROGRAMS = ("loss_rows, plain", "column_sums, plain", "add_to_weight", "dz_rows, given")
PROGRAMS += ("loss_rows, everything", "pair_dz, everything")


@pytest.fixture(scope="module")
def programs(request: Any) -> subprocess.CompletedProcess[str]:
    """All that are asked for in one process."""
    names = collected(request, PROGRAMS)
    table = ["--against", "docs/data/kernels.json"]
    return compiled(".ci/ptx.py", "--arch", "90", *table, "--only", *names)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compile_to_what_is_written_down(programs: Any, name: str) -> None:
    """No spill, no approximate division or exponential, loads of 128 bits, and the registers and
    instructions a logit of the committed table."""
    assert programs.returncode == 0, programs.stderr
    lines = [line for line in programs.stdout.splitlines() if "sm_90" in line]
    assert sum(line.lstrip().startswith(name) for line in lines) == 1, programs.stdout


@cache
def changed() -> subprocess.CompletedProcess[str]:
    return compiled("-c", CHANGED.format(path=str(ROOT / ".ci" / "ptx.py")))


def test_an_approximate_exponential_is_seen() -> None:
    assert changed().returncode == 1
    assert "approximate" in changed().stderr.splitlines()[-1]


def test_every_width_adds_a_block_in_one_order() -> None:
    """A18 on a device: 128 bits of a block a thread, and warps that have blocks of their own.
    Catches: fewer columns than a warp has room for, whose parts would be other threads'."""
    lines = [line for line in changed().stdout.splitlines() if line.startswith("*")]
    assert lines, changed().stderr
    for line, entries in zip(lines, (4, 8), strict=True):
        assert line.count("order") == 1, line
        assert f"sizePerThread = [1, 1, {entries}]" in line
        assert "warpsPerCTA" not in line
        # Triton 3.6 has other threads, which take a shuffle or two more.
        assert "threadsPerWarp = [1, 4, 8]" in line or version("triton") < "3.9"
