"""Per-token log-probabilities in PyTorch: the steps of `xentlib.logprobs`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import FLOOR, Coefficients, TokenStats, WantedStats
from xentlib.arguments import Arguments
from xentlib.logprobs import LogprobOutput
from xentlib.torch.binding import bind
from xentlib.torch.core.from_logits import GivenLogits
from xentlib.torch.core.gradients import Gradients, power_of_two, rounded
from xentlib.torch.core.spread import Terms
from xentlib.torch.core.stream import Streamed, stats_of, sums_of, walk_of
from xentlib.torch.core.vocab import numbers_of, over_shards
from xentlib.torch.core.walk import Walk
from xentlib.torch.derivatives import differentiated_once, wanted
from xentlib.torch.head import with_head
from xentlib.torch.lora import fake_low_rank
from xentlib.torch.operators import DIFFERENTIATED, HeadCall, operator


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
SIX = f"({', '.join(['Tensor'] * 6)})"
Forward = tuple[
    LogprobOutput[Tensor], Residuals, Tensor
]  # the shard as all ranks know it, or nothing


def logprobs_forward(call: HeadCall, values: Values) -> Forward:
    """Steps 1 to 5."""
    entropy, output_dtype, needs = values
    walk = walk_of(call, Terms("chunked_logprobs", needs, float(entropy)))
    walk.meet()
    walk.check_consistent("chunked_logprobs")
    if walk.parallel is not None:
        walk.parallel.consistency.exact("entropy", float(entropy))
        walk.parallel.consistency.exact("gradient", needs[0] + 2.0 * needs[3])
    stats = stats_of(walk, WantedStats(entropy))
    return outputs_of(stats, walk, output_dtype)


def outputs_of(
    stats: TokenStats,
    walk: Walk | Streamed | GivenLogits,
    output_dtype: torch.dtype,
    label_smoothing: float = 0.0,
) -> Forward:
    tokens, parallel = walk.own, walk.parallel
    per_token_5N = tokens.clean(
        walk.mine(
            torch.stack((stats.lse, stats.p_rest, stats.logprob, stats.entropy, stats.correct))
        )
    )
    shard = tokens.labels.new_empty(0) if parallel is None else numbers_of(parallel.shard)
    if isinstance(walk, Streamed):
        shard = walk.numbers
    residuals = Residuals(*per_token_5N[:4])
    logprob = residuals.logprob
    if stats.mean_logp is not None:
        logprob = (1.0 - label_smoothing) * logprob + label_smoothing * stats.mean_logp
        logprob = tokens.clean(logprob)
    output = LogprobOutput(
        logprob.to(output_dtype, copy=True),
        residuals.entropy.to(output_dtype, copy=True),
        residuals.lse.to(output_dtype, copy=True),
        per_token_5N[4] > 0,
    )
    return output, residuals, shard


def logprobs_backward(pulled: Cotangents, call: HeadCall, needs: list[bool]) -> tuple[Tensor, ...]:
    """Steps 6 to 8: the gradients in their inputs' dtypes; empty if not needed."""
    found = gradient_sums(pulled, call, needs)
    # On CPU rows that were not computed are +0 already, elsewhere their dz was.
    inputs = (getattr(call, name) for name in DIFFERENTIATED)
    return tuple(
        rounded(x, (call.hidden if like is None else like).dtype)
        for x, like in zip(found, inputs, strict=True)
    )


def gradient_sums(pulled: Cotangents, call: HeadCall, needs: list[bool]) -> Gradients:
    """The same before they are rounded. The chunk is given up with the walk, before there are
    gradients beside their sums."""
    residuals, entropy = Residuals(*pulled.residuals), pulled.d_entropy is not None
    walk = walk_of(call, Terms("the backward of chunked_logprobs", needs, d_entropy=entropy))
    if walk.spread is not None:
        entropy = walk.spread.d_entropy  # of the tokens of any rank

    *kept, g_logprob, g_entropy, g_lse = walk.meet(*residuals, *clean_upstream(walk, pulled))
    residuals, g_3N = Residuals(*kept), torch.stack((g_logprob, g_entropy, g_lse))
    exponent = power_of_two(call.gemm_dtype, g_3N.abs().sum(0))
    if exponent is not None:
        g_3N = torch.ldexp(g_3N, exponent)
    every = sums_of(walk, needs, call.weight.shape[call.transposed])
    for part, sums in every.passes(exponent):
        for chunk in part.chunks():
            kernels = part.kernels()
            for rows in part.blocks(chunk):
                g_3B = part.scaled(g_3N[:, rows.places], rows)
                of_rows = Residuals(*(x[rows.places] for x in residuals))
                dz = coefficients(g_3B, of_rows, entropy=entropy)
                sums.take(rows, kernels, of_rows.lse, dz)
            del kernels
            sums.add(chunk)
    found = every.finish(exponent)
    for x in found[1:] if call.head_scale != 1.0 else ():
        x.mul_(call.head_scale)
    return found


def clean_upstream(walk: Walk | Streamed | GivenLogits, pulled: Cotangents) -> Tensor:
    """[3, N]: gradients of log-probability, entropy and lse; 0 where there is none, or no token."""
    zeros = torch.zeros(walk.own.valid.shape, **walk.like)
    gradients = (pulled.d_logprobs, pulled.d_entropy, pulled.d_lse)
    return torch.stack(
        [zeros if g is None else walk.own.clean(g.to(walk.compute_dtype)) for g in gradients]
    )


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


@operator("logprobs_forward", HeadCall, Values, returns=SIX)
def logprobs_op(call: HeadCall, values: Values) -> tuple[Tensor, ...]:
    """`logprobs_forward` as one operator, opaque to the compiler: outputs, residuals [4, N], shard
    [3] or nothing."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        output, residuals, shard = over_shards(lambda: logprobs_forward(call, values))
    return (*output, torch.stack(residuals), shard)


@logprobs_op.fake
def _(call: HeadCall, values: Values) -> tuple[Tensor, ...]:
    return fake_outputs(call.hidden, values.output_dtype, call.compute_dtype, call.shard)


def fake_outputs(
    like: Tensor, output_dtype: torch.dtype, compute_dtype: torch.dtype, shard: Tensor | None
) -> tuple[Tensor, ...]:
    dtypes = [output_dtype] * 3 + [torch.bool]
    outputs = [like.new_empty(like.shape[0], dtype=dtype) for dtype in dtypes]
    residuals = like.new_empty(4, like.shape[0], dtype=compute_dtype)
    none = like.new_empty(0, dtype=torch.int64)
    return (*outputs, residuals, none if shard is None else torch.empty_like(shard))


@operator("logprobs_backward", Cotangents, HeadCall, Needs, returns=FIVE)
def logprobs_backward_op(pulled: Cotangents, call: HeadCall, needs: Needs) -> tuple[Tensor, ...]:
    """`logprobs_backward` as one operator, opaque to the compiler."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        return logprobs_backward(pulled, call, needs.needs)


@logprobs_backward_op.fake
def _(pulled: Cotangents, call: HeadCall, needs: Needs) -> tuple[Tensor, ...]:
    hidden, weight = call.hidden, call.weight
    need_hidden, need_weight, need_bias, *need_low = needs.needs
    vocab_size = weight.shape[1 if call.transposed else 0]
    like_bias = hidden if call.bias is None else call.bias
    return (
        hidden.new_empty(hidden.shape if need_hidden else (0, hidden.shape[1])),
        weight.new_empty(weight.shape if need_weight else (0, 0)),
        like_bias.new_empty(vocab_size if need_bias else 0),
        *fake_low_rank(call, need_low),
    )


def keep(ctx: Any, output: tuple[Tensor, ...], call: Any, values: Values) -> None:
    """What a backward needs: the call, with the shard that its forward knew, and residuals."""
    *outputs, residuals, shard = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(outputs[-1], residuals, shard)
    call = call._replace(shard=None if call.shard is None else shard)
    tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
    ctx.save_for_backward(residuals, *tensors.values())
    ctx.tensors, ctx.call = list(tensors), call._replace(**dict.fromkeys(tensors))


def kept_of(
    ctx: Any, function: str, gradients: Sequence[Tensor | None]
) -> tuple[Any, Cotangents] | None:
    """The call and what its backward pulls back; None if nothing is."""
    differentiated_once(function, "log_softmax")
    d_logprobs, d_entropy, d_lse, *_ = gradients
    if d_logprobs is None and d_entropy is None and d_lse is None:
        return None
    residuals, *tensors = ctx.saved_tensors
    call = ctx.call._replace(**dict(zip(ctx.tensors, tensors, strict=True)))
    return call, Cotangents(d_logprobs, d_entropy, d_lse, residuals)


def _backward(ctx: Any, *gradients: Tensor | None) -> dict[str, Tensor | None] | None:
    kept = kept_of(ctx, "chunked_logprobs", gradients)
    if kept is None:
        return None
    call, pulled = kept
    needs = logprobs_op.needed(ctx, *DIFFERENTIATED)
    found = logprobs_backward_op(pulled, call, Needs(needs))
    return {name: g if need else None for name, g, need in zip(DIFFERENTIATED, found, needs)}


logprobs_op.gradient(keep, _backward)


@with_head(recompute=True)
def head_logprobs(given: Arguments) -> LogprobOutput[Tensor]:
    """`chunked_logprobs` of its arguments."""
    given, problem, call = bind("chunked_logprobs", given)
    needs = wanted(*(getattr(call, name) for name in DIFFERENTIATED))
    values = Values(given.entropy, getattr(torch, problem.output_dtype), needs)
    return shaped(logprobs_op(call, values), problem.leading, given.entropy)


def shaped(results: Any, leading: tuple[int, ...], entropy: bool) -> LogprobOutput[Tensor]:
    # Copies, not views: FSDP2 warns of views that a module's forward returns.
    logprobs, entropies, lse, correct = (
        x if x.shape == leading else x.reshape(leading).clone() for x in results[:4]
    )
    return LogprobOutput(logprobs, entropies if entropy else None, lse, correct)
