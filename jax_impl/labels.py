"""Labels in JAX: next-token ones, as `xentlib.labels` defines them, and which tokens count.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib import labels as spec
from xentlib.checks import check_axis, check_label_range, check_next_token_labels
from xentlib.jax.describe import Constants, Options, concrete_on_cpu, describe
from xentlib.jax.head import shard_here
from xentlib.plan import VocabShard

__all__ = ["check_labels", "find_targets", "next_token_labels"]


def next_token_labels(
    labels: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    ignore_index: int = -100,
    sequence_parallel: Any = None,
) -> jax.Array:
    check_next_token_labels(
        describe(labels), describe(segment_ids), describe(cu_seqlens), ignore_index
    )
    length = labels.shape[-1]
    rows = [jnp.asarray(x) for x in (labels, segment_ids) if x is not None]
    if sequence_parallel is None:
        after = [jnp.full_like(x[..., :1], v) for x, v in zip(rows, (ignore_index, 0))]
        start: jax.Array | int = 0
    else:
        after, start = next_slice(rows, ignore_index, sequence_parallel)
    shifted, *segments = (
        jnp.concatenate([x[..., 1:], column], axis=-1) for x, column in zip(rows, after)
    )
    if segments:
        shifted = jnp.where(segments[0] == rows[1], shifted, ignore_index)
    if cu_seqlens is not None:
        last = jnp.asarray(cu_seqlens).astype(jnp.int32) - 1 - start
        # Ends outside of this slice are dropped; a negative index would count from its end.
        last = jnp.where(last < 0, length, last)
        shifted = shifted.at[..., last].set(ignore_index, mode="drop")
    return shifted


def next_slice(
    rows: list[jax.Array], ignore_index: int, axis: Any
) -> tuple[list[jax.Array], jax.Array]:
    """First column of the next slice, of each of `rows`; where this slice starts.

    One collective permute of one column.
    """
    try:
        size = lax.axis_size(axis)
    except (NameError, TypeError):
        check_axis(axis, "sequence_parallel")
    rank = lax.axis_index(axis)
    # The widest integer holds all bits of the others, so that one array takes both columns.
    wide = max((x.dtype for x in rows), key=lambda dtype: dtype.itemsize)
    mine = jnp.stack([x[..., :1].astype(wide) for x in rows])
    theirs = lax.ppermute(mine, axis, [(r + 1, r) for r in range(size - 1)])
    label, *segments = (c.astype(x.dtype) for c, x in zip(theirs, rows))
    label = jnp.where(rank == size - 1, ignore_index, label)
    return [label, *segments], rank * rows[0].shape[-1]


next_token_labels.__doc__ = spec.next_token_labels.__doc__


def widen_labels(labels: Any) -> Any:
    """Labels in a dtype that holds `ignore_index` and V, so that 156 in uint8 is never -100."""
    return labels.astype(np.int32) if labels.dtype.itemsize < 4 else labels


def valid_tokens(labels: Any, where: Any, ignore_index: int) -> Any:
    unsigned = labels.dtype.kind == "u" and ignore_index < 0
    mask = labels == labels if unsigned else labels != ignore_index
    return mask if where is None else mask & where


def find_targets(
    options: Options, labels: jax.Array, constants: Constants, columns: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, VocabShard | None]:
    """Columns of the labels (the last plus one if on another device), which tokens are valid, which
    of them have a label outside the vocabulary, which labels are here, and this device's shard."""
    labels = widen_labels(labels)
    valid_N = valid_tokens(labels, constants.where, options.ignore_index)
    shard = None
    if options.axis is not None:
        shard = shard_here(options.axis, columns, constants.shard)
    in_range_N = (labels >= 0) & (labels < (columns if shard is None else shard.vocab_size))
    bad_N = valid_N & ~in_range_N
    labels = jnp.where(valid_N & in_range_N, labels, 0).astype(jnp.int32)
    if shard is None:
        return labels, valid_N, bad_N, None, None
    owned_N = (labels >= shard.start) & (labels < shard.stop)
    return jnp.where(owned_N, labels - shard.start, columns), valid_N, bad_N, owned_N, shard


def check_labels(labels: Any, where: Any, ignore_index: int, vocab_size: int) -> None:
    """Refuse a label outside the vocabulary, where values can be read."""
    if not concrete_on_cpu(labels, where):
        return
    labels = widen_labels(np.asarray(labels))
    valid = valid_tokens(labels, None if where is None else np.asarray(where), ignore_index)
    offenders = labels[valid & ((labels < 0) | (labels >= vocab_size))]
    if offenders.size:
        check_label_range(int(offenders[0]), vocab_size, ignore_index)
