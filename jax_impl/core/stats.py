"""Statistics of tokens, over all shards of a vocabulary: steps 3 to 5 of `xentlib.nll`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.algebra import BLOCK_COLUMNS, BlockStats, TargetInfo, TokenStats, WantedStats
from xentlib.jax.core.algebra import ALGEBRA
from xentlib.jax.core.logits import Chunk, ChunkedLogits
from xentlib.jax.core.loop import over_chunks
from xentlib.jax.core.vocab import combine, varying


def all_stats(
    logits: ChunkedLogits, wanted: WantedStats, *, only: Chunk | None = None
) -> TokenStats:
    """Steps 2 to 5 over all shards of a vocabulary: packed rows [M] of all tokens, on every
    device."""

    def body(chunk: Chunk, packed: Any) -> Any:
        def put(into: jax.Array, values: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice_in_dim(into, values, chunk.start, axis=values.ndim - 1)

        z_y, blocks, _ = logits.kernels.stats(chunk.block, wanted)
        return jax.tree.map(put, packed, (z_y, blocks))

    width = logits.arrays.hidden.shape[1]
    if logits.operand is not None:
        width = logits.operand.shape[logits.axes[0]]
    shape = -(-width // BLOCK_COLUMNS), logits.order.size
    each = jnp.zeros(shape, logits.options.compute_dtype)
    sum_ed, top = (each if want else None for want in (wanted.entropy, wanted.predicted))
    sum_d = each[0] if wanted.smoothing else None
    packed = each[0], BlockStats(each, each, each, sum_ed, top, sum_d)
    z_y, blocks = over_chunks(logits, body, packed, only=only)
    return stats_of(logits, logits.order, z_y, blocks)


def target_info(logits: ChunkedLogits, rows: jax.Array | slice) -> TargetInfo:
    """Of some tokens."""
    target, weights = logits.tokens.targets[rows], logits.arrays.class_weights
    if weights is None:
        return TargetInfo(target, 1.0, float(logits.vocab_size))
    weights = weights.astype(logits.options.compute_dtype)
    return TargetInfo(target, weights[target], weights.sum())


def stats_of(
    logits: ChunkedLogits, rows: jax.Array, z_y: jax.Array, blocks: BlockStats
) -> TokenStats:
    """Step 5 for some tokens, over all shards if there are several."""
    label = target_info(logits, rows)
    if logits.options.axis is None:
        return ALGEBRA.token_stats(z_y, ALGEBRA.together(blocks), logits.vocab_size, label)
    assert logits.shard is not None
    assert logits.tokens.owned is not None
    owned, shard, own = logits.tokens.owned[rows], logits.shard, logits.shape.class_weights_V
    total = shard.size.astype(z_y.dtype) if own is None else own.sum()
    others = total - label.weight * owned.astype(z_y.dtype)
    z_y, rest = combine(
        logits.options.axis, z_y, owned, shard.start, blocks, others, logits.consistency
    )
    return ALGEBRA.token_stats(z_y, rest, logits.vocab_size, label)


def axes_of_stats(logits: ChunkedLogits, axes: frozenset[Any]) -> frozenset[Any]:
    """Of those over which a logits varies by type: where its tokens' statistics do, which have been
    summed over the vocabulary's axis, each device keeping those of its own tokens."""
    assert logits.options.axis is not None
    varied = axes - varying(lax.axis_index(logits.options.axis.name))
    if logits.own is not None:
        varied |= varying(lax.axis_index(logits.options.gathered))
    return varied


def put_rows(
    logits: ChunkedLogits, chunk: Chunk, packed_RM: jax.Array, rows_RT: jax.Array
) -> jax.Array:
    """Values of a chunk's tokens among those [R, M] of this device's."""
    start = chunk.start
    if logits.own is not None:
        start, count = start // (logits.chunk_rows // logits.own.chunk_rows), logits.own.chunk_rows
        first_row = lax.axis_index(logits.options.gathered) * count
        rows_RT = lax.dynamic_slice_in_dim(rows_RT, first_row, count, axis=1)
    return lax.dynamic_update_slice_in_dim(packed_RM, rows_RT, start, axis=1)
