"""Logits of a head, and the class probabilities of their tokens beside them: steps 2 to 6 of
`xentlib.soft_labels`.

Shapes: N tokens, K classes of each, V vocabulary, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xentlib.algebra import WantedStats
from xentlib.checks.soft_labels import check_columns
from xentlib.pairs import DzTerms
from xentlib.soft_labels import CrossEntropy, Largest, SoftSums
from xentlib.torch.core.kernels import LogitsBlock
from xentlib.torch.core.pairs import (
    GivenTeacher,
    Made,
    Pair,
    PairedLogits,
    Unit,
    UnitValues,
    columns_of_units,
)


class FewClasses(GivenTeacher):
    """Probabilities [N, K] of the further classes of each token, 0 for all others."""

    def pairs(self, rows_of: Iterator[LogitsBlock], chunk: Any) -> Iterator[Pair]:
        self.classes = self.student.local_size
        for rows in rows_of:
            assert rows.more is not None
            # Of classes elsewhere into the spare column.
            q_BV = torch.zeros_like(rows.z_BV)
            q_BV.scatter_add_(1, rows.more.columns, self.logits[rows.places])
            rows.more = None
            yield rows, LogitsBlock(rows.span, rows.places, q_BV, rows.y_B1, None, None, None)


class SoftLogits(PairedLogits):
    """Logits, and in place of a teacher's the probabilities that are their labels."""

    def __init__(
        self,
        student: Any,
        labels: GivenTeacher,
        kind: CrossEntropy,
        *,
        z_loss: float,
        entropy: bool,
    ) -> None:
        super().__init__(student, labels, kind, (WantedStats(entropy), WantedStats()))
        self.z_loss = z_loss

    def values(self, unit: Unit, kernels: Made, *, tempered_nll: bool = False) -> UnitValues:
        """Steps 2 to 6. p total - a is then in place of the logits, p in place of q."""
        students = [rows for rows, _ in unit.pairs]
        of_student = self.student, students, kernels[0], self.wanted[0]
        stats: Largest = self.kind.stats(*columns_of_units(*of_student, learns=True))
        check_columns(self.student.local_size, self.teacher.classes)
        sums = []
        for rows, labels, at in unit.parts():
            of_rows = Largest(*(x[at] for x in stats))
            sums.append(self.sums(self.put_products(rows, labels, of_rows), kernels[0]))
        total, nll, *others = self.summed(sums)
        for rows, labels, at in unit.parts():
            of_rows = Largest(*(x[at] for x in stats))
            self.put_slope(rows.z_BV, labels.z_BV, total[at, None], of_rows)
        z_term = self.z_loss * stats.lse * stats.lse if self.z_loss else torch.zeros_like(nll)
        logprobs = -(others[0] if others else nll)
        dz = DzTerms(torch.ones_like(nll), 2.0 * self.z_loss * stats.lse)
        per_token = total, logprobs, stats.entropy, stats.lse
        return UnitValues(nll, z_term, per_token, logprobs, [], (), dz, total)

    def put_products(self, rows: LogitsBlock, labels: LogitsBlock, of_rows: Largest) -> SoftSums:
        """a in place of the logits, p in place of q; the terms of the sums."""
        z_BV, q_BV = (x.z_BV[:, self.columns] for x in (rows, labels))
        p_BV, a_BV, terms = self.kind.terms(z_BV, q_BV, self.student.own_weights, of_rows)
        z_BV.copy_(a_BV)
        q_BV.copy_(p_BV)
        sums: SoftSums = terms
        return sums

    def put_slope(self, z_BV: Tensor, p_BV: Tensor, total_B1: Tensor, of: Largest) -> None:
        """p total - a in place of a."""
        a_BV, p_BV = z_BV[:, self.columns], p_BV[:, self.columns]
        if not a_BV.shape[1]:
            return
        largest_B1 = p_BV.argmax(1, keepdim=True)
        a_B1 = a_BV.gather(1, largest_B1)
        of_top = self.kind.at_top(a_B1, total_B1, Largest(*(x[:, None] for x in of)))
        p_B1 = p_BV.gather(1, largest_B1)
        a_BV.neg_().addcmul_(p_BV, total_B1)
        a_BV.scatter_(1, largest_B1, torch.where(p_B1 > 0.5, of_top, a_BV.gather(1, largest_B1)))
