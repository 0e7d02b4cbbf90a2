"""Statistics of tokens, over all shards of a vocabulary: steps 3 to 5 of `xentlib.nll`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.algebra import NonTargetStats, TargetInfo, TokenStats, WantedStats, unpack_stats
from xentlib.jax.core.algebra import ALGEBRA
from xentlib.jax.core.logits import Chunk, ChunkedLogits
from xentlib.jax.core.loop import over_chunks
from xentlib.jax.core.vocab import combine, varying


def all_stats(
    logits: ChunkedLogits, wanted: WantedStats, *, only: Chunk | None = None
) -> TokenStats:
    """Steps 2 to 5 over all shards of a vocabulary: packed rows [M] of all tokens, on every
    device."""

    def body(chunk: Chunk, packed: jax.Array) -> jax.Array:
        z_y, rest, _ = logits.kernels.stats(chunk.block, wanted)
        values = jnp.stack([z_y, *(x for x in rest if x is not None)])
        return lax.dynamic_update_slice_in_dim(packed, values, chunk.start, axis=1)

    packed = jnp.zeros((4 + sum(wanted), logits.order.size), logits.options.compute_dtype)
    z_y, rest = unpack_stats(over_chunks(logits, body, packed, only=only), wanted)
    return stats_of(logits, logits.order, z_y, rest)


def target_info(logits: ChunkedLogits, rows: jax.Array | slice) -> TargetInfo:
    """Of some tokens."""
    target, weights = logits.tokens.targets[rows], logits.arrays.class_weights
    if weights is None:
        return TargetInfo(target, 1.0, float(logits.vocab_size))
    weights = weights.astype(logits.options.compute_dtype)
    return TargetInfo(target, weights[target], weights.sum())


def stats_of(
    logits: ChunkedLogits, rows: jax.Array, z_y: jax.Array, rest: NonTargetStats
) -> TokenStats:
    """Step 5 for some tokens, over all shards if there are several."""
    label = target_info(logits, rows)
    if logits.options.axis is not None:
        assert logits.shard is not None
        assert logits.tokens.owned is not None
        owned, shard, own = logits.tokens.owned[rows], logits.shard, logits.shape.class_weights_V
        total = shard.size.astype(z_y.dtype) if own is None else own.sum()
        others = total - label.weight * owned.astype(z_y.dtype)
        z_y, rest = combine(
            logits.options.axis, z_y, owned, shard.start, rest, others, logits.consistency
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
