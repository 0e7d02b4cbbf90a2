"""Statistics of tokens, over all shards of a vocabulary: steps 3 to 5 of `xentlib.nll`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.math.softmax import Algebra, BlockStats, NonTargetStats, TokenStats, WantedStats
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.kernels import stats_in
from xentlib.torch.core.logits import Chunk, ChunkedLogits, num_parts
from xentlib.torch.core.tokens import check_ids, check_labels, target_info


class ColumnStats(NamedTuple):
    """Of some columns: the target's logit, -inf where it is none of them, the others' statistics,
    and their weight; and what makes statistics of all columns out of them."""

    algebra: Algebra
    z_y: Tensor
    rest: BlockStats  # of one part of the columns, or of several
    weight: Tensor | float = 0.0  # for label smoothing
    more: Tensor | None = None  # [K, tokens] logits of further classes, 0 where one is elsewhere
    top: Tensor | None = None  # [2, M, tokens] of the largest, as `LocalVocab.offered` has them

    def joined(self, other: ColumnStats) -> ColumnStats:
        """With those of other columns."""
        both, sum_d = (self, other), None
        if self.rest.sum_d is not None:
            maxima = [ALGEBRA.largest(x.rest) for x in both]
            m = torch.maximum(*maxima)
            terms = zip(both, maxima, strict=True)
            sum_d = sum(ALGEBRA.moved(x.rest.sum_d, x.weight, m_of_x, m) for x, m_of_x in terms)
        pairs = zip(self.rest[:-1], other.rest[:-1], strict=True)
        fields = [None if x is None else (*as_tuple(x), *as_tuple(y)) for x, y in pairs]
        rest = BlockStats(*fields)._replace(sum_d=sum_d)
        z_y, weight = torch.maximum(self.z_y, other.z_y), self.weight + other.weight
        more = None if self.more is None or other.more is None else self.more + other.more
        top = None if self.top is None or other.top is None else torch.cat((self.top, other.top), 1)
        return ColumnStats(self.algebra, z_y, rest, weight, more, top)


def as_tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def all_stats(loop: Any, wanted: WantedStats) -> TokenStats:
    """Of all N tokens of a `HeadLoop`."""
    return combined(loop, columns_of_loop(loop, wanted), slice(None))


def columns_of_loop(loop: Any, wanted: WantedStats) -> ColumnStats:
    """Steps 3 and 4 of all N tokens of a `HeadLoop`, those of one group after the other."""
    parts: list[tuple[Any, ColumnStats]] = []
    for index, blocks in loop.rows.groups(loop):
        columns = columns_of_blocks(blocks, wanted)
        if isinstance(index, slice) and index == slice(None):
            return columns
        # All classes are here: one block
        rest = columns.algebra.together(columns.rest).as_block()
        parts.append((index, columns._replace(rest=rest)))
        del columns, rest  # not beside those of the next group
    count = loop.tokens.valid.shape[0]

    def of_all(*values: Any) -> Any:
        if values[0] is None:
            return None
        whole = values[0].new_zeros(*values[0].shape[:-1], count)
        for (index, _), value in zip(parts, values, strict=True):
            whole[..., index] = value
        return whole

    algebra, z_y, rests, weights, *others = zip(*(columns for _, columns in parts))
    rest = BlockStats(*(of_all(*x) for x in zip(*rests)))
    weight = of_all(*weights) if isinstance(weights[0], Tensor) else weights[0]
    return ColumnStats(algebra[0], of_all(*z_y), rest, weight, *(of_all(*x) for x in others))


def columns_of_blocks(blocks: Iterable[ChunkedLogits], wanted: WantedStats) -> ColumnStats:
    all_columns: ColumnStats | None = None
    stats_Nb4, done = None, 0
    for logits in blocks:
        if stats_Nb4 is None:
            stats_Nb4 = logits.stats_memory(wanted)
        if stats_Nb4 is None:
            block_stats = columns_of(logits, wanted)
        else:
            first, done = done, done + num_parts(logits.local_size)
            block_stats = put_in_place(logits, wanted, stats_Nb4[:, first:done])
        logits.keep_filled()
        all_columns = block_stats if all_columns is None else all_columns.joined(block_stats)
    assert all_columns is not None
    if stats_Nb4 is not None:  # those of all blocks are one part
        rest = stats_in(stats_Nb4, wanted, sum_d=all_columns.rest.sum_d)
        all_columns = all_columns._replace(rest=rest)
    return all_columns


def put_in_place(logits: ChunkedLogits, wanted: WantedStats, stats_Nb4: Tensor) -> ColumnStats:
    """Of a block of classes, by programs that write its statistics [N, parts, 4] where those of
    all blocks are."""
    logits.stats_Nb4, further = stats_Nb4, logits.tokens.more
    z_y, sum_d, more = [stats_Nb4.new_empty(0)], [stats_Nb4.new_empty(0)], []
    if further is not None:
        more = [further.ids.new_empty(0, further.ids.shape[1], dtype=stats_Nb4.dtype)]
    for chunk in logits.chunks():
        for rows in logits.blocks(chunk):
            z_B, rest = logits.kernels().stats(rows, wanted, dz_follows=False)
            z_y.append(z_B)
            sum_d += [] if rest.sum_d is None else [rest.sum_d]
            more += [] if rows.z_more_BK is None else [rows.z_more_BK]
    rest = stats_in(stats_Nb4, wanted, sum_d=whole(sum_d) if wanted.smoothing else None)
    weight, of_more = rest_weight(logits, wanted), whole(more).T if more else None
    return ColumnStats(logits.kernel_cls.algebra, whole(z_y), rest, weight, of_more)


def whole(parts: list[Tensor]) -> Tensor:
    """Of one chunk after the other, the first of which is empty."""
    return parts[1] if len(parts) == 2 else torch.cat(parts)


def chunk_stats(logits: ChunkedLogits, chunk: Chunk, wanted: WantedStats) -> TokenStats:
    """Of the tokens of one chunk, whose logits stay."""
    token_index = logits.tokens.token_index(chunk.start, chunk.start + chunk.size)
    return combined(logits, columns_of(logits, wanted, chunk), token_index)


def columns_of(logits: Any, wanted: WantedStats, chunk: Chunk | None = None) -> ColumnStats:
    """Steps 3 and 4 of the columns of a `ChunkedLogits` or `PrecomputedLogits`, for all N tokens or
    those of a chunk."""
    token_index, count = slice(None), logits.tokens.valid.shape[0]
    if chunk is not None:
        token_index, count = (
            logits.tokens.token_index(chunk.start, chunk.start + chunk.size),
            chunk.size,
        )
    packed: Tensor | None = None
    further, more, top = logits.tokens.more, None, None
    number = 0 if further is None else further.ids.shape[1]
    candidates = min(logits.shape.top_k, logits.local_size)
    for part in logits.chunks() if chunk is None else (chunk,):
        packed = put_stats(packed, count, logits, part, wanted, whole=chunk is None)
    if packed is None:  # of no token
        rows = number + 2 * candidates + 4 + sum(wanted)
        packed = torch.zeros(rows, count, **logits.like)
    if logits.shape.top_k:
        columns, z_top, packed = packed.tensor_split([candidates, 2 * candidates])
        top = torch.stack((logits.vocab.to_class(columns), z_top))
        top = logits.vocab.offered(top, logits.shape.top_k)
    z_y, rest = unpacked(packed[number:], wanted)
    if further is not None:
        more = packed[:number]
        if further.owned is not None:
            more = torch.where(further.at(token_index).owned.T, more, 0.0)
    if rest.top is not None:
        rest = rest._replace(top=logits.vocab.to_class(rest.top))
    weight = rest_weight(logits, wanted, token_index)
    return ColumnStats(logits.kernel_cls.algebra, z_y, rest, weight, more, top)


def rest_weight(
    logits: Any, wanted: WantedStats, token_index: slice | Tensor = slice(None)
) -> Tensor | float:
    """Of the columns without the target, for label smoothing."""
    if not wanted.smoothing:
        return 0.0
    weight: Tensor | float = float(logits.local_size)
    if logits.own_weights is not None:
        weight = logits.own_weights.sum()
    y = logits.tokens.labels[token_index]
    here = (y >= 0) & (y < logits.local_size)
    target: Tensor | float = target_info(logits, token_index).weight
    weight_N: Tensor = weight - target * here.to(logits.compute_dtype)
    return weight_N


def put_stats(
    packed: Tensor | None, count: int, logits: Any, chunk: Any, wanted: WantedStats, *, whole: bool
) -> Tensor | None:
    """Of a chunk, at the places of its tokens within all of them if `whole`, else within it. The
    kernels are given up before the product of the next chunk."""
    kernels = logits.kernels()
    for rows in logits.blocks(chunk):
        z_y, rest = kernels.stats(rows, wanted, dz_follows=False)
        if logits.vocab.shard is None:  # all columns are here: one block
            rest = logits.kernel_cls.algebra.together(rest).as_block()
        further = (rows.top_BK, rows.z_top_BK, rows.z_more_BK)
        parts = [x.T for x in further if x is not None]
        parts += [x for x in (z_y, *rest) if x is not None]
        values = torch.cat([x if x.ndim == 2 else x[None] for x in parts])
        at = rows.token_index if whole else rows.span
        if packed is None and isinstance(at, slice) and at == slice(0, count):
            return values  # of all tokens
        if packed is None:
            packed = values.new_zeros(values.shape[0], count)
        packed[:, at] = values
    return packed


def unpacked(packed: Tensor, wanted: WantedStats) -> tuple[Tensor, BlockStats]:
    """The target's logit and the statistics of blocks out of their rows."""
    sum_d = packed[-1] if wanted.smoothing else None
    fields = packed[1:-1] if wanted.smoothing else packed[1:]
    m, ones, s, *more = fields.chunk(3 + wanted.entropy + wanted.predicted)
    sum_ed = more.pop(0) if wanted.entropy else None
    return packed[0], BlockStats(m, ones, s, sum_ed, more[0] if more else None, sum_d)


def combined(part: Any, columns: ColumnStats, token_index: slice | Tensor) -> TokenStats:
    """Step 5 for tokens at `places`: with the columns of all shards, one MAX and one packed SUM."""
    z_y, rest = over_shards(part, columns, token_index)
    label = target_info(part, token_index)
    return columns.algebra.token_stats(z_y, rest, part.vocab.size, label)


def over_shards(
    part: Any, columns: ColumnStats, token_index: slice | Tensor = slice(None)
) -> tuple[Tensor, NonTargetStats]:
    """The target's logit and the statistics of the rest of all columns."""
    vocab, tokens = part.vocab, part.tokens
    # Of tokens that are gathered all ranks have as many in a chunk, and know it.
    most = len(columns.z_y) if part.gathered else tokens.valid.shape[0]
    owned = torch.ones_like(columns.z_y, dtype=torch.bool)
    if tokens.owned is not None:
        owned = tokens.owned[token_index]
    algebra, z_y, rest, weight, *_ = columns
    z_y, rest = vocab.combine(algebra, z_y, owned, rest, weight, most)
    if vocab.sharded:
        check_ids(part.ids, tokens.valid, vocab.size)
        check_labels(part.labels, tokens.bad, part.ignore_index, vocab.size)
    return z_y, rest


def class_stats(part: Any, columns: ColumnStats) -> Tensor:
    """[1 + K + 2 M + 4, tokens] of a loop: logits of the target and of further
    classes, the M largest that were found, and of the others the largest and their sums; with one
    SUM more than `combined`."""
    z_y, rest = over_shards(part, columns)
    assert columns.more is not None
    more = columns.more
    if columns.top is not None:
        more = torch.cat((more, columns.top.flatten(0, 1)))
    more = part.vocab.of_owners(more)
    sum_ed = torch.zeros_like(rest.s) if rest.sum_ed is None else rest.sum_ed
    return torch.cat((z_y[None], more, torch.stack((rest.m, rest.ones, rest.s, sum_ed))))


def at_rows(stats: TokenStats, index: slice | Tensor) -> TokenStats:
    """Of some of the tokens that `stats` are of."""
    picked: list[Any] = [None if x is None else x[index] for x in stats]
    return TokenStats(*picked)
