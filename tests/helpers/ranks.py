"""Real ranks on this machine: processes that share a gloo group."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any

from helpers.orphans import remove_locks

PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "xentlib.torch"]


class Hang(AssertionError):
    """Ranks that have not come back in time, or have died."""


def launch(
    world: int, work: Callable[..., Any], *arguments: Any, seconds: float = 240
) -> list[Any]:
    """`work(rank, world, *arguments)` on ranks that share a gloo group; what each returned."""
    import torch

    remove_locks()
    # Ranks are forked from a process that has imported what takes seconds, and done nothing else.
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    queue = context.Queue()
    # They meet in a file: a port that is free now may be taken before they listen on it.
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=enter, args=(rank, world, folder, queue, work, arguments))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            found = results(ranks, queue, seconds)
        finally:
            for process in ranks:
                process.kill()
                process.join()
    errors = [value for value in found.values() if isinstance(value, str)]
    assert not errors, "\n".join(errors)
    return [found[rank] for rank in range(world)]


def results(ranks: list[Any], queue: Any, seconds: float) -> dict[int, Any]:
    found: dict[int, Any] = {}
    end = time.monotonic() + seconds
    while len(found) < len(ranks):
        try:
            rank, value = queue.get(timeout=0.5)
            found[rank] = value
        except Empty:
            died = [p.exitcode for p in ranks if p.exitcode]
            if died or time.monotonic() > end:
                said = "\n".join(value for value in found.values() if isinstance(value, str))
                came = f"{len(found)} of {len(ranks)} ranks came back in {seconds:g} s"
                raise Hang(f"{came}, exit codes {died}\n{said}") from None
    for process in ranks:
        process.join(10)
    return found


def end_with_launcher() -> None:
    """The process that started the forkserver, which lives for as long as a rank does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def enter(rank: int, world: int, folder: str, queue: Any, work: Any, arguments: Any) -> None:
    threading.Thread(target=end_with_launcher, daemon=True).start()
    import torch

    # As torchrun has it: the compiler loads DeepSpeed where it is installed, which asks.
    os.environ["LOCAL_RANK"] = str(rank)
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    try:
        queue.put((rank, work(rank, world, *arguments)))
    except Exception:  # noqa: BLE001 - whatever it is, the parent must hear of it
        queue.put((rank, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        torch.distributed.destroy_process_group()
