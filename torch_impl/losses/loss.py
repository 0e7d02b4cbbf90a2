"""What a loss does around its loop: weights of tokens, the divisor, the gradients that its forward
has computed, or that its backward computes from logits that are computed again.

Shapes: N tokens, K numbers of each, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from xentlib.math.softmax import Coefficients
from xentlib.torch import hooks
from xentlib.torch.core.device import device_info, host_readable
from xentlib.torch.core.gemm import power_of_two
from xentlib.torch.core.gradients import Gradients, rounded, same_upstream
from xentlib.torch.core.kernels import LogitsBlock, kernels_for
from xentlib.torch.core.loop import HeadLoop, Objective, Out, run
from xentlib.torch.core.tokens import counted
from xentlib.torch.operators import (
    DIFFERENTIATED,
    HeadCall,
    Named,
    differentiated_once,
    in_eager,
    keeps_graph,
)


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


# Of an operator's results, the gradients and the mask, for its backward.
NUM_SAVED = 1 + len(DIFFERENTIATED)


class Weighting(NamedTuple):
    """What tokens count for, of a loss without a loop."""

    token_weights: Tensor | None
    denominator: Tensor | None
    mean: bool


def token_weights(
    loss: Weights | Weighting,
    valid_N: Tensor,
    dtype: torch.dtype,
    class_weight_N: Tensor | float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """[N] weights of this rank's tokens, 0 where one does not count; their sum, with those of the
    classes; and what the loss is divided by."""
    weights_N = torch.ones(valid_N.shape, dtype=dtype, device=valid_N.device)
    if loss.token_weights is not None:
        weights_N = loss.token_weights.to(dtype)
    weights_N = torch.where(valid_N, weights_N, 0.0)
    total_valid = valid_N.sum()
    weight_sum = total_valid.to(dtype)
    if loss.token_weights is not None or class_weight_N is not None:
        class_weight_N = 1.0 if class_weight_N is None else class_weight_N
        weight_sum = torch.where(valid_N, weights_N * class_weight_N, 0.0).sum()
    if loss.denominator is not None:
        divisor = loss.denominator.to(dtype)
    else:
        divisor = weight_sum if loss.mean else torch.ones_like(weight_sum)
    # An all-masked window has nothing to divide; a zero weight sum would turn 0 into NaN.
    nothing = (total_valid == 0) | ((weight_sum == 0) & (divisor == 0))
    return weights_N, weight_sum, torch.where(nothing, 1.0, divisor)


def reduced(value_N: Tensor, weights_N: Tensor, divisor: Tensor) -> Tensor:
    """Step 9: sum_i w_i value_i / D. Of a token alone and in dz the factor is w_i (1 / D)."""
    return (value_N * weights_N).sum() / divisor


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
        head_needs = sum(2.0**k * need for k, need in enumerate(needs[1:]))
        consistency.exact("gradient of the head", head_needs)
    else:
        consistency.per_token("token_weights", loss.token_weights, loop.local_tokens.valid.shape[0])
        consistency.close("denominator", divisor)


def refused_divisor(call: HeadCall, loss: Weights) -> float | None:
    """A denominator that is not positive, of a call with a token that counts; None where the host
    cannot read it, or what counts."""
    divisor = loss.denominator
    if divisor is None or not (call.denominator_is_0 or (host_readable(divisor) and divisor <= 0)):
        return None
    inputs = call.labels, call.where, loss.token_weights, loss.class_weights
    if not all(x is None or host_readable(x) for x in inputs):
        return None
    valid_N, _ = counted(call.labels, call.where, call.ignore_index)
    weights_N = valid_N.double()
    if loss.token_weights is not None:
        weights_N = torch.where(valid_N, loss.token_weights, 0.0)
    if loss.class_weights is not None:
        classes_N = call.labels.long().clamp(0, loss.class_weights.shape[0] - 1)
        weights_N = weights_N * loss.class_weights[classes_N]
    number = 0.0 if call.denominator_is_0 else float(divisor)
    counts = bool(valid_N.any()) and not (number == 0 and weights_N.sum() == 0)
    return number if counts else None


def scale_gradients(
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
    """Step 10. `reuse` scales the saved gradients in place, where the graph is not kept. Not
    `eager`: under a tracer. `of_all` is the upstream gradient of all ranks whose tokens are in the
    gradients of the head, which are times `head_scale`."""
    # Without a valid token the upstream gradient may be anything, inf included: the result is +0.
    gradient = torch.where(valid_N.any(), gradient, 0.0).to(accumulators[0].dtype)
    on_cpu = device_info(gradient).host_readable
    # Times 1 changes nothing and costs a pass over d weight; the value is free to read on CPU, and
    # without `reuse` there may be none.
    one = reuse and on_cpu and gradient.item() == 1.0
    head_gradient = gradient if of_all is None else of_all.to(gradient.dtype)
    head_gradient = head_gradient if head_scale == 1.0 else head_gradient * head_scale
    results: list[Tensor | None] = [None] * len(accumulators)
    for slot, (accumulator, dtype) in enumerate(zip(accumulators, dtypes, strict=True)):
        by = head_gradient if slot else gradient
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


def save_gradients(ctx: Any, output: tuple[Tensor, ...], call: HeadCall, *options: Any) -> None:
    """`setup_context` of an operator that returns a loss, constants, the gradients and the mask:
    saves the gradients that its forward has computed."""
    constants, kept = output[1:-NUM_SAVED], output[-NUM_SAVED:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*constants, *kept)
    ctx.save_for_backward(*kept)
    ctx.dtypes = [None if x is None else x.dtype for x in call.leaves]
    ctx.needs, ctx.head_scale = options[-1].needs, call.rows.head_scale
    # Ranks whose tokens are in one gradient of the head
    together = call.rows.every or call.rows.group
    ctx.together = together if call.rows.route and any(ctx.needs[1:]) else ""


def saved_gradients(function: str, instead: str) -> Callable[..., Named | None]:
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
        values = scale_gradients(
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


class Recompute(Objective):
    """dz of logits that are computed again, of numbers [K, N] that each token has."""

    def __init__(
        self, loop: HeadLoop, lse_N: Tensor, coefficients: Callable[[Tensor], Coefficients]
    ) -> None:
        """`coefficients` of the numbers of all tokens, once for every block of classes."""
        self.tokens, self.lse_N, self.coefficients = loop.chunks_of, lse_N, coefficients
        self.dz: Coefficients | None = None

    def step(self, rows: LogitsBlock, kernels: Any, out: Out) -> None:
        if self.dz is None:
            self.dz = self.coefficients(self.logits.scaled(out.factor, self.tokens.temperature))
        dz = [None if x is None else x[rows.token_index] for x in self.dz]
        out.sums.take(rows, kernels, self.lse_N[rows.token_index], Coefficients(*dz))


def recompute(
    call: HeadCall, loop: HeadLoop, objective: Objective, factor: Tensor, needs: list[bool]
) -> Gradients:
    """Gradients of a head in the compute dtype, by a backward whose `factor` [N] or [K, N] bounds
    dz."""
    exponent = None
    if call.gemm_dtype == torch.float16:
        exponent = power_of_two(call.gemm_dtype, factor.abs().sum(0) if factor.ndim > 1 else factor)
    if exponent is not None:
        factor = torch.ldexp(factor, exponent)
    _, gradients = run(loop, objective, factor, needs, exponent)
    for x in gradients[1:] if call.rows.head_scale != 1.0 else ():
        x.mul_(call.rows.head_scale)
    return gradients


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """For an operator's body, whose products have dtypes of their own. Entering an autocast costs
    the host 6 us where none is active."""
    if device.type == "meta" or torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def as_inputs(call: HeadCall, gradients: Gradients) -> tuple[Tensor, ...]:
    """Rounded to the dtypes of their inputs, as that of precomputed logits is. On a CPU rows that
    were not computed are +0 already, elsewhere their dz was."""
    if call.weight is None:
        return gradients
    return tuple(
        rounded(x, (call.hidden if like is None else like).dtype)
        for x, like in zip(gradients, call.leaves, strict=True)
    )
