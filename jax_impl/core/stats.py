"""Statistics of tokens, over all shards of a vocabulary: steps 3 to 5 of `xentlib.nll`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.core.algebra import ALGEBRA
from xentlib.jax.core.blocks import columns_of_blocks
from xentlib.jax.core.kernels import Logits
from xentlib.jax.core.logits import Chunk, ChunkedLogits
from xentlib.jax.core.loop import over_chunks
from xentlib.jax.core.tokens import target_info
from xentlib.jax.core.vocab import combine, varying
from xentlib.math.softmax import BLOCK_COLUMNS, BlockStats, NonTargetStats, TokenStats, WantedStats


def all_stats(
    logits: ChunkedLogits, wanted: WantedStats, *, only: Chunk | None = None
) -> TokenStats:
    """Steps 2 to 5 over all shards of a vocabulary: packed rows [M] of all tokens, on every
    device."""
    z_y, blocks, *_ = all_columns(logits, wanted, only=only)
    return stats_of(logits, logits.order, z_y, blocks)


def all_columns(
    logits: ChunkedLogits, wanted: WantedStats, *, only: Chunk | None = None
) -> tuple[jax.Array, BlockStats, jax.Array | None, jax.Array | None]:
    """Steps 2 to 4 of this device's columns: packed rows [M] of all tokens, [K, M] of further
    classes, and [2, K, M] of the largest."""

    def body(chunk: Chunk, packed: Any) -> Any:
        def put(into: jax.Array, values: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(into, values, chunk.start, axis=values.ndim - 1)

        return jax.tree.map(put, packed, chunk_columns(logits, chunk, wanted))

    width = logits.arrays.hidden.shape[1]
    if logits.operand is not None:
        width = logits.operand.shape[logits.axes[0]]
    if logits.block_classes:
        width = logits.blocks * logits.block_classes
    shape = -(-width // BLOCK_COLUMNS), logits.order.size
    each = jnp.zeros(shape, logits.options.compute_dtype)
    sum_ed, top = (each if want else None for want in (wanted.entropy, wanted.predicted))
    sum_d = each[0] if wanted.smoothing else None
    further = logits.tokens.more
    more = None if further is None else jnp.zeros((further.ids.shape[1], each.shape[1]), each.dtype)
    candidates, top_k = None, min(logits.options.top_k, width)
    if top_k:
        candidates = jnp.zeros((2, top_k, each.shape[1]), each.dtype)
    packed = each[0], BlockStats(each, each, each, sum_ed, top, sum_d), more, candidates
    result: Any = over_chunks(logits, body, packed, only=only)
    z_y, blocks, more, candidates = result
    return z_y, blocks, more, candidates


def chunk_columns(
    logits: ChunkedLogits, chunk: Chunk, wanted: WantedStats
) -> tuple[jax.Array, BlockStats, jax.Array | None, jax.Array | None]:
    """The same of the tokens of a chunk."""
    if logits.block_classes:
        return columns_of_blocks(logits, chunk, wanted)
    z_y, blocks, left = logits.kernels.stats(chunk.block, wanted)
    return z_y, blocks, *further_rows(left)


def further_rows(left: Logits) -> tuple[jax.Array | None, jax.Array | None]:
    """Logits of further classes [K, T], and of the largest their columns and logits [2, K, T]."""
    more = None if left.z_more_TK is None else left.z_more_TK.T
    if left.top_TK is None or left.z_top_TK is None:
        return more, None
    return more, jnp.stack((left.top_TK.T, left.z_top_TK.T))


def stats_of(
    logits: ChunkedLogits, rows: jax.Array, z_y: jax.Array, blocks: BlockStats
) -> TokenStats:
    """Step 5 for some tokens, over all shards if there are several."""
    z_y, rest = over_shards(logits, rows, z_y, blocks)
    return ALGEBRA.token_stats(z_y, rest, logits.vocab_size, target_info(logits, rows))


def class_stats(
    logits: ChunkedLogits,
    rows: jax.Array,
    z_y: jax.Array,
    blocks: BlockStats,
    more: jax.Array | None,
    candidates: jax.Array | None,
) -> jax.Array:
    """[1 + K + 2 M + 4, tokens] of some tokens: logits of the target and of further classes, M
    candidates for the largest, and of the others the largest and their sums; over shards with one
    SUM more than `stats_of`."""
    z_y, rest = over_shards(logits, rows, z_y, blocks)
    further = logits.tokens.more
    assert further is not None
    assert more is not None
    if further.owned is not None:
        more = jnp.where(further.owned[rows].T, more, 0.0)
    if candidates is not None:
        more = jnp.concatenate((more, offered(logits, candidates)))
    if logits.options.axis is not None:
        more = lax.psum(more, logits.options.axis.name)
    sum_ed = jnp.zeros_like(rest.s) if rest.sum_ed is None else rest.sum_ed
    return jnp.concatenate((z_y[None], more, jnp.stack((rest.m, rest.ones, rest.s, sum_ed))))


def offered(logits: ChunkedLogits, candidates: jax.Array) -> jax.Array:
    """[2 M, tokens]: the `top_k` largest of every shard, classes and logits, out of this one's
    columns and logits [2, K, tokens], as numbers of which one shard has each. A shard of fewer
    columns has no class, -1, in the others' places."""
    axis, shard, (columns, z) = logits.options.axis, logits.shard, candidates
    if axis is None:
        return lax.collapse(candidates, 0, 2)
    assert shard is not None
    classes = jnp.where(columns < 0, -1.0, columns + shard.start.astype(columns.dtype))
    fill = (0, logits.options.top_k - len(z)), (0, 0)
    packed = jnp.stack((jnp.pad(classes, fill, constant_values=-1.0), jnp.pad(z, fill)))
    packed = jnp.where(packed[:1] < 0, jnp.array([-1.0, 0.0], packed.dtype)[:, None, None], packed)
    rank = jnp.arange(lax.axis_size(axis.name), dtype=jnp.int32)[None, :, None, None]
    gathered = jnp.where(rank == lax.axis_index(axis.name), packed[:, None], 0.0)
    return lax.collapse(gathered, 0, 3)


def over_shards(
    logits: ChunkedLogits, rows: jax.Array, z_y: jax.Array, blocks: BlockStats
) -> tuple[jax.Array, NonTargetStats]:
    """The target's logit and the statistics of the rest of all columns."""
    if logits.options.axis is None:
        return z_y, ALGEBRA.together(blocks)
    label = target_info(logits, rows)
    assert logits.shard is not None
    assert logits.tokens.owned is not None
    owned, shard, weights_V = logits.tokens.owned[rows], logits.shard, logits.shape.class_weights_V
    total = shard.size.astype(z_y.dtype) if weights_V is None else weights_V.sum()
    others = total - label.weight * owned.astype(z_y.dtype)
    return combine(logits.options.axis, z_y, owned, shard.start, blocks, others, logits.consistency)


def axes_of_stats(logits: ChunkedLogits, axes: frozenset[Any]) -> frozenset[Any]:
    """Of those over which a logits varies by type: where its tokens' statistics do, which have been
    summed over the vocabulary's axis, each device keeping those of its own tokens."""
    assert logits.options.axis is not None
    varied = axes - varying(lax.axis_index(logits.options.axis.name))
    if logits.local is not None:
        varied |= varying(lax.axis_index(logits.options.gathered))
    return varied


def put_rows(
    logits: ChunkedLogits, chunk: Chunk, packed_RM: jax.Array, rows_RT: jax.Array
) -> jax.Array:
    """Values of a chunk's tokens among those [R, M] of this device's."""
    start = chunk.start
    if logits.local is not None:
        start, count = (
            start // (logits.chunk_rows // logits.local.chunk_rows),
            logits.local.chunk_rows,
        )
        first_row = lax.axis_index(logits.options.gathered) * count
        rows_RT = lax.dynamic_slice_in_dim(rows_RT, first_row, count, axis=1)
    return lax.dynamic_update_slice_in_dim(packed_RM, rows_RT, start, axis=1)
