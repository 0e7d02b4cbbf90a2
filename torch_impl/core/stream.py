"""Rows of a sharded head that pass by in blocks, some of every rank's at a time: two walks over
them, one for the statistics of this rank's tokens, one for gradients, whose part of d weight leaves
for its ranks while the next block is multiplied.

Classes are counted in the order in which they pass: block by block, in a block rank by rank. Blocks
depend on the sizes of the head alone, so that all ranks have as many, with or without tokens.

Shapes: N tokens, V vocabulary, H hidden width, R ranks, K rows of each rank in a block, C classes
of a block, at most R K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.algebra import NonTargetStats, TokenStats, WantedStats
from xentlib.checks.call import check_class_weights
from xentlib.plan import VocabShard, stream_rows
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.device import chunk_bytes
from xentlib.torch.core.gradients import Gradients, GradientSums
from xentlib.torch.core.spread import Sending, Terms, shake_hands
from xentlib.torch.core.stats import StatSums, add_chunk, all_stats, target_info
from xentlib.torch.core.tokens import select_tokens
from xentlib.torch.core.vocab import gather_into, group_named, scatter_into
from xentlib.torch.core.walk import Walk
from xentlib.torch.operators import HeadCall


class Passing(NamedTuple):
    """Classes of a block, in place of a `VocabParallel`: nobody has to be wanted."""

    shard: VocabShard
    largest: int
    order_V: Tensor  # of the classes
    agreed: bool = True

    def own_part(self, weights: Tensor) -> Tensor:
        return weights[self.shard.start : self.shard.stop]

    def to_class(self, columns: Tensor) -> Tensor:
        """Of columns of the block, as floats; the first of several has the lowest."""
        places = self.shard.start + columns.long().clamp(0, self.shard.size - 1)
        return self.order_V[places].to(columns.dtype)


class Streamed:
    """A walk over all blocks, for what is the same in each: tokens, factors, results."""

    spread = parallel = None  # tokens are this rank's own

    def __init__(
        self,
        call: HeadCall,
        terms: Terms,
    ) -> None:
        assert call.shard is not None
        self.group = group_named(call.group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.numbers = call.shard.clone()
        self.vocab_size, device = int(call.shard[2]), call.hidden.device
        self.compute_dtype, self.gemm_dtype = call.compute_dtype, call.gemm_dtype
        self.like: dict[str, Any] = {"dtype": call.compute_dtype, "device": device}
        self.hidden_size = call.hidden.shape[1]
        shard = VocabShard(0, self.vocab_size, self.vocab_size)
        tokens = select_tokens(
            call.labels, call.where, call.ignore_index, self.vocab_size, shard, device
        )
        self.own = self.tokens = tokens._replace(labels=tokens.targets, owned=None)
        self.rows_each = -(-self.vocab_size // self.ranks)  # of every rank, but for the last ones
        budget = chunk_bytes(call.chunk_bytes, device)
        self.block = stream_rows(self.rows_each, self.hidden_size, self.ranks, budget)
        shake_hands(self.group, call, terms, "stream", chunk_bytes=self.block, tokens=self.own)
        self.class_weights, class_weights = None, terms.class_weights
        if class_weights is not None:
            check_class_weights(class_weights.shape[0], self.vocab_size)
            self.class_weights = class_weights.to(self.compute_dtype)
        # Where each class stands, which stands at each place, and where blocks begin.
        classes_V = torch.arange(self.vocab_size, device=device)
        of_rank_V, row_V = classes_V // self.rows_each, classes_V % self.rows_each
        key_V = (row_V // self.block * self.ranks + of_rank_V) * self.block + row_V % self.block
        self.order_V = torch.argsort(key_V)
        self.place_V = torch.empty_like(self.order_V)
        self.place_V[self.order_V] = classes_V
        # Of the places of a block that classes take, rows beyond a rank's last left out.
        self.taken_V = key_V[self.order_V]
        self.local = call.weight.to(self.gemm_dtype)
        self.bias_V = None if call.bias is None else self._whole_bias(call.bias)
        self.call = self._of_blocks(call)

    def _whole_bias(self, bias: Tensor) -> Tensor:
        """[V], in the order of the classes."""
        mine = bias.new_zeros(self.rows_each)
        mine[: bias.shape[0]] = bias
        whole = bias.new_empty(self.ranks * self.rows_each)
        gather_into(whole, mine, group=self.group)
        return whole[: self.vocab_size]

    def _of_blocks(self, call: HeadCall) -> HeadCall:
        """What every block's call has alike: labels by place, validity told by the mask."""
        counts = self.own.valid & ~self.own.bad
        labels = torch.where(counts, call.labels.long(), 0)
        return call._replace(
            labels=torch.where(counts, self.place_V[labels], 0),
            where=self.own.valid,
            ignore_index=-1,
            group="",
            route="",
            reduce_hidden=False,
            transposed=False,
        )

    @property
    def num_blocks(self) -> int:
        return -(-self.rows_each // self.block)

    def walks(self) -> Iterator[Walk]:
        """One for each block; the next block's rows travel meanwhile."""
        coming: Sending | None = None
        for b in range(self.num_blocks):
            rows = (self._fetch(b) if coming is None else coming).arrived()
            coming = self._fetch(b + 1) if b + 1 < self.num_blocks else None
            start, stop = self._bounds(b)
            if stop - start < rows.shape[0]:
                rows = rows[self._taken(b)]
            places = self.order_V[start:stop]
            call = self.call._replace(
                weight=rows, bias=None if self.bias_V is None else self.bias_V[places]
            )
            weights = None if self.class_weights is None else self.class_weights[self.order_V]
            shard = VocabShard(start, stop, self.vocab_size)
            yield Walk(
                call, Terms(class_weights=weights), Passing(shard, stop - start, self.order_V)
            )

    def _bounds(self, b: int) -> tuple[int, int]:
        """Places of a block's classes."""
        rows, each, total = b * self.block, self.rows_each, self.vocab_size
        full, last = divmod(total, each)

        def before(row: int) -> int:  # classes among the first `row` rows of every rank
            row = min(row, each)
            return full * row + min(last, row)

        return before(rows), before(rows + self.block)

    def _taken(self, b: int) -> Tensor:
        """Of a block as it travels [R K], where its classes are [C]."""
        start, stop = self._bounds(b)
        return self.taken_V[start:stop] - b * self.ranks * self.block

    def _fetch(self, b: int) -> Sending:
        mine_KH = self.local.new_zeros(self.block, self.hidden_size)
        part = self.local[b * self.block : (b + 1) * self.block]
        mine_KH[: part.shape[0]] = part
        result = mine_KH.new_empty(self.ranks * self.block, self.hidden_size)
        work = gather_into(result, mine_KH, group=self.group, async_op=True)
        return Sending(work, result, mine_KH)

    def stats(self, wanted: WantedStats) -> TokenStats:
        """Of all N tokens."""
        found: tuple[Tensor, NonTargetStats] | None = None
        weight: Tensor | float = 0.0
        for walk in self.walks():
            sums = StatSums(walk, wanted)
            for chunk in walk.chunks():
                add_chunk(sums, walk, chunk)
            z_y, owned, rest, others = sums.of_rank()
            z_y = torch.where(owned, z_y, 0.0)
            if found is None:
                found, weight = (z_y, rest), others
            else:
                found = found[0] + z_y, ALGEBRA.joined(found[1], weight, rest, others)
                weight = weight + others
        assert found is not None
        return ALGEBRA.token_stats(*found, self.vocab_size, target_info(self, slice(None)))

    def meet(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """As in `Walk`: of this rank's tokens."""
        return numbers

    def mine(self, values: Tensor) -> Tensor:
        """As in `Walk`."""
        return values

    def check_consistent(self, function: str) -> None:
        """As in `Walk`: what ranks must have alike has been told."""


class StreamSums:
    """Gradients over all blocks: each with its walk, and the sums of its own."""

    def __init__(self, walk: Streamed, needs: list[bool], rows: int) -> None:
        self.walk, self.needs, like = walk, needs, walk.like
        num_tokens, width = walk.own.valid.shape[0], walk.hidden_size
        self.hidden = torch.zeros(num_tokens if needs[0] else 0, width, **like)
        self.weight = torch.zeros((rows, width) if needs[1] else (0, 0), **like)
        self.bias_V = torch.zeros(walk.vocab_size if needs[2] else 0, **like)
        self.rows = rows
        self.leaving: tuple[Sending, int] | None = None

    def passes(self, exponent: Tensor | None) -> Iterator[tuple[Walk, GradientSums]]:
        """Walks whose chunks are to be added to the sums beside them."""
        for b, walk in enumerate(self.walk.walks()):
            sums = GradientSums(walk, self.needs, walk.local_size, hidden=self.hidden)
            yield walk, sums
            self._take(b, sums, exponent)
        self._arrive()

    def _take(self, b: int, sums: GradientSums, exponent: Tensor | None) -> None:
        walk, needs = self.walk, self.needs
        sums.complete()
        start, stop = walk._bounds(b)
        if needs[2]:
            self.bias_V[walk.order_V[start:stop]] = sums.bias
        if not needs[1]:
            return
        self._arrive()
        part_CH = sums.weight if exponent is None else torch.ldexp(sums.weight, -exponent)
        if stop - start < walk.ranks * walk.block:
            whole = part_CH.new_zeros(walk.ranks * walk.block, walk.hidden_size)
            whole[walk._taken(b)] = part_CH
            part_CH = whole
        result = part_CH.new_empty(walk.block, walk.hidden_size)
        work = scatter_into(result, part_CH, group=walk.group, async_op=True)
        self.leaving = Sending(work, result, part_CH), b * walk.block

    def _arrive(self) -> None:
        if self.leaving is None:
            return
        sending, row = self.leaving
        arrived = sending.arrived()
        count = min(self.walk.block, self.rows - row)
        if count > 0:
            self.weight[row : row + count] = arrived[:count]
        self.leaving = None

    def finish(self, exponent: Tensor | None) -> Gradients:
        """Of this rank's tokens and of its rows; d weight has lost its power of two before."""
        hidden, bias = self.hidden, self.bias_V
        if exponent is not None:
            hidden, bias = torch.ldexp(hidden, -exponent), torch.ldexp(bias, -exponent)
        if self.needs[2]:
            walk = self.walk
            whole = bias.new_zeros(walk.ranks * walk.rows_each)
            whole[: walk.vocab_size] = bias
            bias = bias.new_empty(walk.rows_each)
            scatter_into(bias, whole, group=walk.group)
            bias = bias[: self.rows].clone()
        return Gradients(hidden, self.weight, bias, *(bias.new_empty(0, 0) for _ in range(2)))


def walk_of(call: HeadCall, terms: Terms) -> Walk | Streamed:
    """Over the head as the call has it."""
    if call.route == "stream":
        return Streamed(call, terms)
    if call.nodes is not None:
        from xentlib.torch.core.nodes import NodeWalk

        return NodeWalk(call, terms)
    return Walk(call, terms)


def stats_of(walk: Walk | Streamed, wanted: WantedStats) -> TokenStats:
    """Of all N tokens."""
    return walk.stats(wanted) if isinstance(walk, Streamed) else all_stats(walk, wanted)


def sums_of(walk: Walk | Streamed, needs: list[bool], rows: int) -> GradientSums | StreamSums:
    """For the gradients of a head of so many rows."""
    if isinstance(walk, Streamed):
        return StreamSums(walk, needs, rows)
    if walk.places is not None:
        from xentlib.torch.core.nodes import NodeSums, NodeWalk

        assert isinstance(walk, NodeWalk)
        return NodeSums(walk, needs)
    return GradientSums(walk, needs, rows)
