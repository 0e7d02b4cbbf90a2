"""Step 1 in JAX: which tokens count, and where their labels are.

Shapes: N tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xentlib.jax.call import Constants, Options
from xentlib.jax.head import shard_here
from xentlib.jax.labels import valid_tokens, widen_labels
from xentlib.plan import VocabShard

__all__ = ["find_targets"]


def find_targets(
    options: Options, labels: jax.Array, constants: Constants, columns: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, VocabShard | None]:
    """Columns of the labels (the last plus one if on another device) and their classes, which
    tokens are valid, which of them have a label outside the vocabulary, which labels are here, and
    this device's shard."""
    labels = widen_labels(labels)
    valid_N = valid_tokens(labels, constants.where, options.ignore_index)
    shard = None
    if options.axis is not None:
        shard = shard_here(options.axis, columns, constants.shard)
    in_range_N = (labels >= 0) & (labels < (columns if shard is None else shard.vocab_size))
    bad_N = valid_N & ~in_range_N
    labels = jnp.where(valid_N & in_range_N, labels, 0).astype(jnp.int32)
    if shard is None:
        return labels, labels, valid_N, bad_N, None, None
    owned_N = (labels >= shard.start) & (labels < shard.stop)
    column_N = jnp.where(owned_N, labels - shard.start, columns)
    return column_N, labels, valid_N, bad_N, owned_N, shard
