"""Per-token log-probabilities in PyTorch, of a head or of given logits: the steps of
`xentlib.logprobs`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, C columns of given logits, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import FLOOR, Coefficients, TokenStats, WantedStats, is_zero
from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.call import is_soft
from xentlib.logprobs import LogprobOutput
from xentlib.torch.array_spec import with_leading
from xentlib.torch.binding import bind, bind_logits
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.gradients import Gradients, fake_gradients
from xentlib.torch.core.kernels import DzOutput
from xentlib.torch.core.logits import GivenLogits
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.stats import all_stats, given_stats
from xentlib.torch.core.tokens import Selected
from xentlib.torch.losses.loss import Recompute, as_inputs, recompute
from xentlib.torch.operators import (
    DIFFERENTIATED,
    HeadCall,
    LogitsCall,
    Named,
    RowLayout,
    differentiated_once,
    keep_call,
    kept_call,
    operator,
    wanted,
)
from xentlib.torch.placement.head import with_head


class Residuals(NamedTuple):
    """What the backward needs beside the inputs: [N] each, in the compute dtype."""

    lse: Tensor
    p_rest: Tensor  # 1 - p_y, from r / S
    logprob: Tensor
    entropy: Tensor


class Values(NamedTuple):
    """What a forward operator takes beside its call."""

    entropy: bool
    output_dtype: torch.dtype
    wanted: list[bool]  # gradients, as `DIFFERENTIATED` has them: alike on all ranks of a head


class Cotangents(NamedTuple):
    """What a backward operator takes beside its call: upstream gradients and residuals [4, N]."""

    d_logprobs: Tensor | None
    d_entropy: Tensor | None
    d_lse: Tensor | None
    residuals: Tensor


class Needs(NamedTuple):
    """Which gradients a backward operator makes, as `DIFFERENTIATED` has them."""

    needs: list[bool]


FIVE = f"({', '.join(['Tensor'] * len(DIFFERENTIATED))})"
Forward = tuple[LogprobOutput[Tensor], Residuals]


def logprobs_forward(call: HeadCall, values: Values) -> Forward:
    """Steps 1 to 5."""
    entropy, output_dtype, needs = values
    loop = HeadLoop(call, Terms("chunked_logprobs", needs, float(entropy)))
    loop.chunks_of.exchange()
    vocab = loop.check_consistent()
    if vocab is not None:
        vocab.consistency.exact("entropy", float(entropy))
        vocab.consistency.exact("gradient", needs[0] + 2.0 * needs[3])
    stats = all_stats(loop, WantedStats(entropy))
    return outputs_of(loop.own, loop.chunks_of.local(kept_values(stats)), stats, output_dtype)


def kept_values(stats: TokenStats) -> Tensor:
    """[5, tokens]: lse, 1 - p_y, log-probability, entropy, correct."""
    return torch.stack((stats.lse, stats.p_rest, stats.logprob, stats.entropy, stats.correct))


def outputs_of(
    own: Selected,
    values_5N: Tensor,
    stats: TokenStats,
    output_dtype: torch.dtype,
    label_smoothing: float = 0.0,
) -> Forward:
    per_token_5N = own.clean(values_5N)
    residuals = Residuals(*per_token_5N[:4])
    logprob = residuals.logprob
    if stats.mean_logp is not None:
        logprob = (1.0 - label_smoothing) * logprob + label_smoothing * stats.mean_logp
        logprob = own.clean(logprob)
    output = LogprobOutput(
        logprob.to(output_dtype, copy=True),
        residuals.entropy.to(output_dtype, copy=True),
        residuals.lse.to(output_dtype, copy=True),
        per_token_5N[4] > 0,
    )
    return output, residuals


def logprobs_backward(upstream: Cotangents, call: HeadCall, needs: list[bool]) -> Gradients:
    """Steps 6 to 8: gradients in the compute dtype; empty if not needed."""
    residuals, entropy = Residuals(*upstream.residuals), upstream.d_entropy is not None
    terms = Terms("the backward of chunked_logprobs", needs, d_entropy=entropy)
    loop = HeadLoop(call, terms)
    entropy = loop.chunks_of.d_entropy  # of the tokens of any rank

    cleaned_3N = clean_upstream(loop.own, upstream, call.compute_dtype)
    *kept, g_logprob, g_entropy, g_lse = loop.chunks_of.exchange(*residuals, *cleaned_3N)
    residuals = Residuals(*kept)

    def dz_of(g_3B: Tensor, places: slice | Tensor) -> Coefficients:
        of_rows = Residuals(*(x[places] for x in residuals))
        return coefficients(g_3B, of_rows, entropy=entropy)

    g_3N = torch.stack((g_logprob, g_entropy, g_lse))
    return recompute(call, loop, Recompute(residuals.lse, dz_of), g_3N, needs)


def clean_upstream(own: Selected, upstream: Cotangents, dtype: torch.dtype) -> Tensor:
    """[3, N]: gradients of log-probability, entropy and lse; 0 where there is none, or no token."""
    gradients = (upstream.d_logprobs, upstream.d_entropy, upstream.d_lse)
    zeros = upstream.residuals.new_zeros(own.valid.shape, dtype=dtype)
    return torch.stack([zeros if g is None else own.clean(g.to(dtype)) for g in gradients])


def coefficients(
    g_3B: Tensor, kept: Residuals, *, entropy: bool, smoothing: float = 0.0, vocab_size: int = 1
) -> Coefficients:
    """Step 6, per token: of dz."""
    g_logprob, g_entropy, g_lse = g_3B
    alpha, beta, own = g_lse - g_logprob, None, g_lse
    if entropy:
        alpha, beta = alpha - g_entropy * kept.entropy, -g_entropy
        # A label whose p is 0 has a log-probability of -inf: their product must be 0.
        own = g_lse - g_entropy * (kept.logprob.clamp(min=FLOOR) + kept.entropy)
    target: Tensor = g_logprob * kept.p_rest + torch.exp(kept.logprob) * own
    if not smoothing:
        return Coefficients(alpha, beta, None, target)
    uniform = g_logprob * (smoothing / vocab_size)
    return Coefficients(alpha, beta, -uniform, target + (uniform - smoothing * g_logprob))


@operator("logprobs_forward", HeadCall, Values, returns=FIVE)
def logprobs_op(call: HeadCall, values: Values) -> tuple[Tensor, ...]:
    """`logprobs_forward` as one operator, opaque to the compiler: outputs, residuals [4, N]."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        output, residuals = logprobs_forward(call, values)
    return (*output[:4], torch.stack(residuals))


@logprobs_op.fake
def fake_outputs(call: HeadCall | LogitsCall, values: Values) -> tuple[Tensor, ...]:
    like, dtypes = call[0], [values.output_dtype] * 3 + [torch.bool]
    outputs = [like.new_empty(like.shape[0], dtype=dtype) for dtype in dtypes]
    return (*outputs, like.new_empty(4, like.shape[0], dtype=call.compute_dtype))


@operator("logprobs_backward", Cotangents, HeadCall, Needs, returns=FIVE)
def logprobs_backward_op(upstream: Cotangents, call: HeadCall, needs: Needs) -> tuple[Tensor, ...]:
    """`logprobs_backward` as one operator, opaque to the compiler."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        return as_inputs(call, logprobs_backward(upstream, call, needs.needs))


@logprobs_backward_op.fake
def _(upstream: Cotangents, call: HeadCall, needs: Needs) -> tuple[Tensor, ...]:
    return tuple(fake_gradients(call, needs.needs))


def keep(ctx: Any, output: tuple[Tensor, ...], call: Any, values: Values) -> None:
    """What a backward needs: the call, and residuals."""
    *_, correct, residuals = output
    keep_call(ctx, residuals, (correct, residuals), call)


def backward_of(function: str, gradients: Callable[[Any, Cotangents, Any], Named]) -> Any:
    """A backward that hands `gradients` those of the outputs, if there are any, and the call."""

    def backward(ctx: Any, *of_outputs: Tensor | None) -> Named | None:
        differentiated_once(function, "log_softmax")
        d_logprobs, d_entropy, d_lse, *_ = of_outputs
        if d_logprobs is None and d_entropy is None and d_lse is None:
            return None
        residuals, (call,) = kept_call(ctx)
        return gradients(ctx, Cotangents(d_logprobs, d_entropy, d_lse, residuals), call)

    return backward


def gradients_of_head(ctx: Any, upstream: Cotangents, call: HeadCall) -> Named:
    needs = logprobs_op.needed(ctx, *DIFFERENTIATED)
    gradients = logprobs_backward_op(upstream, call, Needs(needs))
    return {name: g if need else None for name, g, need in zip(DIFFERENTIATED, gradients, needs)}


logprobs_op.gradient(keep, backward_of("chunked_logprobs", gradients_of_head))


def head_logprobs(given: Arguments) -> LogprobOutput[Tensor]:
    """`chunked_logprobs` of its arguments."""
    if given.kept is None and given.ids is None and is_zero(given.top_k):
        return of_labels(given)
    from xentlib.torch.losses.classes import head_classes

    return head_classes(given)


@with_head(recompute=True)
def of_labels(given: Arguments, local: RowLayout | None = None) -> LogprobOutput[Tensor]:
    """The same of labels alone."""
    given, problem, call = bind("chunked_logprobs", given, local)
    values = Values(given.entropy, getattr(torch, problem.output_dtype), wanted(*call.leaves))
    return shaped(logprobs_op(call, values), problem.leading, given.entropy)


def shaped(results: Any, leading: tuple[int, ...], entropy: bool) -> LogprobOutput[Tensor]:
    logprobs, entropies, lse, correct = (with_leading(x, leading) for x in results[:4])
    return LogprobOutput(logprobs, entropies if entropy else None, lse, correct)


def given_forward(given: GivenLogits, entropy: bool, output_dtype: torch.dtype) -> Forward:
    """Steps 3 to 5 for precomputed logits."""
    given.check_consistent(entropy=entropy)
    smoothing = given.scalars.label_smoothing
    stats = given_stats(given, WantedStats(entropy, smoothing > 0))
    return outputs_of(given.tokens, kept_values(stats), stats, output_dtype, smoothing)


def given_backward(upstream: Cotangents, given: GivenLogits) -> Tensor:
    """Step 6, in the logits' dtype: every row is written once, its target's column with it."""
    residuals, entropy = Residuals(*upstream.residuals), upstream.d_entropy is not None
    g_3N = clean_upstream(given.tokens, upstream, given.compute_dtype)
    tokens, logits, size = given.tokens, given.logits, given.local_size
    whole = tokens.computed == logits.shape[0]
    d_logits = torch.empty_like(logits) if whole else torch.zeros_like(logits)
    d_logits[:, size:] = 0.0
    kernels = given.kernels()
    for rows in given.blocks():
        g_3B = g_3N[:, rows.places]
        if rows.temperature_B is not None:
            g_3B = g_3B / rows.temperature_B
        kept = Residuals(*(x[rows.places] for x in residuals))
        dz = coefficients(
            g_3B,
            kept,
            entropy=entropy,
            smoothing=given.scalars.label_smoothing,
            vocab_size=given.vocab.size,
        )
        # A gradient has the strides of its logits, which may be those of a transposed view.
        direct = isinstance(rows.places, slice) and d_logits.stride(1) == 1
        into_BV = d_logits[rows.places, :size] if direct else None
        kernels.dz(rows, kept.lse, dz, DzOutput(into_BV, with_target=True))
        if into_BV is None:
            d_logits[rows.places, :size] = rows.z_BV[:, :size].to(logits.dtype)
    return d_logits


@operator("given_forward", LogitsCall, Values, returns=FIVE)
def given_op(call: LogitsCall, values: Values) -> tuple[Tensor, ...]:
    """`given_forward` as one operator, opaque to the compiler; returns what `logprobs_op` does."""
    output, residuals = given_forward(GivenLogits(call), *values[:2])
    return (*output[:4], torch.stack(residuals))


given_op.fake(fake_outputs)


@operator("given_backward", Cotangents, LogitsCall, returns="Tensor")
def given_backward_op(upstream: Cotangents, call: LogitsCall) -> Tensor:
    """`given_backward` as one operator, opaque to the compiler."""
    return given_backward(upstream, GivenLogits(call))


@given_backward_op.fake
def _(upstream: Cotangents, call: LogitsCall) -> Tensor:
    return torch.empty_like(call.logits)


def gradient_of_logits(ctx: Any, upstream: Cotangents, call: LogitsCall) -> Named:
    return {"logits": given_backward_op(upstream, call)}


given_op.gradient(keep, backward_of("vocab_parallel_logprobs", gradient_of_logits))


def given_logprobs(given: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` of its arguments."""
    if is_soft(given.labels, given.logits):
        from xentlib.torch.losses.given_soft_labels import given_soft

        return given_soft(given)
    if given.kept is not None or given.ids is not None or not is_zero(given.top_k):
        from xentlib.torch.losses.classes import given_classes

        return given_classes(given)
    given, problem, call = bind_logits("vocab_parallel_logprobs", given)
    values = Values(given.entropy, getattr(torch, problem.output_dtype), [])
    return shaped(given_op(call, values), problem.leading, given.entropy)
