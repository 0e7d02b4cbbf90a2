"""The low-rank part of a head, u B.T with u = s x A.T: of logits, and of gradients.

Shapes: N tokens, V vocabulary, H hidden width, R rank, T tokens of a chunk, P parts of an operand.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.core.call import Arrays, Options
from xentlib.jax.core.gemm import contract, product, round_to

# Of 8 bits or more each: what float32 has.
PARTS = 3
# Where the largest entry of an operand is put before it is cut into parts of float16, whose
# smallest step is 2^-24: entries of LoRA's B, which begins at 0, had 3 digits.
FP16_EXPONENT = 14
# Columns of a product whose rows are tokens. With 2 to 8 columns XLA takes another kernel on a CPU
# without AVX-512 for chunks of 64 rows than for longer ones, and with one for some numbers of rows:
# 2,436 of 7,200 entries of d hidden had other bits at R = 2 (row A10). With 9 and more none had.
COLUMNS = 16


class Parts(NamedTuple):
    """[N, P R] side by side in the dtype of a GEMM, whose sum is an operand [N, R]."""

    array: jax.Array
    exponent: jax.Array | None  # they are this power of two too large

    def whole(self, product: jax.Array, rank: int) -> jax.Array:
        """[M, R] of the product [M, P R] of something with the parts."""
        if self.array.shape[1] > rank:
            product = product.reshape(product.shape[0], -1, rank).sum(axis=1)
        return product if self.exponent is None else jnp.ldexp(product, -self.exponent)


def parts_of(x: jax.Array, exact: str, dtype: str) -> Parts:
    """`x` in the compute dtype, whose values are those of dtype `exact`, for products with dz in
    `dtype`: a copy of dz in float32 would be as large as a chunk."""
    if dtype in (x.dtype.name, exact):
        return Parts(round_to(x, dtype), None)
    exponent = None
    if dtype == "float16":
        exponent = FP16_EXPONENT - jnp.frexp(jnp.abs(x).max(initial=0.0))[1]
        x = jnp.ldexp(x, exponent)
    parts = []
    for _ in range(PARTS):
        parts.append(round_to(x, dtype))
        x = x - parts[-1].astype(x.dtype)
    return Parts(jnp.concatenate(parts, axis=1), exponent)


class LowRank(NamedTuple):
    """A and B of a head, in the compute dtype; their products are never below it."""

    a_RH: jax.Array
    b_VR: jax.Array
    b_parts: Parts
    scale: jax.Array
    keep: jax.Array | None  # [N, H]
    gemm_dtype: str


class LoraActivations(NamedTuple):
    """Of a chunk's tokens."""

    x_TH: jax.Array  # what A multiplies, in the compute dtype
    keep_TH: jax.Array | None
    u_TR: jax.Array


def product_of_rows(x_TK: jax.Array, low: jax.Array, axis: int, dtype: str) -> jax.Array:
    """[T, R], summed over `axis` of `low`: beside columns of zeros where R is small."""
    rank = low.shape[1 - axis]
    padding = [(0, 0), (0, 0)]
    padding[1 - axis] = (0, max(0, COLUMNS - rank))
    return contract(x_TK, jnp.pad(low, padding), 1, axis, dtype)[:, :rank]


def low_rank(options: Options, arrays: Arrays, b: jax.Array) -> LowRank:
    """`b` has a row for each of the operand's."""
    compute = options.compute_dtype
    assert arrays.low_in is not None
    assert arrays.scale is not None
    b_VR = b.astype(compute)
    return LowRank(
        arrays.low_in.astype(compute),
        b_VR,
        parts_of(b_VR, b.dtype.name, options.gemm_dtype),
        arrays.scale.astype(compute),
        arrays.keep,
        options.gemm_dtype,
    )


def activations_of(low: LowRank, x_TH: jax.Array, rows_T: jax.Array) -> LoraActivations:
    """Of a chunk, whose rows are these tokens."""
    compute = low.a_RH.dtype
    x_TH, keep_TH = x_TH.astype(compute), None
    if low.keep is not None:
        keep_TH = low.keep[rows_T]
        x_TH = jnp.where(keep_TH, x_TH, 0.0)
    u_TR = product_of_rows(x_TH, low.a_RH, 1, compute.name) * low.scale
    # Without the barrier XLA makes it again inside of what uses it: 32 of 471 entries of d B had
    # other bits in a jitted gradient than in one that is not (row A11).
    return LoraActivations(x_TH, keep_TH, lax.optimization_barrier(u_TR))


def add_logits(low: LowRank, z_TV: jax.Array, activations: LoraActivations) -> jax.Array:
    return z_TV + product(activations.u_TR, low.b_VR, 1, z_TV.dtype.name)


def backprop_lora(low: LowRank, dz_TV: jax.Array, dz_y_T1: jax.Array, y_T: jax.Array) -> jax.Array:
    """[T, R]: s dz B, the target's terms last."""
    compute = low.b_VR.dtype.name
    product = product_of_rows(dz_TV, low.b_parts.array, 0, compute)
    du_TR = low.b_parts.whole(product, low.b_VR.shape[1])
    own_TR = dz_y_T1 * jnp.take(low.b_VR, y_T, axis=0, mode="clip")
    return (du_TR + own_TR) * low.scale


def from_hidden(low: LowRank, du_TR: jax.Array, activations: LoraActivations) -> jax.Array:
    """[T, H]: what d hidden has of it."""
    part_TH = contract(du_TR, low.a_RH, 1, 0, low.a_RH.dtype.name)
    return part_TH if activations.keep_TH is None else jnp.where(activations.keep_TH, part_TH, 0.0)


def to_a(du_TR: jax.Array, activations: LoraActivations) -> jax.Array:
    return contract(du_TR, activations.x_TH, 0, 0, du_TR.dtype.name)


def to_b(low: LowRank, dz_TV: jax.Array, activations: LoraActivations) -> jax.Array:
    """[V, R]: d B without the target's terms."""
    compute = activations.u_TR.dtype.name
    parts = parts_of(activations.u_TR, compute, low.gemm_dtype)
    return parts.whole(contract(dz_TV, parts.array, 0, 0, compute), activations.u_TR.shape[1])
