"""Statistics of tokens, over all shards of a vocabulary: steps 3 to 5 of `xentlib.nll`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.algebra import NonTargetStats, TargetInfo, TokenStats, WantedStats, unpack_stats
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.from_logits import GivenLogits
from xentlib.torch.core.kernels import Kernels, LogitsBlock
from xentlib.torch.core.tokens import check_labels
from xentlib.torch.core.vocab import VocabParallel
from xentlib.torch.core.walk import Chunk, Walk


def all_stats(walk: Walk, wanted: WantedStats) -> TokenStats:
    """Of all N tokens. A single chunk keeps its logits for the next walk, unless that needs a
    softcap's derivative."""
    sums = StatSums(walk, wanted)
    for chunk in walk.chunks():
        add_chunk(sums, walk, chunk)
    walk.filled = walk.plan.num_chunks == 1 and walk.shape.scalars.softcap is None
    return sums.finish()


def chunk_stats(walk: Walk, chunk: Chunk, wanted: WantedStats) -> TokenStats:
    """Of the tokens of one chunk, whose logits stay."""
    sums = StatSums(walk, wanted, chunk)
    add_chunk(sums, walk, chunk)
    return sums.finish()


def given_stats(given: GivenLogits, wanted: WantedStats) -> TokenStats:
    """Of all N tokens, from logits that are there."""
    sums, kernels = StatSums(given, wanted), given.kernels()
    for rows in given.blocks():
        sums.add(rows, kernels)
    return sums.finish()


def add_chunk(sums: StatSums, walk: Walk, chunk: Chunk) -> None:
    kernels = walk.kernels()
    for rows in walk.blocks(chunk):
        sums.add(rows, kernels)


class StatSums:
    """Steps 3 to 5 for all N tokens, or those of a chunk, with one MAX and one packed SUM over a
    vocabulary's shards."""

    def __init__(
        self, walk: Walk | GivenLogits, wanted: WantedStats, chunk: Chunk | None = None
    ) -> None:
        self.walk, self.wanted, self.chunk = walk, wanted, chunk
        count = walk.tokens.valid.shape[0] if chunk is None else chunk.size
        self.packed = torch.zeros(4 + sum(wanted), count, **walk.like)

    def add(self, rows: LogitsBlock, kernels: Kernels) -> None:
        z_y, rest = kernels.stats(rows, self.wanted, dz_follows=False)
        places = rows.places if self.chunk is None else rows.span
        self.packed[:, places] = torch.stack([z_y, *(x for x in rest if x is not None)])

    def of_rank(self) -> tuple[Tensor, Tensor, NonTargetStats, Tensor | float]:
        """Of this rank's columns: the target's logit and whether it is one of them, the others'
        statistics, and their weight."""
        z_y, rest = unpack_stats(self.packed, self.wanted)
        walk, places = self.walk, self._places()
        if rest.top is not None and walk.parallel is not None:
            rest = rest._replace(top=walk.parallel.to_class(rest.top))
        owned = walk.tokens.owned
        owned = torch.ones_like(z_y, dtype=torch.bool) if owned is None else owned[places]
        own: Tensor | float = float(walk.local_size)
        if walk.own_weights is not None:
            own = walk.own_weights.sum()
        weight = target_info(walk, places).weight
        return z_y, owned, rest, own - weight * owned.to(z_y.dtype)

    def _places(self) -> slice | Tensor:
        if self.chunk is None:
            return slice(None)
        start = self.chunk.start
        return self.walk.tokens.places(start, start + self.chunk.size)

    def finish(self) -> TokenStats:
        walk = self.walk
        z_y, owned, rest, others = self.of_rank()
        if isinstance(walk.parallel, VocabParallel):
            tokens = walk.tokens
            # Of tokens that are spread all ranks have as many in a chunk, and know it.
            most = z_y.shape[0] if walk.spread is not None else tokens.valid.shape[0]
            z_y, rest = walk.parallel.combine(z_y, owned, rest, others, most)
            check_labels(walk.labels, tokens.bad, walk.ignore_index, walk.vocab_size)
        return ALGEBRA.token_stats(z_y, rest, walk.vocab_size, target_info(walk, self._places()))


def target_info(walk: Any, places: slice | Tensor) -> TargetInfo:
    """Of some tokens."""
    target = walk.tokens.targets[places]
    if walk.class_weights is None:
        return TargetInfo(target, 1.0, float(walk.vocab_size))
    # Never out of bounds, also while the shards are guessed.
    last = walk.class_weights.shape[0] - 1
    weight = walk.class_weights[target.clamp(max=last)]
    return TargetInfo(target, weight, walk.class_weights.sum())


def at_rows(stats: TokenStats, index: slice | Tensor) -> TokenStats:
    """Of some of the tokens that `stats` are of."""
    found: list[Any] = [None if x is None else x[index] for x in stats]
    return TokenStats(*found)
