"""Heads that DeepSpeed ZeRO keeps in pieces: real `deepspeed.initialize` on gloo ranks, against one
process that has the whole batch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.torch

from wrapped import Setup, gradients_of_one_process  # noqa: E402

SETUPS: dict[str, tuple[Setup, int]] = {
    "stage 1": (Setup(model=("bias",)), 1),
    "stage 2": (Setup(model=("bias",)), 2),
    "stage 3": (Setup(), 3),
    "stage 3, bias": (Setup(model=("bias",)), 3),
    "stage 3, many chunks": (Setup(chunk=8), 3),
    "stage 3, rank without tokens": (Setup(idle=True), 3),
    "stage 3, per token": (Setup(function="chunked_logprobs", chunk=8), 3),
    "stage 3, inside": (Setup(model=("inside", "bias")), 3),
    "stage 3, inside, per token": (Setup(model=("inside",), function="chunked_logprobs"), 3),
    "stage 3, tied": (Setup(model=("tied",)), 3),
    "stage 3, tied, inside": (Setup(model=("tied", "inside")), 3),
    "stage 3, frozen trunk": (Setup(frozen=True), 3),
    "stage 3, three micro-batches": (Setup(steps=3), 3),
    "stage 1, NLLHead": (Setup(road="NLLHead"), 1),
    "stage 3, NLLHead": (Setup(road="NLLHead", model=("bias",)), 3),
    "stage 3, NLLHead, per token": (Setup(road="NLLHead", function="chunked_logprobs"), 3),
    "stage 3, NLLHead, inside, tied": (Setup(road="NLLHead", model=("tied", "inside")), 3),
    "stage 3, NLLHead, frozen trunk": (Setup(road="NLLHead", frozen=True), 3),
    "stage 3, gathered": (Setup(road="gather_head", model=("bias",)), 3),
    "stage 3, gathered, per token": (Setup(road="gather_head", function="chunked_logprobs"), 3),
    "stage 3, gathered, inside, tied": (Setup(road="gather_head", model=("tied", "inside")), 3),
    "stage 3, gathered, frozen trunk": (Setup(road="gather_head", frozen=True), 3),
    "stage 3, gathered, three micro-batches": (Setup(road="gather_head", steps=3), 3),
    "stage 3, gathered, checkpoint": (Setup(road="gather_head", checkpoint=True), 3),
    "stage 3, checkpoint": (Setup(checkpoint=True), 3),
    "stage 3, checkpoint, per token": (Setup(checkpoint=True, function="chunked_logprobs"), 3),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every setup on two ranks: one start of both."""
    folder = tmp_path_factory.mktemp("zero")
    (folder / "setups").write_bytes(pickle.dumps(SETUPS))
    here = Path(__file__).parent
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    # DeepSpeed compiles an operator with ninja, which is beside the interpreter.
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*program, str(here / "zero_ranks.py"), str(folder)],
        env=environment,
        cwd=here,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("name", SETUPS)
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    """A12, SPEC 6, ANCHORS 4.7: all gradients, on every rank. Catches: a weight of no elements, a
    gradient that its parameter's hook never sees, one that is divided twice."""
    expected = gradients_of_one_process(SETUPS[name][0])
    for rank in found:
        gradients, _ = rank[name]
        assert gradients.keys() == expected.keys()
        for parameter, want in expected.items():
            assert np.abs(gradients[parameter]).max() > 0
            measured = check("A9", gradients[parameter], want.numpy(), metrics=("rho / u",))
            assert not failures(measured), parameter


def test_gathers_do_not_count_chunks_or_tokens(found: Any) -> None:
    """A15, SPEC 6, ANCHORS 4.5, 4.6 (TRL#6696): the same on every rank, whatever it computes."""
    counts = {name: [rank[name][1] for rank in found] for name in SETUPS}
    for ranks in counts.values():
        assert ranks[0] == ranks[1]
    for name in ("stage 3, many chunks", "stage 3, rank without tokens", "stage 3, bias"):
        assert counts[name] == counts["stage 3"]
    (once, _), (twice, _) = (counts[name] for name in ("stage 3", "stage 3, per token"))
    assert sum(twice.values()) == sum(once.values()) + 1  # the head's values, for its backward
