"""Real ranks: gloo processes for PyTorch, host devices of one process for JAX, started for a whole
list of things to do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from xentlib.processes import RanksFailed, RanksLate, launch

WORLD = 4
SECONDS = 600  # that ranks may go without progress; on two idle cores the longest take 30 in all
# Of a collective: a rank that waits for a slow one must not give up before `launch` does.
GLOO_LIMIT = timedelta(days=1)
# What takes seconds to import. JAX is not to be forked; it has one process anyway.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "xentlib.torch")


def run_ranks(
    backend: str,
    work: Callable[..., list[Any]],
    items: Sequence[Any],
    world: int,
    slowness: float = 1.0,
    **environment: str,
) -> list[list[Any]]:
    """`work(rank, world, folder, items)` of each rank, a process; `backend` is for what is said.

    Raises:
        RuntimeError: a rank failed, or all made no progress for `SECONDS` times `slowness`, at
            least once.
    """
    limit = SECONDS * max(slowness, 1.0)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={WORLD}"
    try:
        return launch(
            work,
            world,
            list(items),
            seconds=limit,
            preload=() if backend == "jax" else PRELOADED,
            environment={"XLA_FLAGS": flags.strip(), **environment},
        )
    except RanksFailed as failed:
        count, outputs = len(failed.outputs), "\n".join(failed.outputs)
        first = next((x for x in reversed(failed.outputs[0].splitlines()) if x.strip()), "no word")
        raise RuntimeError(f"{count} {backend} ranks failed, one with {first}\n{outputs}") from None
    except RanksLate as late:
        count, outputs = len(late.outputs), "\n".join(late.outputs)
        raise RuntimeError(
            f"{count} of {world} {backend} ranks {late.why}, which "
            f"is the limit at this machine's speed\n{outputs}"
        ) from None


def start_gloo(rank: int, world: int, folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=GLOO_LIMIT,
    )
