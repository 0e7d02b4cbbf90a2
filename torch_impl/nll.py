"""Chunked negative log-likelihood in PyTorch: the steps of `xentlib.nll`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from xentlib.algebra import TokenStats, WantedStats
from xentlib.arguments import Arguments
from xentlib.checks.call import CALLS, is_soft
from xentlib.nll import OUTPUTS, NLLOutput
from xentlib.torch import hooks
from xentlib.torch.array_spec import as_tensor
from xentlib.torch.binding import bind, tokens
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.device import device_info, host_readable
from xentlib.torch.core.gemm import power_of_two
from xentlib.torch.core.gradients import Gradients, fake_gradients, same_upstream
from xentlib.torch.core.kernels import FusedLoss, LossTerms, kernels_for
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.stats import all_stats, at_rows, chunk_stats
from xentlib.torch.core.tokens import Selected, counted, target_info
from xentlib.torch.micro_batch import label_loss
from xentlib.torch.operators import (
    DIFFERENTIATED,
    HeadCall,
    Named,
    RowLayout,
    differentiated_once,
    in_eager,
    keeps_graph,
    operator,
    wanted,
    without_gradient,
)
from xentlib.torch.placement.head import with_head


class Weights(Protocol):
    """What tokens count for in a loss, and which gradients are wanted."""

    @property
    def token_weights(self) -> Tensor | None: ...
    @property
    def class_weights(self) -> Tensor | None: ...
    @property
    def denominator(self) -> Tensor | None: ...
    @property
    def mean(self) -> bool: ...
    @property
    def needs(self) -> list[bool]: ...


KEPT = 1 + len(DIFFERENTIATED)  # of an operator's results, for its backward


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


def nll_forward(call: HeadCall, loss: Loss) -> tuple[NLLOutput[Tensor], Gradients, Tensor]:
    """Loss and per-token values, gradient accumulators, and the mask of valid tokens [N]."""
    # 1. Valid tokens, and what each of them counts for
    scalars, needs = call.scalars, loss.needs
    refused, outputs = refused_divisor(call, loss), loss.entropy + 2.0 * loss.predicted
    mean = loss.mean and loss.denominator is None
    loop = HeadLoop(call, Terms("chunked_nll", needs, outputs, loss.class_weights, refused, mean))
    weights_N, weight_sum, divisor = token_weights(loop, loss)
    factor_N = torch.where(loop.own.bad, torch.nan, weights_N * (1.0 / divisor))
    (factor_N,) = loop.chunks_of.exchange(factor_N)
    exponent = power_of_two(call.gemm_dtype, factor_N)
    if exponent is not None:
        factor_N = torch.ldexp(factor_N, exponent)
    check_consistent(loop, loss, divisor)

    wanted_stats = WantedStats(loss.entropy, scalars.label_smoothing > 0, loss.predicted)
    everywhere, sums = target_info(loop, slice(None)), loop.sums(needs)
    # Rows: loss, its z-loss part, logprob, entropy, lse, correct, predicted. One write a block.
    per_token_7N = torch.zeros(7, loop.tokens.valid.shape[0], **loop.like)
    whole: TokenStats | None = None
    when = loop.schedule(needs)
    if when == "two passes":
        whole = all_stats(loop, wanted_stats)
        per_token_7N = ALGEBRA.values(whole, everywhere, scalars)
    # A gradient of the bias sums dz over rows before it is rounded: statistics come first.
    at_once = when == "fused" and not needs[2]
    for logits, of_block in sums.passes(exponent) if whole is None or any(needs) else ():
        for chunk in logits.chunks():  # 2. Logits
            stats = whole
            if when == "each chunk":
                of_chunk = chunk_stats(logits, chunk, wanted_stats)
                places = loop.tokens.places(chunk.start, chunk.start + chunk.size)
                label = target_info(loop, places)
                per_token_7N[:, places] = ALGEBRA.values(of_chunk, label, scalars)
            kernels = logits.kernels()
            for rows in logits.blocks(chunk, fresh=when != "each chunk"):
                factor_B = factor_N[rows.places]
                if at_once and logits.made.fused_loss:  # 3. to 7.
                    dz_y_B = of_block.dz_y_T[rows.span] if any(needs) else None
                    direct = isinstance(rows.places, slice)
                    values_7B = per_token_7N[:, rows.places]
                    values_7B = values_7B if direct else torch.empty_like(values_7B)
                    weights_sum = None if loop.class_weights is None else loop.class_weights.sum()
                    of_loss = LossTerms(factor_B, scalars, weights_sum, values_7B, dz_y_B)
                    fused = cast(FusedLoss, kernels)
                    fused.loss(rows, wanted_stats, of_loss, of_block.output(rows))
                    if not direct:
                        per_token_7N[:, rows.places] = values_7B
                    continue
                # 3. to 5. Softmax without the target column, then the target
                label = target_info(loop, rows.places)
                if whole is not None:
                    stats = at_rows(whole, rows.places)
                elif when == "each chunk":
                    stats = at_rows(of_chunk, rows.span)
                else:
                    z_y, blocks = kernels.stats(rows, wanted_stats, dz_follows=any(needs))
                    algebra = logits.made.algebra
                    rest = algebra.together(blocks)
                    stats = algebra.token_stats(z_y, rest, loop.vocab.size, label)
                    per_token_7N[:, rows.places] = ALGEBRA.values(stats, label, scalars)
                if any(needs):
                    # 6. and 7. dz of the rest in place of the logits, dz of the target beside it
                    factor_B = logits.scaled(factor_B, rows)
                    dz = ALGEBRA.coefficients(stats, factor_B, label, scalars, loop.vocab.size)
                    of_block.take(rows, kernels, stats.lse, dz)
            del kernels
            of_block.add(chunk)  # 8. Gradient GEMMs
    gradients = sums.finish(exponent)
    # 9. Reduce. What is 0 was divided by 1 above, unless it has tokens: then ranks that shake hands
    # have refused it, those of `vocab_parallel` have compared it.
    if refused is not None:
        CALLS.refuse("denominator", value=refused)
    per_token_7N = loop.chunks_of.local(per_token_7N)
    output = reduced(loop.own, per_token_7N, weights_N, weight_sum, divisor, loss)
    return output, gradients, loop.own.valid


def token_weights(loop: HeadLoop, loss: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """[N] weights of this rank's tokens, 0 where one does not count; their sum, with those of the
    classes; and what the loss is divided by."""
    valid_N = loop.own.valid
    weights_N = torch.ones(valid_N.shape, **loop.like)
    if loss.token_weights is not None:
        weights_N = loss.token_weights.to(loop.compute_dtype)
    weights_N = torch.where(valid_N, weights_N, 0.0)
    total_valid = valid_N.sum()
    weight_sum = total_valid.to(loop.compute_dtype)
    if loss.token_weights is not None or loss.class_weights is not None:
        of_class_N = 1.0 if loss.class_weights is None else target_info(loop, slice(None)).weight
        weight_sum = torch.where(valid_N, weights_N * of_class_N, 0.0).sum()
    if loss.denominator is not None:
        divisor = loss.denominator.to(loop.compute_dtype)
    else:
        divisor = weight_sum if loss.mean else torch.ones((), **loop.like)
    # An all-masked window has nothing to divide; a zero weight sum would turn 0 into NaN.
    nothing = (total_valid == 0) | ((weight_sum == 0) & (divisor == 0))
    return weights_N, weight_sum, torch.where(nothing, 1.0, divisor)


def check_consistent(loop: HeadLoop, loss: Weights, divisor: Tensor) -> None:
    """Over shards: what every rank must have the same, that of the loss included."""
    vocab = loop.check_consistent()
    if vocab is None:
        return
    consistency, needs, weights = vocab.consistency, loss.needs, loop.terms.class_weights
    consistency.exact("outputs", loop.terms.outputs)
    consistency.exact("gradient", needs[0] + 2.0 * needs[3])  # which are summed over the ranks
    consistency.exact("class_weights", 0.0 if weights is None else float(weights.shape[0]))
    consistency.per_class("class_weights", loop.class_weights)
    if loop.gathered:
        of_head = sum(2.0**k * need for k, need in enumerate(needs[1:]))
        consistency.exact("gradient of the head", of_head)
    else:
        consistency.per_token("token_weights", loss.token_weights, loop.own.valid.shape[0])
        consistency.close("denominator", divisor)


def reduced(
    own: Selected,
    per_token_7N: Tensor,
    weights_N: Tensor,
    weight_sum: Tensor,
    divisor: Tensor,
    loss: Loss,
) -> NLLOutput[Tensor]:
    """Step 9, of this rank's tokens."""
    output_dtype = loss.output_dtype
    loss_N, z_loss_N, logprob_N, entropy_N, lse_N, correct_N, predicted_N = own.clean(per_token_7N)
    predicted_N = torch.where(own.valid & ~own.bad, predicted_N, -1.0)
    return NLLOutput(
        ((loss_N * weights_N).sum() / divisor).to(output_dtype),
        own.valid.sum(),
        weight_sum.to(output_dtype),
        ((z_loss_N * weights_N).sum() / divisor).to(output_dtype),
        logprob_N.to(output_dtype, copy=True),
        entropy_N.to(output_dtype, copy=True),
        lse_N.to(output_dtype, copy=True),
        correct_N > 0,
        predicted_N.long(),
    )


def refused_divisor(call: HeadCall, loss: Weights) -> float | None:
    """A denominator that is not positive, of a call with a token that counts; None where the host
    cannot read it, or what counts."""
    given = loss.denominator
    if given is None or not (call.denominator_is_0 or (host_readable(given) and given <= 0)):
        return None
    of_tokens = call.labels, call.where, loss.token_weights, loss.class_weights
    if not all(x is None or host_readable(x) for x in of_tokens):
        return None
    valid_N, _ = counted(call.labels, call.where, call.ignore_index)
    weights_N = valid_N.double()
    if loss.token_weights is not None:
        weights_N = torch.where(valid_N, loss.token_weights, 0.0)
    if loss.class_weights is not None:
        classes_N = call.labels.long().clamp(0, loss.class_weights.shape[0] - 1)
        weights_N = weights_N * loss.class_weights[classes_N]
    number = 0.0 if call.denominator_is_0 else float(given)
    counts = bool(valid_N.any()) and not (number == 0 and weights_N.sum() == 0)
    return number if counts else None


def nll_backward(
    gradient: Tensor,
    accumulators: Gradients,
    valid_N: Tensor,
    dtypes: Sequence[torch.dtype | None],
    needs: Sequence[bool],
    *,
    of_all: Tensor | None = None,
    head_scale: float = 1.0,
    eager: bool,
    reuse: bool,
) -> list[Tensor | None]:
    """Step 10. `reuse` scales the accumulators themselves: the graph is not walked again. Not
    `eager`: something stands in for the numbers. `of_all` is the upstream gradient of all
    ranks whose tokens are in the head's gradients, `head_scale` theirs."""
    # Without a valid token the upstream gradient may be anything, inf included: the result is +0.
    gradient = torch.where(valid_N.any(), gradient, 0.0).to(accumulators[0].dtype)
    on_cpu = device_info(gradient).host_readable
    # Times 1 changes nothing and costs a pass over d weight; the value is free to read on CPU, and
    # without `reuse` there may be none.
    one = reuse and on_cpu and gradient.item() == 1.0
    of_head = gradient if of_all is None else of_all.to(gradient.dtype)
    of_head = of_head if head_scale == 1.0 else of_head * head_scale
    results: list[Tensor | None] = [None] * len(accumulators)
    for slot, (accumulator, dtype) in enumerate(zip(accumulators, dtypes, strict=True)):
        by = of_head if slot else gradient
        if one and by is gradient and needs[slot] and dtype is not None:
            results[slot] = accumulator.to(dtype)
        elif needs[slot] and dtype is not None:
            same = accumulator.dtype == dtype and accumulator.is_contiguous()
            if on_cpu or not eager:
                scaled = accumulator.mul_(by) if reuse else accumulator * by
            else:
                # A GPU multiplies in float32, rounds and turns in one pass: 6 bytes an entry of d
                # weight in bfloat16 where scaling the sum and then rounding it moves 14.
                scaled = accumulator
                if not (reuse and same):
                    scaled = torch.empty(accumulator.shape, dtype=dtype, device=accumulator.device)
                kernels = kernels_for(accumulator.device, accumulator.dtype)
                kernels.scale(accumulator, by, scaled)
            if slot == 0:
                # By selection: 0 times an inf is NaN, times a negative number -0.
                fill = scaled.masked_fill_ if eager else scaled.masked_fill
                scaled = fill(~valid_N[:, None], 0.0)
            results[slot] = scaled.to(dtype).contiguous()
    return results


@operator("nll_forward", HeadCall, Loss, returns=f"({', '.join(['Tensor'] * 15)})")
def nll_op(call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    """`nll_forward` as one operator, opaque to the compiler: outputs, gradients, mask."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        output, gradients, valid_N = nll_forward(call, loss)
    results = (*output[:9], *gradients, valid_N)
    hooks.run_compiled_hooks(call, loss, results)
    return results


@nll_op.fake
def _(call: HeadCall, loss: Loss) -> tuple[Tensor, ...]:
    hidden, number, count, flag = call.hidden, loss.output_dtype, torch.int64, torch.bool
    num_tokens = hidden.shape[0]
    of_call = (number, count, number, number)
    of_token = (number, number, number, flag, count)
    return (
        *(hidden.new_empty((), dtype=dtype) for dtype in of_call),
        *(hidden.new_empty(num_tokens, dtype=dtype) for dtype in of_token),
        *fake_gradients(call, loss.needs, call.compute_dtype),
        hidden.new_empty(num_tokens, dtype=flag),
    )


def keep_gradients(ctx: Any, output: tuple[Tensor, ...], call: HeadCall, *options: Any) -> None:
    """Of an operator whose results are a loss, constants, the gradients and the mask."""
    constants, kept = output[1:-KEPT], output[-KEPT:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*constants, *kept)
    ctx.save_for_backward(*kept)
    ctx.dtypes = [None if x is None else x.dtype for x in call.leaves]
    ctx.needs, ctx.head_scale = options[-1].needs, call.rows.head_scale
    # Ranks whose tokens are in one gradient of the head
    together = call.rows.every or call.rows.group
    ctx.together = together if call.rows.route and any(ctx.needs[1:]) else ""


def kept_gradients(function: str, instead: str) -> Callable[..., Named | None]:
    """The backward of such an operator."""

    def backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> Named | None:
        differentiated_once(function, instead)
        if gradient is None:
            return None
        *accumulators, valid_N = ctx.saved_tensors
        eager = in_eager(gradient)
        of_all = None
        if ctx.together:
            of_all = same_upstream(gradient, valid_N.any(), ctx.together)
        values = nll_backward(
            gradient,
            Gradients(*accumulators),
            valid_N,
            ctx.dtypes,
            ctx.needs,
            of_all=of_all,
            head_scale=ctx.head_scale,
            eager=eager,
            reuse=eager and not keeps_graph(),
        )
        gradients = dict(zip(DIFFERENTIATED, values, strict=True))
        hooks.run_backward_hooks(ctx, (gradient, of_all, ctx.head_scale), gradients)
        return gradients

    return backward


nll_op.gradient(keep_gradients, kept_gradients("chunked_nll", "F.cross_entropy"))


def nll(given: Arguments) -> NLLOutput[Tensor]:
    """`chunked_nll` of its arguments."""
    if is_soft(given.labels, given.hidden):
        from xentlib.torch.soft_labels import soft_nll

        return soft_nll(given)
    return of_classes(given)


@with_head(recompute=False)
def of_classes(given: Arguments, local: RowLayout | None = None) -> NLLOutput[Tensor]:
    """The same of labels that are classes."""
    given, problem, call = bind("chunked_nll", given, local)
    divisor = as_tensor(given.denominator, None, call.hidden, call.compute_dtype)
    loss = Loss(
        token_weights=tokens(given.token_weights),
        class_weights=given.class_weights,
        denominator=divisor,
        mean=given.reduction == "mean",
        entropy="entropy" in given.outputs,
        predicted="predicted" in given.outputs,
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
        name: value.reshape(problem.leading) if name in given.outputs else None
        for name, value in zip(OUTPUTS, rest)
    }
    for name, result in per_token.items():
        if result is not None and result.is_floating_point():
            per_token[name] = without_gradient(name, result, call.leaves)
    if divisor is None and loss.mean:
        divisor = weight_sum
    label_loss(total, num_tokens, weight_sum, divisor)
    return NLLOutput(total, num_tokens, weight_sum, z_term, **per_token, denominator=divisor)
