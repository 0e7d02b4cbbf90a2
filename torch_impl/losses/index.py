"""Chunked negative log-likelihood in PyTorch: the steps of `xentlib.nll`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from xentlib.arguments import Arguments
from xentlib.checks.call import CALLS, is_soft
from xentlib.math.softmax import Coefficients, TokenStats, WantedStats
from xentlib.nll import OUTPUTS, NLLOutput
from xentlib.torch import hooks
from xentlib.torch.array_spec import as_tensor
from xentlib.torch.binding import bind, tokens
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.gemm import power_of_two
from xentlib.torch.core.gradients import Gradients, fake_gradients
from xentlib.torch.core.kernels import FusedLoss, LogitsBlock, LossTerms
from xentlib.torch.core.logits import Chunk
from xentlib.torch.core.loop import HeadLoop, Objective, Out, run
from xentlib.torch.core.stats import all_stats, at_rows, chunk_stats
from xentlib.torch.core.tokens import Selected, target_info
from xentlib.torch.losses.loss import (
    Recompute,
    as_inputs,
    check_consistent,
    recompute,
    reduced,
    refused_divisor,
    save_gradients,
    saved_gradients,
    token_weights,
    without_autocast,
)
from xentlib.torch.micro_batch import label_loss
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
    without_gradient,
)
from xentlib.torch.placement.head import with_head

NAMES = "chunked_nll", "F.cross_entropy"  # of the function, and of what to use instead


class Loss(NamedTuple):
    """What the operator of a loss takes beside a `HeadCall`."""

    token_weights: Tensor | None
    class_weights: Tensor | None
    denominator: Tensor | None
    mean: bool
    entropy: bool
    predicted: bool
    output_dtype: torch.dtype
    needs: list[bool]  # gradients of hidden, weight, bias
    recompute: bool  # in a backward, from logits that are computed again


class IndexLabels(Objective):
    """Labels that are classes. Values: loss, its z-loss part, logprob, entropy, lse, correct,
    predicted."""

    num_values = 7

    def __init__(
        self, loop: HeadLoop, wanted_stats: WantedStats, needs: list[bool], *, keep: bool
    ) -> None:
        """`keep`: the statistics of all tokens, for a backward."""
        self.loop, self.wanted, self.scalars = loop, wanted_stats, loop.call.scalars
        self.when = "two passes" if keep else loop.schedule(needs)
        self.needs_dz = any(needs)
        # A gradient of the bias sums dz over rows before it is rounded: statistics come first.
        self.fuses = self.when == "fused" and not needs[2]
        self.stats: TokenStats | None = None  # of all tokens
        if self.when == "two passes":
            self.stats = all_stats(loop, wanted_stats)
            self.values = ALGEBRA.values(self.stats, target_info(loop, slice(None)), self.scalars)

    def units(self, chunk: Chunk) -> Iterator[tuple[LogitsBlock, TokenStats | None]]:
        """Blocks, and the statistics of the chunk where shards have exchanged them."""
        known = None
        if self.when == "each chunk":
            known = chunk_stats(self.logits, chunk, self.wanted)
        return ((rows, known) for rows in self.logits.blocks(chunk, fresh=known is None))

    def step(self, unit: tuple[LogitsBlock, TokenStats | None], kernels: Any, out: Out) -> None:
        rows, known = unit
        factor_B, size = out.factor[rows.token_index], self.loop.vocab.size
        if self.fuses and self.logits.kernel_cls.fused_loss:
            self.fused_step(rows, kernels, factor_B, out)
            return
        # 3. to 5. Softmax without the target column, then the target
        label = target_info(self.loop, rows.token_index)
        if self.stats is not None:
            stats = at_rows(self.stats, rows.token_index)
        elif known is not None:
            stats = at_rows(known, rows.span)
        else:
            z_y, blocks = kernels.stats(rows, self.wanted, dz_follows=self.needs_dz)
            algebra = self.logits.kernel_cls.algebra
            stats = algebra.token_stats(z_y, algebra.together(blocks), size, label)
        if self.stats is None:
            out.values[:, rows.token_index] = ALGEBRA.values(stats, label, self.scalars)
        if out.needs_dz:
            # 6. and 7. dz of the rest in place of the logits, dz of the target beside it
            factor_B = self.logits.scaled(factor_B, rows.temperature_B)
            parts = stats.lse, stats.p_rest, factor_B
            dz = ALGEBRA.coefficients(*parts, label, self.scalars, size)
            out.sums.take(rows, kernels, stats.lse, dz)

    def fused_step(self, rows: LogitsBlock, kernels: Any, factor_B: Tensor, out: Out) -> None:
        """Steps 3 to 7 as one program."""
        dz_y_B = out.sums.dz_y_T[rows.span] if out.needs_dz else None
        direct, values_7B = isinstance(rows.token_index, slice), out.values[:, rows.token_index]
        values_7B = values_7B if direct else torch.empty_like(values_7B)
        weights = self.loop.class_weights
        weights_sum = None if weights is None else weights.sum()
        loss_terms = LossTerms(factor_B, self.scalars, weights_sum, values_7B, dz_y_B)
        cast(FusedLoss, kernels).loss(rows, self.wanted, loss_terms, out.sums.output(rows))
        if not direct:
            out.values[:, rows.token_index] = values_7B


def nll_forward(call: HeadCall, loss: Loss) -> tuple[NLLOutput[Tensor], Tensor, Gradients, Tensor]:
    """Loss and per-token values; residuals [3, N] of a backward that recomputes, lse, 1 - p_y and
    the factor of dz, or without one [3, 0]; gradient accumulators; the mask of valid tokens [N]."""
    # 1. Valid tokens, and what each of them counts for
    later, mean = loss.recompute, loss.mean and loss.denominator is None
    needs = [need and not later for need in loss.needs]
    refused, outputs = refused_divisor(call, loss), loss.entropy + 2.0 * loss.predicted
    terms = Terms(
        "chunked_nll", loss.needs, outputs, loss.class_weights, refused, mean, recompute=later
    )
    loop = HeadLoop(call, terms, in_blocks=later or not (any(needs) or call.rows.group))
    class_weight_N = None if loss.class_weights is None else target_info(loop, slice(None)).weight
    weights_N, weight_sum, divisor = token_weights(
        loss, loop.local_tokens.valid, loop.compute_dtype, class_weight_N
    )
    local_factor_N = torch.where(loop.local_tokens.bad, torch.nan, weights_N * (1.0 / divisor))
    (factor_N,) = loop.chunks_of.exchange(local_factor_N)
    exponent = power_of_two(call.gemm_dtype, factor_N) if any(needs) else None
    if exponent is not None:
        factor_N = torch.ldexp(factor_N, exponent)
    check_consistent(loop, loss, divisor)
    wanted_stats = WantedStats(loss.entropy, call.scalars.label_smoothing > 0, loss.predicted)
    objective = IndexLabels(loop, wanted_stats, needs, keep=later)
    values_7N, gradients = run(loop, objective, factor_N, needs, exponent)
    # 9. Reduce. What is 0 was divided by 1 above, unless it has tokens: then ranks that shake hands
    # have refused it, those of `vocab_parallel` have compared it.
    if refused is not None:
        CALLS.refuse("denominator", value=refused)
    values_7N = loop.chunks_of.local(values_7N)
    output = outputs_of(loop.local_tokens, values_7N, weights_N, weight_sum, divisor, loss)
    residuals, stats = factor_N.new_empty(3, 0), objective.stats
    if later and stats is not None:
        values_2N = loop.chunks_of.local(torch.stack((stats.lse, stats.p_rest)))
        residuals = torch.stack((*loop.local_tokens.clean(values_2N), local_factor_N))
    return output, residuals, gradients, loop.local_tokens.valid


def nll_backward(gradient: Tensor, residuals_3N: Tensor, call: HeadCall, loss: Loss) -> Gradients:
    """Steps 6 to 8 of logits that are computed again, in the compute dtype; empty if not needed."""
    needs, weights = loss.needs, loss.class_weights
    terms = Terms("the backward of chunked_nll", needs, class_weights=weights)
    loop = HeadLoop(call, terms, in_blocks=True)
    # What follows a loss without a valid token may have any gradient, inf included.
    factor_N = residuals_3N[2] * gradient.to(call.compute_dtype)
    factor_1N = torch.where(loop.local_tokens.valid, factor_N, 0.0)[None]
    kept_2N, factor_1N = loop.chunks_of.exchange(residuals_3N[:2], factor_1N)

    def dz_of(factor_1N: Tensor) -> Coefficients:
        label, size = target_info(loop, slice(None)), loop.vocab.size
        lse, p_rest = kept_2N
        return ALGEBRA.coefficients(lse, p_rest, factor_1N[0], label, call.scalars, size)

    return recompute(call, loop, Recompute(loop, kept_2N[0], dz_of), factor_1N, needs)


def outputs_of(
    local: Selected,
    per_token_7N: Tensor,
    weights_N: Tensor,
    weight_sum: Tensor,
    divisor: Tensor,
    loss: Loss,
) -> NLLOutput[Tensor]:
    """Step 9, of this rank's tokens."""
    output_dtype = loss.output_dtype
    loss_N, z_loss_N, logprob_N, entropy_N, lse_N, correct_N, predicted_N = local.clean(
        per_token_7N
    )
    predicted_N = torch.where(local.valid & ~local.bad, predicted_N, -1.0)
    return NLLOutput(
        reduced(loss_N, weights_N, divisor).to(output_dtype),
        local.valid.sum(),
        weight_sum.to(output_dtype),
        reduced(z_loss_N, weights_N, divisor).to(output_dtype),
        logprob_N.to(output_dtype, copy=True),
        entropy_N.to(output_dtype, copy=True),
        lse_N.to(output_dtype, copy=True),
        correct_N > 0,
        predicted_N.long(),
    )


@operator("nll_forward", HeadCall, Loss, returns=f"({', '.join(['Tensor'] * 16)})")
def nll_op(call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    """`nll_forward` as one operator, opaque to the compiler: outputs, residuals, gradients, the
    mask."""
    with without_autocast(call.hidden.device):
        output, residuals, gradients, valid_N = nll_forward(call, loss)
        if hooks.in_compiled(call):
            upstream, seen = output.loss.new_ones(()), gradients
            if loss.recompute:
                seen = nll_backward(upstream, residuals, call, loss)
            hooks.run_compiled_hooks(call, loss, (*output[:9], *seen, valid_N))
    return (*output[:9], residuals, *gradients, valid_N)


@nll_op.fake
def _(call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    hidden, number, count, flag = call.hidden, loss.output_dtype, torch.int64, torch.bool
    num_tokens, later = hidden.shape[0], loss.recompute
    scalars_of_call = (number, count, number, number)
    per_token = (number, number, number, flag, count)
    needs = [need and not later for need in loss.needs]
    return (
        *(hidden.new_empty((), dtype=dtype) for dtype in scalars_of_call),
        *(hidden.new_empty(num_tokens, dtype=dtype) for dtype in per_token),
        hidden.new_empty(3, num_tokens if later else 0, dtype=call.compute_dtype),
        *fake_gradients(call, needs, call.compute_dtype),
        hidden.new_empty(num_tokens, dtype=flag),
    )


class Upstream(NamedTuple):
    """What the operator of a backward takes beside its call."""

    d_loss: Tensor
    residuals: Tensor


@operator("nll_backward", Upstream, HeadCall, Loss, returns=f"({', '.join(['Tensor'] * 5)})")
def nll_backward_op(upstream: Upstream, call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    """`nll_backward` as one operator, opaque to the compiler."""
    with without_autocast(call.hidden.device):
        return as_inputs(call, nll_backward(*upstream, call, loss))


@nll_backward_op.fake
def _(upstream: Upstream, call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    return tuple(fake_gradients(call, loss.needs))


def keep(ctx: Any, output: tuple[Tensor, ...], call: HeadCall, loss: Loss) -> None:
    """What a backward needs: gradients, or the call and what they are computed from."""
    ctx.recompute = loss.recompute
    if loss.recompute:
        keep_call(ctx, output[9], output[1:], call, loss)
    else:
        save_gradients(ctx, output, call, loss)


def backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> Named | None:
    if not ctx.recompute:
        return scaled_gradients(ctx, gradient, *others)
    differentiated_once(*NAMES)
    if gradient is None:
        return None
    residuals, (call, loss) = kept_call(ctx)
    needs = nll_op.needed(ctx, *DIFFERENTIATED)
    results = nll_backward_op(Upstream(gradient, residuals), call, loss._replace(needs=needs))
    gradients = {name: g if need else None for name, g, need in zip(DIFFERENTIATED, results, needs)}
    # Each rank's own, of which the head's gradient is the sum: told as if all had the same
    of_all = gradient if call.rows.route and any(needs[1:]) else None
    hooks.run_backward_hooks(ctx, (gradient, of_all, call.rows.head_scale), gradients)
    return gradients


scaled_gradients = saved_gradients(*NAMES)
nll_op.gradient(keep, backward)


def nll(args: Arguments) -> NLLOutput[Tensor]:
    """`chunked_nll` of its arguments."""
    if is_soft(args.labels, args.hidden):
        from xentlib.torch.losses.soft_labels import soft_nll

        return soft_nll(args)
    return of_classes(args)


@with_head(recompute=False)
def of_classes(args: Arguments, local: RowLayout | None = None) -> NLLOutput[Tensor]:
    """The same of labels that are classes."""
    args, problem, call = bind("chunked_nll", args, local)
    divisor = as_tensor(args.denominator, None, call.hidden, call.compute_dtype)
    loss = Loss(
        token_weights=tokens(args.token_weights),
        class_weights=args.class_weights,
        denominator=divisor,
        mean=args.reduction == "mean",
        entropy="entropy" in args.outputs,
        predicted="predicted" in args.outputs,
        output_dtype=getattr(torch, problem.output_dtype),
        needs=wanted(*call.leaves),
        recompute=args.recompute,
    )
    if not torch.compiler.is_compiling() and hooks.LOSS_HOOKS:
        hooks.EAGER.append(True)
    output = nll_op(call, loss)
    hooks.run_forward_hooks(call, loss, output)
    total, num_tokens, weight_sum, z_term, *rest = output[:9]
    if call.scalars.z_loss:
        z_term = without_gradient("z_loss", z_term, call.leaves)
    per_token = {
        name: value.reshape(problem.leading) if name in args.outputs else None
        for name, value in zip(OUTPUTS, rest)
    }
    for name, result in per_token.items():
        if result is not None and result.is_floating_point():
            per_token[name] = without_gradient(name, result, call.leaves)
    if divisor is None and loss.mean:
        divisor = weight_sum
    label_loss(total, num_tokens, weight_sum, divisor)
    return NLLOutput(total, num_tokens, weight_sum, z_term, **per_token, denominator=divisor)
