"""The largest logits of a row: which columns they are in, alike on every device and in both
frameworks.

Shapes: T rows of a chunk, V columns, K of them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def largest(z_TV: jax.Array, count: int, padded_from: Any) -> tuple[jax.Array, jax.Array]:
    """[T, K] columns, K = `count` or all there are, of several that are equal the lowest, -1 where
    one is no class; and their logits."""
    # `lax.top_k` has 0 before -0, which are equal.
    ordered_TV = jnp.where(z_TV == 0, 0.0, z_TV)
    if padded_from is not None:
        column_TV = lax.broadcasted_iota(jnp.int32, z_TV.shape, 1)
        ordered_TV = jnp.where(column_TV < padded_from, ordered_TV, -jnp.inf)
    _, columns = lax.top_k(ordered_TV, min(count, z_TV.shape[1]))
    z_TK = jnp.take_along_axis(z_TV, columns, axis=1, mode="clip")
    if padded_from is not None:
        columns = jnp.where(columns < padded_from, columns, -1)
    return columns, z_TK
