"""Process groups, and collectives over them.

Shapes: R ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# torch 2.13 has other names for them, and warns of the old ones.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Of groups that reach devices alone, the same ranks over gloo.
HOST_GROUPS: Any = WeakIdKeyDictionary()


class PendingCollective(NamedTuple):
    """A collective under way, and the tensors that it works on."""

    work: Any
    result: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> PendingCollective:
    """[R n, ...] of [n, ...], rank by rank."""
    result = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    return PendingCollective(gather_into(result, x, group=group, async_op=True), result, x)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> PendingCollective:
    """This rank's [n, ...] of [R n, ...], summed over the ranks."""
    result = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    return PendingCollective(scatter_into(result, x, group=group, async_op=True), result, x)


def group_named(name: str) -> dist.ProcessGroup:
    """From its name, which is what an operator may take."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = resolve(name)
    return group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The same ranks where numbers of the host travel without a device: the group itself, or one
    over gloo that its ranks make at its first use."""
    if torch.device("cpu") in group._device_types:
        return group
    if group not in HOST_GROUPS:
        ranks = dist.get_process_group_ranks(group)
        HOST_GROUPS[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    twin: dist.ProcessGroup = HOST_GROUPS[group]
    return twin


def all_gather_rows(rows: Tensor, count: int, over: dist.ProcessGroup) -> Tensor:
    """All `count` rows of a parameter [r, H], of which each rank has as torch.chunk cuts."""
    whole: Tensor = AllGatherRows.apply(rows, count, over)  # type: ignore[no-untyped-call]
    return whole


class AllGatherRows(torch.autograd.Function):
    """All ranks' rows of a parameter, whose gradient each rank has of all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, over: Any) -> Tensor:
        ranks = dist.get_world_size(over)
        each = -(-count // ranks)
        ctx.start, ctx.stop = (min(k * each, count) for k in (over.rank(), over.rank() + 1))
        sent = rows.new_zeros(each, *rows.shape[1:])
        sent[: rows.shape[0]] = rows
        whole = rows.new_empty(ranks * each, *rows.shape[1:])
        gather_into(whole, sent, group=over)
        return whole[:count]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[ctx.start : ctx.stop].clone(), None, None
