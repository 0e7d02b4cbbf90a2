"""Whose rows a checked call has, in PyTorch: its own, a shard of the vocabulary's, or those that a
route leaves on their ranks.

Shapes: V rows of the head, H hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.tools.crosscheck import CrossCheckError
from xentlib.tools.recompute.call import Ranks
from xentlib.torch.core.consistency import all_gather, filled, group_named
from xentlib.torch.operators import HeadCall


class ShardRanks(Ranks):
    """The same tokens on all ranks of a group, each of which has some rows."""

    whole_a = False

    def __init__(self, call: HeadCall) -> None:
        self.group, self.reduced = group_named(call.rows.group), call.reduce_hidden
        size = call.columns
        self.start, self.size, self.vocab_size = declared(call, size)
        if self.start < 0:
            self.vocab_size = self.vocab_size or size * dist.get_world_size(self.group)
            self.start = min(dist.get_rank(self.group) * size, self.vocab_size)
            self.size = min(size, self.vocab_size - self.start)

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def agreed(self, x: Tensor) -> Tensor:
        return self.largest(x)

    def hidden(self, d_hidden: Tensor) -> Tensor:
        return self.sum(d_hidden) if self.reduced else d_hidden


class RouteRanks(Ranks):
    """Tokens of each rank's own, and rows that all of them share: the rows come here, and what all
    tokens make of d weight is added up."""

    others, whole_a = True, False

    def __init__(self, call: HeadCall) -> None:
        layout = call.rows
        if layout.shards or layout.over or layout.alike is not None:
            raise CrossCheckError(
                f"a checked call must have rows that either tensor parallelism or `fully_shard` "
                f"has cut; got a head that both have, with `gather={layout.route!r}`. Check a run "
                f"with `gather='head'`."
            )
        self.group = group_named(layout.every or layout.group)
        rows = call.columns
        _, size, self.vocab_size = declared(call, rows)
        if layout.nodes is not None:  # it is of the rows that a node has gathered
            size = rows
        size = min(size, rows)
        sizes = all_gather(torch.tensor([size], device=call.hidden.device), self.group).tolist()
        rank = dist.get_rank(self.group)
        self.first, self.size, self.sizes = sum(sizes[:rank]), size, sizes
        self.vocab_size = min(self.vocab_size or sum(sizes), sum(sizes))
        self.local = slice(self.first, min(self.first + size, self.vocab_size))

    def gathered(self, x: Tensor | None) -> Tensor | None:
        """[V, ...] of this rank's rows."""
        if x is None:
            return None
        most = max(self.sizes)
        every = all_gather(filled(x[: self.size], most), self.group)
        parts = [every[k * most : k * most + size] for k, size in enumerate(self.sizes)]
        return torch.cat(parts)[: self.vocab_size]

    def together(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x

    def agreed(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x


def declared(call: HeadCall, rows: int) -> tuple[int, int, int]:
    """The first class of a shard, -1 if nobody has said so, its classes and all of them, or 0."""
    shard: Any = call.rows.shard
    start, stop, vocab_size = (int(x) for x in shard[:3])
    return start, stop - start if start >= 0 else rows, max(vocab_size, 0)


def ranks_of(call: HeadCall) -> Ranks | None:
    if not call.rows.group:
        return None
    return RouteRanks(call) if call.rows.route else ShardRanks(call)
