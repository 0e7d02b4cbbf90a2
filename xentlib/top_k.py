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
        if self.tail == "renormalize":
            return student, teacher
        # What is left out of 1, never below 0.
        rest = xp.clip(1.0 - self.sum(self.exp(teacher)), min=0.0)
        teacher_tail = xp.log(rest)[:, None]
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
