"""Real ranks on this machine: processes that share a gloo group."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from queue import Empty
from typing import Any


class Hang(AssertionError):
    """Ranks that have not come back in time, or have died."""


def launch(
    world: int, work: Callable[..., Any], *arguments: Any, seconds: float = 240
) -> list[Any]:
    """`work(rank, world, *arguments)` on ranks that share a gloo group; what each returned."""
    import torch

    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = 29500 + (os.getpid() * 7 + world) % 2000
    ranks = [
        context.Process(target=enter, args=(rank, world, port, queue, work, arguments))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found: dict[int, Any] = {}
    end = time.monotonic() + seconds
    try:
        while len(found) < world:
            try:
                rank, value = queue.get(timeout=0.5)
                found[rank] = value
            except Empty:
                died = [p.exitcode for p in ranks if p.exitcode]
                if died or time.monotonic() > end:
                    said = "\n".join(value for value in found.values() if isinstance(value, str))
                    came = f"{len(found)} of {world} ranks came back in {seconds:g} s"
                    raise Hang(f"{came}, exit codes {died}\n{said}") from None
        for process in ranks:
            process.join(10)
    finally:
        for process in ranks:
            process.kill()
    errors = [value for value in found.values() if isinstance(value, str)]
    assert not errors, "\n".join(errors)
    return [found[rank] for rank in range(world)]


def enter(rank: int, world: int, port: int, queue: Any, work: Any, arguments: Any) -> None:
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    try:
        queue.put((rank, work(rank, world, *arguments)))
    except Exception:  # noqa: BLE001 - whatever it is, the parent must hear of it
        queue.put((rank, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        torch.distributed.destroy_process_group()
