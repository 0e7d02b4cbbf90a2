"""Next-token labels in JAX, as `xentlib.labels` defines them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib import labels as spec
from xentlib.checks import check_next_token_labels, refuse_axis
from xentlib.jax.describe import describe

__all__ = ["next_token_labels"]


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
        refuse_axis("sequence_parallel", axis)
    rank = lax.axis_index(axis)
    # The widest integer holds all bits of the others, so that one array takes both columns.
    wide = max((x.dtype for x in rows), key=lambda dtype: dtype.itemsize)
    mine = jnp.stack([x[..., :1].astype(wide) for x in rows])
    theirs = lax.ppermute(mine, axis, [(r + 1, r) for r in range(size - 1)])
    label, *segments = (c.astype(x.dtype) for c, x in zip(theirs, rows))
    label = jnp.where(rank == size - 1, ignore_index, label)
    return [label, *segments], rank * rows[0].shape[-1]


next_token_labels.__doc__ = spec.next_token_labels.__doc__
