"""Class probabilities as labels, and the cross-entropy that they make of logits, written once for
both frameworks: steps 4 to 6 of `xentlib.nll` where a label is a distribution.

With q the probabilities, c the class weights and eps the label smoothing,

    a_v = c_v ((1 - eps) q_v + eps / V),   loss = sum_v a_v (lse - z_v) + z_loss lse^2
    dz_v = p_v sum(a) - a_v + 2 z_loss lse p_v

lse - z_v is log S - (z_v - m), with m the largest logit and S the sum of exp(z - m), whose 1 is
left out of it: of the largest class log1p of a small number keeps the digits that lse has rounded
away. Where that class has p > 1/2, 1 - p is -expm1(-log S), so that one-hot labels have the
gradients of class indices.

Shapes: B tokens, V classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xentlib.math.softmax import INF, Algebra, BlockStats, LossOptions, NonTargetStats

Array = Any
# A log-probability stands no lower; where a class with any has it the loss is beyond `INFINITE`.
FAR, INFINITE = 1e30, 1e12
SOFT_LABELS = "soft_labels"  # in place of a kind of divergence


class Largest(NamedTuple):
    """Of a token's logits: [B] each."""

    m: Array
    log_total: Array  # log S
    lse: Array
    entropy: Array  # 0 where it was not asked for


class SoftSums(NamedTuple):
    """Over classes: [blocks, B] or [B] each, or terms [B, V]."""

    total: Array  # of a
    loglik: Array  # of a (z - lse)
    q_loglik: Array | None  # of q (z - lse), where that is another


@dataclass(frozen=True)
class CrossEntropy:
    """Bound to a framework: its namespace, an exp of [B, V], steps 4 and 5 of tokens; and to the
    numbers of a call, which are those of class indices."""

    xp: Any
    exp: Any
    algebra: Algebra
    options: LossOptions
    vocab_size: Any = 1

    def stats(self, z_y: Array, rest: NonTargetStats) -> Largest:
        """Of the logit of any class and the statistics of all others."""
        xp, none = self.xp, self.xp.zeros_like(z_y)
        blocks = BlockStats(
            m=xp.stack((xp.where(z_y == -INF, 0.0, z_y), rest.m)),
            ones=xp.stack((xp.where(z_y == -INF, none, 1.0), rest.ones)),
            s=xp.stack((none, rest.s)),
            sum_ed=None if rest.sum_ed is None else xp.stack((none, rest.sum_ed)),
        )
        every = self.algebra.together(blocks)
        total, above_one = every.ones + every.s, (every.ones - 1.0) + every.s
        log_total = xp.where(above_one < 1.0, xp.log1p(above_one), xp.log(total))
        # A maximum that is not finite leaves nothing to compare: NaN, as log_softmax has it.
        # XLA has lost a NaN of z_y, summed over shards, in the maximum of two.
        none = (every.ones == 0) | xp.isinf(every.m) | xp.isnan(z_y)
        log_total = xp.where(none, xp.nan, log_total)
        entropy = xp.zeros_like(log_total)
        if every.sum_ed is not None:
            entropy = log_total - every.sum_ed / total
        return Largest(every.m, log_total, every.m + log_total, entropy)

    def log_p(self, z: Array, of: Largest) -> Array:
        """Of each class; a finite number of one at -inf, so that without any probability it adds
        nothing. `of` has an axis for classes."""
        log_p = (z - of.m) - of.log_total
        return self.xp.clip(log_p, min=-FAR)

    def target(self, q: Array, c: Array | None) -> Array:
        """a of each class, of which `c` are the weights."""
        a = q
        eps = self.options.label_smoothing
        if eps:
            kept = 1.0 - eps
            a = self.algebra.rounded(kept * q) + eps / self.vocab_size
        return a if c is None else a * c

    def from_sums(self, sums: SoftSums) -> tuple[Array, Array, Array]:
        """Per token: the sum of a, the loss, and sum q log p."""
        loglik = sums.loglik if sums.q_loglik is None else sums.q_loglik
        finite = (self.xp.where(x < -INFINITE, -INF, x) for x in (sums.loglik, loglik))
        loss, q_logprob = finite
        return sums.total, -loss, q_logprob

    def regularised(self, nll: Array, of: Largest) -> tuple[Array, Array, Array | None]:
        """Per token: the loss, the part of it that z-loss is, and the factor of p in dz, None where
        dz is a - p total alone."""
        loss, z_term = self.algebra.regularised(nll, of.lse, self.options)
        return loss, z_term, self.algebra.lse_slope(of.lse, self.options)

    def at_top(self, a: Array, total: Array, of: Largest) -> Array:
        """a - p total of the largest class, where its p > 1/2."""
        return (a - total) - total * self.xp.expm1(-of.log_total)
