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
from xentlib.math.softmax import TokenStats, WantedStats
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
    check_consistent,
    reduced,
    refused_divisor,
    save_gradients,
    saved_gradients,
    token_weights,
    without_autocast,
)
from xentlib.torch.micro_batch import label_loss
from xentlib.torch.operators import HeadCall, RowLayout, operator, wanted, without_gradient
from xentlib.torch.placement.head import with_head


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


class IndexLabels(Objective):
    """Labels that are classes. Values: loss, its z-loss part, logprob, entropy, lse, correct,
    predicted."""

    num_values = 7

    def __init__(self, loop: HeadLoop, wanted_stats: WantedStats, needs: list[bool]) -> None:
        self.loop, self.wanted, self.scalars = loop, wanted_stats, loop.call.scalars
        self.when, self.needs_dz = loop.schedule(needs), any(needs)
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
            factor_B = self.logits.scaled(factor_B, rows)
            dz = ALGEBRA.coefficients(stats, factor_B, label, self.scalars, size)
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


def nll_forward(call: HeadCall, loss: Loss) -> tuple[NLLOutput[Tensor], Gradients, Tensor]:
    """Loss and per-token values, gradient accumulators, and the mask of valid tokens [N]."""
    # 1. Valid tokens, and what each of them counts for
    needs, mean = loss.needs, loss.mean and loss.denominator is None
    refused, outputs = refused_divisor(call, loss), loss.entropy + 2.0 * loss.predicted
    terms = Terms("chunked_nll", needs, outputs, loss.class_weights, refused, mean)
    loop = HeadLoop(call, terms, in_blocks=not (any(needs) or call.rows.group))
    class_weight_N = None if loss.class_weights is None else target_info(loop, slice(None)).weight
    weights_N, weight_sum, divisor = token_weights(
        loss, loop.local_tokens.valid, loop.compute_dtype, class_weight_N
    )
    factor_N = torch.where(loop.local_tokens.bad, torch.nan, weights_N * (1.0 / divisor))
    (factor_N,) = loop.chunks_of.exchange(factor_N)
    exponent = power_of_two(call.gemm_dtype, factor_N)
    if exponent is not None:
        factor_N = torch.ldexp(factor_N, exponent)
    check_consistent(loop, loss, divisor)
    wanted_stats = WantedStats(loss.entropy, call.scalars.label_smoothing > 0, loss.predicted)
    objective = IndexLabels(loop, wanted_stats, needs)
    values_7N, gradients = run(loop, objective, factor_N, needs, exponent)
    # 9. Reduce. What is 0 was divided by 1 above, unless it has tokens: then ranks that shake hands
    # have refused it, those of `vocab_parallel` have compared it.
    if refused is not None:
        CALLS.refuse("denominator", value=refused)
    values_7N = loop.chunks_of.local(values_7N)
    output = outputs_of(loop.local_tokens, values_7N, weights_N, weight_sum, divisor, loss)
    return output, gradients, loop.local_tokens.valid


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


@operator("nll_forward", HeadCall, Loss, returns=f"({', '.join(['Tensor'] * 15)})")
def nll_op(call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    """`nll_forward` as one operator, opaque to the compiler: outputs, gradients, mask."""
    with without_autocast(call.hidden.device):
        output, gradients, valid_N = nll_forward(call, loss)
    results = (*output[:9], *gradients, valid_N)
    hooks.run_compiled_hooks(call, loss, results)
    return results


@nll_op.fake
def _(call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    hidden, number, count, flag = call.hidden, loss.output_dtype, torch.int64, torch.bool
    num_tokens = hidden.shape[0]
    scalars_of_call = (number, count, number, number)
    per_token = (number, number, number, flag, count)
    return (
        *(hidden.new_empty((), dtype=dtype) for dtype in scalars_of_call),
        *(hidden.new_empty(num_tokens, dtype=dtype) for dtype in per_token),
        *fake_gradients(call, loss.needs, call.compute_dtype),
        hidden.new_empty(num_tokens, dtype=flag),
    )


nll_op.gradient(save_gradients, saved_gradients("chunked_nll", "F.cross_entropy"))


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
    )
    if not torch.compiler.is_compiling() and hooks.LOSS_HOOKS:
        hooks.EAGER.append(True)
    output = nll_op(call, loss)
    hooks.run_forward_hooks(call, loss, output)
    total, num_tokens, weight_sum, z_term, *rest = output
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
