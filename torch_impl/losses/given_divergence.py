"""Divergences of precomputed logits in PyTorch: steps 3 to 7 of `xentlib.divergence`.

Shapes: N tokens, C columns of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import WantedStats
from xentlib.arguments import GivenDivergenceArguments, LogitsArguments, Scalars
from xentlib.checks.divergence import check_kind, check_only_logits, of_teacher
from xentlib.checks.validators import plain
from xentlib.divergence import DivergenceOutput
from xentlib.options import DIVERGENCES
from xentlib.pairs import DzTerms, PairSums
from xentlib.torch.array_spec import only_tensors, with_leading
from xentlib.torch.binding import bind_logits
from xentlib.torch.core.kernels import kernels_for
from xentlib.torch.core.logits import GivenLogits
from xentlib.torch.core.pairs import GivenTeacher, InPlace, PairedLogits, Unit
from xentlib.torch.core.stats import given_stats
from xentlib.torch.core.vocab import ShardedVocab
from xentlib.torch.losses.divergence import Upstream
from xentlib.torch.losses.teacher import given_teacher, labels_for, pairs_for
from xentlib.torch.operators import (
    LogitsCall,
    Named,
    differentiated_once,
    keep_call,
    kept_call,
    operator,
)


class GivenTerms(NamedTuple):
    """What the operators of given logits take beside the student's call."""

    teacher_logits: Tensor
    teacher_temperature: Tensor | None
    kind: str
    output_dtype: torch.dtype

    def beside(self, call: LogitsCall) -> PairedLogits:
        made = kernels_for(call.logits.device, call.compute_dtype, call.scalars)
        student, kind = GivenLogits(call, made), InPlace(torch, torch.exp, self.kind)
        teacher = GivenTeacher(self.teacher_logits, self.teacher_temperature, student)
        return pairs_for(made)(student, teacher, kind._replace(beta=call.scalars.beta or 0.0))


def given_forward(call: LogitsCall, terms: GivenTerms) -> tuple[Tensor, Tensor]:
    """Steps 3 to 5 of given logits: the divergences [N]; lse of both, delta, gain and shift [5, N].
    What shards exchange is of all tokens at once, and blocks are read again in between."""
    both = terms.beside(call)
    other = call._replace(
        logits=terms.teacher_logits, temperature=terms.teacher_temperature, scalars=Scalars()
    )
    known = []
    for part in (both.student, GivenLogits(other, both.student.made)):
        part.check_consistent("vocab_parallel_divergence")
        if isinstance(part.vocab, ShardedVocab):
            part.vocab.consistency.exact("kind", float(DIVERGENCES.index(terms.kind)))
            more = both.teacher.classes - call.logits.shape[1]
            part.vocab.consistency.exact("the classes of the teacher", float(more))
        known.append(given_stats(part, WantedStats()).lse)
        both.check_classes()
    delta = torch.zeros_like(known[0])
    if both.kind.twice:
        delta = both.kind.delta(*sums_of_blocks(both, known, first=True)[:2])
        known.append(delta)
    value, dz = both.kind.of_sums(both.kind.named(sums_of_blocks(both, known)))
    tokens, residuals = both.student.tokens, torch.stack((known[0], known[1], delta, *dz))
    return tokens.clean(value).to(terms.output_dtype, copy=True), tokens.clean(residuals)


def blocks_of(both: PairedLogits) -> Iterator[tuple[Unit, Any]]:
    for pair in both.teacher.pairs(both.student.blocks(), None):
        unit = Unit([pair])
        yield unit, next(unit.parts())


def sums_of_blocks(both: PairedLogits, known: list[Tensor], *, first: bool = False) -> Tensor:
    """[k, N] over all classes, of those that delta needs if `first`; from lse of both, and delta,
    [N]."""
    tokens, kernels = both.student.tokens, both.kernels()
    sums = known[0].new_zeros(len(PairSums._fields), known[0].shape[0])
    parts = [
        both.given_sums(unit, kernels, [x[unit.places] for x in known], first=first)
        for unit, _ in blocks_of(both)
    ]
    if parts:
        summed = both.summed(parts)
        sums[: len(summed), tokens.places(0, tokens.computed)] = summed
    return sums


def given_backward(upstream: Upstream, call: LogitsCall, terms: GivenTerms) -> Tensor:
    """Steps 6 and 7 of given logits, in their dtype."""
    both, logits = terms.beside(call), call.logits
    student, residuals = both.student, upstream.residuals
    g_N = student.tokens.clean(upstream.d_loss.to(call.compute_dtype))
    d_logits, kernels = torch.zeros_like(logits), both.kernels()
    for unit, part in blocks_of(both):
        both.again(unit, kernels, torch.cat((residuals[:3], residuals[:1])))
        rows = part[0]
        factor = g_N[rows.places]
        if rows.temperature_B is not None:
            factor = factor / rows.temperature_B
        dz = DzTerms(*(factor * x[rows.places] for x in residuals[3:]))
        both.put_given(part, dz, kernels, d_logits)
    return d_logits


@operator("given_divergence_forward", LogitsCall, GivenTerms, returns="(Tensor, Tensor)")
def given_op(call: LogitsCall, terms: GivenTerms) -> tuple[Tensor, Tensor]:
    """`given_forward` as one operator, opaque to the compiler."""
    return given_forward(call, terms)


@given_op.fake
def _(call: LogitsCall, terms: GivenTerms) -> tuple[Tensor, Tensor]:
    count = call.logits.shape[0]
    values = call.logits.new_empty(count, dtype=terms.output_dtype)
    return values, call.logits.new_empty(5, count, dtype=call.compute_dtype)


@operator("given_divergence_backward", Upstream, LogitsCall, GivenTerms, returns="Tensor")
def given_backward_op(upstream: Upstream, call: LogitsCall, terms: GivenTerms) -> Tensor:
    """`given_backward` as one operator, opaque to the compiler."""
    return given_backward(upstream, call, terms)


@given_backward_op.fake
def _(upstream: Upstream, call: LogitsCall, terms: GivenTerms) -> Tensor:
    return torch.empty_like(call.logits)


def gradient_of_logits(ctx: Any, gradient: Tensor | None, *others: Tensor | None) -> Named | None:
    differentiated_once("vocab_parallel_divergence", "F.kl_div")
    if gradient is None:
        return None
    residuals, (call, terms) = kept_call(ctx)
    return {"logits": given_backward_op(Upstream(gradient, residuals), call, terms)}


def setup(ctx: Any, output: tuple[Tensor, Tensor], call: LogitsCall, terms: GivenTerms) -> None:
    keep_call(ctx, output[1], output[1:], call, terms)


given_op.gradient(setup, gradient_of_logits)


def given_divergence(given: GivenDivergenceArguments) -> DivergenceOutput[Tensor]:
    """`vocab_parallel_divergence` of its arguments."""
    given = GivenDivergenceArguments(*map(plain, given))
    only_tensors(logits=given.logits)
    check_kind(given)
    check_only_logits(given)
    names = [x for x in LogitsArguments._fields if x in GivenDivergenceArguments._fields]
    fields = {name: getattr(given, name) for name in names}
    labels = labels_for(given.logits, None, given.where)
    of_logits = LogitsArguments(labels=labels, **fields)
    bound, problem, call = bind_logits("vocab_parallel_divergence", of_logits)
    call = call._replace(scalars=call.scalars._replace(beta=given.beta))
    with of_teacher():
        columns = None if call.rows.group else problem.columns
        teacher = given_teacher(given.teacher, bound, call, problem, columns)
    output_dtype = getattr(torch, problem.output_dtype)
    terms = GivenTerms(
        teacher.teacher_hidden, teacher.teacher_temperature, given.kind, output_dtype
    )
    loss = with_leading(given_op(call, terms)[0], problem.leading)
    valid = torch.ones_like(call.labels) if call.where is None else call.where
    count, nll = valid.sum(), torch.zeros((), dtype=output_dtype, device=loss.device)
    return DivergenceOutput(loss, count, count.to(output_dtype), nll)
