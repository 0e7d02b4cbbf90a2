"""Rates of the machine at hand, for `xentlib plan --measure`: of a product, of a copy and, where
several processes were started, of an all-gather and a reduce-scatter of two sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from xentlib.plan import Rates
from xentlib.torch.core.consistency import gather_into, scatter_into

ROUNDS, WARM_UP = 7, 3
LEAST = 1e-15  # seconds a byte, of what noise makes negative


class Sizes(NamedTuple):
    """Of what is timed: rows and columns of a product, bytes of a copy, and bytes of all ranks
    together that a collective moves."""

    product: int
    dtype: torch.dtype
    copy: int
    few: int
    many: int


ON = {
    "cuda": Sizes(8192, torch.bfloat16, 1 << 30, 1 << 16, 1 << 28),
    "cpu": Sizes(1024, torch.float32, 1 << 26, 1 << 12, 1 << 24),
}


def measure(given: Rates) -> tuple[Rates, bool]:
    """These rates with what was measured in their place, the same on all ranks, and whether this is
    the first of them. Without other processes links keep the rates that were given."""
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    began = several and not dist.is_initialized()
    if began:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        rates = of_one(given, device)
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not alone:
            rates = of_links(rates, device)
        return rates, alone or dist.get_rank() == 0
    finally:
        if began:
            dist.destroy_process_group()


def of_one(given: Rates, device: torch.device) -> Rates:
    sizes = ON[device.type]
    x = torch.ones(sizes.product, sizes.product, dtype=sizes.dtype, device=device)
    y = torch.empty_like(x)
    source = torch.ones(sizes.copy // 4, device=device)
    target = torch.empty_like(source)
    product = seconds_of(lambda: torch.mm(x, x, out=y), device)
    copy = seconds_of(lambda: target.copy_(source), device)
    return given._replace(gemm=2 * sizes.product**3 / product, memory=2 * sizes.copy / copy)


def of_links(given: Rates, device: torch.device) -> Rates:
    """Of the ranks of a node, and of all ranks where there are several nodes: of two numbers of
    ranks what a collective takes by itself has a part for each step."""
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    local = local if world % local == 0 else world
    nodes = world // local
    found: dict[int, float] = {}
    if local > 1:
        starts = range(0, world, local)
        groups = [dist.new_group(list(range(start, start + local))) for start in starts]
        found[local], byte = fitted(groups[dist.get_rank() // local], device)
        given = given._replace(node=(local - 1) / local / byte)
    if nodes > 1:
        found[world], byte = fitted(dist.group.WORLD, device)
        given = given._replace(network=(nodes - 1) / nodes / local / byte)
    (ranks, start), *more = found.items()
    if more:
        ((others, later),) = more
        given = given._replace(step=max(0.0, (later - start) / (others - ranks)))
    return given._replace(latency=max(0.0, start - given.step * (ranks - 1)))


def fitted(group: Any, device: torch.device) -> tuple[float, float]:
    """Seconds of a collective that moves nothing, and of each byte of all ranks together."""
    sizes, ranks = ON[device.type], dist.get_world_size(group)
    took = []
    for size in (sizes.few, sizes.many):
        part = torch.ones(size // 4 // ranks, device=device)
        whole = part.new_ones(ranks * len(part))

        def both(part: Any = part, whole: Any = whole) -> None:
            gather_into(whole, part, group=group)
            scatter_into(part, whole, group=group)

        took.append((whole.nbytes, seconds_of(both, device, group) / 2))
    (few, short), (many, long) = took
    byte = max(LEAST, (long - short) / (many - few))
    return max(0.0, short - byte * few), byte


def seconds_of(call: Callable[[], object], device: torch.device, group: Any = None) -> float:
    """The median of some rounds, of the slowest rank where there are several."""
    took = []
    for _ in range(WARM_UP + ROUNDS):
        if group is not None:
            dist.barrier(group)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(median(took[WARM_UP:]), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
