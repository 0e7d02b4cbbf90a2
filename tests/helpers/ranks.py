"""Real ranks on this machine: processes that share a gloo group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from helpers.orphans import remove_locks
from helpers.seconds import rank_ends
from xentlib import processes
from xentlib.tools.harness.ranks import start_gloo

PRELOADED = ("helpers.preloaded",)
TESTS = str(Path(__file__).parents[1])


class Hang(AssertionError):
    """Ranks that make no progress."""


def launch(
    world: int, work: Callable[..., Any], *arguments: Any, seconds: float = 240
) -> list[Any]:
    """`work(rank, world, *arguments)` on ranks that share a gloo group; what each returned.
    `seconds` without progress are a `Hang`, as `processes.launch` has it."""
    with failing(world):
        return processes.launch(on_gloo, world, work, arguments, seconds=seconds, preload=PRELOADED)


@contextmanager
def failing(world: int) -> Iterator[None]:
    """What ranks do wrong, as what a test does."""
    remove_locks()
    preload()
    try:
        yield
    except processes.RanksLate as late:
        raise Hang(f"{len(late.outputs)} of {world} ranks {late.why}\n{late}") from None
    except processes.RanksFailed as failed:
        raise AssertionError(str(failed)) from None


def preload() -> None:
    """Start the process that ranks are forked from, unless it runs. It drops a module that it does
    not find without a word, and has no path but the environment's."""
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TESTS, known]))
    try:
        forkserver.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= {"PYTHONPATH": known} if known is not None else {}


def preload_first() -> None:
    """The first ranks of a process decide what all later ones are forked with. Where a parity run's
    were first, each rank of DeepSpeed's imported it by itself, for 6 s."""
    right = processes._context

    def context(names: Any) -> Any:
        if names:
            preload()
        return right(names)

    processes._context = context


def on_gloo(rank: int, world: int, folder: str, work: Any, arguments: Any) -> Any:
    import torch

    # As torchrun has it: the compiler loads DeepSpeed where it is installed, which asks.
    os.environ["LOCAL_RANK"] = str(rank)
    torch.manual_seed(rank)
    start_gloo(rank, world, folder)
    try:
        return work(rank, world, *arguments)
    finally:
        torch.distributed.destroy_process_group()
        rank_ends()
