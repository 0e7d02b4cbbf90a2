"""Statistics of tokens, over all shards of a vocabulary: steps 3 to 5 of `xentlib.nll`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import NonTargetStats, TokenStats, WantedStats, unpack_stats
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.kernels import Kernels, LogitsBlock
from xentlib.torch.core.logits import Chunk, ChunkedLogits, GivenLogits
from xentlib.torch.core.tokens import check_labels, target_info


class ColumnStats(NamedTuple):
    """Of some columns: the target's logit and whether it is one of them, the others' statistics,
    and their weight."""

    z_y: Tensor
    owned: Tensor
    rest: NonTargetStats
    weight: Tensor | float

    def joined(self, other: ColumnStats) -> ColumnStats:
        """With those of other columns."""
        z_y = torch.where(self.owned, self.z_y, 0.0) + torch.where(other.owned, other.z_y, 0.0)
        rest = ALGEBRA.joined(self.rest, self.weight, other.rest, other.weight)
        return ColumnStats(z_y, self.owned | other.owned, rest, self.weight + other.weight)


def all_stats(loop: Any, wanted: WantedStats) -> TokenStats:
    """Of all N tokens of a `HeadLoop`. A single chunk keeps its logits for the next pass, unless
    that needs a softcap's derivative."""
    return combined(loop, columns_of_blocks(loop.blocks(), wanted), slice(None))


def columns_of_blocks(blocks: Iterable[ChunkedLogits], wanted: WantedStats) -> ColumnStats:
    of_all: ColumnStats | None = None
    for logits in blocks:
        sums = StatSums(logits, wanted)
        for chunk in logits.chunks():
            sums.add_chunk(logits, chunk)
        logits.filled = logits.plan.num_chunks == 1 and logits.shape.scalars.softcap is None
        of_block = sums.of_columns()
        of_all = of_block if of_all is None else of_all.joined(of_block)
    assert of_all is not None
    return of_all


def chunk_stats(logits: ChunkedLogits, chunk: Chunk, wanted: WantedStats) -> TokenStats:
    """Of the tokens of one chunk, whose logits stay."""
    sums = StatSums(logits, wanted, chunk)
    sums.add_chunk(logits, chunk)
    return combined(logits, sums.of_columns(), sums.places)


def given_stats(given: GivenLogits, wanted: WantedStats) -> TokenStats:
    """Of all N tokens, from logits that are there."""
    sums, kernels = StatSums(given, wanted), given.kernels()
    for rows in given.blocks():
        sums.add(rows, kernels)
    return combined(given, sums.of_columns(), sums.places)


class StatSums:
    """Steps 3 and 4 of some columns, for all N tokens or those of a chunk."""

    def __init__(
        self,
        logits: ChunkedLogits | GivenLogits,
        wanted: WantedStats,
        chunk: Chunk | None = None,
    ) -> None:
        self.logits, self.wanted, self.whole = logits, wanted, chunk is None
        self.places: slice | Tensor = slice(None)
        if chunk is not None:
            self.places = logits.tokens.places(chunk.start, chunk.start + chunk.size)
        count = logits.tokens.valid.shape[0] if chunk is None else chunk.size
        self.packed = torch.zeros(4 + sum(wanted), count, **logits.like)

    def add_chunk(self, logits: ChunkedLogits, chunk: Chunk) -> None:
        kernels = logits.kernels()
        for rows in logits.blocks(chunk):
            self.add(rows, kernels)

    def add(self, rows: LogitsBlock, kernels: Kernels) -> None:
        z_y, rest = kernels.stats(rows, self.wanted, dz_follows=False)
        places = rows.places if self.whole else rows.span
        self.packed[:, places] = torch.stack([z_y, *(x for x in rest if x is not None)])

    def of_columns(self) -> ColumnStats:
        z_y, rest = unpack_stats(self.packed, self.wanted)
        logits, owned = self.logits, self.logits.tokens.owned
        if rest.top is not None:
            rest = rest._replace(top=logits.vocab.to_class(rest.top))
        here = torch.ones_like(z_y, dtype=torch.bool) if owned is None else owned[self.places]
        weight: Tensor | float = float(logits.local_size)
        if logits.own_weights is not None:
            weight = logits.own_weights.sum()
        label = target_info(logits, self.places)
        return ColumnStats(z_y, here, rest, weight - label.weight * here.to(z_y.dtype))


def combined(part: Any, columns: ColumnStats, places: slice | Tensor) -> TokenStats:
    """Step 5 for tokens at `places`: with the columns of all shards, one MAX and one packed SUM."""
    vocab, tokens = part.vocab, part.tokens
    # Of tokens that are gathered all ranks have as many in a chunk, and know it.
    most = len(columns.z_y) if part.gathered else tokens.valid.shape[0]
    z_y, rest = vocab.combine(*columns, most)
    if vocab.sharded:
        check_labels(part.labels, tokens.bad, part.ignore_index, vocab.size)
    return ALGEBRA.token_stats(z_y, rest, vocab.size, target_info(part, places))


def at_rows(stats: TokenStats, index: slice | Tensor) -> TokenStats:
    """Of some of the tokens that `stats` are of."""
    picked: list[Any] = [None if x is None else x[index] for x in stats]
    return TokenStats(*picked)
