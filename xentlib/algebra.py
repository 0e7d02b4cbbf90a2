"""Steps 5 and 6 of `xentlib.nll` per token, written once: the same operations in the same order in
both frameworks, on vectors with one entry per token.

The products and the pass over logits stand in each backend's `core/`, and so does what differs on
purpose: JAX's products of `chunked_logprobs`, Triton's program of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

Array = Any  # a tensor or an array of the backend
INF = float("inf")
# exp of this is 0 in float64 too: stands for -inf where a product with 0 must stay 0.
FLOOR = -1e4


class WantedStats(NamedTuple):
    """Statistics of a call beside those that every call needs."""

    entropy: bool = False
    smoothing: bool = False
    predicted: bool = False


class NonTargetStats(NamedTuple):
    """Of the columns other than the target, d = z - max: what `token_stats` needs.

    Entries of exp(d) that are 1 are counted, the others summed: a sum that holds a 1 rounds a small
    remainder away, and lse near 0 with it (3.7 ULP against 1.7, row A3).
    """

    m: Array
    ones: Array  # how many exp(d) are 1; 0 where there is no column, or none above -inf
    s: Array  # sum of the exp(d) below 1
    sum_ed: Array | None  # sum of exp(d) * d: entropy
    sum_d: Array | None  # sum of d, or of w d with class weights: label smoothing
    top: Array | None = None  # column of the largest, the first of several; exact to 2^24


def unpack_stats(packed: Any, wanted: WantedStats) -> tuple[Array, NonTargetStats]:
    """The target's logit and the statistics out of rows [4 to 7, tokens], those that are wanted."""
    z_y, m, ones, s, *more = packed
    rows = iter(more)
    return z_y, NonTargetStats(m, ones, s, *(next(rows) if want else None for want in wanted))


class TargetInfo(NamedTuple):
    """What step 5 needs to know of each token's label."""

    target: Array  # its class
    weight: Array | float  # of that class; the number 1.0 without class weights
    total: Array | float  # weight of all classes


class TokenStats(NamedTuple):
    """Per token, in the compute dtype."""

    lse: Array
    logprob: Array
    p_y: Array
    p_rest: Array  # 1 - p_y, from r / S: no cancellation for confident tokens
    entropy: Array  # 0 where it was not asked for
    mean_logp: Array | None  # mean over the vocabulary of z - lse, or of w (z - lse)
    correct: Array  # 1 or 0
    predicted: Array | None = None  # the class of the largest logit, the first of several


class Coefficients(NamedTuple):
    """Of dz, per token: what a loss makes, and all that step 7 needs of it.

    dz_v = p_v (alpha + beta (z_v - lse)) - gamma w_v for the rest, dz_y = own for the target.
    """

    alpha: Array
    beta: Array | None  # of an entropy
    gamma: Array | None  # of label smoothing
    own: Array


class LossOptions(Protocol):
    """What a loss makes of a token's statistics."""

    @property
    def label_smoothing(self) -> float: ...
    @property
    def z_loss(self) -> Any: ...  # a number, or an array of JAX


class Algebra(NamedTuple):
    """Bound to a framework: its namespace, its most accurate exp, and `cast(x, like)`."""

    xp: Any
    exp: Any
    cast: Any

    def exp_difference(self, a: Array, b: Array) -> Array:
        """exp(a - b) with the rounding error of the difference put back (TwoDiff).

        At a - b = -50 that error alone would be 2e-6, four times the bound of row A4.
        """
        d = a - b
        back = d - a
        error = (a - (d - back)) - (b + back)
        # A difference that overflows has no error to put back.
        return self.exp(d) * self.xp.where(d == -INF, 1.0, 1.0 + error)

    def below(self, rest: NonTargetStats, m: Array) -> Array:
        """How far the rest's own maximum is below that of all; never so far that a product with it
        overflows before it meets its factor of 0, as classes that are masked with finfo.min did."""
        return self.xp.where(rest.ones == 0, 0.0, self.xp.clip(rest.m - m, min=FLOOR))

    def relative_to(self, m: Array, rest: NonTargetStats, weights: Array | float) -> NonTargetStats:
        """Statistics of some columns, as terms of the sums that have `m`, no smaller, for maximum.

        `weights` is that of the columns, for label smoothing: their number without any.
        """
        where = self.xp.where
        none = rest.ones == 0
        top = where(none, -INF, rest.m) == m
        scale = where(none, 0.0, self.exp_difference(rest.m, m))
        total = rest.ones + rest.s
        sum_ed = sum_d = None
        if rest.sum_ed is not None:
            sum_ed = scale * (rest.sum_ed + self.below(rest, m) * total)
        if rest.sum_d is not None:
            sum_d = rest.sum_d + weights * (rest.m - m)
        first = None if rest.top is None else where(top & ~none, rest.top, INF)
        ones, s = where(top, rest.ones, 0.0), where(top, rest.s, scale * total)
        return NonTargetStats(m, ones, s, sum_ed, sum_d, first)

    def joined(
        self,
        a: NonTargetStats,
        a_weights: Array | float,
        b: NonTargetStats,
        b_weights: Array | float,
    ) -> NonTargetStats:
        """Of the columns of both."""
        m = self.xp.maximum(*(self.xp.where(x.ones == 0, -INF, x.m) for x in (a, b)))
        m = self.xp.where(m == -INF, 0.0, m)
        a, b = self.relative_to(m, a, a_weights), self.relative_to(m, b, b_weights)
        sum_ed = None if a.sum_ed is None else a.sum_ed + b.sum_ed
        sum_d = None if a.sum_d is None else a.sum_d + b.sum_d
        first = None if a.top is None else self.xp.minimum(a.top, b.top)
        return NonTargetStats(m, a.ones + b.ones, a.s + b.s, sum_ed, sum_d, first)

    def token_stats(
        self, z_y: Array, rest: NonTargetStats, vocab_size: int, label: TargetInfo
    ) -> TokenStats:
        """Step 5, from the target's logit and the statistics of the rest."""
        xp = self.xp
        m_rest = xp.where(rest.ones == 0, -INF, rest.m)
        m = xp.maximum(z_y, m_rest)
        scale = xp.where(rest.ones == 0, 0.0, self.exp_difference(rest.m, m))
        r = scale * (rest.ones + rest.s)
        t = self.exp(z_y - m)
        total = r + t
        # A maximum that is not finite leaves nothing to compare: NaN, as log_softmax has it. A row
        # of -inf throughout must not look like a label that has all of the probability.
        top = (z_y == m) & ~xp.isinf(m)
        # S without the 1 of its largest term, which would round a small remainder away (row A3).
        above_one = xp.where(top, r, (rest.ones - 1.0) + rest.s + t)
        log_total = xp.where(above_one < 1.0, xp.log1p(above_one), xp.log(total))
        logprob = xp.where(top, -log_total, (z_y - m) - log_total)
        lse = xp.where(xp.isinf(m), m, m + log_total)
        p_y, p_rest = t / total, r / total
        entropy, mean_logp = xp.zeros_like(lse), None
        if rest.sum_ed is not None:
            rest_part = scale * (rest.sum_ed + self.below(rest, m) * (rest.ones + rest.s))
            own_part = xp.where(t == 0, 0.0, t * (z_y - m))
            entropy = log_total - (rest_part + own_part) / total
        if rest.sum_d is not None:
            others = label.total - label.weight
            own = label.weight * logprob
            mean_logp = (rest.sum_d + others * (rest.m - lse) + own) / vocab_size
        predicted = None
        if rest.top is not None:
            target = self.cast(label.target, lse)
            predicted = xp.where(z_y == m_rest, xp.minimum(target, rest.top), rest.top)
            predicted = xp.where(z_y > m_rest, target, predicted)
        correct = self.cast(z_y > m_rest, lse)
        return TokenStats(lse, logprob, p_y, p_rest, entropy, mean_logp, correct, predicted)

    def token_loss(
        self, stats: TokenStats, label: TargetInfo, options: LossOptions
    ) -> tuple[Array, Array]:
        """Per token: the loss, and the part of it that z-loss contributes."""
        eps, nll = options.label_smoothing, -stats.logprob
        if weighted(label):
            nll = nll * label.weight
        if stats.mean_logp is not None:
            nll = (1.0 - eps) * nll - eps * stats.mean_logp
        z_term = self.xp.zeros_like(nll)
        if not is_zero(options.z_loss):
            z_term = options.z_loss * stats.lse * stats.lse
        return nll + z_term, z_term

    def values(self, stats: TokenStats, label: TargetInfo, options: LossOptions) -> Array:
        """[7, tokens]: loss, its z-loss part, logprob, entropy, lse, correct, predicted."""
        loss, z_term = self.token_loss(stats, label, options)
        predicted = self.xp.zeros_like(loss) if stats.predicted is None else stats.predicted
        values = (loss, z_term, stats.logprob, stats.entropy, stats.lse, stats.correct, predicted)
        return self.xp.stack(values)

    def coefficients(
        self,
        stats: TokenStats,
        factor: Array,
        label: TargetInfo,
        options: LossOptions,
        vocab_size: int,
    ) -> Coefficients:
        """Step 6, per token: of dz times the factor."""
        eps, uniform = options.label_smoothing, options.label_smoothing / vocab_size
        extra = self.xp.zeros_like(stats.lse)
        if not is_zero(options.z_loss):
            extra = 2.0 * options.z_loss * stats.lse
        slope: Array = 1.0 + extra
        left: Array | float = eps - uniform
        if weighted(label):
            slope, left = (1.0 - eps) * label.weight + extra, 0.0
            if uniform:  # 0 times a sum with inf is NaN: 1 / count of a class that is not there
                slope = (1.0 - eps) * label.weight + uniform * label.total + extra
                left = uniform * (label.total - label.weight)
        return Coefficients(
            alpha=factor * slope,
            beta=None,
            gamma=factor * uniform if uniform else None,
            # slope * p_y - (1 - eps) - eps / V with p_y = 1 - p_rest: exactly -p_rest without
            # options.
            own=factor * (extra + left - slope * stats.p_rest),
        )


def weighted(label: TargetInfo) -> bool:
    """Whether classes have weights."""
    return not isinstance(label.weight, float)


def is_zero(option: Any) -> bool:
    """Whether a trace knows it; of an array none does."""
    return isinstance(option, (int, float)) and option == 0
