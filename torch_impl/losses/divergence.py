"""Divergences of a head or of precomputed logits in PyTorch: the steps of `xentlib.divergence`,
under their numbers.

Shapes: N tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.arguments import (
    Arguments,
    DivergenceArguments,
    LogitsArguments,
    LogitsDivergenceArguments,
)
from xentlib.checks.call import CALLS
from xentlib.checks.divergence import (
    DIVERGING,
    check_divergence,
    check_kind,
    check_only_logits,
    of_teacher,
)
from xentlib.checks.validators import plain_args
from xentlib.divergence import DivergenceOutput
from xentlib.options import DIVERGENCE_OUTPUTS
from xentlib.teacher import TeacherTopK
from xentlib.torch.array_spec import as_tensor, only_tensors, with_leading
from xentlib.torch.binding import bind, bind_logits, tokens
from xentlib.torch.core.gemm import power_of_two
from xentlib.torch.core.gradients import Gradients, fake_gradients
from xentlib.torch.core.loop import HeadLoop, run
from xentlib.torch.core.tokens import check_ids, check_labels
from xentlib.torch.losses.loss import (
    NUM_SAVED,
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
from xentlib.torch.losses.paired import (
    FUNCTION,
    LOGITS_FUNCTION,
    VALUES,
    Divergence,
    DivergenceRecompute,
    Loss,
    Residuals,
    logits_values,
)
from xentlib.torch.losses.pairs import in_halves
from xentlib.torch.losses.teacher import (
    TeacherCall,
    kernels_of,
    labels_for,
    logits_teacher,
    of_both,
    teacher_call,
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


def divergence_forward(
    call: HeadCall, teacher: TeacherCall, loss: Loss
) -> tuple[DivergenceOutput[Tensor], Tensor, Gradients, Tensor]:
    """Loss and per-token values, what a backward may need, gradient accumulators, and the mask of
    valid tokens [N]."""
    if call.weight is None:
        return logits_forward(call, teacher, loss)
    needs = loss.reduced_needs
    refused = refused_divisor(call, loss)
    terms = loss.terms(loss.function, teacher.form, refused)
    loop = HeadLoop(in_halves(call, each=loss.each), terms, kernel_cls=kernels_of(call, loss))
    weights_N, weight_sum, divisor = token_weights(
        loss, loop.local_tokens.valid, loop.compute_dtype
    )
    own_factor_N = weights_N * (1.0 / divisor)
    squared_N = torch.ones_like(weights_N)
    if loss.squared and call.temperature is not None:
        squared_N = squared_N * call.temperature.to(loop.compute_dtype).square()
    factor_N = torch.where(loop.local_tokens.bad, torch.nan, own_factor_N)
    probs = teacher.per_token(loop.compute_dtype)
    factor_N, squared_N, *gathered_probs = loop.chunks_of.exchange(factor_N, squared_N, *probs)
    teacher = teacher.of_chunks(gathered_probs)
    exponent = power_of_two(call.gemm_dtype, factor_N * squared_N) if any(needs) else None
    scaled_N = factor_N if exponent is None else torch.ldexp(factor_N, exponent)
    check_consistent(loop, loss, divisor)
    teacher.check_consistent(loop, loss.kind)
    objective = Divergence(loop, teacher, loss, squared_N, factor_N)
    values, gradients = run(loop, objective, scaled_N, needs, exponent)
    # Ranks of a route have refused it, those of `vocab_parallel` have compared it.
    if refused is not None:
        CALLS.refuse("denominator", value=refused)
    if loop.vocab.sharded:
        check_ids(loop.ids, loop.tokens.valid, loop.vocab.size)
        check_labels(loop.labels, loop.tokens.bad, loop.ignore_index, loop.vocab.size)
    values_6N, residuals_7N = loop.chunks_of.local(values).tensor_split([len(VALUES)])
    own_6N = loop.local_tokens.clean(values_6N)
    loss_N, nll_N = own_6N[:2]
    total = loss_N * own_factor_N if loss.each else reduced(loss_N, weights_N, divisor)
    token_results = [x.to(loss.output_dtype, copy=True) for x in own_6N[2:]]
    output = DivergenceOutput(
        total.to(loss.output_dtype),
        loop.local_tokens.valid.sum(),
        weight_sum.to(loss.output_dtype),
        reduced(nll_N, weights_N, divisor).to(loss.output_dtype),
        *token_results,
    )
    return output, residuals_7N.clone(), gradients, loop.local_tokens.valid


def logits_forward(
    call: HeadCall, teacher: TeacherCall, loss: Loss
) -> tuple[DivergenceOutput[Tensor], Tensor, Gradients, Tensor]:
    """Of precomputed logits: a loss of each token, and no other output."""
    loop, value, residuals = logits_values(call, teacher, loss)
    valid_N, value = loop.local_tokens.valid, loop.local_tokens.clean(value)
    loss_N = value.to(loss.output_dtype, copy=True)
    none = fake_gradients(call, loss.reduced_needs)
    outputs = [torch.zeros_like(loss_N) for _ in range(4)]
    count, nll = valid_N.sum(), loss_N.new_zeros(())
    output = DivergenceOutput(loss_N, count, count.to(loss.output_dtype), nll, *outputs)
    return output, loop.local_tokens.clean(torch.stack(residuals)), none, valid_N


def divergence_backward(
    gradient: Tensor, residuals_7N: Tensor, call: HeadCall, teacher: TeacherCall, loss: Loss
) -> Gradients:
    """Steps 6 to 8 of a loss of each token, from logits that are computed again."""
    terms = loss.terms(f"the backward of {FUNCTION}", teacher.form)
    # dz of a class needs lse of both, and delta, which are known: no other class's logits. An
    # adapter of either has all classes at once.
    loop = HeadLoop(
        in_halves(call, each=loss.each),
        terms,
        kernel_cls=kernels_of(call, loss),
        in_blocks=teacher.head.low_in is None,
    )
    g_N = loop.local_tokens.clean(gradient.to(loop.compute_dtype))
    g_N, *exchanged = loop.chunks_of.exchange(g_N, *residuals_7N)
    objective = DivergenceRecompute(loop, teacher, loss, torch.stack(exchanged))
    return recompute(call, loop, objective, g_N, loss.needs)


RESULTS = 8  # of `DivergenceOutput`, what an operator makes
Tensors = tuple[Tensor, ...]


@operator(
    "divergence_forward",
    *(HeadCall, TeacherCall, Loss),
    returns=f"({', '.join(['Tensor'] * (RESULTS + 1 + NUM_SAVED))})",
)
def divergence_op(call: HeadCall, teacher: TeacherCall, loss: Loss) -> Tensors:
    """`divergence_forward` as one operator, opaque to the compiler: outputs, what a backward of
    each token's loss needs, gradients of a reduced one, mask."""
    with without_autocast(call.hidden.device):
        output, residuals_7N, gradients, valid_N = divergence_forward(call, teacher, loss)
    return (*output[:RESULTS], residuals_7N, *gradients, valid_N)


@divergence_op.fake
def _(call: HeadCall, teacher: TeacherCall, loss: Loss) -> Tensors:
    hidden, number, count = call.hidden, loss.output_dtype, call.hidden.shape[0]
    first = (count,) if loss.each else ()
    scalars_of_call = (number, torch.int64, number, number)
    rows = len(Residuals._fields) if loss.each else 0
    return (
        *(hidden.new_empty(() if k else first, dtype=x) for k, x in enumerate(scalars_of_call)),
        *(hidden.new_empty(count, dtype=number) for _ in range(RESULTS - len(scalars_of_call))),
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
    returns=f"({', '.join(['Tensor'] * (NUM_SAVED - 1))})",
)
def each_backward_op(
    upstream: Upstream, call: HeadCall, teacher: TeacherCall, loss: Loss
) -> Tensors:
    """`divergence_backward` as one operator, opaque to the compiler."""
    with without_autocast(call.hidden.device):
        return as_inputs(call, divergence_backward(*upstream, call, teacher, loss))


@each_backward_op.fake
def _(upstream: Upstream, call: HeadCall, teacher: TeacherCall, loss: Loss) -> Tensors:
    return tuple(fake_gradients(call, loss.needs))


def setup(ctx: Any, output: Tensors, call: HeadCall, teacher: TeacherCall, loss: Loss) -> None:
    ctx.each = loss.each
    if loss.each:
        keep_call(ctx, output[RESULTS], output[1:], call, teacher, loss)
    else:
        save_gradients(ctx, output, call, loss)


def backward(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> Named | None:
    if not ctx.each:
        return of_reduced(ctx, gradient)
    residuals, (call, teacher, loss) = kept_call(ctx)
    differentiated_once(FUNCTION if call.weight is not None else LOGITS_FUNCTION, "F.kl_div")
    if gradient is None:
        return None
    gradients = each_backward_op(Upstream(gradient, residuals), call, teacher, loss)
    pairs = zip(DIFFERENTIATED, gradients, loss.needs, strict=True)
    return {name: g if need else None for name, g, need in pairs}


of_reduced = saved_gradients(FUNCTION, "F.kl_div")
divergence_op.gradient(setup, backward)


# Of a divergence's arguments, what its student is called with.
OF_STUDENT = tuple(
    x
    for x in Arguments._fields
    if x in DivergenceArguments._fields and x not in ("labels", "outputs")
)


def head_divergence(args: DivergenceArguments) -> DivergenceOutput[Tensor]:
    """`chunked_divergence` of its arguments."""
    args = plain_args(args)
    only_tensors(hidden=args.hidden)
    check_divergence(args)
    args = args._replace(labels=labels_for(args.hidden, args.labels, args.where))
    fields = {name: getattr(args, name) for name in OF_STUDENT}
    fields["reduction"] = "sum" if args.reduction == "none" else args.reduction
    if args.vocab == "intersect" and args.gather == "auto":  # the one route of whole heads
        fields |= {"gather": "head", "tokens_per_rank": None}
    if isinstance(args.teacher, TeacherTopK):
        from xentlib.torch.losses.top_k import top_k_divergence

        return top_k_divergence(args, Arguments(labels=args.labels, **fields))

    @with_head(recompute=args.reduction == "none")
    def student_divergence(
        call: Arguments, local: RowLayout | None = None
    ) -> DivergenceOutput[Tensor]:
        return placed_divergence(args, call, local)

    return student_divergence(Arguments(labels=args.labels, **fields))


def placed_divergence(
    args: DivergenceArguments, student: Arguments, local: RowLayout | None
) -> DivergenceOutput[Tensor]:
    """With the student's head as this rank multiplies with it."""
    DIVERGING.require("stream", student.gather != "stream")
    student, problem, call = bind(FUNCTION, student, local, args)
    divisor = as_tensor(args.denominator, None, call.hidden, call.compute_dtype)
    with ExitStack() as opened, of_teacher():
        teacher = teacher_call(args, student, call, problem, opened)
        kept_open = opened.pop_all()
    if args.vocab == "intersect":
        call, teacher = of_both(call, teacher)
    loss = Loss(
        args.kind,
        args.temperature_squared,
        tokens(student.token_weights),
        divisor,
        args.reduction == "mean",
        "entropy" in args.outputs,
        "teacher_entropy" in args.outputs,
        0 if args.vocab == "intersect" else teacher.classes - problem.vocab_size,
        args.reduction == "none",
        getattr(torch, problem.output_dtype),
        None,
        wanted(*call.leaves),
    )
    with kept_open:
        results = divergence_op(call, teacher, loss)
    return output_of(args, call, problem.leading, results[:RESULTS], divisor)


def output_of(
    args: DivergenceArguments,
    call: HeadCall,
    leading: tuple[int, ...],
    results: Sequence[Tensor],
    divisor: Tensor | None,
) -> DivergenceOutput[Tensor]:
    """What a call returns: the outputs that it asks for, of which the loss alone has a derivative,
    and what the loss was divided by."""
    total, num_tokens, weight_sum, nll, *token_results = results
    nll = without_gradient("nll", nll, call.leaves, FUNCTION) if args.nll_weight else nll
    per_token: dict[str, Any] = dict.fromkeys(DIVERGENCE_OUTPUTS)
    for name, x in zip(DIVERGENCE_OUTPUTS, token_results):
        if name in args.outputs:
            value = with_leading(x, leading)
            per_token[name] = without_gradient(name, value, call.leaves, FUNCTION)
    if divisor is None and args.reduction == "mean":
        divisor = weight_sum
    if args.reduction == "none":
        total = with_leading(total, leading)
    else:
        label_loss(total, num_tokens, weight_sum, divisor)
    return DivergenceOutput(total, num_tokens, weight_sum, nll, **per_token, denominator=divisor)


def logits_divergence(args: LogitsDivergenceArguments) -> DivergenceOutput[Tensor]:
    """`vocab_parallel_divergence` of its arguments."""
    args = plain_args(args)
    only_tensors(logits=args.logits)
    check_kind(args)
    check_only_logits(args)
    names = [x for x in LogitsArguments._fields if x in LogitsDivergenceArguments._fields]
    fields = {name: getattr(args, name) for name in names}
    labels = labels_for(args.logits, None, args.where)
    logits_args = LogitsArguments(labels=labels, **fields)
    bound, problem, call = bind_logits(LOGITS_FUNCTION, logits_args, args)
    with of_teacher():
        columns = None if call.rows.group else problem.columns
        teacher = logits_teacher(args.teacher, bound, call, problem, columns)
    loss = Loss(
        kind=args.kind,
        squared=False,
        token_weights=None,
        denominator=None,
        mean=False,
        entropy=False,
        teacher_entropy=False,
        more_classes=teacher.classes - problem.columns,
        each=True,
        output_dtype=getattr(torch, problem.output_dtype),
        soft_class_weights=None,
        needs=wanted(*call.leaves),
    )
    total, *scalars_of_call = divergence_op(call, teacher, loss)[:4]
    return DivergenceOutput(with_leading(total, problem.leading), *scalars_of_call)
