"""What a loss does around its loop: weights of tokens, the divisor, and the gradients of a backward
from logits that are computed again.

Shapes: N tokens, M = N filled up to chunks, T tokens of a chunk, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from xentlib.jax.core.blocks import gradients_of_blocks
from xentlib.jax.core.call import Arrays, Options, sum_over_devices
from xentlib.jax.core.device import as_bits, from_bits
from xentlib.jax.core.gemm import round_to
from xentlib.jax.core.gradients import Gradients, put_dz
from xentlib.jax.core.kernels import is_target
from xentlib.jax.core.layout import per_token
from xentlib.jax.core.logits import Chunk, ChunkedLogits
from xentlib.jax.core.loop import at_rows, over_chunks
from xentlib.jax.core.vocab import agreed_upstream, as_primal, vary, varying
from xentlib.jax.derivatives import Needs
from xentlib.math.softmax import Coefficients

T = TypeVar("T")


def token_weights(
    options: Options,
    arrays: Arrays,
    valid_N: jax.Array,
    count: jax.Array,
    class_weight_N: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[N] weights of this device's tokens, 0 where one does not count; the sum of all tokens' with
    those of the classes; and what the loss is divided by."""
    compute = options.compute_dtype
    weights_N, weight_sum = valid_N.astype(compute), count.astype(compute)
    if arrays.token_weights is not None:
        weights_N = jnp.where(valid_N, arrays.token_weights.astype(compute), 0.0)
    if arrays.token_weights is not None or class_weight_N is not None:
        counted_N = weights_N
        if class_weight_N is not None:
            counted_N = jnp.where(valid_N, weights_N * class_weight_N, 0.0)
        weight_sum = sum_over_devices(options, counted_N.sum())
    divisor = weight_sum if options.mean else jnp.ones((), compute)
    if arrays.denominator is not None:
        divisor = arrays.denominator.astype(compute)
    # An all-masked window has nothing to divide; a zero weight sum would turn 0 into NaN.
    nothing = (count == 0) | ((weight_sum == 0) & (divisor == 0))
    return weights_N, weight_sum, jnp.where(nothing, 1.0, divisor)


def reduced(
    options: Options, weights_N: jax.Array, divisor: jax.Array, *values_N: jax.Array
) -> list[jax.Array]:
    """Step 9, of all tokens and in one sum over their devices: sum_i w_i value_i / D. Of a token
    alone and in dz the factor is w_i (1 / D)."""
    sums = sum_over_devices(options, jnp.stack([(x * weights_N).sum() for x in values_N]))
    return [x / divisor for x in sums]


def in_chunks(logits: ChunkedLogits, numbers: T) -> T:
    """[..., M + 1] of numbers [..., N], in the order of the chunks' rows."""

    def ordered(x: jax.Array) -> jax.Array:
        return jnp.pad(x[..., logits.order], [(0, 0)] * (x.ndim - 1) + [(0, 1)])

    result: T = jax.tree.map(ordered, numbers)
    return result


def head_gradients(
    local: ChunkedLogits,
    logits: ChunkedLogits,
    needs: Needs,
    numbers_M: Any,
    step: Callable[[ChunkedLogits, Chunk, Any, Gradients], Gradients],
    exponent: jax.Array | None,
    *used: Any,
) -> dict[str, jax.Array | None]:
    """By name, from logits that are computed again: `step(logits, chunk, numbers_T, sums)` adds
    those of a chunk, or of its logits of one block of classes. `local` before tokens were gathered;
    `exponent` is the power of two that dz carries."""

    def body(part: ChunkedLogits, chunk: Chunk, sums: Gradients) -> Gradients:
        return step(part, chunk, at_rows(logits, chunk, numbers_M), sums)

    options = logits.options
    if logits.block_classes:
        gradients = gradients_of_blocks(logits, needs, body, exponent, used, numbers_M)
        if options.place is not None:  # of whose pieces these are
            options = options._replace(place=options.place._replace(weight_cut=((), ())))
    else:
        sums = vary(Gradients.zeros(logits, needs), varying(logits, (used, numbers_M)))
        exchange = bool(logits.options.gathered)
        whole = partial(body, logits)
        sums = over_chunks(logits, whole, sums, used, numbers_M, exchange=exchange)
        gradients = sums.finished(logits, exponent)
    return gradients.rounded(options, local.arrays.leaves)


def logits_gradient(
    logits: ChunkedLogits, numbers_M: Any, dz_of: Callable[[Chunk, Any], jax.Array], *used: Any
) -> dict[str, jax.Array | None]:
    """The same of precomputed logits, in their dtype: every row is written once, its target's
    column with it; `dz_of(chunk, numbers_T)`: [T, V]."""
    primal = logits.arrays.hidden

    def body(chunk: Chunk, d_logits: jax.Array) -> jax.Array:
        dz_TV = dz_of(chunk, at_rows(logits, chunk, numbers_M))
        return put_dz(logits, chunk, d_logits, round_to(dz_TV, primal.dtype.name))

    d_logits = over_chunks(logits, body, as_bits(jnp.zeros_like(primal)), used, numbers_M)
    return {"hidden": as_primal(from_bits(d_logits, primal), primal)}


def dz_with_target(
    logits: ChunkedLogits, chunk: Chunk, lse_T: jax.Array, dz: Coefficients
) -> jax.Array:
    """Steps 6 and 7, with the target's in its column."""
    dz_TV, dz_y_T, _ = logits.kernels.dz(chunk.block, lse_T, dz)
    return jnp.where(is_target(chunk.block, dz_TV), per_token(dz_y_T), dz_TV)


def scale_gradients(
    options: Options,
    gradient: jax.Array,
    accumulators: Gradients,
    valid_N: jax.Array,
    primals: Sequence[jax.Array | None],
) -> dict[str, jax.Array | None]:
    """Step 10. Of the primals only the types are used."""
    # Without a valid token the upstream gradient may be anything, inf included: the result is +0.
    token_factor = head_factor = jnp.where(valid_N.any(), gradient, 0.0)
    if options.gathered:
        # The head's sums are over all devices' tokens, and were made before any upstream gradient.
        head_factor = agreed_upstream(gradient, valid_N.any(), options.gathered)
    factors = Gradients(token_factor, head_factor, head_factor, head_factor, head_factor)
    multiplied: Gradients = jax.tree.map(
        lambda x, factor: x * factor.astype(x.dtype), accumulators, factors
    )
    if multiplied.hidden.size:
        d_hidden = jnp.where(valid_N[:, None], multiplied.hidden, 0.0)
        multiplied = multiplied._replace(hidden=d_hidden)
    return multiplied.rounded(options, primals)
