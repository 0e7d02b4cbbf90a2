"""Divergences of a head in PyTorch: the steps of `xentlib.divergence`, under their numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import WantedStats
from xentlib.arguments import Arguments, DivergenceArguments
from xentlib.checks.call import CALLS
from xentlib.checks.divergence import DIVERGING, check_divergence, of_teacher
from xentlib.checks.validators import plain
from xentlib.divergence import DivergenceOutput
from xentlib.options import DIVERGENCE_OUTPUTS
from xentlib.pairs import DzTerms
from xentlib.soft_labels import SOFT_LABELS
from xentlib.teacher import TeacherTopK
from xentlib.torch.array_spec import as_tensor, only_tensors, with_leading
from xentlib.torch.binding import bind, tokens
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.gemm import power_of_two
from xentlib.torch.core.gradients import Gradients, fake_gradients, rounded
from xentlib.torch.core.kernels import LogitsBlock
from xentlib.torch.core.loop import HeadLoop
from xentlib.torch.core.pairs import in_halves
from xentlib.torch.core.tokens import check_ids, check_labels
from xentlib.torch.micro_batch import label_loss
from xentlib.torch.nll import (
    KEPT,
    check_consistent,
    keep_gradients,
    kept_gradients,
    refused_divisor,
    token_weights,
)
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
from xentlib.torch.teacher import (
    KINDS,
    TeacherCall,
    is_tempered,
    kernels_of,
    labels_for,
    of_both,
    paired,
    teacher_call,
)

FUNCTION = "chunked_divergence"


class Loss(NamedTuple):
    """What the operator of a divergence takes beside its calls."""

    kind: str
    squared: bool  # times the temperature's square
    token_weights: Tensor | None
    denominator: Tensor | None
    mean: bool
    entropy: bool
    teacher_entropy: bool
    more_classes: int  # that the teacher has on this rank: 0, or all ranks are to refuse it
    each: bool  # a loss of each token, whose gradients are made in the backward
    output_dtype: torch.dtype
    soft_class_weights: Tensor | None  # of class probabilities
    needs: list[bool]  # gradients of hidden, weight, bias and a low-rank part

    @property
    def class_weights(self) -> Tensor | None:
        """None that a token's weight has: of class probabilities they weigh terms of its loss, and
        the labels of its call are not classes."""
        return None

    @property
    def function(self) -> str:
        return "chunked_nll" if self.kind == SOFT_LABELS else FUNCTION

    @property
    def reduced_needs(self) -> list[bool]:
        """Those of a forward."""
        return [need and not self.each for need in self.needs]

    @property
    def wanted(self) -> tuple[WantedStats, WantedStats]:
        return WantedStats(self.entropy), WantedStats(self.teacher_entropy)

    def terms(self, function: str, form: float, refused: float | None = None) -> Terms:
        """`form` is that of the teacher."""
        options = self.squared, self.entropy, self.teacher_entropy, self.each
        outputs = sum(2.0**k * x for k, x in enumerate(options))
        kind, more = KINDS.index(self.kind) + 8.0 * form, float(self.more_classes)
        weights = self.soft_class_weights
        mean = self.mean and self.denominator is None
        return Terms(function, self.needs, outputs, weights, refused, mean, False, kind, more)


class Residuals(NamedTuple):
    """What a backward that makes the logits again needs beside its inputs: [N] each."""

    lse: Tensor
    teacher_lse: Tensor
    delta: Tensor
    labels_lse: Tensor  # of the logits that a loss of the labels is of
    gain: Tensor  # of dz, with the token's weight
    shift: Tensor
    own: Tensor  # of the labels' loss, what is added in the target's column


VALUES = ("loss", "nll", "divergence", "logprobs", "entropy", "teacher_entropy")


def divergence_forward(
    call: HeadCall, teacher: TeacherCall, loss: Loss
) -> tuple[DivergenceOutput[Tensor], Tensor, Gradients, Tensor]:
    """Loss and per-token values, what a backward may need, gradient accumulators, and the mask of
    valid tokens [N]."""
    needs = loss.reduced_needs
    refused = refused_divisor(call, loss)
    of_loss = loss.terms(loss.function, teacher.form, refused)
    loop = HeadLoop(in_halves(call), of_loss, made=kernels_of(call, loss))
    weights_N, weight_sum, divisor = token_weights(loop, loss)
    loss_weights = weights_N / divisor
    squared_N = torch.ones_like(weights_N)
    if loss.squared and call.temperature is not None:
        squared_N = squared_N * call.temperature.to(loop.compute_dtype).square()
    factor_N = torch.where(loop.own.bad, torch.nan, loss_weights)
    probs = teacher.of_tokens(loop.compute_dtype)
    factor_N, squared_N, *of_labels = loop.chunks_of.exchange(factor_N, squared_N, *probs)
    teacher = teacher.of_chunks(of_labels)
    exponent = power_of_two(call.gemm_dtype, factor_N * squared_N) if any(needs) else None
    scaled_N = factor_N if exponent is None else torch.ldexp(factor_N, exponent)
    check_consistent(loop, loss, divisor)
    teacher.check_consistent(loop, loss.kind)
    nll_weight, sums, tempered_nll = call.scalars.nll_weight, loop.sums(needs), is_tempered(call)
    values_6N = torch.zeros(len(VALUES), factor_N.shape[0], **loop.like)
    residuals_7N = torch.zeros(
        len(Residuals._fields) if loss.each else 0, factor_N.shape[0], **loop.like
    )
    for student, of_block in sums.passes(exponent):
        both = paired(loop, student, teacher, loss)
        for chunk, other in zip(student.chunks(), both.teacher.chunks()):
            kernels = both.kernels()
            for unit in both.units(chunk, other):
                made, places = both.values(unit, kernels, tempered_nll=tempered_nll), unit.places
                value = made.loss * squared_N[places]
                more = -nll_weight * made.labels if nll_weight else made.beside
                values_6N[:, places] = torch.stack((value + more, more, *made.per_token))
                dz = DzTerms(*(x * squared_N[places] for x in made.dz))
                if nll_weight and not tempered_nll:
                    dz = both.kind.with_nll(dz, made.total, nll_weight)
                if loss.each:
                    terms = (*dz, torch.full_like(value, -nll_weight))
                    weighted = (x * factor_N[places] for x in terms)
                    residuals_7N[:, places] = torch.stack((*made.known, *weighted))
                for k, part in enumerate(unit.parts()) if any(needs) else ():
                    rows, _, at = part
                    factor = student.scaled(scaled_N[rows.places], rows)
                    of_rows = DzTerms(*(factor * x[at] for x in dz))
                    own = -nll_weight * untempered(factor, rows) if nll_weight else None
                    p = made.p_labels[k] if tempered_nll else None
                    both.write(part, of_rows, own, p, kernels, of_block)
            del kernels
            of_block.add(chunk)
    gradients = sums.finish(exponent)
    # Ranks of a route have refused it, those of `vocab_parallel` have compared it.
    if refused is not None:
        CALLS.refuse("denominator", value=refused)
    if loop.vocab.sharded:
        check_ids(loop.ids, loop.tokens.valid, loop.vocab.size)
        check_labels(loop.labels, loop.tokens.bad, loop.ignore_index, loop.vocab.size)
    own_6N = loop.own.clean(loop.chunks_of.local(values_6N))
    loss_N, nll_N = own_6N[0] * loss_weights, own_6N[1] * loss_weights
    of_token = [x.to(loss.output_dtype, copy=True) for x in own_6N[2:]]
    output = DivergenceOutput(
        loss_N.to(loss.output_dtype) if loss.each else loss_N.sum().to(loss.output_dtype),
        loop.own.valid.sum(),
        weight_sum.to(loss.output_dtype),
        nll_N.sum().to(loss.output_dtype),
        *of_token,
    )
    return output, loop.chunks_of.local(residuals_7N), gradients, loop.own.valid


def untempered(factor: Tensor, rows: LogitsBlock) -> Tensor:
    """A factor of dz of logits before their temperature."""
    return factor if rows.temperature_B is None else factor * rows.temperature_B


def divergence_backward(
    gradient: Tensor, residuals_7N: Tensor, call: HeadCall, teacher: TeacherCall, loss: Loss
) -> tuple[Tensor, ...]:
    """Steps 6 to 8 of a loss of each token, from logits that are made again."""
    terms = loss.terms(f"the backward of {FUNCTION}", teacher.form)
    loop = HeadLoop(in_halves(call), terms, made=kernels_of(call, loss))
    g_N = loop.own.clean(gradient.to(loop.compute_dtype))
    g_N, *exchanged = loop.chunks_of.exchange(g_N, *residuals_7N)
    residuals_7N, residuals = torch.stack(exchanged), Residuals(*exchanged)
    exponent = power_of_two(call.gemm_dtype, g_N)
    if exponent is not None:
        g_N = torch.ldexp(g_N, exponent)
    sums, tempered_nll = loop.sums(loss.needs), is_tempered(call)
    for student, of_block in sums.passes(exponent):
        both = paired(loop, student, teacher, loss)
        for chunk, other in zip(student.chunks(), both.teacher.chunks()):
            kernels = both.kernels()
            for unit in both.units(chunk, other):
                p_labels = both.again(unit, kernels, residuals_7N[:4], tempered_nll=tempered_nll)
                for k, part in enumerate(unit.parts()):
                    rows, places = part[0], part[0].places
                    factor = student.scaled(g_N[places], rows)
                    dz, own = (
                        DzTerms(factor * residuals.gain[places], factor * residuals.shift[places]),
                        None,
                    )
                    if call.scalars.nll_weight:
                        own = untempered(factor, rows) * residuals.own[places]
                    p = p_labels[k] if tempered_nll else None
                    both.write(part, dz, own, p, kernels, of_block)
            del kernels
            of_block.add(chunk)
    accumulators = sums.finish(exponent)
    for x in accumulators[1:] if call.rows.head_scale != 1.0 else ():
        x.mul_(call.rows.head_scale)
    return tuple(
        rounded(x, (call.hidden if like is None else like).dtype)
        for x, like in zip(accumulators, call.leaves, strict=True)
    )


RESULTS = 8  # of `DivergenceOutput`, what an operator makes
Tensors = tuple[Tensor, ...]


@operator(
    "divergence_forward",
    *(HeadCall, TeacherCall, Loss),
    returns=f"({', '.join(['Tensor'] * (RESULTS + 1 + KEPT))})",
)
def divergence_op(call: HeadCall, teacher: TeacherCall, loss: Loss) -> Tensors:
    """`divergence_forward` as one operator, opaque to the compiler: outputs, what a backward of
    each token's loss needs, gradients of a reduced one, mask."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        output, residuals_7N, gradients, valid_N = divergence_forward(call, teacher, loss)
    return (*output[:RESULTS], residuals_7N, *gradients, valid_N)


@divergence_op.fake
def _(call: HeadCall, teacher: TeacherCall, loss: Loss) -> Tensors:
    hidden, number, count = call.hidden, loss.output_dtype, call.hidden.shape[0]
    first = (count,) if loss.each else ()
    of_call = (number, torch.int64, number, number)
    rows = len(Residuals._fields) if loss.each else 0
    return (
        *(hidden.new_empty(() if k else first, dtype=x) for k, x in enumerate(of_call)),
        *(hidden.new_empty(count, dtype=number) for _ in range(RESULTS - len(of_call))),
        hidden.new_empty(rows, count, dtype=call.compute_dtype),
        *fake_gradients(call, loss.reduced_needs, call.compute_dtype),
        hidden.new_empty(count, dtype=torch.bool),
    )


class Upstream(NamedTuple):  # of a backward operator
    d_loss: Tensor
    residuals: Tensor


@operator(
    "divergence_backward",
    *(Upstream, HeadCall, TeacherCall, Loss),
    returns=f"({', '.join(['Tensor'] * (KEPT - 1))})",
)
def each_backward_op(
    upstream: Upstream, call: HeadCall, teacher: TeacherCall, loss: Loss
) -> Tensors:
    """`divergence_backward` as one operator, opaque to the compiler."""
    with torch.autocast(call.hidden.device.type, enabled=False):
        return divergence_backward(*upstream, call, teacher, loss)


@each_backward_op.fake
def _(upstream: Upstream, call: HeadCall, teacher: TeacherCall, loss: Loss) -> Tensors:
    return tuple(fake_gradients(call, loss.needs))


def setup(ctx: Any, output: Tensors, call: HeadCall, teacher: TeacherCall, loss: Loss) -> None:
    ctx.each = loss.each
    if loss.each:
        keep_call(ctx, output[RESULTS], output[1:], call, teacher, loss)
    else:
        keep_gradients(ctx, output, call, loss)


def backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> Named | None:
    if not ctx.each:
        return of_reduced(ctx, gradient)
    differentiated_once(FUNCTION, "F.kl_div")
    if gradient is None:
        return None
    residuals, (call, teacher, loss) = kept_call(ctx)
    gradients = each_backward_op(Upstream(gradient, residuals), call, teacher, loss)
    pairs = zip(DIFFERENTIATED, gradients, loss.needs, strict=True)
    return {name: g if need else None for name, g, need in pairs}


of_reduced = kept_gradients(FUNCTION, "F.kl_div")
divergence_op.gradient(setup, backward)


# Of a divergence's arguments, what its student is called with.
OF_STUDENT = tuple(
    x
    for x in Arguments._fields
    if x in DivergenceArguments._fields and x not in ("labels", "outputs")
)


def head_divergence(given: DivergenceArguments) -> DivergenceOutput[Tensor]:
    """`chunked_divergence` of its arguments."""
    given = DivergenceArguments(*map(plain, given))
    only_tensors(hidden=given.hidden)
    check_divergence(given)
    given = given._replace(labels=labels_for(given.hidden, given.labels, given.where))
    fields = {name: getattr(given, name) for name in OF_STUDENT}
    fields["reduction"] = "sum" if given.reduction == "none" else given.reduction
    if given.vocab == "intersect" and given.gather == "auto":  # the one route of whole heads
        fields |= {"gather": "head", "tokens_per_rank": None}
    if isinstance(given.teacher, TeacherTopK):
        from xentlib.torch.top_k import top_k_divergence

        return top_k_divergence(given, Arguments(labels=given.labels, **fields))

    @with_head(recompute=given.reduction == "none")
    def of_student(call: Arguments, local: RowLayout | None = None) -> DivergenceOutput[Tensor]:
        return placed_divergence(given, call, local)

    return of_student(Arguments(labels=given.labels, **fields))


def placed_divergence(
    given: DivergenceArguments, student: Arguments, local: RowLayout | None
) -> DivergenceOutput[Tensor]:
    """With the student's head as this rank multiplies with it."""
    DIVERGING.require("stream", student.gather != "stream")
    student, problem, call = bind(FUNCTION, student, local)
    scalars = call.scalars._replace(beta=given.beta, nll_weight=float(given.nll_weight))
    call = call._replace(scalars=scalars)
    divisor = as_tensor(given.denominator, None, call.hidden, call.compute_dtype)
    with ExitStack() as opened, of_teacher():
        teacher = teacher_call(given, student, call, problem, opened)
        kept_open = opened.pop_all()
    if given.vocab == "intersect":
        call, teacher = of_both(call, teacher)
    loss = Loss(
        given.kind,
        given.temperature_squared,
        tokens(student.token_weights),
        divisor,
        given.reduction == "mean",
        "entropy" in given.outputs,
        "teacher_entropy" in given.outputs,
        0 if given.vocab == "intersect" else teacher.classes - problem.vocab_size,
        given.reduction == "none",
        getattr(torch, problem.output_dtype),
        None,
        wanted(*call.leaves),
    )
    with kept_open:
        results = divergence_op(call, teacher, loss)
    total, num_tokens, weight_sum, nll, *rest = results[:RESULTS]
    if loss.each:
        total = with_leading(total, problem.leading)
    nll = without_gradient("nll", nll, call.leaves, FUNCTION) if given.nll_weight else nll
    per_token: dict[str, Any] = {
        name: without_gradient(name, with_leading(x, problem.leading), call.leaves, FUNCTION)
        if name in given.outputs
        else None
        for name, x in zip(DIVERGENCE_OUTPUTS, rest)
    }
    if divisor is None and loss.mean:
        divisor = weight_sum
    if not loss.each:
        label_loss(total, num_tokens, weight_sum, divisor)
    return DivergenceOutput(total, num_tokens, weight_sum, nll, **per_token, denominator=divisor)
