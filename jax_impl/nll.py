"""Chunked negative log-likelihood in JAX: the steps of `xentlib.nll`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib import nll as spec
from xentlib.checks import check_label_range, check_nll
from xentlib.jax.describe import as_array, concrete_on_cpu, describe, need_x64
from xentlib.jax.gemm import column_sums, contract, contract_rows, round_to
from xentlib.jax.softmax import TokenStats, exp, rest_stats, take_target, token_stats
from xentlib.nll import NLLOutput
from xentlib.plan import default_chunk_bytes, plan_chunks

__all__ = ["NLLOutput", "chunked_nll", "nll_backward", "nll_forward"]

# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11


class Options(NamedTuple):
    """What a trace depends on; hashable."""

    ignore_index: int
    softcap: float | None
    label_smoothing: float
    z_loss: float
    mean: bool
    entropy: bool
    gemm_dtype: str
    compute_dtype: str
    output_dtype: str
    chunk_bytes: int
    transposed: bool


class Constants(NamedTuple):
    """Arrays without a gradient, flat; None where absent."""

    where: jax.Array | None
    token_weights: jax.Array | None
    logit_scale: jax.Array | None
    temperature: jax.Array | None
    denominator: jax.Array | None


class Gradients(NamedTuple):
    """Accumulators in the compute dtype, before the upstream gradient; empty where not wanted.

    Never None: JAX keeps the residual tree of the last trace of a function beside a cached earlier
    one, and fails where their numbers of leaves differ.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: jax.Array


class Carry(NamedTuple):
    """What the loop over chunks accumulates."""

    per_token: jax.Array  # rows: loss, its z-loss part, logprob, entropy, lse, correct
    hidden: jax.Array
    weight: jax.Array
    bias: jax.Array


def widen_labels(labels: Any) -> Any:
    """Labels in a dtype that holds `ignore_index` and V, so that 156 in uint8 is never -100."""
    return labels.astype(np.int32) if labels.dtype.itemsize < 4 else labels


def valid_tokens(labels: Any, where: Any, ignore_index: int) -> Any:
    unsigned = labels.dtype.kind == "u" and ignore_index < 0
    mask = labels == labels if unsigned else labels != ignore_index
    return mask if where is None else mask & where


def nll_forward(
    options: Options,
    needs: tuple[bool, bool, bool],
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    constants: Constants,
) -> tuple[NLLOutput, Gradients, jax.Array]:
    """Loss and per-token values, gradient accumulators, and the mask of valid tokens [N].

    `hidden` is [N, H], everything else flat.
    """
    compute = options.compute_dtype
    num_tokens, hidden_size = hidden.shape
    axis_v, axis_h = (1, 0) if options.transposed else (0, 1)
    vocab_size = weight.shape[axis_v]
    need_hidden, need_weight, need_bias = needs

    # 1. Valid tokens first; their number bounds the loop, so chunks without any cost nothing.
    labels = widen_labels(labels)
    valid_N = valid_tokens(labels, constants.where, options.ignore_index)
    in_range_N = (labels >= 0) & (labels < vocab_size)
    bad_N = valid_N & ~in_range_N
    count = valid_N.sum(dtype=jnp.int32)
    labels = jnp.where(valid_N & in_range_N, labels, 0).astype(jnp.int32)
    if constants.token_weights is None:
        weights_N = valid_N.astype(compute)
        weight_sum = count.astype(compute)
    else:
        weights_N = jnp.where(valid_N, constants.token_weights.astype(compute), 0.0)
        weight_sum = weights_N.sum()
    if constants.denominator is not None:
        divisor = constants.denominator.astype(compute)
    else:
        divisor = weight_sum if options.mean else jnp.ones((), compute)
    # An all-masked window has nothing to divide; a zero weight sum would turn 0 into NaN.
    divisor = jnp.where((count == 0) | ((weight_sum == 0) & (divisor == 0)), 1.0, divisor)
    factor_N = weights_N * (1.0 / divisor)
    factor_N = jnp.where(bad_N, jnp.nan, factor_N)
    unscale = None
    if options.gemm_dtype == "float16":
        largest = jnp.abs(factor_N).max(initial=0.0)
        exponent = FP16_EXPONENT - jnp.frexp(largest)[1]
        factor_N = jnp.ldexp(factor_N, exponent)
        unscale = jnp.ldexp(jnp.ones((), compute), -exponent)

    plan = plan_chunks(
        num_tokens,
        vocab_size,
        hidden_size,
        dtype=options.gemm_dtype,
        compute_dtype=compute,
        max_chunk_bytes=options.chunk_bytes,
    )
    chunk, padded = plan.chunk_tokens, plan.padded_tokens
    order_M = jnp.argsort(~valid_N, stable=True).astype(jnp.int32)
    order_M = jnp.pad(order_M, (0, padded - num_tokens))
    operand = weight.astype(options.gemm_dtype)
    bias_V = None if bias is None else bias.astype(compute)
    any_gradient = need_hidden or need_weight or need_bias

    def body(index: jax.Array, carry: Carry) -> Carry:
        start = index * chunk
        in_chunk_T = start + jnp.arange(chunk, dtype=jnp.int32) < count
        rows_T = lax.dynamic_slice(order_M, (start,), (chunk,))
        x_TH = jnp.where(in_chunk_T[:, None], hidden[rows_T], 0).astype(options.gemm_dtype)
        # 2. Logits
        z_TV = contract_rows(x_TH, operand, axis_h, compute)
        temperature_T = None
        if constants.temperature is not None:
            temperature_T = jnp.broadcast_to(constants.temperature, (num_tokens,))[rows_T]
            temperature_T = temperature_T.astype(compute)
        z_TV, derivative_TV = shape_logits(
            z_TV, bias_V, constants.logit_scale, options.softcap, temperature_T
        )
        # 3. to 5. Softmax without the target column, then the target
        y_T1 = labels[rows_T][:, None]
        z_y, target_TV, z_TV = take_target(z_TV, y_T1)
        rest = rest_stats(
            z_TV, target_TV, entropy=options.entropy, smoothing=options.label_smoothing > 0
        )
        stats = token_stats(z_y, rest, vocab_size)
        loss_T, z_loss_T = token_loss(stats, options.label_smoothing, options.z_loss)
        values = jnp.stack(
            (loss_T, z_loss_T, stats.logprob, stats.entropy, stats.lse, stats.correct)
        )
        carry = carry._replace(
            per_token=lax.dynamic_update_slice_in_dim(carry.per_token, values, start, axis=1)
        )
        if not any_gradient:
            return carry
        # 6. and 7. dz
        factor_T = factor_N[rows_T]
        if constants.logit_scale is not None:
            factor_T = factor_T * constants.logit_scale.astype(compute)
        if temperature_T is not None:
            factor_T = factor_T / temperature_T
        dz_TV, dz_y_T = dlogits(
            z_TV, target_TV, stats, factor_T, options.label_smoothing, options.z_loss
        )
        if derivative_TV is not None:
            dz_TV = dz_TV * derivative_TV
            dz_y_T = dz_y_T * jnp.take_along_axis(derivative_TV, y_T1, axis=1)[:, 0]
        dz_TV = jnp.where(in_chunk_T[:, None], dz_TV, 0.0)
        dz_y_T = jnp.where(in_chunk_T, dz_y_T, 0.0)
        y_T = y_T1[:, 0]
        if need_bias:
            total_V = carry.bias + column_sums(dz_TV, compute)
            carry = carry._replace(bias=total_V.at[y_T].add(dz_y_T))
        dz_TV = round_to(dz_TV, options.gemm_dtype)
        dz_y_T1 = round_to(dz_y_T, options.gemm_dtype).astype(compute)[:, None]
        # 8. Gradient GEMMs of the rest, then the target's terms: they are most of both gradients,
        # and every small term that a GEMM adds after one is rounded at its size (tau of d hidden
        # 4.8 against 1.5, of d weight on real text 9.6 against 1.5).
        if need_hidden:
            dx_TH = contract_rows(dz_TV, operand, axis_v, compute)
            w_y_TH = jnp.take(operand, y_T, axis=axis_v)
            w_y_TH = (w_y_TH.T if options.transposed else w_y_TH).astype(compute)
            dx_TH = dx_TH + dz_y_T1 * w_y_TH
            target_rows = jnp.where(in_chunk_T, rows_T, num_tokens)
            carry = carry._replace(hidden=carry.hidden.at[target_rows].set(dx_TH, mode="drop"))
        if need_weight:
            left, right = (x_TH, dz_TV) if options.transposed else (dz_TV, x_TH)
            total = carry.weight + contract(left, right, 0, 0, compute)
            own_TH = dz_y_T1 * x_TH.astype(compute)
            if options.transposed:
                total = total.at[:, y_T].add(own_TH.T)
            else:
                total = total.at[y_T].add(own_TH)
            carry = carry._replace(weight=total)
        return carry

    carry = Carry(
        jnp.zeros((6, padded), compute),
        jnp.zeros((num_tokens if need_hidden else 0, hidden_size), compute),
        jnp.zeros(weight.shape if need_weight else (0, 0), compute),
        jnp.zeros((vocab_size if need_bias else 0,), compute),
    )
    if num_tokens:
        carry = lax.fori_loop(0, (count + chunk - 1) // chunk, body, carry)
    gradients = Gradients(carry.hidden, carry.weight, carry.bias)
    if unscale is not None:
        gradients = jax.tree.map(lambda x: x * unscale, gradients)

    # 9. Reduce
    per_token_6N = jnp.zeros((6, num_tokens), compute)
    per_token_6N = per_token_6N.at[:, order_M[:num_tokens]].set(carry.per_token[:, :num_tokens])
    per_token_6N = jnp.where(bad_N[None, :], jnp.nan, per_token_6N)
    per_token_6N = jnp.where(valid_N[None, :], per_token_6N, 0.0)
    loss_N, z_loss_N, logprob_N, entropy_N, lse_N, correct_N = per_token_6N
    output = NLLOutput(
        ((loss_N * weights_N).sum() / divisor).astype(options.output_dtype),
        count,
        weight_sum.astype(options.output_dtype),
        ((z_loss_N * weights_N).sum() / divisor).astype(options.output_dtype),
        logprob_N.astype(options.output_dtype),
        entropy_N.astype(options.output_dtype),
        lse_N.astype(options.output_dtype),
        correct_N > 0,
    )
    return output, gradients, valid_N


def shape_logits(
    z_TV: jax.Array,
    bias_V: jax.Array | None,
    logit_scale: jax.Array | None,
    softcap: float | None,
    temperature_T: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Bias, scale, softcap and temperature (step 2), and the softcap's derivative."""
    if bias_V is not None:
        z_TV = z_TV + bias_V[None, :]
    if logit_scale is not None:
        z_TV = z_TV * logit_scale.astype(z_TV.dtype)
    derivative = None
    if softcap is not None:
        tanh_TV = jnp.tanh(z_TV / softcap)
        derivative = 1.0 - tanh_TV * tanh_TV
        z_TV = tanh_TV * softcap
    if temperature_T is not None:
        z_TV = z_TV / temperature_T[:, None]
    return z_TV, derivative


def token_loss(
    stats: TokenStats, label_smoothing: float, z_loss: float
) -> tuple[jax.Array, jax.Array]:
    """Per token: the loss, and the part of it that z-loss contributes."""
    nll = -stats.logprob
    if stats.mean_logp is not None:
        nll = (1.0 - label_smoothing) * nll - label_smoothing * stats.mean_logp
    z_term = z_loss * stats.lse * stats.lse if z_loss else jnp.zeros_like(nll)
    return nll + z_term, z_term


def dlogits(
    z_TV: jax.Array,
    target_TV: jax.Array,
    stats: TokenStats,
    factor_T: jax.Array,
    label_smoothing: float,
    z_loss: float,
) -> tuple[jax.Array, jax.Array]:
    """Step 6: from logits with -inf in the target column, dz times the factor with 0 in that
    column, and the target's own dz."""
    uniform = label_smoothing / z_TV.shape[1]
    extra = 2.0 * z_loss * stats.lse if z_loss else jnp.zeros_like(stats.lse)
    dz_TV = exp(z_TV - stats.lse[:, None]) * (factor_T * (1.0 + extra))[:, None]
    if uniform:
        dz_TV = jnp.where(target_TV, 0.0, dz_TV - (factor_T * uniform)[:, None])
    # slope * p_y - (1 - eps) - eps / V with p_y = 1 - p_rest: exactly -p_rest without options.
    target = extra + (label_smoothing - uniform) - (1.0 + extra) * stats.p_rest
    return dz_TV, factor_T * target


def nll_backward(
    gradient: jax.Array, accumulators: Gradients, valid_N: jax.Array, dtypes: Sequence[str | None]
) -> list[jax.Array | None]:
    """Step 10."""
    # Without a valid token the upstream gradient may be anything, inf included: the result is +0.
    gradient = jnp.where(valid_N.any(), gradient, 0.0)
    results: list[jax.Array | None] = [None, None, None]
    for slot, (accumulator, dtype) in enumerate(zip(accumulators, dtypes, strict=True)):
        if accumulator.size and dtype is not None:  # None stands for a zero gradient
            scaled = accumulator * gradient.astype(accumulator.dtype)
            if slot == 0:
                scaled = jnp.where(valid_N[:, None], scaled, 0.0)
            results[slot] = round_to(scaled, dtype)
    return results


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
    """Primals come with `.perturbed`: a frozen head or trunk costs no GEMM."""
    for name, primal in constants._asdict().items():
        if primal is not None and primal.perturbed:
            raise ValueError(
                f"`{name}` must be a constant; got an array that is differentiated, whose gradient "
                f"is not computed. Pass `jax.lax.stop_gradient({name})`."
            )
    primals = (hidden, weight, bias)
    need_hidden, need_weight, need_bias = (p is not None and p.perturbed for p in primals)
    needs = (need_hidden, need_weight, need_bias)
    values = jax.tree.map(
        lambda p: p.value,
        (hidden, weight, labels, bias, constants),
        is_leaf=lambda p: hasattr(p, "perturbed"),
    )
    output, gradients, valid_N = nll_forward(options, needs, *values)
    # A residual must be an array: an empty one carries each input's dtype to the backward.
    dtypes = tuple(None if p is None else jnp.zeros((0,), p.value.dtype) for p in primals)
    return output, (gradients, valid_N, dtypes)


def _nll_bwd(options: Options, residuals: Any, cotangent: NLLOutput) -> tuple[Any, ...]:
    gradients, valid_N, dtypes = residuals
    upstream = cotangent.loss
    if isinstance(upstream, jax.custom_derivatives.SymbolicZero):
        return (None, None, None, None, None)
    names = [None if like is None else like.dtype.name for like in dtypes]
    d_hidden, d_weight, d_bias = nll_backward(upstream, gradients, valid_N, names)
    return (d_hidden, d_weight, None, d_bias, None)


_nll.defvjp(_nll_fwd, _nll_bwd, symbolic_zeros=True)
_nll_jit = jax.jit(_nll, static_argnums=(0,))


def chunked_nll(
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    *,
    bias: jax.Array | None = None,
    where: jax.Array | None = None,
    token_weights: jax.Array | None = None,
    ignore_index: int = -100,
    logit_scale: float | jax.Array = 1.0,
    softcap: float | None = None,
    temperature: float | jax.Array = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    denominator: float | jax.Array | None = None,
    outputs: Sequence[str] = (),
    vocab_parallel: Any = None,
    compute_dtype: str | None = None,
    max_chunk_bytes: int | None = None,
    weight_layout: str = "VH",
) -> NLLOutput:
    problem = check_nll(
        describe(hidden),
        describe(weight),
        describe(labels),
        bias=describe(bias),
        where=describe(where),
        token_weights=describe(token_weights),
        ignore_index=ignore_index,
        logit_scale=describe(logit_scale),
        softcap=softcap,
        temperature=describe(temperature),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        reduction=reduction,
        denominator=describe(denominator),
        outputs=outputs,
        vocab_parallel=vocab_parallel,
        compute_dtype=compute_dtype,
        max_chunk_bytes=max_chunk_bytes,
        weight_layout=weight_layout,
    )
    need_x64(problem.compute_dtype)
    if concrete_on_cpu(labels, where):
        _check_labels(np.asarray(labels), where, ignore_index, problem.vocab_size)

    def flat(x: Any) -> jax.Array | None:
        return None if x is None else jnp.reshape(jnp.asarray(x), (-1,))

    temperatures = as_array(temperature, 1.0, problem.compute_dtype)
    options = Options(
        ignore_index,
        None if softcap is None else float(softcap),
        float(label_smoothing),
        float(z_loss),
        reduction == "mean",
        "entropy" in outputs,
        problem.gemm_dtype,
        problem.compute_dtype,
        problem.output_dtype,
        max_chunk_bytes or default_chunk_bytes(jax.default_backend()),
        weight_layout == "HV",
    )
    result = _nll_jit(
        options,
        jnp.reshape(jnp.asarray(hidden), (problem.num_tokens, problem.hidden_size)),
        jnp.asarray(weight),
        flat(labels),
        None if bias is None else jnp.asarray(bias),
        Constants(
            flat(where),
            flat(token_weights),
            as_array(logit_scale, 1.0, problem.compute_dtype),
            flat(temperatures),
            as_array(denominator, None, problem.compute_dtype),
        ),
    )
    per_token = {
        name: jnp.reshape(getattr(result, name), problem.leading) if name in outputs else None
        for name in ("logprobs", "entropy", "lse", "correct")
    }
    scalars = jax.tree.map(lax.stop_gradient, result[1:4])
    return NLLOutput(result.loss, *scalars, **jax.tree.map(lax.stop_gradient, per_token))


def _check_labels(labels: np.ndarray, where: Any, ignore_index: int, vocab_size: int) -> None:
    labels = widen_labels(labels)
    valid = valid_tokens(labels, None if where is None else np.asarray(where), ignore_index)
    offenders = labels[valid & ((labels < 0) | (labels >= vocab_size))]
    if offenders.size:
        check_label_range(int(offenders[0]), vocab_size, ignore_index)


chunked_nll.__doc__ = spec.chunked_nll.__doc__
