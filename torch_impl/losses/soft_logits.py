"""Logits of a head, and the class probabilities of their tokens beside them: steps 2 to 6 of
`xentlib.math.soft_labels`.

Shapes: N tokens, K classes of each, V vocabulary, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xentlib.checks.soft_labels import check_columns
from xentlib.math.divergence import DzTerms
from xentlib.math.soft_labels import FAR, CrossEntropy, Largest, SoftSums
from xentlib.math.softmax import WantedStats
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.kernels import LogitsBlock
from xentlib.torch.losses.pairs import (
    KernelPair,
    LogitsTeacher,
    Pair,
    PairedLogits,
    Unit,
    UnitValues,
    columns_of_units,
)


class FewClasses(LogitsTeacher):
    """Probabilities [N, K] of the further classes of each token, 0 for all others."""

    def pairs(self, rows_of: Iterator[LogitsBlock], chunk: Any) -> Iterator[Pair]:
        self.classes = self.student.local_rows
        for rows in rows_of:
            assert rows.more is not None
            # Of classes elsewhere into the spare column.
            q_BV = torch.zeros_like(rows.z_BV)
            q_BV.scatter_add_(1, rows.more.columns, self.logits[rows.token_index].to(q_BV.dtype))
            rows.more = None
            yield rows, LogitsBlock(rows.span, rows.token_index, q_BV, rows.y_B1, None, None, None)


class SoftLogits(PairedLogits):
    """Logits, and in place of a teacher's the probabilities that are their labels."""

    def __init__(
        self,
        student: Any,
        labels: LogitsTeacher,
        kind: CrossEntropy,
        *,
        entropy: bool,
    ) -> None:
        super().__init__(student, labels, kind, (WantedStats(entropy), WantedStats()))
        self.dz_has_p = False

    def values(self, unit: Unit, kernels: KernelPair, *, tempered_nll: bool = False) -> UnitValues:
        """Steps 2 to 6. a - p total is then in place of the logits, p in place of q."""
        students = [rows for rows, _ in unit.pairs]
        student_args = self.student, students, kernels[0], self.wanted[0]
        stats: Largest = self.kind.stats(*columns_of_units(*student_args, learns=True))
        check_columns(self.student.local_rows, self.teacher.classes)
        sums, targets = [], []
        for rows, labels, at in unit.parts():
            stats_of_rows = Largest(*(x[at] for x in stats))
            targets.append(self.put_p(rows, labels, stats_of_rows))
            sums.append(self.sums_of(rows, labels, targets[-1], kernels[0]))
        total, nll, logprobs = self.totals(sums)
        for (rows, labels, at), a_BV in zip(unit.parts(), targets, strict=True):
            stats_of_rows = Largest(*(x[at] for x in stats))
            self.put_slope(rows, labels, a_BV, total[at, None], stats_of_rows)
        loss, z_term, slope = self.kind.regularised(nll, stats)
        self.dz_has_p = slope is not None
        dz = DzTerms(-torch.ones_like(nll), torch.zeros_like(nll) if slope is None else slope)
        per_token = total, logprobs, stats.entropy, stats.lse
        return UnitValues(loss, z_term, per_token, logprobs, [], (), dz, total)

    def put_p(self, rows: LogitsBlock, labels: LogitsBlock, stats_of_rows: Largest) -> Tensor:
        """log p in place of the logits; a."""
        z_BV, q_BV = (x.z_BV[:, self.columns] for x in (rows, labels))
        z_BV.sub_(stats_of_rows.m[:, None]).sub_(stats_of_rows.log_total[:, None]).clamp_(min=-FAR)
        a_BV: Tensor = self.kind.target(q_BV, self.student.own_weights)
        return a_BV

    def sums_of(
        self, rows: LogitsBlock, labels: LogitsBlock, a_BV: Tensor, kernels: Eager
    ) -> Tensor:
        """[k, blocks, B] of `SoftSums`; NaN of a negative probability. p is then in place of q."""
        log_p_BV, q_BV = (x.z_BV[:, self.columns] for x in (rows, labels))
        another = a_BV is not q_BV
        q_loglik = q_BV * log_p_BV if another else None
        sums = self.sums(SoftSums(a_BV, a_BV * log_p_BV, q_loglik), kernels)
        if q_BV.shape[1]:
            sums += torch.where(q_BV.amin(1) < 0, torch.nan, 0.0)
        labels.z_BV = kernels.exp(log_p_BV)
        return sums

    def totals(self, sums: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Over all classes."""
        total, loglik, *q_loglik = self.summed(sums)
        results: tuple[Tensor, Tensor, Tensor]
        results = self.kind.from_sums(SoftSums(total, loglik, q_loglik[0] if q_loglik else None))
        return results

    def put_slope(
        self,
        rows: LogitsBlock,
        labels: LogitsBlock,
        a_BV: Tensor,
        total_B1: Tensor,
        stats_of_rows: Largest,
    ) -> None:
        """a - p total in place of log p."""
        z_BV, p_BV = rows.z_BV[:, self.columns], labels.z_BV
        if not z_BV.shape[1]:
            return
        torch.addcmul(a_BV, p_BV, total_B1, value=-1.0, out=z_BV)
        largest_B1 = p_BV.argmax(1, keepdim=True)
        a_B1, p_B1 = (x.gather(1, largest_B1) for x in (a_BV, p_BV))
        dz_top = self.kind.at_top(a_B1, total_B1, Largest(*(x[:, None] for x in stats_of_rows)))
        z_BV.scatter_(1, largest_B1, torch.where(p_B1 > 0.5, dz_top, z_BV.gather(1, largest_B1)))

    def put_dz(self, part: Any, dz: DzTerms, target: Any = None, p: Any = None) -> None:
        """Step 6, in place of a - p total."""
        rows, labels, _ = part
        dz_BV = rows.z_BV[:, self.columns].mul_(dz.gain[:, None])
        if self.dz_has_p:
            dz_BV.addcmul_(labels.z_BV, dz.shift[:, None])
