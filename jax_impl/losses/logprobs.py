"""Per-token log-probabilities in JAX, of a head or of given logits: the steps of
`xentlib.logprobs`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.call import is_soft
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.core.algebra import exp
from xentlib.jax.core.call import Arrays, Options, Placement, as_gradients
from xentlib.jax.core.gradients import Gradients, add_gradients, power_of_two
from xentlib.jax.core.logits import Chunk, ChunkedLogits, chunked_logits, scaled
from xentlib.jax.core.loop import gather_tokens, over_chunks, unpack
from xentlib.jax.core.stats import all_stats, axes_of_stats, chunk_columns, put_rows, stats_of
from xentlib.jax.core.vocab import upstream_of, vary, varying
from xentlib.jax.derivatives import Needs, differentiable, primal_values, wanted
from xentlib.jax.head import unwrapped
from xentlib.jax.losses.loss import dz_with_target, head_gradients, in_chunks, logits_gradient
from xentlib.jax.placement import run, whole_rows
from xentlib.logprobs import LogprobOutput
from xentlib.math.softmax import FLOOR, Coefficients, TokenStats, WantedStats, is_zero


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


class Terms(NamedTuple):
    """Per token: what step 6 adds up, for the rest and for the target's own dz."""

    kept_lse: jax.Array
    logprob: jax.Array
    own_logprob: jax.Array
    lse: jax.Array
    own_lse: jax.Array
    # Of an entropy: its upstream gradient, and what the rest and the target have of it
    entropy: tuple[jax.Array, jax.Array, jax.Array] | None
    # Of label smoothing: what is in every column, and what the target has of it
    uniform: tuple[jax.Array, jax.Array] | None


def logprobs_forward(options: Options, arrays: Arrays) -> tuple[LogprobOutput[Any], Residuals]:
    """Steps 2 to 5: per-token outputs, and what the backward needs of them. The arrays are flat."""
    logits = chunked_logits(options, arrays, in_blocks=True)
    options, eps = logits.options, logits.options.scalars.label_smoothing
    stats_wanted = WantedStats(options.entropy, eps > 0)
    local, (logits, _) = logits, gather_tokens(logits, ())

    def body(chunk: Chunk, packed_6M: jax.Array) -> jax.Array:
        # 3. to 5. Softmax without the target column, then the target
        z_y, blocks, *_ = chunk_columns(logits, chunk, stats_wanted)
        values = kept_values(stats_of(logits, chunk.rows_T, z_y, blocks), eps)
        return put_rows(logits, chunk, packed_6M, values)

    if options.axis is None or options.gathered:
        packed_6M = jnp.zeros((6, local.order.size), options.compute_dtype)
        if options.gathered:
            packed_6M = vary(packed_6M, axes_of_stats(logits, varying(logits)))
        packed_6M = over_chunks(logits, body, packed_6M, exchange=bool(options.gathered))
    else:
        packed_6M = kept_values(all_stats(logits, stats_wanted), eps)
    lse_N, p_rest_N, logprob_N, entropy_N, correct_N, smoothed_N = unpack(local, packed_6M)
    output = LogprobOutput(
        smoothed_N.astype(options.output_dtype),
        entropy_N.astype(options.output_dtype) if options.entropy else None,
        lse_N.astype(options.output_dtype),
        correct_N > 0,
    )
    return output, Residuals(lse_N, p_rest_N, logprob_N, entropy_N)


def kept_values(stats: TokenStats, label_smoothing: float) -> jax.Array:
    """[6, tokens]: lse, 1 - p_y, log-probability, entropy, correct, smoothed log-likelihood."""
    smoothed = stats.logprob
    if stats.mean_logp is not None:
        smoothed = (1.0 - label_smoothing) * smoothed + label_smoothing * stats.mean_logp
    return jnp.stack(
        (stats.lse, stats.p_rest, stats.logprob, stats.entropy, stats.correct, smoothed)
    )


def logprobs_backward(
    options: Options,
    needs: Needs,
    kept: Residuals,
    upstream: Upstream,
    arrays: Arrays,
) -> dict[str, jax.Array | None]:
    """Gradients by name, from logits that are computed again."""
    logits = chunked_logits(options, arrays, in_blocks=True)
    has_head = arrays.weight is not None
    cleaned, exponent = clean_upstream(logits, upstream), None
    if has_head:
        sizes = jnp.stack([jnp.abs(g) for g in jax.tree.leaves(cleaned)])
        exponent = power_of_two(options, sizes.sum(axis=0))
    if exponent is not None:
        cleaned = jax.tree.map(lambda g: jnp.ldexp(g, exponent), cleaned)
    terms_N = scaled_terms(logits, kept, cleaned)
    local, (logits, terms_N) = logits, gather_tokens(logits, terms_N)

    # 6. to 8. dz and the gradients
    def step(part: ChunkedLogits, chunk: Chunk, terms_T: Terms, sums: Gradients) -> Gradients:
        dz = coefficients(terms_T)
        return add_gradients(part, chunk, needs, sums, terms_T.kept_lse, dz)

    def dz_of(chunk: Chunk, terms_T: Terms) -> jax.Array:
        return dz_with_target(logits, chunk, terms_T.kept_lse, coefficients(terms_T))

    terms_M = in_chunks(logits, terms_N)
    if not has_head:
        return logits_gradient(logits, terms_M, dz_of)
    return head_gradients(local, logits, needs, terms_M, step, exponent)


def scaled_terms(logits: ChunkedLogits, kept: Residuals, upstream: Upstream) -> Terms:
    """[N] of upstream gradients that are clean."""
    through = jax.tree.map(partial(scaled, logits), upstream)
    return terms_of(kept, through, logits.options.scalars.label_smoothing, logits.vocab_size)


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
        slope = upstream.entropy
        entropy = slope, slope * kept.entropy, p_y * (slope * above)
    uniform = None
    if eps:
        uniform = logprob * (eps / vocab_size), logprob * (eps / vocab_size - eps)
    target = logprob * kept.p_rest
    return Terms(kept.lse, logprob, target, lse, lse * p_y, entropy, uniform)


def coefficients(terms_T: Terms) -> Coefficients:
    """Step 6, per token: the sums of the terms."""
    alpha, beta, gamma = terms_T.lse - terms_T.logprob, None, None
    target = terms_T.own_logprob + terms_T.own_lse
    if terms_T.entropy is not None:
        slope, rest, target_part = terms_T.entropy
        alpha, beta, target = alpha - rest, -slope, target - target_part
    if terms_T.uniform is not None:
        every, target_part = terms_T.uniform
        gamma, target = -every, target + target_part
    return Coefficients(alpha, beta, gamma, target)


def _logprobs(options: Options, arrays: Arrays) -> LogprobOutput[Any]:
    return logprobs_forward(options, whole_rows(options, arrays))[0]


def _logprobs_fwd(options: Options, primals: Any) -> tuple[LogprobOutput[Any], Any]:
    needs = wanted(primals.constants, *primals.leaves)
    # The backward reads the gathered head again: it is kept rather than gathered twice.
    arrays = whole_rows(options, primal_values(primals))
    output, kept = logprobs_forward(options, arrays)
    # A residual must be an array, their tree the same whatever is wanted: the sizes say what is.
    markers = () if arrays.weight is None else tuple(jnp.zeros((int(need),)) for need in needs)
    return output, (arrays, kept, markers)


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


_logprobs_jit = jax.jit(
    differentiable(_logprobs, _logprobs_fwd, _logprobs_bwd), static_argnums=(0,)
)


def head_logprobs(args: Arguments, place: Placement | None = None) -> LogprobOutput[Any]:
    """`chunked_logprobs` of its arguments, which `NLLHead` has placed on a mesh."""
    if args.kept is not None or args.ids is not None or not is_zero(args.top_k):
        from xentlib.jax.losses.classes import head_classes

        return head_classes(args, place)
    return _run_logprobs(*bind(args._replace(reduction="sum"), place, recompute=True))


def logits_logprobs(args: LogitsArguments) -> LogprobOutput[Any]:
    """`vocab_parallel_logprobs` of its arguments."""
    if is_soft(unwrapped(args.labels), unwrapped(args.logits)):
        from xentlib.jax.losses.soft_labels import logits_soft

        return logits_soft(args)
    if args.kept is not None or args.ids is not None or not is_zero(args.top_k):
        from xentlib.jax.losses.classes import logits_classes

        return logits_classes(args)
    return _run_logprobs(*bind_logits(args))


def _run_logprobs(options: Options, arrays: Arrays) -> LogprobOutput[Any]:
    outputs = LogprobOutput(True, True if options.entropy else None, True, True)
    return run(_logprobs_jit, options, arrays, outputs)
