"""Statistics of tokens, over all shards of a vocabulary: steps 3 to 5 of `xentlib.nll`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.torch.core.given import Given
from xentlib.torch.core.kernels import Asked, Kernels, RestStats, Rows
from xentlib.torch.core.softmax import Labelled, TokenStats, token_stats
from xentlib.torch.core.tokens import check_labels
from xentlib.torch.core.walk import Chunk, Walk

__all__ = ["all_stats", "at_rows", "chunk_stats", "given_stats", "labelled_at"]


def all_stats(walk: Walk, asked: Asked) -> TokenStats:
    """Of all N tokens. A single chunk keeps its logits for the next walk, unless that needs a
    softcap's derivative."""
    sums = StatSums(walk, asked)
    for chunk in walk.chunks():
        add_chunk(sums, walk, chunk)
    walk.filled = walk.plan.num_chunks == 1 and walk.shape.softcap is None
    return sums.finish()


def chunk_stats(walk: Walk, chunk: Chunk, asked: Asked) -> TokenStats:
    """Of the tokens of one chunk, whose logits stay."""
    sums = StatSums(walk, asked, chunk)
    add_chunk(sums, walk, chunk)
    return sums.finish()


def given_stats(given: Given, asked: Asked) -> TokenStats:
    """Of all N tokens, from logits that are there."""
    sums, kernels = StatSums(given, asked), given.kernels()
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

    def __init__(self, walk: Walk | Given, asked: Asked, chunk: Chunk | None = None) -> None:
        self.walk, self.asked, self.chunk = walk, asked, chunk
        count = walk.tokens.valid.shape[0] if chunk is None else chunk.size
        self.found = torch.zeros(4 + sum(asked), count, **walk.like)

    def add(self, rows: Rows, kernels: Kernels) -> None:
        z_y, rest = kernels.stats(rows, self.asked, dz_follows=False)
        places = rows.places if self.chunk is None else rows.span
        self.found[:, places] = torch.stack([z_y, *(x for x in rest if x is not None)])

    def finish(self) -> TokenStats:
        z_y, m, ones, s, *more = self.found
        found = iter(more)
        rest = RestStats(m, ones, s, *(next(found) if wanted else None for wanted in self.asked))
        walk, chunk, parallel = self.walk, self.chunk, self.walk.parallel
        tokens = walk.tokens
        places: slice | Tensor = slice(None)
        if chunk is not None:
            places = tokens.places(chunk.start, chunk.start + chunk.size)
        labelled = labelled_at(walk, places)
        if parallel is not None:
            assert tokens.owned is not None
            owned = tokens.owned[places]
            own: Tensor | float = float(walk.local_size)
            if walk.own_weights is not None:
                own = walk.own_weights.sum()
            others = own - labelled.weight * owned.to(z_y.dtype)
            most = tokens.valid.shape[0]
            z_y, rest = parallel.combine(z_y, owned, rest, others, most)
            check_labels(walk.labels, tokens.bad, walk.ignore_index, walk.vocab_size)
        return token_stats(z_y, rest, walk.vocab_size, labelled)


def labelled_at(walk: Walk | Given, places: slice | Tensor) -> Labelled:
    """Of some tokens."""
    target = walk.tokens.targets[places]
    if walk.class_weights is None:
        return Labelled(target, 1.0, float(walk.vocab_size))
    # Never out of bounds, also while the shards are guessed.
    last = walk.class_weights.shape[0] - 1
    weight = walk.class_weights[target.clamp(max=last)]
    return Labelled(target, weight, walk.class_weights.sum())


def at_rows(stats: TokenStats, index: slice | Tensor) -> TokenStats:
    """Of some of the tokens that `stats` are of."""
    found: list[Any] = [None if x is None else x[index] for x in stats]
    return TokenStats(*found)
