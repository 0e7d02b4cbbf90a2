"""Ranks of DeepSpeed, started as users start them: what each finds, as a file."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.orphans import remove_locks
from helpers.wrapped import Zero
from xentlib.processes import end_with_parent


def torchrun(
    world: int, program: str, folder: Path, setups: Mapping[str, Zero]
) -> list[dict[str, Any]]:
    """What each rank of a module of `helpers` leaves in `folder`, of the setups in there."""
    # Not `launch`: users start DeepSpeed with torchrun, whose variables it reads, and what torchrun
    # leaves behind when it is killed is among what is tested.
    remove_locks()
    (folder / "setups").write_bytes(pickle.dumps(setups))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={world}", "-m", program, str(folder)),
        ],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world)]


def start() -> None:
    """A rank that engines of DeepSpeed will be made on. What is imported by now is no garbage: an
    engine collects, and looked at all of that for 0.3 s each time."""
    import deepspeed
    import torch

    end_with_parent(os.getppid())  # torchrun, which does not take its ranks along when killed
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    gc.collect()
    gc.freeze()
