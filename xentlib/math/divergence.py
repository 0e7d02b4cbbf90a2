"""Steps 3 to 6 of `xentlib.divergence`, written once: the same operations in the same order in both
frameworks, on logits of a student and of a teacher, class by class.

With p and q the two distributions and x = log(q / p), a term of KL(p : q) is p phi(x), with
phi(x) = exp(x) - 1 - x, or the same as q psi(-x), with psi(x) = x exp(x) - expm1(x): the one that
has the larger of p and q is computed, w phi(-|x|) or w psi(-|x|), so that exp never overflows and
its argument is rounded where it is small. A term of a JSD with the mixture m is m psi(log(p / m)),
of each. None is negative, and they add up to the divergence where the sum of q - p is 0.

Shapes: B tokens, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

Array = Any  # a tensor or an array of the backend
# Of x: its sign; and 1 or 0, where it is not positive and where it is: a product with one of them
# selects.
Sides = tuple[Array, Array, Array]

# A logit stands no lower than this, so that of two that are -inf the log-ratio is a number; where
# the divergence is infinite its sum is beyond `INFINITE`.
FLOOR, INFINITE = -1e30, 1e12
# Above this expm1(x), phi(x) and psi(x), x <= 0, are series, of as many terms as the element size
# needs: exp(x) - 1 - x would keep no digit. Below, phi loses one.
NEAR = -0.3
TERMS = {4: 7, 8: 14}


class PairSums(NamedTuple):
    """Over classes: [blocks, tokens] or [tokens] each."""

    total: Array  # of p
    value: Array  # of the terms of the divergence
    excess: Array | None  # of q - p, where delta is not known yet
    slope: Array | None  # of a, where its mean is in dz


class DzTerms(NamedTuple):
    """Per token: dz = gain a + shift p, for an upstream gradient of 1."""

    gain: Array
    shift: Array


class Near0(NamedTuple):
    """Of a number x <= 0."""

    exp: Array
    expm1: Array
    phi: Array  # exp(x) - 1 - x
    psi: Array  # x exp(x) - expm1(x)


@dataclass(frozen=True)
class Kind:
    """What kinds of divergences share, bound to a framework: its namespace and an exp of [B, V];
    and to the number that a kind has. Each kind is a class, by its name in `KINDS`."""

    xp: Any
    exp: Any
    beta: float = 0.0

    name: ClassVar[str]
    student_first: ClassVar[bool]  # p is the student's; else the teacher's
    sums: ClassVar[tuple[bool, bool, bool, bool]]  # which of `PairSums` it has
    takes_beta: ClassVar[bool] = False
    twice: ClassVar[bool] = False  # delta is known before the terms: of what is no polynomial of it
    drops: ClassVar[bool] = False  # a sum of p log(p / q) over a few classes is a loss
    finite_slope: ClassVar[bool] = True  # also where the divergence is infinite

    def terms_of(
        self, w: Array, x: Array, sides: Sides, near: Near0
    ) -> tuple[Array, Array, PairSums]:
        """Of `ratio`, and of -|x|: p and a, of which dz is made, and the terms of the sums."""
        raise NotImplementedError

    def value_and_dz(self, total: Array, value: Array, sums: PairSums) -> tuple[Array, DzTerms]:
        """Step 5: the divergence of each token, of `value` by `total`, and what dz is made of."""
        raise NotImplementedError

    def with_nll(self, dz: DzTerms, total: Array, weight: float) -> DzTerms:
        """With the gradient of that much NLL, but for -1 in the target's column: weight p_S, and
        p / total is p_S."""
        return dz._replace(shift=dz.shift + weight / total)

    def series(self, x: Array) -> Array:
        """phi of small numbers."""
        terms = TERMS[x.dtype.itemsize]
        total = x * (1.0 / math.factorial(terms + 1)) + 1.0 / math.factorial(terms)
        for k in range(terms - 1, 1, -1):
            total = total * x + 1.0 / math.factorial(k)
        return total * x * x

    def near0(self, x: Array) -> Near0:
        """By the series of what is near 0, and exp of the rest of x, which is given up."""
        near = self.xp.clip(x, min=NEAR)
        rest = x - near
        phi = self.series(near)
        t, e = near + phi, self.exp(rest)
        less, grown = e - 1.0, 1.0 + t
        more = less * grown
        psi = (near * t - phi) + grown * (less * (near - 1.0) + e * rest)
        return Near0(grown * e, t + more, phi + (more - rest), psi)

    def ratio(
        self, z_s: Array, z_t: Array, lse_s: Array, lse_t: Array, delta: Array | None = None
    ) -> tuple[Array, Array]:
        """w, the larger of p and q, and x = log(q / p). lse and delta are [B, 1]."""
        xp, clip = self.xp, self.xp.clip
        z_s, z_t = clip(z_s, min=FLOOR), clip(z_t, min=FLOOR)
        w = self.exp(xp.maximum(z_s - lse_s, z_t - lse_t))
        x = (z_s - z_t) - (lse_s - lse_t)
        if self.student_first:
            x = -x
        if delta is None:
            return w, x
        x = x - delta
        return w + w * (clip(xp.sign(x), min=0.0) * xp.expm1(-delta)), x

    def first_sums(self, w: Array, x: Array) -> tuple[Array, Array]:
        """Terms of the sums that delta needs: of p, and of q - p."""
        more = -self.xp.sign(x) * (w * self.near0(-self.xp.abs(x)).expm1)
        return w - self.xp.clip(more, min=0.0), more

    def delta(self, total: Array, excess: Array) -> Array:
        return self.xp.log1p(excess / total)

    def terms(self, w: Array, x: Array) -> tuple[Array, Array, PairSums]:
        """`terms_of`."""
        sign = self.xp.sign(x)
        right = self.xp.clip(sign, min=0.0)
        sides = sign, 1.0 - right, right
        return self.terms_of(w, x, sides, self.near0(-self.xp.abs(x)))

    def named(self, sums: Iterable[Array]) -> PairSums:
        """Those that the kind has, in their order."""
        rows = iter(sums)
        return PairSums(*(next(rows) if one else None for one in self.sums))

    def from_sums(self, sums: PairSums) -> tuple[Array, DzTerms]:
        """Step 5, of what is not negative, and infinite beyond `INFINITE`."""
        value, dz = self.value_and_dz(sums.total, sums.value / sums.total, sums)
        value = self.xp.where(value < 0.0, 0.0, value)
        infinite = value > INFINITE
        if not self.finite_slope:
            dz = DzTerms(*(self.xp.where(infinite, math.nan, x) for x in dz))
        return self.xp.where(infinite, math.inf, value), dz


class KL(Kind):
    """KL(p : q), of either direction."""

    drops = True

    def kl_terms(self, w: Array, sides: Sides, near: Near0) -> tuple[Array, Array]:
        """Terms of q - p, and of the divergence."""
        sign, left, right = sides
        return -sign * (w * near.expm1), w * (right * near.psi + left * near.phi)

    def kl(self, total: Array, value: Array, sums: PairSums) -> tuple[Array, Array]:
        """(sum of q) / (sum of p) - 1, and the divergence."""
        excess = sums.excess / total
        # Exact, as the sum of p exp(x) is 1 + excess.
        return excess, value - self.series(self.xp.log1p(excess))


class ForwardKL(KL):
    """KL(teacher : student): dz = q - p, q the student's."""

    name = "forward_kl"
    student_first = False
    sums = (True, True, True, False)

    def terms_of(
        self, w: Array, x: Array, sides: Sides, near: Near0
    ) -> tuple[Array, Array, PairSums]:
        """`Kind.terms_of`: a is q - p."""
        more, value = self.kl_terms(w, sides, near)
        # p is multiplied by what is small: it may be rounded at the size of w.
        p = w - self.xp.clip(more, min=0.0)
        return p, more, PairSums(p, value, more, None)

    def value_and_dz(self, total: Array, value: Array, sums: PairSums) -> tuple[Array, DzTerms]:
        """`Kind.value_and_dz`."""
        excess, value = self.kl(total, value, sums)
        gain = 1.0 / (total + sums.excess)
        # Of equal logits +0, so that dz is.
        return value, DzTerms(gain, self.xp.where(excess == 0.0, 0.0, -gain * excess))

    def with_nll(self, dz: DzTerms, total: Array, weight: float) -> DzTerms:
        """`Kind.with_nll`: p_S is gain (a + p)."""
        return DzTerms(dz.gain + weight * dz.gain, dz.shift + weight * dz.gain)


class ReverseKL(KL):
    """KL(student : teacher): dz = p (D - x), p the student's."""

    name = "reverse_kl"
    student_first = True
    sums = (True, True, True, True)
    finite_slope = False

    def terms_of(
        self, w: Array, x: Array, sides: Sides, near: Near0
    ) -> tuple[Array, Array, PairSums]:
        """`Kind.terms_of`: a is p x."""
        more, value = self.kl_terms(w, sides, near)
        _, left, right = sides
        p = left * w + right * (w * near.exp)
        a = p * x
        return p, a, PairSums(p, value, more, a)

    def value_and_dz(self, total: Array, value: Array, sums: PairSums) -> tuple[Array, DzTerms]:
        """`Kind.value_and_dz`."""
        _, value = self.kl(total, value, sums)
        return value, DzTerms(-1.0 / total, (1.0 / total) * (sums.slope / total))


class JSD(Kind):
    """beta KL(teacher : m) + (1 - beta) KL(student : m), m their mixture with that weight."""

    name = "jsd"
    student_first = False
    sums = (True, True, False, True)
    takes_beta = twice = True

    def terms_of(
        self, w: Array, x: Array, sides: Sides, near: Near0
    ) -> tuple[Array, Array, PairSums]:
        """`Kind.terms_of`, of p_S and p_S v, v = log(p_S / m). With u = log(p_T / m), v - u = x:
        one of the two is a log1p of t = expm1(-|x|), which overflows nowhere."""
        _, left, right = sides
        less, t, beta = w * near.exp, near.expm1, self.beta
        p, q = left * w + right * less, left * less + right * w
        part = -self.xp.log1p((left * (1.0 - beta) + right * beta) * t)
        u, v = part - right * x, part + left * x
        m = beta * p + (1.0 - beta) * q
        a = q * v
        value = m * (beta * self.psi(u) + (1.0 - beta) * self.psi(v))
        return q, a, PairSums(q, value, None, a)

    def psi(self, x: Array) -> Array:
        """Of numbers of either sign, none far above 0."""
        above = self.xp.clip(x, min=0.0)
        below = self.near0(x - above)
        # psi(x) of x > 0 is exp(x) phi(-x).
        return below.psi + self.exp(above) * self.near0(-above).phi

    def value_and_dz(self, total: Array, value: Array, sums: PairSums) -> tuple[Array, DzTerms]:
        """`Kind.value_and_dz`."""
        gain = (1.0 - self.beta) / total
        return value, DzTerms(gain, -gain * (sums.slope / total))


KINDS: dict[str, type[Kind]] = {x.name: x for x in (ForwardKL, ReverseKL, JSD)}
