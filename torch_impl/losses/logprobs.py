"""Per-token log-probabilities in PyTorch, of a head or of precomputed logits: the steps of
`xentlib.logprobs`, under their numbers.

Shapes: N tokens, V vocabulary, B rows of a block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.call import is_soft
from xentlib.logprobs import LogprobOutput
from xentlib.math.softmax import FLOOR, Coefficients, WantedStats, is_zero
from xentlib.torch.array_spec import with_leading
from xentlib.torch.binding import bind, bind_logits
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.gradients import Gradients, fake_gradients
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.stats import all_stats
from xentlib.torch.core.tokens import Selected
from xentlib.torch.losses.loss import Recompute, as_inputs, recompute, without_autocast
from xentlib.torch.operators import (
    DIFFERENTIATED,
    HeadCall,
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
    probs: Tensor | None = None  # labels [N, C], or [N, K] of the call's `ids`, of logits
    sparse: bool = False

    @property
    def labels(self) -> Any:
        """As a teacher."""
        from xentlib.torch.losses.teacher import probabilities

        assert self.probs is not None
        return probabilities(self.probs, sparse=self.sparse)


class Cotangents(NamedTuple):
    """What a backward operator takes beside its call: upstream gradients and residuals [4, N]."""

    d_logprobs: Tensor | None
    d_entropy: Tensor | None
    d_lse: Tensor | None
    residuals: Tensor


LOGITS_FUNCTION = "vocab_parallel_logprobs"


def function_of(call: HeadCall) -> str:
    return "chunked_logprobs" if call.weight is not None else LOGITS_FUNCTION


FIVE = f"({', '.join(['Tensor'] * len(DIFFERENTIATED))})"
Forward = tuple[LogprobOutput[Tensor], Residuals]


def logprobs_forward(call: HeadCall, values: Values) -> Forward:
    """Steps 1 to 5."""
    entropy, output_dtype, needs, *_ = values
    smoothing = call.scalars.label_smoothing
    loop = HeadLoop(call, Terms(function_of(call), needs, float(entropy)), in_blocks=True)
    loop.chunks_of.exchange()
    vocab = loop.check_consistent()
    if vocab is not None and call.weight is not None:
        vocab.consistency.exact("entropy", float(entropy))
        vocab.consistency.exact("gradient", needs[0] + 2.0 * needs[3])
    stats = all_stats(loop, WantedStats(entropy, smoothing > 0))
    values_5N = torch.stack((stats.lse, stats.p_rest, stats.logprob, stats.entropy, stats.correct))
    per_token_5N = loop.local_tokens.clean(loop.chunks_of.local(values_5N))
    residuals = Residuals(*per_token_5N[:4])
    logprob = residuals.logprob
    if stats.mean_logp is not None:
        logprob = loop.local_tokens.clean((1.0 - smoothing) * logprob + smoothing * stats.mean_logp)
    output = LogprobOutput(
        logprob.to(output_dtype, copy=True),
        residuals.entropy.to(output_dtype, copy=True),
        residuals.lse.to(output_dtype, copy=True),
        per_token_5N[4] > 0,
    )
    return output, residuals


def logprobs_backward(upstream: Cotangents, call: HeadCall, values: Values) -> Gradients:
    """Steps 6 to 8: gradients in the compute dtype; empty if not needed."""
    needs, entropy = values.wanted, upstream.d_entropy is not None
    terms = Terms("the backward of chunked_logprobs", needs, d_entropy=entropy)
    if values.probs is not None:
        from xentlib.torch.losses.soft_labels import SoftRecompute

        loop = HeadLoop(call, terms, kernel_cls=Eager)
        objective = SoftRecompute(loop, values.labels, upstream)
        g_3N = clean_upstream(loop.local_tokens, upstream, call.compute_dtype)
        return recompute(call, loop, objective, g_3N, needs)
    loop = HeadLoop(call, terms, in_blocks=True)
    entropy = loop.chunks_of.d_entropy  # of the tokens of any rank
    smoothing, vocab_size = call.scalars.label_smoothing, loop.vocab.size

    g_3N = clean_upstream(loop.local_tokens, upstream, call.compute_dtype)
    residuals_4N, g_3N = loop.chunks_of.exchange(upstream.residuals, g_3N)

    def dz_of(g_3N: Tensor) -> Coefficients:
        options: Any = {"entropy": entropy, "smoothing": smoothing, "vocab_size": vocab_size}
        return coefficients(g_3N, Residuals(*residuals_4N), **options)

    return recompute(call, loop, Recompute(loop, residuals_4N[0], dz_of), g_3N, needs)


def clean_upstream(local: Selected, upstream: Cotangents, dtype: torch.dtype) -> Tensor:
    """[3, N]: gradients of log-probability, entropy and lse; 0 where there is none, or no token."""
    gradients = (upstream.d_logprobs, upstream.d_entropy, upstream.d_lse)
    zeros = upstream.residuals.new_zeros(local.valid.shape, dtype=dtype)
    return torch.stack([zeros if g is None else local.clean(g.to(dtype)) for g in gradients])


def coefficients(
    g_3N: Tensor, kept: Residuals, *, entropy: bool, smoothing: float, vocab_size: int
) -> Coefficients:
    """Step 6, per token: of dz."""
    g_logprob, g_entropy, g_lse = g_3N
    alpha, beta, slope = g_lse - g_logprob, None, g_lse
    if entropy:
        alpha, beta = alpha - g_entropy * kept.entropy, -g_entropy
        # A label whose p is 0 has a log-probability of -inf: their product must be 0.
        slope = g_lse - g_entropy * (kept.logprob.clamp(min=FLOOR) + kept.entropy)
    target: Tensor = g_logprob * kept.p_rest + torch.exp(kept.logprob) * slope
    if not smoothing:
        return Coefficients(alpha, beta, None, target)
    uniform = g_logprob * (smoothing / vocab_size)
    return Coefficients(alpha, beta, -uniform, target + (uniform - smoothing * g_logprob))


@operator("logprobs_forward", HeadCall, Values, returns=FIVE)
def logprobs_op(call: HeadCall, values: Values) -> tuple[Tensor, ...]:
    """`logprobs_forward` as one operator, opaque to the compiler: outputs, residuals [4, N]."""
    with without_autocast(call.hidden.device):
        if values.probs is not None:
            from xentlib.torch.losses.soft_labels import soft_forward

            return soft_forward(call, values.labels, values)
        output, residuals = logprobs_forward(call, values)
    return (*output[:4], torch.stack(residuals))


@logprobs_op.fake
def _(call: HeadCall, values: Values) -> tuple[Tensor, ...]:
    like, soft = call.hidden, values.probs is not None
    dtypes = [values.output_dtype] * 3 + [call.compute_dtype if soft else torch.bool]
    outputs = [like.new_empty(like.shape[0], dtype=dtype) for dtype in dtypes]
    return (*outputs, like.new_empty(4 + soft, like.shape[0], dtype=call.compute_dtype))


@operator("logprobs_backward", Cotangents, HeadCall, Values, returns=FIVE)
def logprobs_backward_op(
    upstream: Cotangents, call: HeadCall, values: Values
) -> tuple[Tensor, ...]:
    """`logprobs_backward` as one operator, opaque to the compiler."""
    with without_autocast(call.hidden.device):
        return as_inputs(call, logprobs_backward(upstream, call, values))


@logprobs_backward_op.fake
def _(upstream: Cotangents, call: HeadCall, values: Values) -> tuple[Tensor, ...]:
    return tuple(fake_gradients(call, values.wanted))


def keep(ctx: Any, output: tuple[Tensor, ...], call: Any, values: Values) -> None:
    """What a backward needs: the call and its options, and residuals."""
    *_, correct, residuals = output
    keep_call(ctx, residuals, (correct, residuals), call, values)


def backward(ctx: Any, *of_outputs: Tensor | None) -> Named | None:
    d_logprobs, d_entropy, d_lse, *_ = of_outputs
    residuals, (call, values) = kept_call(ctx)
    differentiated_once(function_of(call), "log_softmax")
    if d_logprobs is None and d_entropy is None and d_lse is None:
        return None
    needs = logprobs_op.needed(ctx, *DIFFERENTIATED)
    upstream = Cotangents(d_logprobs, d_entropy, d_lse, residuals)
    gradients = logprobs_backward_op(upstream, call, values._replace(wanted=needs))
    return {name: g if need else None for name, g, need in zip(DIFFERENTIATED, gradients, needs)}


logprobs_op.gradient(keep, backward)


def head_logprobs(args: Arguments) -> LogprobOutput[Tensor]:
    """`chunked_logprobs` of its arguments."""
    if args.kept is None and args.ids is None and is_zero(args.top_k):
        return index_logprobs(args)
    from xentlib.torch.losses.classes import head_classes

    return head_classes(args)


@with_head(recompute=True)
def index_logprobs(args: Arguments, local: RowLayout | None = None) -> LogprobOutput[Tensor]:
    """The same of labels alone."""
    args, problem, call = bind("chunked_logprobs", args, local)
    values = Values(args.entropy, getattr(torch, problem.output_dtype), wanted(*call.leaves))
    return shaped(logprobs_op(call, values), problem.leading, args.entropy)


def shaped(results: Any, leading: tuple[int, ...], entropy: bool) -> LogprobOutput[Tensor]:
    logprobs, entropies, lse, correct = (with_leading(x, leading) for x in results[:4])
    return LogprobOutput(logprobs, entropies if entropy else None, lse, correct)


def logits_logprobs(args: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` of its arguments."""
    if is_soft(args.labels, args.logits):
        from xentlib.torch.losses.soft_labels import logits_soft

        return logits_soft(args)
    if args.kept is not None or args.ids is not None or not is_zero(args.top_k):
        from xentlib.torch.losses.classes import logits_classes

        return logits_classes(args)
    args, problem, call = bind_logits("vocab_parallel_logprobs", args)
    values = Values(args.entropy, getattr(torch, problem.output_dtype), wanted(*call.leaves))
    return shaped(logprobs_op(call, values), problem.leading, args.entropy)
