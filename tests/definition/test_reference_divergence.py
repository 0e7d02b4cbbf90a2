"""The oracle of divergences against 50 digits, and against finite differences of those."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from xentlib.reference import divergence_reference

KINDS = {"forward_kl": 0.5, "reverse_kl": 0.5, "jsd": 0.3}
# In float64, of which the bounds count roundings of 2^-53 where the contract has 2^-24.
UNIT = 2.0**-53


def exact(kind: str, beta: float, student: list, teacher: list) -> mpmath.mpf:
    """D of logits, by the definition."""
    log_s, log_t = (
        [z - mpmath.log(mpmath.fsum(map(mpmath.exp, x))) for z in x] for x in (student, teacher)
    )
    p_s, p_t = ([mpmath.exp(x) for x in y] for y in (log_s, log_t))
    if kind == "forward_kl":
        return mpmath.fsum(p * (t - s) for p, s, t in zip(p_t, log_s, log_t))
    if kind == "reverse_kl":
        return mpmath.fsum(p * (s - t) for p, s, t in zip(p_s, log_s, log_t))
    m = [beta * t + (1 - beta) * s for s, t in zip(p_s, p_t)]
    of_teacher = mpmath.fsum(t * (x - mpmath.log(y)) for t, x, y in zip(p_t, log_t, m))
    of_student = mpmath.fsum(s * (x - mpmath.log(y)) for s, x, y in zip(p_s, log_s, m))
    return beta * of_teacher + (1 - beta) * of_student


@pytest.mark.parametrize("far", [1.0, 1e-2, 3e-5])
@pytest.mark.parametrize("kind", KINDS)
def test_against_50_digits(kind: str, far: float) -> None:
    """Values and dz of given logits, down to a divergence of 1e-10."""
    beta, (tokens, vocab) = KINDS[kind], (3, 7)
    rng = np.random.default_rng(5)
    teacher = 2 * rng.standard_normal((tokens, vocab))
    student = teacher + far * rng.standard_normal((tokens, vocab))
    eye = np.eye(tokens)
    got = divergence_reference(
        eye, student.T, eye, teacher.T, kind=kind, beta=beta, reduction="none", exact_logits=True
    )
    with mpmath.workdps(50):
        step = mpmath.mpf(10) ** -20
        for n in range(tokens):
            s, t = ([mpmath.mpf(float(z)) for z in x[n]] for x in (student, teacher))
            value = exact(kind, mpmath.mpf(beta), s, t)
            off = abs(mpmath.mpf(float(got.divergence[n])) - value)
            assert off <= 4 * UNIT * got.bound_divergence[n]
            for v in range(vocab):
                moved = [exact(kind, mpmath.mpf(beta), [*s[:v], s[v] + d, *s[v + 1 :]], t)
                         for d in (step, -step)]  # fmt: skip
                slope = (moved[0] - moved[1]) / (2 * step)
                assert abs(got.dz[n, v] - slope) <= 4 * UNIT * got.bound_dz[n, v]
