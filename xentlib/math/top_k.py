"""A divergence from a teacher's most probable classes, written once for both frameworks, which
differentiate it: from log-probabilities [N, K] of both and what the student has beside them, the
logits [N, K + 1] or [N, K] of two distributions, or the terms that are left where a tail is
dropped.

Shapes: N tokens, K classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xentlib.math.divergence import KINDS
from xentlib.math.softmax import INF

Array = Any  # a tensor or an array of the backend
# Probability of a tail that numbers of this element size may tell from none.
LEAST = {4: 2.0**-24, 8: 2.0**-53}
# What probabilities of a token's classes may add up to: a 16-bit one is off by 0.4 %.
MOST = 1.01


class TopK(NamedTuple):
    """Bound to a framework, and to a teacher's tail."""

    xp: Any
    exp: Any
    sum: Any  # of rows
    left: Any  # 1 less the probabilities of rows of log-probabilities
    tail: str

    def checked(self, counts: Array, teacher: Array) -> Array:
        """[N] 1, or NaN where the teacher's numbers are no log-probabilities: a factor, so that
        gradients are NaN too."""
        total = self.sum(self.xp.where(counts, self.exp(teacher), 0.0))
        return self.xp.where(total <= MOST, 1.0, self.xp.nan)

    def logits(
        self, counts: Array, student: Array, student_tail: Array, teacher: Array
    ) -> tuple[Array, Array]:
        """Of both; -inf where a class does not count."""
        xp = self.xp
        student, teacher = (xp.where(counts, x, -INF) for x in (student, teacher))
        if self.tail == "renormalize":  # of no class nothing diverges
            none = ~counts.any(1)[:, None]
            return xp.where(none, 0.0, student), xp.where(none, 0.0, teacher)
        # What is left out of 1. Where rounding leaves nothing there is something all the same, of
        # which a reverse KL would be infinite, unless no class is left.
        rest = xp.clip(self.left(teacher), min=LEAST[teacher.dtype.itemsize])
        teacher_tail = xp.where(student_tail == -INF, -INF, xp.log(rest))[:, None]
        with_tail = xp.concatenate((student, student_tail[:, None]), 1)
        return with_tail, xp.concatenate((teacher, teacher_tail), 1)

    def dropped(self, kind: str, counts: Array, student: Array, teacher: Array) -> Array:
        """[N] terms p log(p / q) of the classes alone, 0 where p is."""
        xp, student_first = self.xp, KINDS[kind].student_first
        counts = counts & ((student if student_first else teacher) != -INF)
        student, teacher = (xp.where(counts, x, 0.0) for x in (student, teacher))
        log_p, log_q = (student, teacher) if student_first else (teacher, student)
        terms = xp.where(counts, self.exp(log_p) * (log_p - log_q), 0.0)
        total: Array = self.sum(terms)
        return total
