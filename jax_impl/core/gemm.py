"""Matrix products with exact operands and a wide accumulator, for every XLA backend.

Operands stay in their own dtype; `preferred_element_type` makes the accumulator and the result
float32 (float64 in the audit mode), `Precision.HIGHEST` keeps float32 operands whole.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from xentlib.jax.core.device import device_info
from xentlib.math.softmax import BLOCK_COLUMNS

MANTISSA = {"bfloat16": (8, 7), "float16": (5, 10)}
# float16 is normal from here on; below, its numbers are the multiples of 2^-24.
FP16_NORMAL = 2.0**-14


def contract(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int, dtype: str) -> jax.Array:
    """Sum over `axis_a` of a and `axis_b` of b, both matrices; result in `dtype`."""
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.dtype(dtype),
    )


def product(x_TH: jax.Array, head: jax.Array, axis_h: int, dtype: str) -> jax.Array:
    """Logits of rows and a head; where classes lead of whole blocks, up to which the head is filled
    up on its way into the product: one that is filled up before the loop is an array of its own,
    2.6 GiB of Gemma 3 27B's for 64 classes."""
    if not device_info().classes_lead:
        return contract(x_TH, head, 1, axis_h, dtype)
    more = -head.shape[1 - axis_h] % BLOCK_COLUMNS
    if more:
        head = jnp.pad(head, [(0, more), (0, 0)][:: 1 if axis_h else -1])
    # Or XLA swaps the operands back, for a v6e also across a barrier.
    z_VT: jax.Array = with_layout_constraint(contract(head, x_TH, axis_h, 1, dtype), Layout((0, 1)))
    columns, rows = z_VT.shape
    return z_VT.reshape(columns // BLOCK_COLUMNS, BLOCK_COLUMNS, rows)


def column_sums(x_TV: jax.Array, dtype: str) -> jax.Array:
    """Sum over the rows, as two products: of groups of about sqrt(T) rows, then of the groups.

    XLA's own column sum has other bits on another number of cores (row A11); one product with ones
    adds the rows one after the other, three times the error of PyTorch's sum at 512 rows (row A9).
    """
    rows = x_TV.shape[0]
    size = -(-rows // max(1, math.isqrt(rows)))
    groups = -(-rows // size)
    member_TG = jnp.arange(rows)[:, None] // size == jnp.arange(groups)[None, :]
    partial_GV = contract(member_TG.astype(dtype), x_TV, 0, 0, dtype)
    return contract(partial_GV, jnp.ones((groups, 1), dtype), 0, 0, dtype)[:, 0]


def round_to(x: jax.Array, dtype: str) -> jax.Array:
    """`x` rounded once to `dtype`; a plain cast may be dropped by XLA's excess precision."""
    if dtype in MANTISSA:
        if x.dtype == jnp.float64:  # through float32, as torch's cast goes
            x = x.astype(jnp.float32)
        rounded = lax.reduce_precision(x, *MANTISSA[dtype])
        if dtype == "float16":
            # `reduce_precision` takes subnormals to 0: of the gradient of a mean over 256 x 1000
            # logits it left 0.1 %. A float32 at 0.5 has its last place at 2^-24, so that adding 0.5
            # and taking it away rounds as float16 does there, ties to even.
            small = jnp.copysign((jnp.abs(x) + 0.5) - 0.5, x)
            rounded = jnp.where(jnp.abs(x) < FP16_NORMAL, small, rounded)
        x = rounded
    return x.astype(dtype)
