"""`vocab_parallel_logprobs` of class probabilities, in PyTorch: the steps of `xentlib.soft_labels`
on precomputed logits.

    out = sum_v a_v (z_v - lse),   d out / dz_v = a_v - p_v sum(a)

Shapes: N tokens, C columns of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import FLOOR, WantedStats, is_zero
from xentlib.arguments import LogitsArguments
from xentlib.checks.soft_labels import SOFT, check_columns
from xentlib.logprobs import LogprobOutput
from xentlib.soft_labels import SOFT_LABELS, CrossEntropy, Largest
from xentlib.torch.array_spec import only_tensors, with_leading
from xentlib.torch.binding import bind_logits
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.kernels import DzOutput
from xentlib.torch.core.logits import GivenLogits
from xentlib.torch.core.pairs import GivenTeacher, restore
from xentlib.torch.core.soft_labels import FewClasses, SoftLogits
from xentlib.torch.core.stats import columns_of, over_shards
from xentlib.torch.core.vocab import ShardedVocab
from xentlib.torch.losses.soft_labels import check_soft_values, labels_call
from xentlib.torch.losses.teacher import KINDS, labels_for
from xentlib.torch.operators import (
    LogitsCall,
    Named,
    differentiated_once,
    keep_call,
    kept_call,
    operator,
)

FIVE = f"({', '.join(['Tensor'] * 5)})"


class SoftTerms(NamedTuple):
    """What the operators take beside the call of the logits."""

    probs: Tensor  # [N, C], or [N, K] of the call's `ids`
    few: bool
    entropy: bool
    output_dtype: torch.dtype

    def beside(self, call: LogitsCall) -> SoftLogits:
        student = GivenLogits(call, Eager)
        kind = CrossEntropy(
            torch, torch.exp, ALGEBRA, call.scalars.label_smoothing, student.vocab.size
        )
        labels = (FewClasses if self.few else GivenTeacher)(self.probs, None, student)
        return SoftLogits(student, labels, kind, z_loss=0.0, entropy=self.entropy)


class Upstream(NamedTuple):
    """Gradients of the results, and what a backward needs beside its inputs: `Largest`, and the sum
    of a, [5, N]."""

    d_logprobs: Tensor | None
    d_entropy: Tensor | None
    d_lse: Tensor | None
    residuals: Tensor


def given_forward(call: LogitsCall, terms: SoftTerms) -> tuple[Tensor, ...]:
    """Steps 3 to 5: the results and the sum of each token's probabilities, [N] each; residuals."""
    both = terms.beside(call)
    student, tokens = both.student, both.student.tokens
    student.check_consistent(entropy=terms.entropy)
    if isinstance(student.vocab, ShardedVocab):
        more = 0 if terms.few else both.teacher.classes - call.logits.shape[1]
        student.vocab.consistency.exact("kind", float(KINDS.index(SOFT_LABELS)))
        student.vocab.consistency.exact("the classes of the teacher", float(more))
        if terms.few:
            student.vocab.consistency.probs(terms.probs, tokens.valid)
        else:
            probs = terms.probs[:, : student.vocab.local_size]
            student.vocab.consistency.local_softmax(probs, tokens.valid, logits=False)
    student.tokens = tokens._replace(more=None)
    columns = columns_of(student, WantedStats(terms.entropy))
    stats: Largest = both.kind.stats(*over_shards(student, columns))
    student.tokens = tokens
    if not terms.few:
        check_columns(student.local_rows, both.teacher.classes)
    kernels, parts = both.kernels(), []
    for rows, labels in both.teacher.pairs(student.blocks(), None):
        restore(rows, kernels[0].prepare(rows, derivative=False))
        a_BV = both.put_p(rows, labels, Largest(*(x[rows.places] for x in stats)))
        parts.append(both.sums_of(rows, labels, a_BV, kernels[0]))
    total, nll = torch.zeros_like(stats.lse), torch.zeros_like(stats.lse)
    if parts:
        places = tokens.places(0, tokens.computed)
        total[places], nll[places], _ = both.totals(parts)
    values = (tokens.clean(x).to(terms.output_dtype) for x in (-nll, stats.entropy, stats.lse))
    return *values, tokens.clean(total), torch.stack((*stats, total))


def given_backward(upstream: Upstream, call: LogitsCall, terms: SoftTerms) -> Tensor:
    """Steps 6 and 7, in the dtype of the logits."""
    both, logits = terms.beside(call), call.logits
    student, (*stats, total) = both.student, upstream.residuals
    g_logprobs, g_entropy, g_lse = (
        None if g is None else student.tokens.clean(g.to(call.compute_dtype)) for g in upstream[:3]
    )
    d_logits, kernels, columns = torch.zeros_like(logits), both.kernels(), both.columns
    for rows, labels in both.teacher.pairs(student.blocks(), None):
        places = rows.places
        of_rows = Largest(*(x[places] for x in stats))
        restore(rows, kernels[0].prepare(rows, derivative=True))
        a_BV = both.put_p(rows, labels, of_rows)
        dz_BV = rows.z_BV[:, columns]
        above = None
        if g_entropy is not None:
            above = dz_BV.clamp(min=FLOOR).add_(of_rows.entropy[:, None])
        labels.z_BV = p_BV = kernels[0].exp(dz_BV)
        both.put_slope(rows, labels, a_BV, total[places, None], of_rows)
        dz_BV.mul_(0.0 if g_logprobs is None else g_logprobs[places, None])
        if g_lse is not None:
            dz_BV.addcmul_(p_BV, g_lse[places, None])
        if above is not None and g_entropy is not None:
            dz_BV.addcmul_(above.mul_(p_BV), g_entropy[places, None], value=-1.0)
        if rows.temperature_B is not None:
            dz_BV.div_(rows.temperature_B[:, None])
        kernels[0].chained(rows, torch.zeros_like(of_rows.lse), DzOutput())
        d_logits[places, columns] = dz_BV.to(logits.dtype)
    return d_logits


@operator("given_soft_forward", LogitsCall, SoftTerms, returns=FIVE)
def given_op(call: LogitsCall, terms: SoftTerms) -> tuple[Tensor, ...]:
    """`given_forward` as one operator, opaque to the compiler."""
    return given_forward(call, terms)


@given_op.fake
def _(call: LogitsCall, terms: SoftTerms) -> tuple[Tensor, ...]:
    logits, count, compute = call.logits, call.logits.shape[0], call.compute_dtype
    dtypes = [terms.output_dtype] * 3 + [compute]
    values = (logits.new_empty(count, dtype=dtype) for dtype in dtypes)
    return *values, logits.new_empty(5, count, dtype=compute)


@operator("given_soft_backward", Upstream, LogitsCall, SoftTerms, returns="Tensor")
def given_backward_op(upstream: Upstream, call: LogitsCall, terms: SoftTerms) -> Tensor:
    """`given_backward` as one operator, opaque to the compiler."""
    return given_backward(upstream, call, terms)


@given_backward_op.fake
def _(upstream: Upstream, call: LogitsCall, terms: SoftTerms) -> Tensor:
    return torch.empty_like(call.logits)


def setup(ctx: Any, output: tuple[Tensor, ...], call: LogitsCall, terms: SoftTerms) -> None:
    keep_call(ctx, output[4], output[3:], call, terms)


def gradient_of_logits(ctx: Any, *of_outputs: Tensor | None) -> Named | None:
    differentiated_once("vocab_parallel_logprobs", "log_softmax")
    if all(g is None for g in of_outputs[:3]):
        return None
    residuals, (call, terms) = kept_call(ctx)
    d_logprobs, d_entropy, d_lse = of_outputs[:3]
    upstream = Upstream(d_logprobs, d_entropy, d_lse, residuals)
    return {"logits": given_backward_op(upstream, call, terms)}


given_op.gradient(setup, gradient_of_logits)


def given_soft(given: LogitsArguments) -> LogprobOutput[Tensor]:
    """`vocab_parallel_logprobs` of arguments whose labels are class probabilities."""
    soft: Any = given.labels
    SOFT.require("kept", given.kept is None and given.ids is None and is_zero(given.top_k))
    only_tensors(logits=given.logits)
    labels = labels_for(given.logits, None, given.where)
    given, problem, call = bind_logits("vocab_parallel_logprobs", given._replace(labels=labels))
    columns = None if call.rows.group else problem.columns
    call, of_labels = labels_call(call, soft, given, "logits", columns)
    dtype = getattr(torch, problem.output_dtype)
    terms = SoftTerms(of_labels.teacher_hidden, of_labels.few, given.entropy, dtype)
    *values, mass, _ = given_op(call, terms)
    check_soft_values(mass, call)
    logprobs, entropy, lse = (with_leading(x, problem.leading) for x in values)
    none: Any = None
    return LogprobOutput(logprobs, entropy if given.entropy else None, lse, none)
