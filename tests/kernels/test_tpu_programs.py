"""What libtpu makes of programs for TPUs that are not there, and the plan of their peak."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xentlib.plan import default_chunk_bytes, peak_bytes, plan_chunks

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "docs" / "data" / "tpu.json").read_text())
LIBTPU = ROOT / "build" / "libtpu" / "libtpu" / "libtpu.so"
GIB = 2**30
# Bytes of a logit, at most, that each loop moves: written once, and read for a maximum, for two
# sums at once, and for dz, which is stored in 16 bits where a V is filled up (22, 12, 12 and 6).
MOST = {
    "nll": [24.0],
    "nll alone": [14.0],
    "nll recompute": [14.0, 8.0],
    "logprobs": [14.0, 8.0],
}
PRODUCTS = {"nll": 3, "nll alone": 1, "nll recompute": 4, "logprobs": 4}
RECOMPUTE = ("nll recompute", "logprobs")


def beside_inputs(row: dict[str, Any], head: dict[str, Any]) -> float:
    """Bytes that are live at the peak without those of hidden states and of the head."""
    itemsize = {"bfloat16": 2, "float32": 4}[head["dtype"]]
    inputs = itemsize * head["hidden"] * (head["tokens"] + head["vocab"])
    return row["live_gib"] * GIB - inputs


def plain_heads() -> list[str]:
    """Rows of a v5p whose peak the plan has: none of a softcap or of [H, V]."""
    heads = {x for x, y in TABLE["heads"].items() if not y["options"] and y["layout"] == "VH"}
    keys = [key.split(", ") for key in TABLE["now"]]
    return [", ".join(x) for x in keys if x[0] == "v5p" and x[1] in heads and x[2] in MOST]


@pytest.mark.cpu
@pytest.mark.parametrize("key", plain_heads())
def test_the_plan_is_the_compiler_s_count(key: str) -> None:
    """Within 3 % of what is live. Catches: the plan of a GPU, or one without a chunk."""
    _, label, call = key.split(", ")
    row, head = TABLE["now"][key], TABLE["heads"][label]
    plan = plan_chunks(
        head["tokens"],
        head["vocab"],
        head["hidden"],
        dtype=head["dtype"],
        max_chunk_bytes=default_chunk_bytes("tpu"),
    )
    how: dict[str, Any] = {"gradient": call != "nll alone", "recompute": call in RECOMPUTE}
    planned = peak_bytes(plan, backend="jax", dtype=head["dtype"], platform="tpu", **how)
    assert abs(planned - beside_inputs(row, head)) <= 0.03 * row["live_gib"] * GIB


@pytest.mark.cpu
def test_less_memory_than_full_logits() -> None:
    """Of heads with gradients, at the default chunk."""
    named = [x.removesuffix(", optax") for x in TABLE["peers"] if x.endswith(", optax")]
    peers = {x: TABLE["peers"][f"{x}, optax"] for x in named}
    ours = {x: TABLE["now"][f"{x}, nll"]["live_gib"] for x in named}
    assert len(ours) >= 4
    assert not [x for x, live in ours.items() if live >= peers[x]["live_gib"]]


def needs_libtpu() -> None:
    pytest.importorskip("jax")
    if not LIBTPU.is_file():
        pytest.skip("libtpu is not in build/libtpu: `make tpu` downloads it, 213 MB")


@pytest.mark.cpu
@pytest.mark.parametrize("head", ["llama3-8b", "qwen3-0.6b"])
def test_rows_of_logits_are_not_copied(head: str) -> None:
    """Beside logits and gradient there is no more than a chunk in 16 bits, and what it has of each
    token. Catches: a gather of rows, for which a TPU copies the array."""
    row = TABLE["now"][f"v5p, {head}, precomputed logits"]
    assert row["temporary_gib"] <= 0.5
    assert (
        row["live_gib"]
        < 0.6 * TABLE["peers"][f"v5p, {head}, optax of precomputed logits"]["live_gib"]
    )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: Any) -> dict[str, Any]:
    """A small head, of the working tree; in a process of its own, as libtpu is loaded once."""
    needs_libtpu()
    out = tmp_path_factory.mktemp("tpu") / "table.json"
    small = ["--head", "small", "--call", *MOST, "--out", str(out)]
    subprocess.run([sys.executable, ".ci/tpu.py", *small], cwd=ROOT, check=True)
    rows: dict[str, Any] = json.loads(out.read_text())["now"]
    return {key.split(", ")[2]: row for key, row in rows.items()}


@pytest.mark.jax
@pytest.mark.cpu
@pytest.mark.parametrize("call", MOST)
def test_programs_of_a_small_head(call: str, compiled: dict[str, Any]) -> None:
    """Catches: targets that are gathered, blocks along lanes, traits of this process's device, a
    head that is filled up as an array."""
    row = compiled[call]
    assert "failed" not in row, row
    assert row["products"] == PRODUCTS[call]
    assert row["copies"] == 0
    assert len(row["bytes_a_logit"]) == len(MOST[call])
    assert np.all(np.array(row["bytes_a_logit"]) <= MOST[call])
    assert abs(row["planned_gib"] - row["live_gib"]) <= 0.03 * row["live_gib"]


@pytest.mark.jax
@pytest.mark.cpu
def test_the_example_is_compiled_for_chips_that_are_not_there() -> None:
    """Catches: parameters that are whole on each of four chips, states that are not donated."""
    needs_libtpu()
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TOPOLOGY": "v5p:2x2x1",
        "PYTHONPATH": f"{LIBTPU.parents[1]}{os.pathsep}{ROOT}",
    }
    command = [sys.executable, "examples/flax_tpu.py"]
    printed = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    arguments, aliases = (
        int(re.search(rf"\b{name}_size_in_bytes=(\d+)", printed)[1])  # type: ignore[index]
        for name in ("argument", "alias")
    )
    parameters = 2 * 512 * 64 + 64 * 64 + 64
    whole = 3 * 4 * parameters  # AdamW's moments are as large
    assert whole / 4 < arguments < whole / 3
    assert aliases > whole / 4
