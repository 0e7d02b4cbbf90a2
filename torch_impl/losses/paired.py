"""Losses of two distributions: a divergence from a teacher, or the cross-entropy of class
probabilities, and what a backward of each token's loss computes again.

Shapes: N tokens, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.checks.divergence import check_vocabulary
from xentlib.math.divergence import DzTerms, PairSums
from xentlib.math.soft_labels import SOFT_LABELS
from xentlib.math.softmax import WantedStats
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.logits import Chunk, ChunkedLogits
from xentlib.torch.core.loop import HeadLoop, Objective, Out
from xentlib.torch.core.stats import all_stats
from xentlib.torch.losses.pairs import PairedLogits, Unit
from xentlib.torch.losses.teacher import KINDS, TeacherCall, is_tempered, kernels_of, paired_logits
from xentlib.torch.operators import HeadCall

FUNCTION = "chunked_divergence"
LOGITS_FUNCTION = "vocab_parallel_divergence"


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
        """None: divergences have no class weights, and those of class probabilities weigh the terms
        of a token's loss, not the token."""
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
        outputs = self.squared + 2.0 * self.entropy + 4.0 * self.teacher_entropy + 8.0 * self.each
        kind, more = KINDS.index(self.kind) + 8.0 * form, float(self.more_classes)
        weights = self.soft_class_weights
        mean = self.mean and self.denominator is None
        return Terms(function, self.needs, outputs, weights, refused, mean, False, kind, more)


class Residuals(NamedTuple):
    """What a backward that makes the logits again needs beside its inputs: [N] each."""

    lse: Tensor
    teacher_lse: Tensor
    delta: Tensor
    labels_lse: Tensor  # of the student's logits at temperature 1, for the NLL term
    gain: Tensor  # of dz, with the token's weight
    shift: Tensor
    nll_dz: Tensor  # of the labels' loss, what is added in the target's column


VALUES = ("loss", "nll", "divergence", "logprobs", "entropy", "teacher_entropy")


class PairedObjective(Objective):
    """Of a student's logits, and of a teacher's or class probabilities beside them."""

    pair: PairedLogits

    def __init__(self, pair_of: Callable[[ChunkedLogits], PairedLogits]) -> None:
        self.pair_of = pair_of

    def start(self, logits: ChunkedLogits) -> None:
        self.logits, self.pair = logits, self.pair_of(logits)

    def chunks(self) -> Iterator[Chunk]:
        return self.pair.chunks()

    def kernels(self) -> Any:
        return self.pair.kernels()

    def units(self, chunk: Chunk) -> Iterator[Unit]:
        return self.pair.units(chunk)


class PairedRecompute(PairedObjective):
    """In a backward, which exchanges no statistics."""

    def units(self, chunk: Chunk) -> Iterator[Unit]:
        return self.pair.blocks(chunk)


class Divergence(PairedObjective):
    """A loss. Values: loss, its labels' part or z-loss, and the four outputs of a token; of a loss
    of each token what its backward needs too."""

    def __init__(
        self, loop: HeadLoop, teacher: TeacherCall, loss: Loss, squared_N: Tensor, weights_N: Tensor
    ) -> None:
        """`weights_N` of the loss, without a power of two."""
        super().__init__(paired_logits(loop, teacher, loss))
        self.call, self.loss = loop.call, loss
        self.squared_N, self.weights_N = squared_N, weights_N
        self.num_values = len(VALUES) + len(Residuals._fields) * loss.each

    def step(self, unit: Unit, kernels: Any, out: Out) -> None:
        weight, tempered, token_index = (
            self.call.scalars.nll_weight,
            is_tempered(self.call),
            unit.token_index,
        )
        unit_values = self.pair.values(unit, kernels, tempered_nll=tempered)
        value = unit_values.loss * self.squared_N[token_index]
        more = unit_values.z_term
        if weight:
            more = -weight * unit_values.labels
            value = value + more
        dz = DzTerms(*(x * self.squared_N[token_index] for x in unit_values.dz))
        if weight and not tempered:
            dz = self.pair.kind.with_nll(dz, unit_values.total, weight)
        values = [value, more, *unit_values.per_token]
        if self.loss.each:
            terms = (*dz, torch.full_like(value, -weight))
            values += [*unit_values.known, *(x * self.weights_N[token_index] for x in terms)]
        out.values[:, token_index] = torch.stack(values)
        for k, part in enumerate(unit.parts()) if out.needs_dz else ():
            rows, _, at = part
            factor_B = self.logits.scaled(out.factor[rows.token_index], rows.temperature_B)
            nll_dz = -weight * untempered(factor_B, rows.temperature_B) if weight else None
            dz_terms = DzTerms(factor_B * dz.gain[at], factor_B * dz.shift[at])
            p = unit_values.p_labels[k] if tempered else None
            self.pair.write(part, dz_terms, nll_dz, p, kernels, out.sums)


class DivergenceRecompute(PairedRecompute):
    """Its backward, of a loss of each token."""

    def __init__(
        self, loop: HeadLoop, teacher: TeacherCall, loss: Loss, residuals_7N: Tensor
    ) -> None:
        super().__init__(paired_logits(loop, teacher, loss))
        self.call, self.tokens = loop.call, loop.chunks_of
        self.known = Residuals(*residuals_7N)
        self.known_4N = residuals_7N[:4]
        # Of all tokens, once for every block of classes: dz, and what the labels' loss adds
        self.dz: tuple[Tensor, Tensor, Tensor | None] | None = None

    def coefficients(self, factor_N: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        known, temperature, nll_dz = self.known, self.tokens.temperature, None
        factor_N = self.logits.scaled(factor_N, temperature)
        if self.call.scalars.nll_weight:
            nll_dz = untempered(factor_N, temperature) * known.nll_dz
        return factor_N * known.gain, factor_N * known.shift, nll_dz

    def step(self, unit: Unit, kernels: Any, out: Out) -> None:
        tempered, (part,) = is_tempered(self.call), unit.parts()
        p_labels = self.pair.recompute(unit, kernels, self.known_4N, tempered_nll=tempered)
        if self.dz is None:
            self.dz = self.coefficients(out.factor)
        token_index = unit.token_index
        gain, shift, nll_dz = (None if x is None else x[token_index] for x in self.dz)
        p = p_labels[0] if tempered else None
        self.pair.write(part, DzTerms(gain, shift), nll_dz, p, kernels, out.sums)


def untempered(factor: Tensor, temperature: Tensor | None) -> Tensor:
    """A factor of dz of logits before their temperature."""
    return factor if temperature is None else factor * temperature.to(factor.dtype)


def logits_values(
    call: HeadCall, teacher: TeacherCall, loss: Loss
) -> tuple[HeadLoop, Tensor, Residuals]:
    """Of precomputed logits: the divergences [N], and what their backward needs. What shards
    exchange is of all tokens at once, and blocks are read again in between."""
    loops, known, kernel_cls = [], [], kernels_of(call, loss)
    for part in (call, teacher.as_head_call(call)):
        loop = HeadLoop(part, Terms(LOGITS_FUNCTION), kernel_cls=kernel_cls)
        vocab = loop.check_consistent()
        if vocab is not None:
            vocab.consistency.exact("kind", float(KINDS.index(loss.kind)))
            vocab.consistency.exact("the classes of the teacher", float(loss.more_classes))
        known.append(all_stats(loop, WantedStats()).lse)
        check_vocabulary(call.columns, teacher.classes, sharded=loop.vocab.sharded)
        loops.append(loop)
    loop = loops[0]
    (logits,) = loop.blocks()
    pair = paired_logits(loop, teacher, loss)(logits)
    delta, none = torch.zeros_like(known[0]), torch.zeros_like(known[0])
    if pair.kind.twice:
        delta = pair.kind.delta(*sums_of_blocks(pair, known, first=True)[:2])
        known.append(delta)
    value, dz = pair.kind.from_sums(pair.kind.named(sums_of_blocks(pair, known)))
    lse, teacher_lse = known[:2]
    return loop, value, Residuals(lse, teacher_lse, delta, lse, dz.gain, dz.shift, none)


def sums_of_blocks(pair: PairedLogits, known: list[Tensor], *, first: bool = False) -> Tensor:
    """[k, N] over all classes, of those that delta needs if `first`; from lse of both, and delta,
    [N]."""
    tokens, kernels = pair.student.tokens, pair.kernels()
    sums = known[0].new_zeros(len(PairSums._fields), known[0].shape[0])
    parts = [
        pair.block_sums(unit, kernels, [x[unit.token_index] for x in known], first=first)
        for chunk in pair.chunks()
        for unit in pair.blocks(chunk)
    ]
    if parts:
        summed = pair.summed(parts)
        sums[: len(summed), tokens.token_index(0, tokens.computed)] = summed
    return sums
