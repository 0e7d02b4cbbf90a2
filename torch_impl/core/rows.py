"""Head rows received from other ranks: all-gathered across nodes (`NodeRows`), d weight being
reduce-scattered the same way; or streamed from all ranks in blocks in two passes (`StreamedRows`),
the first for the statistics of this rank's tokens and the second for gradients, where a block's
d weight is reduce-scattered while the next block is multiplied.

A wrapper gives each rank one part of the head, classes in order, the last parts shorter or empty.
Gathered over nodes, the parts of one place are not next to each other, so classes are counted in
the order in which the rows of a node stand: rank by rank, of a rank part by part. Of one rank they
ascend. Passing by, classes are counted in the order in which they pass: block by block, in a block
rank by rank. Blocks depend on the sizes of the head alone, so that all ranks have as many, with or
without tokens.

Shapes: N tokens, V vocabulary, H hidden width. Of nodes: G nodes, L ranks of a node, R = G L parts,
v = ceil(V / R) rows of each, C columns of this rank. Of a stream: R ranks, K rows of each rank in a
block, C classes of a block, at most R K.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.checks.call import check_class_weights
from xentlib.checks.shards import ROUTES
from xentlib.plan import stream_rows
from xentlib.shards import VocabShard
from xentlib.torch.core.consistency import (
    PendingCollective,
    all_gather,
    filled,
    group_named,
    scatter_into,
    start_all_gather,
    start_reduce_scatter,
)
from xentlib.torch.core.gradients import Gradients, GradientSums, sum_over_shards
from xentlib.torch.core.logits import ChunkedLogits
from xentlib.torch.core.loop import HeadLoop, LocalRows, Rows, Sums
from xentlib.torch.core.tokens import LocalVocab
from xentlib.torch.operators import HeadCall


class ClassOrder(NamedTuple):
    """Of the classes of a vocabulary, and of this rank's columns."""

    each: int  # rows of a part
    first_R: Tensor  # place of the first class of a part
    parts_G: Tensor  # of this rank

    def to_place(self, classes: Tensor) -> Tensor:
        """Where classes stand; all of them are in the vocabulary."""
        row_index: Tensor = self.first_R[classes // self.each] + classes % self.each
        return row_index

    def to_class(self, columns: Tensor) -> Tensor:
        """Of columns of this rank."""
        classes: Tensor = self.parts_G[columns // self.each] * self.each + columns % self.each
        return classes


def class_order_of(nodes_GL: Tensor, shard: Tensor, rank: int, device: torch.device) -> ClassOrder:
    """From what an operator may take: the part of the head that each rank of each node keeps, a
    shard as `numbers_of` gives it, and this rank's place in its node."""
    vocab_size = int(shard[2])
    each = -(-vocab_size // nodes_GL.numel())
    count_L = (vocab_size - nodes_GL * each).clamp(0, each).sum(0)
    nodes_G1 = torch.arange(nodes_GL.shape[0], device=nodes_GL.device)[:, None]
    first_R = torch.empty(nodes_GL.numel(), dtype=torch.int64, device=nodes_GL.device)
    first_R[nodes_GL] = count_L.cumsum(0) - count_L + nodes_G1 * each
    return ClassOrder(each, first_R.to(device), nodes_GL[:, rank].to(device))


class NodeRows(LocalRows):
    """The rows of this rank's place in all nodes, G v of them. Nodes make collectives of their own
    within a call, as many as they have chunks."""

    def __init__(self, call: HeadCall) -> None:
        super().__init__(call)
        layout = call.rows
        assert layout.shard is not None
        assert layout.nodes is not None
        group, self.peers = group_named(layout.group), group_named(layout.peers)
        self.nodes = dist.get_world_size(self.peers)
        self.own_rows = self.size
        self.each = -(-int(layout.shard[2]) // (self.nodes * dist.get_world_size(group)))
        self.size = self.nodes * self.each
        device = call.hidden.device
        self.order = class_order_of(layout.nodes, layout.shard, dist.get_rank(group), device)
        # In the dtype of the products: what travels loses nothing.
        weight = self._gathered(call.rows_VH.to(call.gemm_dtype))
        bias = None if call.bias is None else self._gathered(call.bias)
        self.call = call._replace(weight=weight, bias=bias)

    def _gathered(self, rows: Tensor) -> Tensor:
        """[v, ...] of every node; rows that the last ranks lack are 0 and no class."""
        if rows.shape[0] < self.each:
            rows = filled(rows, self.each)
        return all_gather(rows.contiguous(), self.peers)

    def scattered(self, whole: Tensor) -> Tensor:
        """This rank's rows [v, ...] of a gradient, summed over the nodes."""
        result = whole.new_empty(self.each, *whole.shape[1:])
        scatter_into(result, whole, group=self.peers)
        # What is kept until the backward has no room for rows that there are not.
        return result if self.own_rows == self.each else result[: self.own_rows].clone()

    def sums(self, loop: HeadLoop, needs: list[bool]) -> Sums:
        return NodeSums(self, self.block(loop), needs)


class NodeSums(GradientSums):
    """Sums of the tokens of this node, and in the end of all nodes."""

    def __init__(self, rows: NodeRows, logits: ChunkedLogits, needs: list[bool]) -> None:
        super().__init__(logits, needs, rows.size)
        self.rows = rows

    def finish(self, exponent: Tensor | None) -> Gradients:
        """d hidden of this rank's tokens, d weight and d bias of its rows and of all tokens, each
        node's without its own power of two."""
        gradients, logits = super().finish(exponent), self.logits
        logits.operand_VH = logits.operand_VH.new_empty(0, logits.hidden_size)  # not beside those
        if self.needs[1]:
            gradients = gradients._replace(weight=self.rows.scattered(gradients.weight))
        if self.needs[2]:
            gradients = gradients._replace(bias=self.rows.scattered(gradients.bias))
        return gradients


class PassingOrder(NamedTuple):
    """Of classes in the order in which they pass, and the columns of one block."""

    place_V: Tensor
    class_V: Tensor
    start: int
    first: int = 0  # class, of a shard of tensor parallelism

    def to_place(self, classes: Tensor) -> Tensor:
        local = classes - self.first
        inside = (local >= 0) & (local < self.place_V.shape[0])
        if not self.place_V.numel():  # of a shard without rows
            return torch.full_like(classes, -1)
        return torch.where(inside, self.place_V[torch.where(inside, local, 0)], -1)

    def to_class(self, columns: Tensor) -> Tensor:
        return self.first + self.class_V[self.start + columns]


class StreamedRows(Rows):
    """The rows of all ranks, block by block."""

    streamed = True

    def __init__(
        self, call: HeadCall, class_weights: Tensor | None, rows_each: int, budget: int
    ) -> None:
        """`rows_each`: of every rank, but for the last ones. `budget`: bytes of a chunk's logits,
        the same on every rank."""
        assert call.rows.shard is not None
        self.group, self.size = group_named(call.rows.group), call.columns
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        start, stop, self.all_classes = (int(x) for x in call.rows.shard[:3])
        ROUTES.require("stream_top", not (call.rows.shards and call.top_k), top_k=call.top_k)
        if not call.rows.shards:  # else those of a shard of tensor parallelism pass by
            start, stop = 0, self.all_classes
        self.first, self.vocab_size, self.hidden_size = start, stop - start, call.hidden.shape[1]
        if class_weights is not None:
            check_class_weights(class_weights.shape[0], self.all_classes)
        self.rows_each = rows_each
        self.block = stream_rows(self.rows_each, self.hidden_size, self.ranks, budget)
        # Where each class stands, which stands at each place, and where blocks begin.
        classes_V = torch.arange(self.vocab_size, device=call.hidden.device)
        of_rank_V, row_V = classes_V // self.rows_each, classes_V % self.rows_each
        key_V = (row_V // self.block * self.ranks + of_rank_V) * self.block + row_V % self.block
        self.class_V = torch.argsort(key_V)
        self.place_V = torch.empty_like(self.class_V)
        self.place_V[self.class_V] = classes_V
        # Of the places of a block that classes take, rows beyond a rank's last left out.
        self.taken_V = key_V[self.class_V]
        self.local = call.rows_VH.to(call.gemm_dtype)
        self.bias_V: Tensor | None = None  # in the order of the classes
        if call.bias is not None:
            bias = all_gather(filled(call.bias, self.rows_each), self.group)
            self.bias_V = bias[: self.vocab_size]
        self.call = call._replace(transposed=False)

    def blocks(self, loop: HeadLoop) -> Iterator[ChunkedLogits]:
        """The next block's rows travel meanwhile."""
        pending: PendingCollective | None = None
        num_blocks = -(-self.rows_each // self.block)
        for b in range(num_blocks):
            rows = (self._start(b) if pending is None else pending).wait()
            pending = self._start(b + 1) if b + 1 < num_blocks else None
            start, stop = self.bounds(b)
            if stop - start < rows.shape[0]:
                rows = rows[self.taken(b)]
            bias = None if self.bias_V is None else self.bias_V[self.class_V[start:stop]]
            shard = VocabShard(start, stop, self.vocab_size)
            order = PassingOrder(self.place_V, self.class_V, start, self.first)
            yield ChunkedLogits(
                self.call._replace(weight=rows, bias=bias),
                loop.chunks_of,
                LocalVocab(self.all_classes, shard, order),
                loop.class_weights,
                kernel_cls=loop.kernel_cls,
            )

    def bounds(self, b: int) -> tuple[int, int]:
        """Places of a block's classes."""
        rows, each, total = b * self.block, self.rows_each, self.vocab_size
        full, last = divmod(total, each)

        def before(row: int) -> int:  # classes among the first `row` rows of every rank
            row = min(row, each)
            return full * row + min(last, row)

        return before(rows), before(rows + self.block)

    def taken(self, b: int) -> Tensor:
        """Of a block as it travels [R K], where its classes are [C]."""
        start, stop = self.bounds(b)
        return self.taken_V[start:stop] - b * self.ranks * self.block

    def _start(self, b: int) -> PendingCollective:
        part = self.local[b * self.block : (b + 1) * self.block]
        return start_all_gather(filled(part, self.block), self.group)

    def sums(self, loop: HeadLoop, needs: list[bool]) -> Sums:
        return StreamSums(self, loop, needs)


class StreamSums:
    """Gradients over all blocks: each with the sums of its own."""

    def __init__(self, rows: StreamedRows, loop: HeadLoop, needs: list[bool]) -> None:
        self.rows, self.loop, self.needs, like = rows, loop, needs, loop.like
        num_tokens, width = rows.call.hidden.shape
        self.hidden = torch.zeros(num_tokens if needs[0] else 0, width, **like)
        self.weight = torch.zeros((rows.size, width) if needs[1] else (0, 0), **like)
        self.bias_V = torch.zeros(rows.vocab_size if needs[2] else 0, **like)
        self.leaving: tuple[PendingCollective, int] | None = None

    def passes(self, exponent: Tensor | None) -> Iterator[tuple[ChunkedLogits, GradientSums]]:
        for b, logits in enumerate(self.rows.blocks(self.loop)):
            sums = GradientSums(logits, self.needs, logits.local_size, hidden=self.hidden)
            yield logits, sums
            self._take(b, sums, exponent)
        self._wait()

    def _take(self, b: int, sums: GradientSums, exponent: Tensor | None) -> None:
        rows, needs = self.rows, self.needs
        sums.complete()
        start, stop = rows.bounds(b)
        if needs[2]:
            self.bias_V[rows.class_V[start:stop]] = sums.bias
        if not needs[1]:
            return
        self._wait()
        part_CH = sums.weight if exponent is None else torch.ldexp(sums.weight, -exponent)
        if stop - start < rows.ranks * rows.block:
            whole = part_CH.new_zeros(rows.ranks * rows.block, rows.hidden_size)
            whole[rows.taken(b)] = part_CH
            part_CH = whole
        self.leaving = start_reduce_scatter(part_CH, rows.group), b * rows.block

    def _wait(self) -> None:
        if self.leaving is None:
            return
        pending, row = self.leaving
        part = pending.wait()
        count = min(self.rows.block, self.rows.size - row)
        if count > 0:
            self.weight[row : row + count] = part[:count]
        self.leaving = None

    def finish(self, exponent: Tensor | None) -> Gradients:
        """d weight has lost the power of two before."""
        rows, hidden, bias = self.rows, self.hidden, self.bias_V
        if self.needs[0]:
            sum_over_shards(rows.call, hidden)
        if exponent is not None:
            hidden, bias = torch.ldexp(hidden, -exponent), torch.ldexp(bias, -exponent)
        if self.needs[2]:
            whole = filled(bias, rows.ranks * rows.rows_each)
            bias = bias.new_empty(rows.rows_each)
            scatter_into(bias, whole, group=rows.group)
            bias = bias[: rows.size].clone()
        return Gradients(hidden, self.weight, bias, *(bias.new_empty(0, 0) for _ in range(2)))
