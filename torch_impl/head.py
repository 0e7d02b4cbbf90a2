"""Where the head lives, in PyTorch: the rows of a vocabulary that this rank holds.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from xentlib.plan import VocabShard, shard_of
from xentlib.torch.softmax import RestStats, exp_difference

__all__ = ["Local", "VocabParallel", "local_rows", "vocab_parallel_of"]

# The shard of each head that was asked for, by the tensor itself: heads of one size on this rank
# may have other sizes on another, and a rank that remembers must not meet one that asks.
KNOWN: Any = WeakIdKeyDictionary()


def find_group(parallel: Any, argument: str = "vocab_parallel") -> dist.ProcessGroup:
    """The process group of a ProcessGroup or of a one-dimensional DeviceMesh."""
    if isinstance(parallel, dist.ProcessGroup):
        return parallel
    mesh_type = getattr(getattr(dist, "device_mesh", None), "DeviceMesh", None)
    if mesh_type is not None and isinstance(parallel, mesh_type):
        if parallel.ndim != 1:
            raise ValueError(
                f"`{argument}` must be a one-dimensional DeviceMesh; got {parallel.ndim} "
                f"dimensions. Pass `mesh['name']`, the dimension of these ranks."
            )
        group: dist.ProcessGroup = parallel.get_group()
        return group
    raise TypeError(
        f"`{argument}` must be a ProcessGroup or a one-dimensional DeviceMesh; got "
        f"{type(parallel).__name__}. Pass the group of these ranks, or None."
    )


def find_shard(holder: Tensor, local_size: int, group: dist.ProcessGroup) -> VocabShard:
    """Where this rank's rows begin: from the sizes of all shards, exchanged once for a `holder`."""
    known = KNOWN.get(holder)
    if known is not None and known[:2] == (group.group_name, local_size):
        shard: VocabShard = known[2]
        return shard
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=holder.device)
    sizes[dist.get_rank(group)] = local_size
    dist.all_reduce(sizes, group=group)
    shard = shard_of(tuple(sizes.tolist()), dist.get_rank(group))
    KNOWN[holder] = (group.group_name, local_size, shard)
    return shard


class VocabParallel:
    """The collectives of a call: one MAX, one packed SUM, one SUM of d hidden."""

    def __init__(self, group: dist.ProcessGroup, shard: VocabShard) -> None:
        self.group, self.shard = group, shard

    def combine(self, z_y: Tensor, owned: Tensor, rest: RestStats) -> tuple[Tensor, RestStats]:
        """Target's logit and statistics of the rest over all shards: [N] each, on every rank."""
        none = rest.ones == 0
        m_local = torch.where(none, -torch.inf, rest.m)
        m = m_local.clone()
        dist.all_reduce(m, dist.ReduceOp.MAX, group=self.group)
        m = torch.where(m == -torch.inf, 0.0, m)
        top = m_local == m
        scale = torch.where(none, 0.0, exp_difference(rest.m, m))
        below = torch.where(none, 0.0, rest.m - m)
        total = rest.ones + rest.s
        packed = [
            torch.where(owned, z_y, 0.0),
            torch.where(top, rest.ones, 0.0),
            torch.where(top, rest.s, scale * total),
        ]
        if rest.sum_ed is not None:
            packed.append(scale * (rest.sum_ed + below * total))
        if rest.sum_d is not None:
            columns = self.shard.size - owned.to(z_y.dtype)
            packed.append(rest.sum_d + columns * (rest.m - m))
        sums = torch.stack(packed)
        dist.all_reduce(sums, group=self.group)
        z_y, ones, s, *more = sums
        sum_ed = more.pop(0) if rest.sum_ed is not None else None
        sum_d = more.pop(0) if rest.sum_d is not None else None
        return z_y, RestStats(m, ones, s, sum_ed, sum_d)

    def start_sum(self, x: Tensor) -> Any:
        """Work to wait for."""
        return dist.all_reduce(x, group=self.group, async_op=True)


def vocab_parallel_of(group_name: str, shard: list[int]) -> VocabParallel | None:
    """From what an operator may take as arguments; None without a group."""
    if not group_name:
        return None
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    group = resolve(group_name)
    return VocabParallel(group, VocabShard(*shard))


class Local(NamedTuple):
    """Group and shard as an operator takes them; ("", []) for a whole vocabulary."""

    group: str
    shard: list[int]

    @property
    def arguments(self) -> tuple[str, list[int]]:
        return self.group, self.shard


def local_rows(weight: Tensor, parallel: Any, layout: str) -> tuple[Tensor, Local]:
    """This rank's rows of the head as a plain tensor, and where they belong."""
    if parallel is None:
        return weight, Local("", [])
    from torch.distributed.tensor import DTensor

    group = find_group(parallel)
    axis = 0 if layout == "VH" else 1
    holder = weight
    if isinstance(weight, DTensor):
        placements = weight.placements
        if weight.device_mesh.ndim != 1 or not placements[0].is_shard(axis):
            raise ValueError(
                f"`weight` must be sharded over its vocabulary, dimension {axis}, on a "
                f"one-dimensional mesh; got {placements} on {weight.device_mesh.ndim} dimensions. "
                f"Pass `weight.redistribute(placements=[Shard({axis})])`."
            )
        weight = weight.to_local()
    shard = find_shard(holder, weight.shape[axis], group)
    return weight, Local(group.group_name, [shard.start, shard.stop, shard.vocab_size])
