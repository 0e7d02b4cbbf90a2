"""Next-token labels in JAX, as `xentlib.labels` defines them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from xentlib import labels as spec
from xentlib.checks import check_next_token_labels
from xentlib.jax.describe import describe

__all__ = ["next_token_labels"]


def next_token_labels(
    labels: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    ignore_index: int = -100,
) -> jax.Array:
    check_next_token_labels(
        describe(labels), describe(segment_ids), describe(cu_seqlens), ignore_index
    )
    labels = jnp.asarray(labels)
    fill = jnp.full((*labels.shape[:-1], min(1, labels.shape[-1])), ignore_index, labels.dtype)
    shifted = jnp.concatenate([labels[..., 1:], fill], axis=-1)
    if segment_ids is not None:
        segment_ids = jnp.asarray(segment_ids)
        boundary = segment_ids[..., :-1] != segment_ids[..., 1:]
        inner = jnp.where(boundary, jnp.asarray(ignore_index, labels.dtype), shifted[..., :-1])
        shifted = jnp.concatenate([inner, fill], axis=-1)
    if cu_seqlens is not None and labels.shape[-1]:
        # An offset of 0 ends an empty document: its "last token" is the row's own last one.
        last = (jnp.asarray(cu_seqlens).astype(jnp.int32) - 1) % labels.shape[-1]
        shifted = shifted.at[..., last].set(ignore_index)
    return shifted


next_token_labels.__doc__ = spec.next_token_labels.__doc__
