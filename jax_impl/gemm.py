"""Matrix products with exact operands and a wide accumulator, for every XLA backend.

Operands stay in their own dtype; `preferred_element_type` makes the accumulator and the result
float32 (float64 in the audit mode), `Precision.HIGHEST` keeps float32 operands whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["contract", "pad_free", "round_to"]

MANTISSA = {"bfloat16": (8, 7), "float16": (5, 10)}

# XLA's CPU GEMM picks another kernel where the free dimension of a row-major right operand is no
# multiple of 16, and a row's bits then depend on the number of rows: at H=63 up to 80 % of
# d hidden changed with the chunk size, at H=64 none (contract row A10). That dimension is H in the
# GEMM of d hidden from a [V, H] head, V in the GEMM of the logits from an [H, V] head.
CPU_TILE = 16


def contract(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, dtype: str) -> jax.Array:
    """Sum over `axis_a` of a and `axis_b` of b, both matrices; result in `dtype`."""
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.dtype(dtype),
    )


def round_to(x: jax.Array, dtype: str) -> jax.Array:
    """`x` rounded once to `dtype`; a plain cast may be dropped by XLA's excess precision."""
    if dtype in MANTISSA:
        if x.dtype == jnp.float64:  # through float32, as torch's cast goes
            x = x.astype(jnp.float32)
        x = lax.reduce_precision(x, *MANTISSA[dtype])
    return x.astype(dtype)


def pad_free(weight: jax.Array) -> jax.Array:
    """The head with its second dimension filled up with zeros where this backend needs it."""
    width = weight.shape[1]
    if jax.default_backend() != "cpu" or width % CPU_TILE == 0:
        return weight
    return jnp.pad(weight, ((0, 0), (0, -width % CPU_TILE)))
