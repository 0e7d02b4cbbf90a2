"""Where the head lives, in PyTorch: the rows of a vocabulary that this rank holds.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from xentlib.checks import check_group, check_not_whole, check_placement, check_shard
from xentlib.plan import PaddedVocab, VocabShard, shard_of
from xentlib.torch.softmax import RestStats, exp_difference

__all__ = ["Local", "VocabParallel", "local_columns", "local_rows", "vocab_parallel_of"]

# The shard of each head that was asked for, by the tensor itself: heads of one size on this rank
# may have other sizes on another, and a rank that remembers must not meet one that asks.
KNOWN: Any = WeakIdKeyDictionary()


def find_group(parallel: Any, name: str = "vocab_parallel") -> dist.ProcessGroup:
    """The process group of a ProcessGroup or of a one-dimensional DeviceMesh."""
    mesh_type = getattr(getattr(dist, "device_mesh", None), "DeviceMesh", ())
    if isinstance(parallel, mesh_type) and parallel.ndim == 1:
        parallel = parallel.get_group()
    if not isinstance(parallel, dist.ProcessGroup):
        check_group(parallel, name)
    found: dist.ProcessGroup = parallel
    return found


def unpadded(parallel: Any) -> tuple[dist.ProcessGroup, int | None]:
    """The group, and the number of classes where it was declared."""
    if isinstance(parallel, PaddedVocab):
        return find_group(parallel.over), parallel.vocab_size
    return find_group(parallel), None


def gathered(row: list[Any] | Tensor, group: dist.ProcessGroup, like: Tensor) -> list[list[float]]:
    """Everybody's row of numbers, in rank order, with one collective."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.zeros(world, len(row), dtype=torch.float64, device=like.device)
    rows[rank] = torch.as_tensor(row, dtype=torch.float64, device=like.device)
    dist.all_reduce(rows, group=group)
    found: list[list[float]] = rows.tolist()
    return found


def find_shard(
    holder: Tensor, local_size: int, group: dist.ProcessGroup, vocab_size: int | None
) -> VocabShard:
    """Where this rank's rows begin: from the sizes of all shards, exchanged once for a `holder`."""
    known, key = KNOWN.get(holder), (group.group_name, local_size, vocab_size)
    if known is not None and known[0] == key:
        shard: VocabShard = known[1]
        return shard
    sizes = tuple(int(size) for (size,) in gathered([local_size], group, holder))
    shard = shard_of(sizes, dist.get_rank(group), vocab_size)
    KNOWN[holder] = (key, shard)
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


def local_rows(
    weight: Tensor, bias: Tensor | None, parallel: Any, layout: str
) -> tuple[Tensor, Tensor | None, Local]:
    """This rank's classes of the head as plain tensors, and where they belong."""
    axis = 0 if layout == "VH" else 1
    if parallel is None or weight.ndim != 2:  # the latter is refused where shapes are checked
        return weight, bias, Local("", [])
    from torch.distributed.tensor import DTensor

    group, vocab_size = unpadded(parallel)
    holder = weight
    if isinstance(weight, DTensor):
        placements = weight.placements
        check_placement(
            weight.device_mesh.ndim, placements[0].is_shard(axis), axis, tuple(placements)
        )
        weight = weight.to_local()
    rows = weight.shape[axis]
    shard = find_shard(holder, rows, group, vocab_size)
    if shard.padding:
        weight = weight.narrow(axis, 0, shard.size)
        if bias is not None and bias.shape == (rows,):
            bias = bias[: shard.size]
    return weight, bias, Local(group.group_name, [shard.start, shard.stop, shard.vocab_size])


def local_columns(logits: Tensor, parallel: Any, shard: VocabShard | None) -> Local:
    """Where this rank's columns belong. Without `shard` one exchange in every call: logits are new
    in every step, and ranks that remember must not meet ranks that ask."""
    if parallel is None or logits.ndim < 1:
        return Local("", [])
    group, vocab_size = unpadded(parallel)
    columns = logits.shape[-1]
    if shard is None:
        rows = logits.detach().reshape(-1, columns)[:1] if columns else logits.new_zeros(0, 1)
        row = rows.double() if rows.numel() else torch.zeros(1, 1, device=logits.device)
        sums = torch.stack([row.sum(), row.min(), row.max()]).tolist()
        found = gathered([columns, *sums], group, logits)
        sizes = tuple(int(x[0]) for x in found)
        if vocab_size is None:
            check_not_whole(sizes, [x[1:] for x in found])
        shard = shard_of(sizes, dist.get_rank(group), vocab_size)
    check_shard(shard, columns)
    return Local(group.group_name, [shard.start, shard.stop, shard.vocab_size])
