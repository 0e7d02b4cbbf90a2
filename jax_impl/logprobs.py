"""Per-token log-probabilities in JAX: the steps of `xentlib.logprobs`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xentlib.algebra import FLOOR, Coefficients, TokenStats, WantedStats
from xentlib.arguments import Arguments
from xentlib.jax.binding import bind
from xentlib.jax.core.algebra import exp
from xentlib.jax.core.call import Arrays, Options, as_gradients, flat
from xentlib.jax.core.gradients import (
    Gradients,
    add_gradients,
    own_columns,
    power_of_two,
    round_gradients,
    without_power,
    zero_gradients,
)
from xentlib.jax.core.logits import Chunk, ChunkedLogits, chunked_logits, scaled
from xentlib.jax.core.loop import at_rows, gather_tokens, over_chunks, unpack
from xentlib.jax.core.stats import all_stats, axes_of_stats, put_rows, stats_of
from xentlib.jax.core.vocab import upstream_of, vary, varying
from xentlib.jax.derivatives import Needs, primal_values, wanted
from xentlib.jax.placement import Placement, over_mesh, whole_rows
from xentlib.logprobs import LogprobOutput


class Residuals(NamedTuple):
    """Per token, in the compute dtype: what the forward keeps for the backward."""

    lse: jax.Array
    p_rest: jax.Array  # 1 - p_y, from r / S
    logprob: jax.Array
    entropy: jax.Array  # 0 where it was not asked for


class Upstream(NamedTuple):
    """Gradients of the outputs; None stands for 0."""

    logprob: jax.Array | None
    entropy: jax.Array | None
    lse: jax.Array | None


class EntropyTerms(NamedTuple):
    slope: jax.Array  # the upstream gradient
    rest: jax.Array
    own: jax.Array


class Terms(NamedTuple):
    """Per token: what step 6 adds up, for the rest and for the target's own dz."""

    kept_lse: jax.Array
    logprob: jax.Array
    own_logprob: jax.Array
    lse: jax.Array
    own_lse: jax.Array
    entropy: EntropyTerms | None
    uniform: jax.Array | None  # label smoothing's, in every column
    own_uniform: jax.Array | None  # what the target has of it


def logprobs_forward(options: Options, arrays: Arrays) -> tuple[LogprobOutput[Any], Residuals]:
    """Per-token outputs, and what the backward needs of them. The arrays are flat."""
    return forward_of(chunked_logits(options, arrays))


def forward_of(logits: ChunkedLogits) -> tuple[LogprobOutput[Any], Residuals]:
    """Steps 2 to 5."""
    options, eps = logits.options, logits.options.scalars.label_smoothing
    stats_wanted = WantedStats(options.entropy, eps > 0)
    own, (logits, _) = logits, gather_tokens(logits, ())

    def body(chunk: Chunk, packed_6M: jax.Array) -> jax.Array:
        # 3. to 5. Softmax without the target column, then the target
        z_y, rest, _ = logits.kernels.stats(chunk.block, stats_wanted)
        values = kept_values(stats_of(logits, chunk.rows_T, z_y, rest), eps)
        return put_rows(logits, chunk, packed_6M, values)

    if options.axis is None or options.gathered:
        packed_6M = jnp.zeros((6, own.order.size), options.compute_dtype)
        if options.gathered:
            packed_6M = vary(packed_6M, axes_of_stats(logits, varying(logits)))
        packed_6M = over_chunks(logits, body, packed_6M, exchange=bool(options.gathered))
    else:
        packed_6M = kept_values(all_stats(logits, stats_wanted), eps)
    return outputs_of(unpack(own, packed_6M), options.entropy, options.output_dtype)


def kept_values(stats: TokenStats, label_smoothing: float) -> jax.Array:
    """[6, tokens]: lse, 1 - p_y, log-probability, entropy, correct, smoothed log-likelihood."""
    smoothed = stats.logprob
    if stats.mean_logp is not None:
        smoothed = (1.0 - label_smoothing) * smoothed + label_smoothing * stats.mean_logp
    return jnp.stack(
        (stats.lse, stats.p_rest, stats.logprob, stats.entropy, stats.correct, smoothed)
    )


def outputs_of(
    values_6N: jax.Array, entropy: bool, output_dtype: str
) -> tuple[LogprobOutput[Any], Residuals]:
    lse_N, p_rest_N, logprob_N, entropy_N, correct_N, smoothed_N = values_6N
    output = LogprobOutput(
        smoothed_N.astype(output_dtype),
        entropy_N.astype(output_dtype) if entropy else None,
        lse_N.astype(output_dtype),
        correct_N > 0,
    )
    return output, Residuals(lse_N, p_rest_N, logprob_N, entropy_N)


def logprobs_backward(
    options: Options,
    needs: Needs,
    kept: Residuals,
    upstream: Upstream,
    arrays: Arrays,
) -> dict[str, jax.Array | None]:
    """Gradients by name, from logits that are computed again."""
    compute = options.compute_dtype
    logits = chunked_logits(options, arrays)
    given = clean_upstream(logits, upstream)
    sizes = jnp.stack([jnp.abs(g) for g in jax.tree.leaves(given)])
    exponent = power_of_two(options, sizes.sum(axis=0))
    if exponent is not None:
        given = jax.tree.map(lambda g: jnp.ldexp(g, exponent), given)
    given = jax.tree.map(partial(scaled, logits), given)
    terms_N = terms_of(kept, given, options.scalars.label_smoothing, logits.vocab_size)
    own, (logits, terms_N) = logits, gather_tokens(logits, terms_N)
    terms_M = jax.tree.map(lambda x: jnp.pad(x[logits.order], (0, 1)), terms_N)

    def body(chunk: Chunk, gradients: Gradients) -> Gradients:
        # 6. to 8. dz and the gradients
        terms_T = at_rows(logits, chunk, terms_M)
        dz = coefficients(terms_T)
        return add_gradients(logits, chunk, needs, gradients, terms_T.kept_lse, dz)

    sums = vary(zero_gradients(logits, needs), varying(logits, terms_M))
    gradients = over_chunks(logits, body, sums, terms_M, exchange=bool(options.gathered))
    if exponent is not None:
        gradients = without_power(gradients, exponent, compute)
    gradients = own_columns(logits, gradients)
    return round_gradients(gradients, own.tokens.valid, arrays.leaves, options.mesh_axes)


def clean_upstream(logits: ChunkedLogits, upstream: Upstream) -> Upstream:
    """0 for tokens that are not valid: what follows them may have any gradient, inf included, and
    the largest sets the power of two."""
    compute = logits.options.compute_dtype
    cleaned: Upstream = jax.tree.map(
        lambda g: jnp.where(logits.tokens.valid, g.astype(compute), 0), upstream
    )
    return cleaned


def terms_of(kept: Residuals, upstream: Upstream, eps: float, vocab_size: int) -> Terms:
    """Products alone; the loop over chunks adds them.

    Where one program has a product and its sum together XLA contracts them, or another product of
    the same sum, by what else it holds: a quarter of the target's dz had other bits under remat, a
    sixth of d hidden in one chunk (rows A10, A11).
    """
    zero = jnp.zeros_like(kept.lse)
    logprob = zero if upstream.logprob is None else upstream.logprob
    lse = zero if upstream.lse is None else upstream.lse
    p_y = exp(kept.logprob)
    entropy = None
    if upstream.entropy is not None:
        # A label whose p is 0 has a log-probability of -inf: their product must be 0.
        above = jnp.maximum(kept.logprob, FLOOR) + kept.entropy
        entropy = EntropyTerms(
            upstream.entropy, upstream.entropy * kept.entropy, p_y * (upstream.entropy * above)
        )
    uniform = own_uniform = None
    if eps:
        uniform, own_uniform = logprob * (eps / vocab_size), logprob * (eps / vocab_size - eps)
    own = logprob * kept.p_rest
    return Terms(kept.lse, logprob, own, lse, lse * p_y, entropy, uniform, own_uniform)


def coefficients(terms_T: Terms) -> Coefficients:
    """Step 6, per token: the sums of the terms."""
    alpha, beta, gamma = terms_T.lse - terms_T.logprob, None, None
    own = terms_T.own_logprob + terms_T.own_lse
    if terms_T.entropy is not None:
        alpha, beta = alpha - terms_T.entropy.rest, -terms_T.entropy.slope
        own = own - terms_T.entropy.own
    if terms_T.uniform is not None:
        assert terms_T.own_uniform is not None
        gamma, own = -terms_T.uniform, own + terms_T.own_uniform
    return Coefficients(alpha, beta, gamma, own)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logprobs(options: Options, arrays: Arrays) -> LogprobOutput[Any]:
    arrays = whole_rows(options.mesh_axes, options.transposed, arrays)
    return logprobs_forward(options, arrays)[0]


def _logprobs_fwd(options: Options, primals: Any) -> tuple[LogprobOutput[Any], Any]:
    needs = wanted(primals.constants, *primals.leaves)
    # The backward reads the gathered head again: it is kept rather than gathered twice.
    arrays = whole_rows(options.mesh_axes, options.transposed, primal_values(primals))
    output, kept = logprobs_forward(options, arrays)
    # A residual must be an array, their tree the same whatever is wanted: the sizes say what is.
    return output, (arrays, kept, [jnp.zeros((int(need),)) for need in needs])


def _logprobs_bwd(
    options: Options, residuals: Any, cotangent: LogprobOutput[Any]
) -> tuple[Any, ...]:
    arrays, kept, markers = residuals
    upstream = upstream_in(options, cotangent)
    if upstream is None:
        return (None,)
    needs = Needs(*(marker.size > 0 for marker in markers))
    return (as_gradients(logprobs_backward(options, needs, kept, upstream, arrays)),)


def upstream_in(options: Options, cotangent: LogprobOutput[Any]) -> Upstream | None:
    """Of the outputs that the loss uses; None if it uses none."""
    gradients = (cotangent.logprobs, cotangent.entropy, cotangent.lse)
    unused = jax.custom_derivatives.SymbolicZero
    upstream = Upstream(*(None if isinstance(g, unused) else g for g in gradients))
    axis = None if options.gathered else options.axis
    return upstream_of(upstream, axis) if jax.tree.leaves(upstream) else None


_logprobs.defvjp(_logprobs_fwd, _logprobs_bwd, symbolic_zeros=True)
_logprobs_jit = jax.jit(_logprobs, static_argnums=(0,))


def shaped(result: LogprobOutput[Any], leading: tuple[int, ...]) -> LogprobOutput[Any]:
    return LogprobOutput(*(None if x is None else jnp.reshape(x, leading) for x in result))


def _logprobs_anywhere(options: Options, arrays: Arrays) -> LogprobOutput[Any]:
    """On arrays with any leading dimensions, or this device's part of them."""
    return shaped(_logprobs_jit(options, flat(arrays)), arrays.labels.shape)


@partial(jax.jit, static_argnums=(0, 1))
def _logprobs_over_mesh(options: Options, place: Placement, arrays: Arrays) -> LogprobOutput[Any]:
    outputs = LogprobOutput(True, True if options.entropy else None, True, True)
    result: LogprobOutput[Any] = over_mesh(
        partial(_logprobs_anywhere, options), place, arrays, outputs
    )
    return result


def head_logprobs(given: Arguments, place: Placement | None = None) -> LogprobOutput[Any]:
    """`chunked_logprobs` of its arguments, which `NLLHead` has placed on a mesh."""
    options, arrays, place = bind(given, place, recompute=True)
    if place:
        result: LogprobOutput[Any] = _logprobs_over_mesh(options, place, arrays)
        return result
    return _logprobs_anywhere(options, arrays)
