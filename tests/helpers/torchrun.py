"""Ranks as torchrun starts them, forked from a process that has imported DeepSpeed: what each
finds, as a file. torchrun itself starts those of `test_audit_command.py`."""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any

from helpers.ranks import PRELOADED, failing
from helpers.seconds import rank_ends
from xentlib import processes


def torchrun(world: int, program: str, folder: Path, setups: Any) -> list[Any]:
    """What each rank of a module of `helpers` leaves in `folder`, of the setups in there."""
    (folder / "setups").write_bytes(pickle.dumps(setups))
    run(world, program, folder)
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(world)]


def run(world: int, program: str, folder: Path, seconds: float = 240) -> None:
    """`python -m program folder` on each rank."""
    from torch.distributed import TCPStore

    # As torchrun has it: a port that is free now may be taken before a rank listens.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {
        "DS_ACCELERATOR": "cpu",
        "PYTHONWARNINGS": "ignore",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with failing(world):
        arguments = (program, str(folder))
        processes.launch(
            rank_of,
            world,
            *arguments,
            seconds=seconds,
            preload=PRELOADED,
            environment=environment,
        )


def rank_of(rank: int, world: int, _: str, program: str, folder: str) -> None:
    # Where another list of modules was there first: what DeepSpeed prints goes where the output
    # goes as it is imported, which a program may catch.
    import helpers.preloaded  # noqa: F401

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    sys.argv = [program, folder]
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        rank_ends()


def start() -> None:
    """A rank that engines of DeepSpeed will be made on."""
    import deepspeed
    import torch

    import helpers.preloaded  # noqa: F401  # where another list of modules was there first

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")


def settle() -> None:
    """After each engine, whose last objects are kept: the next one collects garbage as it starts,
    and looked at those of all before it, 0.1 s after forty of them."""
    gc.collect()
    gc.freeze()
