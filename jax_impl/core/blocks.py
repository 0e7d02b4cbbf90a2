"""A head in blocks of classes, which tokens pass one after the other, where logits are computed
twice or have no gradient: the statistics of all blocks come first. d weight of a block is whole
once its tokens have passed, and is rounded at once; only d hidden is summed over blocks. Neither a
sum of d weight nor a row of logits is ever as large as the vocabulary.

Blocks have as many classes whatever the number of tokens and the budget of a chunk, so that neither
shows in d hidden (rows A10 and A17).

Shapes: N tokens, V vocabulary, H hidden width, C classes of a block, T tokens of a chunk, M = N
filled up to chunks, b blocks of 128 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.core.algebra import ALGEBRA, rounded
from xentlib.jax.core.call import Axes, own_piece
from xentlib.jax.core.device import from_bits, slice_bits
from xentlib.jax.core.gemm import round_to
from xentlib.jax.core.gradients import LABEL_GROUP, Gradients, add_targets, transposed
from xentlib.jax.core.logits import Chunk, ChunkedLogits, logits_of, own_rows, zero_from
from xentlib.jax.core.loop import over_chunks
from xentlib.jax.core.tokens import ELSEWHERE, of_shard, target_info
from xentlib.jax.core.vocab import as_primal, vary, varying
from xentlib.jax.derivatives import Needs
from xentlib.math.softmax import BLOCK_COLUMNS, BlockStats, WantedStats
from xentlib.shards import VocabShard


def class_block(logits: ChunkedLogits, index: jax.Array) -> ChunkedLogits:
    """One block, as a shard has its rows; what fills the last one up is no class."""
    size, axis_v = logits.block_classes, logits.axes[0]
    first, shape = index * size, logits.shape
    columns = logits.columns if logits.shard is None else logits.shard.size
    begin = 0 if logits.shard is None else logits.shard.start
    count = jnp.clip(columns - first, 0, size)
    shard = VocabShard(begin + first, begin + first + count, logits.vocab_size, size - count)
    known, more = logits.tokens, logits.tokens.more
    tokens = of_shard(
        known.targets, known.valid, known.bad, shard, None if more is None else more.ids
    )
    assert logits.operand is not None
    operand = columns_at(logits.operand, first, size, axis_v)
    padded_from = None
    if logits.shard is not None or logits.columns % size:
        padded_from = count
        operand = zero_from(padded_from, operand, axis_v)

    def of_block(x_V: jax.Array | None) -> jax.Array | None:
        if x_V is None:
            return None
        x_C = columns_at(x_V, first, size, 0)
        return x_C if padded_from is None else zero_from(padded_from, x_C, 0)

    return logits._replace(
        operand=operand.astype(logits.options.gemm_dtype),
        columns=size,
        tokens=tokens,
        shard=shard,
        shape=shape._replace(
            bias_V=of_block(shape.bias_V),
            class_weights_V=of_block(shape.class_weights_V),
            padded_from=padded_from,
        ),
        block_classes=0,
        first=first,
        paired=None if logits.paired is None else class_block(logits.paired, index),
    )


def columns_at(x: jax.Array, first: jax.Array, size: int, axis: int) -> jax.Array:
    """So many of an axis; of the last block, which the array may not fill, with others after."""
    most, like, x = x.shape[axis] - size, x, slice_bits(x)
    block = lax.dynamic_slice_in_dim(x, jnp.minimum(first, most), size, axis)
    if x.shape[axis] % size == 0:
        return from_bits(block, like)
    fill = [(0, size if n == axis else 0) for n in range(x.ndim)]
    rolled = lax.dynamic_slice_in_dim(
        jnp.pad(block, fill), jnp.maximum(first - most, 0), size, axis
    )
    return from_bits(rolled, like)


def put_columns(x: jax.Array, block: jax.Array, first: jax.Array, axis: int) -> jax.Array:
    """In the place of those that `columns_at` reads."""
    size, block = block.shape[axis], slice_bits(block)
    most = x.shape[axis] - size
    at = jnp.minimum(first, most)
    if x.shape[axis] % size:
        before = jnp.maximum(first - most, 0)
        fill = [(size if n == axis else 0, 0) for n in range(x.ndim)]
        block = lax.dynamic_slice_in_dim(jnp.pad(block, fill), size - before, size, axis)
        there = lax.dynamic_slice_in_dim(x, at, size, axis)
        block = jnp.where(lax.broadcasted_iota(jnp.int32, there.shape, axis) < before, there, block)
    put: jax.Array = lax.dynamic_update_slice_in_dim(x, block, at, axis)
    return put


def columns_of_blocks(
    logits: ChunkedLogits, chunk: Chunk, wanted: WantedStats
) -> tuple[jax.Array, BlockStats, jax.Array | None, None]:
    """Steps 2 to 4 of a chunk's tokens, in all blocks: the target's logit, statistics [b, T], and
    logits of further classes [K, T], 0 where one is on another device."""
    options, further = logits.options, logits.tokens.more
    index, per_block = chunk.start // logits.chunk_rows, logits.block_classes // BLOCK_COLUMNS
    none_T = jnp.zeros(logits.chunk_rows, options.compute_dtype)
    none_bT = jnp.zeros((logits.blocks * per_block, logits.chunk_rows), none_T.dtype)
    # Of label smoothing: a sum relative to a maximum, that maximum, and the weight of its classes.
    of_rest = (none_T, none_T - jnp.inf, none_T) if wanted.smoothing else None
    sum_ed, top = (none_bT if want else None for want in (wanted.entropy, wanted.predicted))
    rows = None if further is None else jnp.zeros((further.ids.shape[1], none_T.size), none_T.dtype)

    def body(number: jax.Array, carry: Any) -> Any:
        z_y_T, stats, of_rest, rows = carry
        part = class_block(logits, number)
        of_part = logits_of(part, index)
        label_T, block, left = part.kernels.stats(of_part.block, wanted)
        owned_T, more, shard = of_part.block.owned_T, of_part.block.more, part.shard
        assert owned_T is not None
        assert shard is not None
        z_y_T = z_y_T + jnp.where(owned_T, label_T, 0.0)
        if rows is not None:
            assert more is not None
            assert more.owned is not None
            assert left.z_more_TK is not None
            rows = rows + jnp.where(more.owned, left.z_more_TK, 0.0).T
        if of_rest is not None:
            assert block.sum_d is not None
            label, weights_C = target_info(logits, of_part.rows_T), part.shape.class_weights_V
            total = jnp.asarray(shard.size, none_T.dtype) if weights_C is None else weights_C.sum()
            others = total - label.weight * owned_T.astype(none_T.dtype)
            both = of_rest, (block.sum_d, ALGEBRA.largest(block), others)
            m_T = jnp.maximum(both[0][1], both[1][1])
            moved = [ALGEBRA.moved(sum_d, w, m, m_T) for sum_d, m, w in both]
            of_rest = moved[0] + moved[1], m_T, both[0][2] + both[1][2]
        if block.top is not None:
            block = block._replace(top=block.top + part.first.astype(none_T.dtype))
        stats = jax.tree.map(
            lambda x, y: lax.dynamic_update_slice_in_dim(x, y, number * per_block, 0),
            stats,
            block._replace(sum_d=None),
        )
        return z_y_T, stats, of_rest, rows

    carry = none_T, BlockStats(none_bT, none_bT, none_bT, sum_ed, top, None), of_rest, rows
    carry = vary(carry, varying(logits, chunk))
    result: Any = lax.fori_loop(0, logits.blocks, body, carry)
    z_y_T, stats, of_rest, rows = result
    return z_y_T, stats._replace(sum_d=None if of_rest is None else of_rest[0]), rows, None


def gradients_of_blocks(
    logits: ChunkedLogits,
    needs: Needs,
    step: Callable[[ChunkedLogits, Chunk, Gradients], Gradients],
    exponent: jax.Array | None,
    *used: Any,
) -> Gradients:
    """Of all blocks, d weight in the dtype of the head; `step(block, chunk, sums)` adds those of a
    block of logits. dz carries the power of two `exponent`, which the gradients do not."""
    options, arrays = logits.options, logits.arrays
    size, axis, (axis_v, _) = logits.block_classes, int(transposed(options)), logits.axes
    primal, axes = arrays.weight, varying(logits, used)
    assert primal is not None
    one = None
    if exponent is not None:
        one = jnp.ldexp(jnp.ones((), options.compute_dtype), -exponent)
    by_class = rows_by_class(logits)
    shape = primal.shape[:: -1 if axis != axis_v else 1] if needs.weight else (0, 0)
    # Devices that have a part of each row, gathered for the call, have that part of the gradient.
    cut: list[Axes] = [(), ()]
    if options.place is not None:
        cut[1 - axis] = options.place.weight_cut[1 - axis_v]
        shape = tuple(n // math.prod(map(lax.axis_size, x)) for n, x in zip(shape, cut))
    weight = vary(slice_bits(jnp.zeros(shape, primal.dtype)), varying(primal))
    nothing = Gradients.zeros(class_block(logits, jnp.zeros((), jnp.int32)), needs)
    bias = jnp.zeros(logits.columns if needs.bias else 0, options.compute_dtype)
    # Beside a teacher dz of the target is in its column.
    apart = logits.paired is None
    target_M = jnp.zeros(logits.order.size if apart else 0, options.compute_dtype)

    def body(number: jax.Array, carry: Any) -> Any:
        hidden, weight, bias, target_M = carry
        part = class_block(logits, number)
        sums = vary(nothing._replace(hidden=hidden, target=target_M), axes)
        sums = over_chunks(part, lambda chunk, sums: step(part, chunk, sums), sums, used)
        hidden, target_M = sums.hidden, sums.target
        if apart:
            sums = add_targets_of_block(part, needs, sums, *by_class)
        if needs.weight:
            d_weight = own_piece(sums.weight if one is None else sums.weight * one, tuple(cut))
            d_weight = round_to(as_primal(d_weight, primal), primal.dtype.name)
            weight = put_columns(weight, d_weight, part.first, axis)
        if needs.bias:
            bias = put_columns(bias, sums.bias[:size], part.first, 0)
        return hidden, weight, bias, target_M

    carry = *vary((nothing.hidden,), axes), weight, *vary((bias, target_M), axes)
    hidden, weight, bias, target_M = lax.fori_loop(0, logits.blocks, body, carry)
    if needs.hidden and apart:
        hidden = add_labels_rows(logits, hidden, target_M)
    if one is not None:
        hidden, bias = hidden * one, bias * one
    return nothing._replace(hidden=hidden, weight=from_bits(weight, primal), bias=bias)


def rows_by_class(logits: ChunkedLogits) -> tuple[jax.Array, jax.Array]:
    """Packed rows in the order of their targets' classes, and these: those of a block are
    neighbours."""
    counts_M = jnp.arange(logits.order.size, dtype=jnp.int32) < logits.num_valid
    classes_M = jnp.where(counts_M, logits.tokens.targets[logits.order], ELSEWHERE)
    rows_M = jnp.argsort(classes_M, stable=True)
    return rows_M, classes_M[rows_M]


def add_targets_of_block(
    part: ChunkedLogits,
    needs: Needs,
    sums: Gradients,
    by_class_M: jax.Array,
    classes_M: jax.Array,
) -> Gradients:
    """The targets' terms of d weight and d bias, of those tokens alone whose label is in the block:
    all pairs of a group's labels are compared, and of every block those of all tokens would cost a
    twenty-fourth of its products."""
    if not (needs.weight or needs.bias):
        return sums
    assert part.shard is not None
    options, axis = part.options, int(transposed(part.options))
    first = part.shard.start
    # Not a search, which has no program for any number of tokens.
    start, stop = ((classes_M < x).sum(dtype=jnp.int32) for x in (first, part.shard.stop))
    count = min(LABEL_GROUP, part.chunk_rows)

    def body(group: jax.Array, both: Any) -> Any:
        weight, bias = both
        at_T = start + group * count + jnp.arange(count, dtype=start.dtype)
        inside_T = at_T < stop
        y_T = jnp.where(inside_T, classes_M.at[at_T].get(mode="clip") - first, ELSEWHERE)
        rows_T = by_class_M.at[at_T].get(mode="clip")
        dz_y_T = jnp.where(inside_T, sums.target[rows_T], 0.0)
        if needs.bias:
            bias = bias + add_targets(jnp.zeros_like(bias), y_T, dz_y_T)
        if needs.weight:
            x_TH = slice_bits(part.arrays.hidden)[part.order[rows_T]]
            x_TH = from_bits(x_TH, part.arrays.hidden)
            x_TH = jnp.where(inside_T[:, None], x_TH, 0).astype(options.gemm_dtype)
            dz_y_T = round_to(dz_y_T, options.gemm_dtype).astype(weight.dtype)
            weight = add_targets(weight, y_T, dz_y_T, x_TH, axis)
        return weight, bias

    trips = (stop - start + count - 1) // count
    weight, bias = lax.fori_loop(0, trips, body, (sums.weight, sums.bias))
    return sums._replace(weight=weight, bias=bias)


def add_labels_rows(logits: ChunkedLogits, hidden: jax.Array, target_M: jax.Array) -> jax.Array:
    """The targets' terms of d hidden, after all products: the last term, rounded at its size."""
    options, (axis_v, _) = logits.options, logits.axes
    operand, compute = logits.operand, options.compute_dtype
    assert operand is not None

    def body(index: jax.Array, hidden: jax.Array) -> jax.Array:
        rows_T, in_chunk_T, _ = own_rows(logits, index)
        dz_y_T = lax.dynamic_slice_in_dim(target_M, index * logits.chunk_rows, logits.chunk_rows)
        dz_y_T1 = round_to(dz_y_T, options.gemm_dtype).astype(compute)[:, None]
        y_T = logits.tokens.labels[rows_T]
        w_y_TH = jnp.take(slice_bits(operand), y_T, axis=axis_v, mode="clip")
        w_y_TH = from_bits(w_y_TH, operand)
        w_y_TH = (w_y_TH.T if options.transposed else w_y_TH).astype(options.gemm_dtype)
        # 0 times what another device's row, or one of padding, may be is not 0.
        terms_TH = jnp.where(dz_y_T1 == 0, 0.0, rounded(dz_y_T1 * w_y_TH.astype(compute)))
        at = jnp.where(in_chunk_T, rows_T, logits.tokens.labels.shape[0])
        return hidden.at[at].add(terms_TH, mode="drop")

    trips = (logits.num_valid + logits.chunk_rows - 1) // logits.chunk_rows
    result: jax.Array = lax.fori_loop(0, trips, body, hidden)
    return result
