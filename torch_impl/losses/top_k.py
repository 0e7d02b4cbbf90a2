"""Divergences from a teacher's most probable classes in PyTorch: `xentlib.math.top_k` between the
operators of `xentlib.math.classes` and of divergences of precomputed logits.

Shapes: N tokens, K classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.arguments import (
    SCALARS,
    Arguments,
    DivergenceArguments,
    LogitsDivergenceArguments,
)
from xentlib.checks.classes import check_classes
from xentlib.checks.divergence import (
    check_logprobs,
    check_mass,
    check_stored,
    of_teacher,
)
from xentlib.checks.soft_labels import check_none
from xentlib.divergence import DivergenceOutput
from xentlib.math.top_k import TopK
from xentlib.options import DIVERGENCES, TAILS
from xentlib.teacher import TeacherLogits, TeacherTopK
from xentlib.torch.array_spec import array_spec, as_tensor, only_tensors
from xentlib.torch.binding import tokens
from xentlib.torch.core.device import host_readable, onto
from xentlib.torch.losses.classes import CLASSES, FewClasses, class_results
from xentlib.torch.losses.divergence import logits_divergence, output_of
from xentlib.torch.losses.loss import Weighting, reduced, token_weights
from xentlib.torch.operators import not_differentiable

FUNCTION = "chunked_divergence"
OF_FEW = ("kind", *SCALARS["vocab_parallel_divergence"])  # its options of two distributions


def top_k_divergence(args: DivergenceArguments, student: Arguments) -> DivergenceOutput[Tensor]:
    """`chunked_divergence` of a student's arguments and a `TeacherTopK`."""
    teacher = args.teacher
    assert isinstance(teacher, TeacherTopK)
    with of_teacher():
        only_tensors(ids=teacher.ids, logprobs=teacher.logprobs)
        not_differentiable(logprobs=teacher.logprobs)
        ids_spec = array_spec(teacher.ids)
        check_classes(None, ids_spec, array_spec(args.hidden), source="hidden")
        check_logprobs(ids_spec, array_spec(teacher.logprobs))
        check_temperatures(args.temperature, teacher.temperature)
    entropy = "entropy" in args.outputs
    student = student._replace(ids=teacher.ids, entropy=entropy)
    classes = class_results(student, few_classes(args, teacher))
    logprob, ids_logprobs, tail = classes.logprobs, classes.ids_logprobs, classes.tail
    call, problem, entropies = classes.call, classes.problem, classes.entropy
    valid = call.labels.long() != call.ignore_index
    valid = onto(valid if call.where is None else valid & call.where, call.hidden.device)
    compute = call.compute_dtype
    ids = call.ids
    assert ids is not None
    log_q = teacher.logprobs.reshape(ids.shape).to(compute)
    # Where tokens travel one rank would raise alone: its loss is NaN, or has fewer tokens.
    read = host_readable(log_q) and not call.rows.route and not torch.compiler.is_compiling()
    if read:
        with of_teacher():
            check_none(int((valid & (ids < 0).all(1)).sum()))
    valid = valid & (ids >= 0).any(1)
    counts = (ids >= 0) & CLASSES.first(ids) & valid[:, None]
    if read and log_q.numel():
        total = torch.where(counts, log_q, -torch.inf).detach().double().exp().sum(1)
        with of_teacher():
            check_mass(float(total.max()))
    top_k = TopK(torch, torch.exp, CLASSES.sum, left_over, teacher.tail)
    if teacher.tail == "drop":
        value = top_k.dropped(args.kind, counts, ids_logprobs, log_q)
    else:
        student_logits, teacher_logits = top_k.logits(counts, ids_logprobs, tail, log_q)
        options: dict[str, Any] = {name: getattr(args, name) for name in OF_FEW}
        divergence_args = LogitsDivergenceArguments(
            student_logits,
            TeacherLogits(teacher_logits.to(student_logits.dtype)),
            where=valid,
            **options,
        )
        value = logits_divergence(divergence_args).loss
    value = torch.where(valid, value * top_k.checked(counts, log_q), 0.0)
    loss_N = value
    if args.temperature_squared and call.temperature is not None:
        loss_N = value * call.temperature.to(value.dtype).square()
    nll_N = -args.nll_weight * logprob if args.nll_weight else torch.zeros_like(value)
    dtype, mean = getattr(torch, problem.output_dtype), args.reduction == "mean"
    denominator = as_tensor(args.denominator, None, call.hidden, compute)
    weighting = Weighting(tokens(args.token_weights), denominator, mean)
    weights, weight_sum, divisor = token_weights(weighting, valid, compute)
    loss_N = loss_N + nll_N
    each = args.reduction == "none"
    total = loss_N * (weights * (1.0 / divisor)) if each else reduced(loss_N, weights, divisor)
    numbers = (total, valid.sum(), weight_sum, reduced(nll_N.detach(), weights, divisor))
    per_token = (torch.where(valid, x.detach(), 0.0) for x in (value, logprob, entropies))
    results = [x.to(dtype) if x.is_floating_point() else x for x in (*numbers, *per_token)]
    return output_of(args, call, problem.leading, results, denominator)


def few_classes(args: DivergenceArguments, teacher: TeacherTopK[Tensor]) -> FewClasses:
    """What ranks with the same tokens compare: each makes the divergence for itself."""
    options = (DIVERGENCES, args.kind), (TAILS, teacher.tail)
    kind, tail = (names.index(name) for names, name in options)
    mean = args.reduction == "mean" and args.denominator is None
    more = 4 * mean + 2 * args.temperature_squared + (args.reduction == "none")
    probs = torch.where(teacher.ids >= 0, teacher.logprobs.detach().exp(), 0.0)
    number = 1.0 + kind + 8 * tail + 64 * more
    return FewClasses(number, args, probs.reshape(-1, probs.shape[-1]))


def check_temperatures(call: Any, stored: Any) -> None:
    """Of which one at least is a tensor; numbers have been compared."""
    tensors = [x for x in (call, stored) if isinstance(x, Tensor)]
    if stored is None or not tensors or torch.compiler.is_compiling():
        return
    if all(map(host_readable, tensors)):
        one, other = (torch.as_tensor(x).detach().float() for x in (call, stored))
        check_stored(call, stored, same=bool((one == other).all()))


def left_over(log_q: Tensor) -> Tensor:
    """[N] 1 less the probabilities: in float32 an eighth of a tail of 5e-7 would be lost."""
    return (1.0 - log_q.double().exp().sum(1)).to(log_q.dtype)
