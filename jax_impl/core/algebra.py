"""Steps 5 and 6 of `xentlib.nll` per token, in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.math.softmax import Algebra


def exp(x: jax.Array) -> jax.Array:
    return lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)


def cast(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.astype(like.dtype)


def rounded(x: jax.Array) -> jax.Array:
    """Not an `optimization_barrier`, which XLA drops before it fuses: LLVM then contracts a product
    and a sum that are side by side, in one program and not in another. -inf becomes finfo.min."""
    return jnp.maximum(x, float(np.finfo(x.dtype).min))


ALGEBRA = Algebra(jnp, exp, cast, rounded, lambda x: x)
