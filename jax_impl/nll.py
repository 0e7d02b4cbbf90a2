"""Chunked negative log-likelihood in JAX: the steps of `xentlib.nll`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xentlib import nll as spec
from xentlib.checks import OUTPUTS, check_nll, check_reduced, plain
from xentlib.jax.chunks import (
    Asked,
    Chunk,
    Chunks,
    Gradients,
    add_gradients,
    all_stats,
    cut,
    fp16_exponent,
    labelled_at,
    only_chunk,
    over_chunks,
    own_weights,
    rest_of,
    round_gradients,
    rows_of,
    scaled,
    stats_of,
    unpack,
    without_power,
    zero_gradients,
)
from xentlib.jax.describe import (
    Constants,
    Needs,
    Options,
    describe,
    fixed,
    flat,
    prepare,
    values_of,
    wanted,
)
from xentlib.jax.head import (
    Placement,
    Spread,
    axis_of,
    of_all_tokens,
    over_mesh,
    placed,
    upstream_of,
    vary,
    varying,
    whole_rows,
)
from xentlib.jax.labels import check_division, check_labels
from xentlib.jax.softmax import TokenStats, exp, take_target
from xentlib.nll import NLLOutput
from xentlib.plan import default_chunk_bytes, exchanges_per_chunk

__all__ = ["NLLOutput", "chunked_nll", "nll_backward", "nll_forward"]


class Carry(NamedTuple):
    """What the loop over chunks accumulates."""

    per_token: jax.Array  # rows: those of `per_token_values`
    gradients: Gradients


def nll_forward(
    options: Options,
    needs: Needs,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    constants: Constants,
) -> tuple[NLLOutput, Gradients, jax.Array]:
    """Loss and per-token values, gradient accumulators, and the mask of valid tokens [N].

    `hidden` is [N, H], everything else flat. The accumulators lack the upstream gradient.
    """
    compute = options.compute_dtype
    hidden, weight, bias = whole_rows(options.spread, options.transposed, hidden, weight, bias)
    chunks = cut(options, hidden, weight, labels, bias, constants)
    options = chunks.options
    count, valid_N = of_all_tokens(options.spread, chunks.num_valid), chunks.valid
    everywhere = labelled_at(chunks, slice(None))
    weights_N, weight_sum = valid_N.astype(compute), count.astype(compute)
    if constants.token_weights is not None:
        weights_N = jnp.where(valid_N, constants.token_weights.astype(compute), 0.0)
    if constants.token_weights is not None or constants.class_weights is not None:
        counted_N = jnp.where(valid_N, weights_N * everywhere.weight, 0.0)
        weight_sum = of_all_tokens(options.spread, counted_N.sum())
    if constants.denominator is not None:
        divisor = constants.denominator.astype(compute)
    else:
        divisor = weight_sum if options.mean else jnp.ones((), compute)
    # An all-masked window has nothing to divide; a zero weight sum would turn 0 into NaN.
    divisor = jnp.where((count == 0) | ((weight_sum == 0) & (divisor == 0)), 1.0, divisor)
    factor_N = weights_N * (1.0 / divisor)
    factor_N = jnp.where(chunks.bad, jnp.nan, factor_N)
    exponent = None
    if options.gemm_dtype == "float16":
        exponent = fp16_exponent(factor_N)
        factor_N = jnp.ldexp(factor_N, exponent)
    factor_N = scaled(chunks, factor_N)

    asked = Asked(options.entropy, options.label_smoothing > 0, options.predicted)
    carry = Carry(jnp.zeros((7, chunks.order.size), compute), zero_gradients(chunks, needs))

    def differentiated(
        chunk: Chunk, z_TV: jax.Array, target_TV: jax.Array, stats: TokenStats, sums: Gradients
    ) -> Gradients:
        # 6. to 8. dz and the gradients
        factor_T = factor_N[chunk.rows_T]
        dz_TV, dz_y_T = dlogits(z_TV, target_TV, stats, factor_T, chunks, chunk.rows_T)
        return add_gradients(chunks, chunk, needs, sums, dz_TV, dz_y_T)

    def body(chunk: Chunk, carry: Carry) -> Carry:
        # 3. to 5. Softmax without the target column, then the target
        z_y, target_TV, z_TV = take_target(chunk.z_TV, chunk.y_T1, chunks.padded_from)
        rest = rest_of(chunks, asked, z_TV, target_TV)
        stats = stats_of(chunks, chunk.rows_T, z_y, rest)
        values_7T = per_token_values(stats, chunks, chunk.rows_T)
        rows_7M = lax.dynamic_update_slice_in_dim(carry.per_token, values_7T, chunk.start, axis=1)
        if not any(needs):
            return carry._replace(per_token=rows_7M)
        return Carry(rows_7M, differentiated(chunk, z_TV, target_TV, stats, carry.gradients))

    # Statistics over shards come before gradients: in each chunk, or in all of them. The logits are
    # then computed again, unless one chunk holds them all.
    each = options.axis is not None and any(needs)
    each = each and exchanges_per_chunk(chunks.plan, jax.default_backend())
    if options.axis is None or each:
        if options.axis is not None:
            axes = varying(chunks, factor_N)
            shared = axes - varying(lax.axis_index(options.axis.name))
            carry = Carry(vary(carry.per_token, shared), vary(carry.gradients, axes))
        per_token, gradients = over_chunks(chunks, body, carry, factor_N, exchange=each)
    else:
        only = only_chunk(chunks)
        stats_M = all_stats(chunks, asked, only=only)
        per_token = per_token_values(stats_M, chunks, chunks.order)
        gradients = carry.gradients
        stats_M = jax.tree.map(lambda x: jnp.pad(x, (0, 1)), stats_M)

        def again(chunk: Chunk, sums: Gradients) -> Gradients:
            _, target_TV, z_TV = take_target(chunk.z_TV, chunk.y_T1, chunks.padded_from)
            stats = rows_of(chunks, chunk, stats_M)
            return differentiated(chunk, z_TV, target_TV, stats, sums)

        if any(needs):
            gradients = over_chunks(chunks, again, gradients, factor_N, stats_M, only=only)
    if exponent is not None:
        gradients = without_power(gradients, exponent, compute)

    # 9. Reduce
    loss_N, z_loss_N, logprob_N, entropy_N, lse_N, correct_N, predicted_N = unpack(
        chunks, per_token
    )
    predicted_N = jnp.where(valid_N & ~chunks.bad, predicted_N, -1.0)
    sums = jnp.stack([(loss_N * weights_N).sum(), (z_loss_N * weights_N).sum()])
    loss, z_loss = of_all_tokens(options.spread, sums)
    output = NLLOutput(
        (loss / divisor).astype(options.output_dtype),
        count,
        weight_sum.astype(options.output_dtype),
        (z_loss / divisor).astype(options.output_dtype),
        logprob_N.astype(options.output_dtype),
        entropy_N.astype(options.output_dtype),
        lse_N.astype(options.output_dtype),
        correct_N > 0,
        predicted_N.astype(jnp.int32),
    )
    return output, gradients, valid_N


def per_token_values(stats: TokenStats, chunks: Chunks, rows: jax.Array) -> jax.Array:
    """[7, tokens]: loss, its z-loss part, logprob, entropy, lse, correct, predicted."""
    loss, z_term = token_loss(stats, chunks, rows)
    predicted = jnp.zeros_like(loss) if stats.predicted is None else stats.predicted
    values = (loss, z_term, stats.logprob, stats.entropy, stats.lse, stats.correct, predicted)
    return jnp.stack(values)


def token_loss(stats: TokenStats, chunks: Chunks, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per token: the loss, and the part of it that z-loss contributes."""
    eps, z_loss = chunks.options.label_smoothing, chunks.options.z_loss
    nll = -stats.logprob
    if chunks.constants.class_weights is not None:
        nll = nll * labelled_at(chunks, rows).weight
    if stats.mean_logp is not None:
        nll = (1.0 - eps) * nll - eps * stats.mean_logp
    z_term = jnp.zeros_like(nll) if is_zero(z_loss) else z_loss * stats.lse * stats.lse
    return nll + z_term, z_term


def is_zero(z_loss: float | jax.Array) -> bool:
    """Whether a trace knows it."""
    return not isinstance(z_loss, jax.Array) and z_loss == 0


def dlogits(
    z_TV: jax.Array,
    target_TV: jax.Array,
    stats: TokenStats,
    factor_T: jax.Array,
    chunks: Chunks,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Step 6: from logits with -inf in the target column, dz times the factor with 0 in that
    column, and the target's own dz."""
    eps, z_loss = chunks.options.label_smoothing, chunks.options.z_loss
    uniform = eps / chunks.vocab_size
    extra = jnp.zeros_like(stats.lse) if is_zero(z_loss) else 2.0 * z_loss * stats.lse
    slope: jax.Array = 1.0 + extra
    left: jax.Array | float = eps - uniform
    if chunks.constants.class_weights is not None:
        labelled = labelled_at(chunks, rows)
        slope = (1.0 - eps) * labelled.weight + uniform * labelled.total + extra
        left = uniform * (labelled.total - labelled.weight)
    dz_TV = exp(z_TV - stats.lse[:, None]) * (factor_T * slope)[:, None]
    if uniform:
        own_V = own_weights(chunks)
        share_TV = (factor_T * uniform)[:, None]
        share_TV = share_TV if own_V is None else share_TV * own_V[None, :]
        dz_TV = jnp.where(target_TV, 0.0, dz_TV - share_TV)
    # slope * p_y - (1 - eps) - eps / V with p_y = 1 - p_rest: exactly -p_rest without options.
    return dz_TV, factor_T * (extra + left - slope * stats.p_rest)


def nll_backward(
    gradient: jax.Array,
    accumulators: Gradients,
    valid_N: jax.Array,
    primals: Sequence[jax.Array | None],
    spread: Spread | None,
) -> list[jax.Array | None]:
    """Step 10. Of the primals only the types are used."""
    # Without a valid token the upstream gradient may be anything, inf included: the result is +0.
    gradient = jnp.where(valid_N.any(), gradient, 0.0)
    multiplied = Gradients(*(x * gradient.astype(x.dtype) for x in accumulators))
    return round_gradients(multiplied, valid_N, primals, spread)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(
    options: Options,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    constants: Constants,
) -> NLLOutput:
    return nll_forward(options, (False, False, False), hidden, weight, labels, bias, constants)[0]


def _nll_fwd(
    options: Options, hidden: Any, weight: Any, labels: Any, bias: Any, constants: Any
) -> tuple[NLLOutput, Any]:
    primals = (hidden, weight, bias)
    needs = wanted(constants, *primals)
    values = values_of((hidden, weight, labels, bias, constants))
    output, gradients, valid_N = nll_forward(options, needs, *values)
    # A residual must be an array: an empty one carries each input's type to the backward.
    types = tuple(None if p is None else jnp.ravel(p.value)[:0] for p in primals)
    return output, (gradients, valid_N, types)


def _nll_bwd(options: Options, residuals: Any, cotangent: NLLOutput) -> tuple[Any, ...]:
    gradients, valid_N, types = residuals
    if isinstance(cotangent.loss, jax.custom_derivatives.SymbolicZero):
        return (None, None, None, None, None)
    upstream = upstream_of(cotangent.loss, options.axis)
    d_hidden, d_weight, d_bias = nll_backward(upstream, gradients, valid_N, types, options.spread)
    return (d_hidden, d_weight, None, d_bias, None)


_nll.defvjp(_nll_fwd, _nll_bwd, symbolic_zeros=True)
_nll_jit = jax.jit(_nll, static_argnums=(0,))


def _nll_anywhere(options: Options, *arrays: Any) -> NLLOutput:
    """On arrays with any leading dimensions, or this device's part of them."""
    result = _nll_jit(options, *flat(arrays))
    leading = arrays[2].shape
    return NLLOutput(*result[:4], *(jnp.reshape(x, leading) for x in result[4:9]))


@partial(jax.jit, static_argnums=(0, 1))
def _nll_over_mesh(options: Options, place: Placement, *arrays: Any) -> NLLOutput:
    outputs = NLLOutput(*(False,) * 4, *(True,) * 5)
    result: NLLOutput = over_mesh(partial(_nll_anywhere, options), place, arrays, outputs)
    return result


def chunked_nll(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    where: jax.Array | None = None,
    token_weights: jax.Array | None = None,
    class_weights: jax.Array | None = None,
    ignore_index: int = -100,
    logit_scale: float | jax.Array = 1.0,
    softcap: float | jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float | jax.Array = 0.0,
    reduction: str = "mean",
    denominator: float | jax.Array | None = None,
    outputs: Sequence[str] = (),
    vocab_parallel: Any = None,
    reduce_hidden_grad: bool = True,
    compute_dtype: str | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: str = "VH",
) -> NLLOutput:
    ignore_index, logit_scale, softcap, temperature, label_smoothing, z_loss, denominator = map(
        plain,
        (ignore_index, logit_scale, softcap, temperature, label_smoothing, z_loss, denominator),
    )
    max_chunk_bytes = plain(max_chunk_bytes)
    check_reduced(reduce_hidden_grad)
    place = placed(vocab_parallel, hidden, weight, bias, weight_layout)
    axis = place.axis if place else axis_of(vocab_parallel, weight, bias, weight_layout)
    problem = check_nll(
        describe(hidden),
        describe(weight),
        describe(labels),
        bias=describe(bias),
        where=describe(where),
        token_weights=describe(token_weights),
        class_weights=describe(class_weights),
        ignore_index=ignore_index,
        logit_scale=describe(logit_scale),
        softcap=describe(softcap),
        temperature=describe(temperature),
        label_smoothing=label_smoothing,
        z_loss=describe(z_loss),
        reduction=reduction,
        denominator=describe(denominator),
        outputs=outputs,
        sharded=axis is not None and place is None,
        classes=None if axis is None else axis.vocab_size,
        reduce_hidden_grad=reduce_hidden_grad,
        compute_dtype=compute_dtype,
        max_chunk_bytes=max_chunk_bytes,
        weight_layout=weight_layout,
    )
    vocab_size = problem.vocab_size if axis is None else axis.vocab_size
    check_labels(labels, where, ignore_index, vocab_size)
    check_division(labels, where, ignore_index, token_weights, denominator)
    arrays = prepare(
        problem,
        hidden,
        weight,
        labels,
        bias,
        where=where,
        logit_scale=logit_scale,
        temperature=temperature,
        token_weights=token_weights,
        denominator=denominator,
        softcap=softcap,
        z_loss=z_loss,
        class_weights=class_weights,
    )
    options = Options(
        ignore_index,
        fixed(softcap),
        float(label_smoothing),
        fixed(z_loss) or 0.0,
        reduction == "mean",
        "entropy" in outputs,
        problem.gemm_dtype,
        problem.compute_dtype,
        problem.output_dtype,
        max_chunk_bytes or default_chunk_bytes(jax.default_backend()),
        weight_layout == "HV",
        axis,
        place.spread if place else None,
        "predicted" in outputs,
    )
    result = _nll_over_mesh(options, place, *arrays) if place else _nll_anywhere(options, *arrays)
    per_token = {name: getattr(result, name) if name in outputs else None for name in OUTPUTS}
    divisor = arrays[-1].denominator
    if divisor is None and reduction == "mean":
        divisor = result.weight_sum
    per_token["denominator"] = divisor
    scalars = jax.tree.map(lax.stop_gradient, result[1:4])
    return NLLOutput(result.loss, *scalars, **jax.tree.map(lax.stop_gradient, per_token))


chunked_nll.__doc__ = spec.chunked_nll.__doc__
