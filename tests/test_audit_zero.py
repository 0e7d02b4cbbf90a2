"""Steps through DeepSpeed ZeRO on two gloo ranks, audited by the command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.orphans import remove_locks

pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        pytest.param("stage_1", 0, "nothing found", marks=pytest.mark.full),
        ("stage_2", 0, "nothing found"),
        pytest.param("stage_3", 0, "nothing found", marks=pytest.mark.full),
        ("twice_over_ranks", 1, "gradients of the head: reduced twice over ranks"),
    ],
)
def test_a_step_of_deepspeed(name: str, status: int, said: str) -> None:
    remove_locks()
    environment = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *run, "-m", "xentlib", "audit", f"helpers.audited_zero:{name}"],
        env={**os.environ, **environment},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr[-4000:]
    assert f"\n{said}" in done.stdout
    assert "2 ranks, 3 micro-batches" in done.stdout
