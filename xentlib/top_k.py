"""A divergence from a teacher's most probable classes, written once for both frameworks, which
differentiate it: from log-probabilities [N, K] of both and what the student has beside them, the
logits [N, K + 1] or [N, K] of two distributions, or the terms that are left where a tail is
dropped.

Shapes: N tokens, K classes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xentlib.algebra import INF

Array = Any  # a tensor or an array of the backend
# Probability of a tail that numbers of this element size may tell from none.
LEAST = {4: 2.0**-24, 8: 2.0**-53}


class TopK(NamedTuple):
    """Bound to a framework, and to a teacher's tail."""

    xp: Any
    exp: Any
    sum: Any  # of rows
    tail: str

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
        rest = xp.clip(1.0 - self.sum(self.exp(teacher)), min=LEAST[teacher.dtype.itemsize])
        teacher_tail = xp.where(student_tail == -INF, -INF, xp.log(rest))[:, None]
        with_tail = xp.concatenate((student, student_tail[:, None]), 1)
        return with_tail, xp.concatenate((teacher, teacher_tail), 1)

    def dropped(self, kind: str, counts: Array, student: Array, teacher: Array) -> Array:
        """[N] terms of the classes alone."""
        xp = self.xp
        student, teacher = (xp.where(counts, x, 0.0) for x in (student, teacher))
        log_p, log_q = (student, teacher) if kind == "reverse_kl" else (teacher, student)
        terms = xp.where(counts, self.exp(log_p) * (log_p - log_q), 0.0)
        total: Array = self.sum(terms)
        return total
