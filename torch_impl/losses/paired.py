"""Losses of two distributions: a divergence from a teacher, or the cross-entropy of class
probabilities, and what a backward of each token's loss computes again.

Shapes: N tokens, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import WantedStats
from xentlib.pairs import DzTerms
from xentlib.soft_labels import SOFT_LABELS
from xentlib.torch.core.consistency import Terms
from xentlib.torch.core.logits import Chunk, ChunkedLogits
from xentlib.torch.core.loop import HeadLoop, Objective, Out
from xentlib.torch.core.pairs import Unit
from xentlib.torch.losses.teacher import KINDS, TeacherCall, is_tempered, paired

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


class PairedObjective(Objective):
    """Of a student's logits, and of a teacher's or class probabilities beside them."""

    def __init__(self, loop: HeadLoop, teacher: TeacherCall, loss: Loss) -> None:
        self.loop, self.teacher, self.loss = loop, teacher, loss
        self.nll_weight, self.tempered_nll = loop.call.scalars.nll_weight, is_tempered(loop.call)

    def start(self, logits: ChunkedLogits) -> None:
        self.logits, self.pair = logits, paired(self.loop, logits, self.teacher, self.loss)

    def chunks(self) -> Iterator[Chunk]:
        return self.pair.chunks()

    def kernels(self) -> Any:
        return self.pair.kernels()

    def units(self, chunk: Chunk) -> Iterator[Unit]:
        return self.pair.units(chunk)

    def write(
        self, part: Any, factor_B: Tensor, dz: DzTerms, of_nll: Any, p: Any, kernels: Any, out: Out
    ) -> None:
        """Steps 6 and 7 of a block: `dz` and `of_nll`, of the labels' loss in the target's column,
        times the factor; `p` of the logits that the labels' loss is of, where they are others."""
        rows, own = part[0], None
        dz = DzTerms(factor_B * dz.gain, factor_B * dz.shift)
        if self.nll_weight:  # of logits before their temperature
            tempered = rows.temperature_B
            own = of_nll * (factor_B if tempered is None else factor_B * tempered)
        self.pair.write(part, dz, own, p, kernels, out.sums)


class Divergence(PairedObjective):
    """A loss. Values: loss, its labels' part or z-loss, and the four outputs of a token; of a loss
    of each token what its backward needs too."""

    def __init__(
        self,
        loop: HeadLoop,
        teacher: TeacherCall,
        loss: Loss,
        squared_N: Tensor,
        weights_N: Tensor,
    ) -> None:
        """`weights_N` of the loss, without a power of two."""
        super().__init__(loop, teacher, loss)
        self.squared_N, self.weights_N = squared_N, weights_N
        self.num_values = len(VALUES) + len(Residuals._fields) * loss.each

    def step(self, unit: Unit, kernels: Any, out: Out) -> None:
        weight, places = self.nll_weight, unit.places
        made = self.pair.values(unit, kernels, tempered_nll=self.tempered_nll)
        value = made.loss * self.squared_N[places]
        more = -weight * made.labels if weight else made.beside
        dz = DzTerms(*(x * self.squared_N[places] for x in made.dz))
        if weight and not self.tempered_nll:
            dz = self.pair.kind.with_nll(dz, made.total, weight)
        values = [value + more, more, *made.per_token]
        if self.loss.each:
            terms = (*dz, torch.full_like(value, -weight))
            values += [*made.known, *(x * self.weights_N[places] for x in terms)]
        out.values[:, places] = torch.stack(values)
        for k, part in enumerate(unit.parts()) if out.needs_dz else ():
            rows, _, at = part
            factor_B = self.logits.scaled(out.factor[rows.places], rows)
            p = made.p_labels[k] if self.tempered_nll else None
            of_rows = DzTerms(*(x[at] for x in dz))
            self.write(part, factor_B, of_rows, -weight, p, kernels, out)


class DivergenceAgain(PairedObjective):
    """Its backward, of a loss of each token."""

    def __init__(
        self, loop: HeadLoop, teacher: TeacherCall, loss: Loss, residuals_7N: Tensor
    ) -> None:
        super().__init__(loop, teacher, loss)
        self.residuals_7N = residuals_7N

    def step(self, unit: Unit, kernels: Any, out: Out) -> None:
        known_4N = self.residuals_7N[:4]
        p_labels = self.pair.again(unit, kernels, known_4N, tempered_nll=self.tempered_nll)
        for k, part in enumerate(unit.parts()):
            rows, p = part[0], p_labels[k] if self.tempered_nll else None
            of_rows = Residuals(*self.residuals_7N[:, rows.places])
            factor_B = self.logits.scaled(out.factor[rows.places], rows)
            dz = DzTerms(of_rows.gain, of_rows.shift)
            self.write(part, factor_B, dz, of_rows.own, p, kernels, out)
