"""Chunked negative log-likelihood in JAX: the steps of `xentlib.nll`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.arguments import Arguments
from xentlib.checks.call import is_soft
from xentlib.jax.binding import bind
from xentlib.jax.core.algebra import ALGEBRA
from xentlib.jax.core.call import Arrays, Options, Placement, as_gradients, sum_over_devices
from xentlib.jax.core.gradients import Gradients, add_gradients, power_of_two
from xentlib.jax.core.logits import Chunk, ChunkedLogits, chunked_logits, scaled
from xentlib.jax.core.loop import at_rows, gather_tokens, only_chunk, over_chunks, unpack
from xentlib.jax.core.stats import all_stats, axes_of_stats, chunk_columns, put_rows, stats_of
from xentlib.jax.core.tokens import target_info
from xentlib.jax.core.vocab import upstream_of, vary, varying
from xentlib.jax.derivatives import (
    REFUSED,
    Needs,
    differentiable,
    named,
    primal_values,
    refused,
    wanted,
)
from xentlib.jax.head import unwrapped
from xentlib.jax.losses.loss import (
    head_gradients,
    in_chunks,
    reduced,
    scale_gradients,
    token_weights,
)
from xentlib.jax.micro_batch import labelled
from xentlib.jax.placement import run, whole_rows
from xentlib.math.softmax import TokenStats, WantedStats, is_zero
from xentlib.nll import OUTPUTS, NLLOutput
from xentlib.plan import schedule

# What the loop over chunks accumulates: rows of `Algebra.values`, and the sums.
Carry = tuple[jax.Array, Gradients]
Residuals = tuple[jax.Array, ...]  # [N] each: lse, 1 - p_y, and the factor of dz


def nll_forward(
    options: Options,
    needs: Needs,
    arrays: Arrays,
) -> tuple[NLLOutput[Any], Gradients, jax.Array, Residuals]:
    """Loss and per-token values, gradient accumulators, the mask of valid tokens [N], and what a
    backward needs that computes the logits again.

    The arrays are flat. The accumulators lack the upstream gradient.
    """
    compute = options.compute_dtype
    logits = chunked_logits(options, arrays, in_blocks=not any(needs))
    options, scalars = logits.options, logits.options.scalars
    count, valid_N = sum_over_devices(options, logits.num_valid), logits.tokens.valid
    everywhere = target_info(logits, slice(None))
    class_weight_N: Any = None if arrays.class_weights is None else everywhere.weight
    weights_N, weight_sum, divisor = token_weights(options, arrays, valid_N, count, class_weight_N)
    factor_N = weights_N * (1.0 / divisor)
    factor_N = jnp.where(logits.tokens.bad, jnp.nan, factor_N)
    exponent = power_of_two(options, factor_N) if any(needs) else None
    if exponent is not None:
        factor_N = jnp.ldexp(factor_N, exponent)
    local_factor_N = factor_N
    local, (logits, factor_N) = logits, gather_tokens(logits, scaled(logits, factor_N))

    stats_wanted = WantedStats(options.entropy, scalars.label_smoothing > 0, options.predicted)
    per_token = jnp.zeros((7 + options.recompute, local.order.size), compute)
    gradients = Gradients.zeros(logits, needs)

    def values_of(stats: TokenStats, rows: jax.Array) -> jax.Array:
        values = ALGEBRA.values(stats, target_info(logits, rows), scalars)
        return jnp.concatenate((values, stats.p_rest[None])) if options.recompute else values

    def differentiated(
        chunk: Chunk, stats: TokenStats, sums: Gradients, left: Any = None
    ) -> Gradients:
        # 6. to 8. dz and the gradients
        factor_T = factor_N[chunk.rows_T]
        label = target_info(logits, chunk.rows_T)
        parts = stats.lse, stats.p_rest, factor_T
        dz = ALGEBRA.coefficients(*parts, label, scalars, logits.vocab_size)
        return add_gradients(logits, chunk, needs, sums, stats.lse, dz, left)

    def body(chunk: Chunk, carry: Carry) -> Carry:
        # 3. to 5. Softmax without the target column, then the target
        left = None
        if any(needs):
            z_y, blocks, left = logits.kernels.stats(chunk.block, stats_wanted)
        else:
            z_y, blocks, *_ = chunk_columns(logits, chunk, stats_wanted)
        stats = stats_of(logits, chunk.rows_T, z_y, blocks)
        rows_7M, sums = carry
        rows_7M = put_rows(logits, chunk, rows_7M, values_of(stats, chunk.rows_T))
        return rows_7M, differentiated(chunk, stats, sums, left) if any(needs) else sums

    # Statistics over shards come before gradients: in each chunk, or in all of them. The logits are
    # then computed again, unless one chunk holds them all.
    sharded, gathered = options.axis is not None, logits.local is not None
    traits = {"sharded": sharded, "gathered": gathered, "once": any(needs) or gathered}
    when = schedule(logits.plan, options.platform, **traits)
    if when != "two passes":
        if sharded:
            axes = varying(logits, factor_N)
            per_token = vary(per_token, axes_of_stats(logits, axes))
            gradients = vary(gradients, axes)
        carry, exchange = (per_token, gradients), when == "each chunk"
        per_token, gradients = over_chunks(logits, body, carry, factor_N, exchange=exchange)
    else:
        only = only_chunk(logits)
        stats_M = all_stats(logits, stats_wanted, only=only)
        per_token = values_of(stats_M, logits.order)
        stats_M = jax.tree.map(lambda x: jnp.pad(x, (0, 1)), stats_M)

        def second_pass(chunk: Chunk, sums: Gradients) -> Gradients:
            return differentiated(chunk, at_rows(logits, chunk, stats_M), sums)

        if any(needs):
            gradients = over_chunks(logits, second_pass, gradients, factor_N, stats_M, only=only)
    gradients = gradients.finished(logits, exponent)

    # 9. Reduce
    values_N = unpack(local, per_token)
    loss_N, z_loss_N, logprob_N, entropy_N, lse_N, correct_N, predicted_N, *p_rest_N = values_N
    predicted_N = jnp.where(valid_N & ~local.tokens.bad, predicted_N, -1.0)
    loss, z_loss = reduced(options, weights_N, divisor, loss_N, z_loss_N)
    output = NLLOutput(
        loss.astype(options.output_dtype),
        count,
        weight_sum.astype(options.output_dtype),
        z_loss.astype(options.output_dtype),
        logprob_N.astype(options.output_dtype),
        entropy_N.astype(options.output_dtype),
        lse_N.astype(options.output_dtype),
        correct_N > 0,
        predicted_N.astype(jnp.int32),
    )
    return output, gradients, valid_N, (lse_N, *p_rest_N, local_factor_N)


def nll_backward(
    options: Options, needs: Needs, kept: Residuals, upstream: jax.Array, arrays: Arrays
) -> dict[str, jax.Array | None]:
    """Gradients by name, from logits that are computed again."""
    logits = chunked_logits(options, arrays, in_blocks=True)
    scalars, (lse_N, p_rest_N, factor_N) = logits.options.scalars, kept
    # What follows a loss without a valid token may have any gradient, inf included.
    factor_N = factor_N * upstream.astype(options.compute_dtype)
    factor_N = jnp.where(logits.tokens.valid, factor_N, 0.0)
    exponent = power_of_two(options, factor_N)
    if exponent is not None:
        factor_N = jnp.ldexp(factor_N, exponent)
    numbers_N = lse_N, p_rest_N, scaled(logits, factor_N)
    local, (logits, numbers_N) = logits, gather_tokens(logits, numbers_N)

    def step(part: ChunkedLogits, chunk: Chunk, numbers_T: Residuals, sums: Gradients) -> Gradients:
        label = target_info(logits, chunk.rows_T)
        lse_T, p_rest_T, factor_T = numbers_T
        parts = lse_T, p_rest_T, factor_T, label
        dz = ALGEBRA.coefficients(*parts, scalars, logits.vocab_size)
        return add_gradients(part, chunk, needs, sums, lse_T, dz)

    return head_gradients(local, logits, needs, in_chunks(logits, numbers_N), step, exponent)


def _nll(options: Options, arrays: Arrays) -> NLLOutput[Any]:
    return nll_forward(options, Needs(), whole_rows(options, arrays))[0]


def _nll_fwd(options: Options, primals: Any) -> tuple[NLLOutput[Any], Any]:
    needs, arrays = wanted(primals.constants, *primals.leaves), primal_values(primals)
    whole, recompute = whole_rows(options, arrays), options.recompute
    output, gradients, valid_N, kept = nll_forward(options, Needs() if recompute else needs, whole)
    # A residual must be an array: of those that are wanted the size says so, and an empty one
    # carries each input's type to the backward.
    if recompute:
        # The backward reads the gathered head again: it is kept rather than gathered twice.
        return output, (whole, kept, tuple(jnp.zeros((int(need),)) for need in needs))
    types = tuple(None if x is None else jnp.ravel(x)[:0] for x in arrays.leaves)
    return output, (gradients, valid_N, types)


def _nll_bwd(options: Options, residuals: Any, cotangent: NLLOutput[Any]) -> tuple[Any, ...]:
    upstream = refused(cotangent)
    if upstream is None:
        return (None,)
    upstream = upstream_of(upstream, None if options.gathered else options.axis)
    if options.recompute:
        arrays, kept, markers = residuals
        needs = Needs(*(marker.size > 0 for marker in markers))
        return (as_gradients(nll_backward(options, needs, kept, upstream, arrays)),)
    gradients, valid_N, types = residuals
    return (as_gradients(scale_gradients(options, upstream, gradients, valid_N, types)),)


_nll_jit = jax.jit(differentiable(_nll, _nll_fwd, _nll_bwd), static_argnums=(0,))


def nll(args: Arguments, place: Placement | None = None) -> NLLOutput[Any]:
    """`chunked_nll` of its arguments, which `NLLHead` has placed on a mesh."""
    if is_soft(unwrapped(args.labels), unwrapped(args.hidden)):
        from xentlib.jax.losses.soft_labels import soft_nll

        return soft_nll(args, place)
    options, arrays = bind(args, place, recompute=args.recompute)
    outputs = NLLOutput(False, False, False, False, **dict.fromkeys(OUTPUTS, True))
    result: NLLOutput[Any] = run(_nll_jit, options, arrays, outputs)
    kept = {name: None for name in OUTPUTS if name not in args.outputs}
    divisor = arrays.denominator
    if divisor is None and options.mean:
        divisor = result.weight_sum
    result = result._replace(**kept, denominator=divisor)
    constant: NLLOutput[Any] = jax.tree.map(lax.stop_gradient, result)
    dependent = {x: y for x in REFUSED if (y := getattr(result, x)) is not None}
    if is_zero(args.z_loss):
        del dependent["z_loss"]
    out = constant._replace(loss=result.loss, **named(dependent))
    return labelled(out, arrays.denominator)
