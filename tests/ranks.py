"""Real ranks on this machine: processes that share a gloo group."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any


def launch(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(rank, world, *arguments)` on ranks that share a gloo group; what each returned."""
    import torch

    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    port = 29500 + (os.getpid() * 7 + world) % 2000
    ranks = [
        context.Process(target=enter, args=(rank, world, port, queue, work, arguments))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = dict(queue.get() for _ in ranks)
    for process in ranks:
        process.join()
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
