"""A head in blocks of classes, which all tokens pass, where logits are computed twice or have no
gradient: the statistics of all blocks come first. d weight of a block is whole once its tokens have
passed, and is rounded at once; only d hidden is summed over blocks. Neither a sum of d weight nor a
row of logits is ever as large as the vocabulary.

Blocks have as many classes whatever the number of tokens and the budget of a chunk, so that neither
shows in d hidden (rows A10 and A17).

Shapes: V vocabulary, H hidden width, C classes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from xentlib.plan import BLOCK_CLASSES, GROUP_TOKENS
from xentlib.shards import VocabShard
from xentlib.torch.core.gradients import Gradients, GradientSums
from xentlib.torch.core.logits import ChunkedLogits, Shared, num_parts
from xentlib.torch.core.loop import HeadLoop, Rows
from xentlib.torch.core.tokens import LocalTokens, LocalVocab
from xentlib.torch.core.vocab import ShardedVocab
from xentlib.torch.operators import HeadCall


class LocalBlocks(Rows):
    """This rank's rows, some classes at a time."""

    streamed = True

    def __init__(self, call: HeadCall, vocab: LocalVocab) -> None:
        self.call, self.vocab, self.size = call, vocab, call.columns
        self.first = 0 if vocab.shard is None else vocab.shard.start
        self.memory: Tensor | None = None  # of the logits of every block

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Rows of each block, those that are no class left out; of no row there is one block."""
        rows = self.vocab.local_size
        for start in range(0, max(1, rows), BLOCK_CLASSES):
            yield start, min(start + BLOCK_CLASSES, rows)

    def groups(self, loop: HeadLoop) -> Iterator[tuple[slice | Tensor, Iterator[ChunkedLogits]]]:
        """Tokens whose statistics of all blocks are made before those of others, and the blocks:
        three numbers of a token and 128 classes. Of a shard all tokens', whose ranks meet once."""
        tokens = loop.chunks_of
        count, rows = tokens.all.computed, tokens.all.rows
        if self.vocab.sharded or not count or (count <= GROUP_TOKENS and rows is None):
            yield slice(None), self.blocks(loop)
            return
        for start in range(0, tokens.all.computed, GROUP_TOKENS):
            part = tokens.part(start, start + GROUP_TOKENS)
            yield tokens.all.token_index(start, start + GROUP_TOKENS), self.blocks(loop, part)

    def blocks(self, loop: HeadLoop, tokens: LocalTokens | None = None) -> Iterator[ChunkedLogits]:
        """`tokens`: those of a group."""
        call, chunks_of = self.call, tokens or loop.chunks_of
        # A target that is elsewhere has a column beyond those that are planned.
        columns = min(BLOCK_CLASSES, self.vocab.largest)
        plan = chunks_of.plan(columns, columns * call.compute_dtype.itemsize)
        parts = sum(num_parts(stop - start) for start, stop in self.bounds())
        shared = Shared(plan, parts, self.memory)
        for start, stop in self.bounds():
            shard = VocabShard(self.first + start, self.first + stop, self.vocab.size)
            logits = ChunkedLogits(
                call._replace(
                    weight=call.rows_VH[start:stop],
                    bias=None if call.bias is None else call.bias[start:stop],
                    transposed=False,
                ),
                chunks_of,
                LocalVocab(self.vocab.size, shard),
                loop.class_weights,  # of whole heads alone, whose number has been checked
                kernel_cls=loop.kernel_cls,
                shared=shared,
            )
            self.memory = shared.memory
            yield logits
            # A copy in a CPU's dtype of products is not to stand beside the next one.
            logits.operand_VH = logits.operand_VH.new_empty(0, logits.hidden_size)

    def sums(self, loop: HeadLoop, needs: list[bool]) -> BlockSums:
        return BlockSums(self, loop, needs)


class BlockSums:
    """Gradients over all blocks: d weight in the dtype of the head."""

    def __init__(self, rows: LocalBlocks, loop: HeadLoop, needs: list[bool]) -> None:
        self.rows, self.loop, self.needs, call = rows, loop, needs, rows.call
        (num_tokens, width), like = call.hidden.shape, loop.like
        self.hidden = torch.zeros(num_tokens if needs[0] else 0, width, **like)
        self.bias = torch.zeros(rows.size if needs[2] else 0, **like)
        self.weight = call.hidden.new_empty(0, 0)
        if needs[1]:
            assert call.weight is not None
            self.weight = torch.empty_like(call.weight, memory_format=torch.contiguous_format)
        self.weight_VH = self.weight.T if call.transposed else self.weight
        self.sum_CH: Tensor | None = None

    def passes(self, exponent: Tensor | None) -> Iterator[tuple[ChunkedLogits, GradientSums]]:
        """Each block with its sums."""
        for (start, stop), logits in zip(self.rows.bounds(), self.rows.blocks(self.loop)):
            sum_CH = self._sum_of(start, stop) if self.needs[1] else None
            sums = GradientSums(logits, self.needs, stop - start, hidden=self.hidden, weight=sum_CH)
            yield logits, sums
            sums.complete()
            if self.needs[2]:
                self.bias[start:stop] = sums.bias
            if self.needs[1]:
                self._round(sums.weight, exponent, start, stop)
        for x in (self.weight_VH, self.bias) if self.rows.vocab.local_size < self.rows.size else ():
            x[self.rows.vocab.local_size :] = 0.0  # of rows that are no class

    def _sum_of(self, start: int, stop: int) -> Tensor:
        """[C, H] in the compute dtype: the rows of the result, where they have it."""
        rows_CH = self.weight_VH[start:stop]
        if rows_CH.dtype == self.loop.compute_dtype and rows_CH.is_contiguous():
            return rows_CH
        if self.sum_CH is None:
            self.sum_CH = torch.empty(rows_CH.shape, **self.loop.like)
        return self.sum_CH[: stop - start]

    def _round(self, sum_CH: Tensor, exponent: Tensor | None, start: int, stop: int) -> None:
        rows_CH = self.weight_VH[start:stop]
        if exponent is not None:
            sum_CH.copy_(torch.ldexp(sum_CH, -exponent))
        if sum_CH.data_ptr() != rows_CH.data_ptr():
            rows_CH.copy_(sum_CH)

    def finish(self, exponent: Tensor | None) -> Gradients:
        hidden, bias, vocab = self.hidden, self.bias, self.loop.vocab
        if self.needs[0] and self.rows.call.reduce_hidden and isinstance(vocab, ShardedVocab):
            vocab.start_sum(hidden).wait()
        if exponent is not None:
            hidden, bias = (torch.ldexp(x, -exponent) for x in (hidden, bias))
        return Gradients(hidden, self.weight, bias, *(bias.new_empty(0, 0) for _ in range(2)))
