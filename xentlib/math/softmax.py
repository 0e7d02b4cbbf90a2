"""Steps 5 and 6 of `xentlib.nll` per token, written once: the same operations in the same order in
both frameworks, on vectors with one entry per token.

The products and the pass over logits stand in each backend's `core/`, and so does what differs on
purpose: JAX's products of `chunked_logprobs`, Triton's programs, which have both steps in float64.
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


# Columns of a block, counted from the vocabulary's first: its statistics are the same bits in every
# shard that holds all of it.
BLOCK_COLUMNS = 128
# An exact sum is made of words, integers that the dtype of this element size holds: how many bits
# each lies below the one before, the first below 1. Of up to 2^20 columns none overflows (2^24,
# 2^53), and what is lost of a term is below 2^-73.
WORD_BITS = {4: (0, *[11] * 7), 8: (33, 40)}


class BlockStats(NamedTuple):
    """Of the columns other than the target, d = z - max, by blocks: [blocks, tokens] each.

    Entries of exp(d) that are 1 are counted, the others summed: a sum that holds a 1 rounds a small
    remainder away, and lse near 0 with it (3.7 ULP against 1.7, row A3).
    """

    m: Array
    ones: Array  # how many exp(d) are 1; 0 where there is no column, or none above -inf
    s: Array  # sum of the exp(d) below 1
    sum_ed: Array | None  # sum of exp(d) * d: entropy
    top: Array | None = None  # column of the largest, the first of several; exact to 2^24
    sum_d: Array | None = None  # [tokens] over all blocks, d of the largest m: label smoothing


class NonTargetStats(NamedTuple):
    """The same of all columns together: [tokens] each."""

    m: Array
    ones: Array
    s: Array
    sum_ed: Array | None
    top: Array | None
    sum_d: Array | None

    def as_block(self) -> BlockStats:
        """Of columns that are one block."""
        fields = [None if x is None else x[None] for x in self[:-1]]
        return BlockStats(*fields)._replace(sum_d=self.sum_d)


class BlockSums(NamedTuple):
    """Over blocks, of exp(z - m) with the m of all: [tokens], and [words, tokens] of `words`."""

    ones: Array
    s: Array
    sum_ed: Array | None = None  # of -d


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

    dz_v = p_v (alpha + beta (z_v - lse)) - gamma w_v for the rest, dz_y = target for its label.
    """

    alpha: Array
    beta: Array | None  # of an entropy
    gamma: Array | None  # of label smoothing
    target: Array
    more: Array | None = None  # of further classes [tokens, K], whose columns are not of the rest


class LossOptions(Protocol):
    """What a loss makes of a token's statistics."""

    @property
    def label_smoothing(self) -> float: ...
    @property
    def z_loss(self) -> Any: ...  # a number, or an array of JAX


class Algebra(NamedTuple):
    """Bound to a framework: its namespace, its most accurate exp, `cast(x, like)`, `rounded`, of
    products that a compiler must not contract with a sum, and `wide`, to the dtype of exact sums.
    """

    xp: Any
    exp: Any
    cast: Any
    rounded: Any
    wide: Any

    def exp_difference(self, a: Array, b: Array) -> Array:
        """exp(a - b) with the rounding error of the difference put back (TwoDiff).

        At a - b = -50 that error alone would be 2e-6, four times the bound of row A4.
        """
        d = a - b
        back = d - a
        error = (a - (d - back)) - (b + back)
        # A difference that overflows has no error to put back.
        return self.exp(d) * self.xp.where(d == -INF, 1.0, 1.0 + error)

    def below(self, rest: BlockStats | NonTargetStats, m: Array) -> Array:
        """How far the rest's own maximum is below that of all; never so far that a product with it
        overflows before it meets its factor of 0, as classes that are masked with finfo.min did."""
        return self.xp.where(rest.ones == 0, 0.0, self.xp.clip(rest.m - m, min=FLOOR))

    def largest(self, blocks: BlockStats) -> Array:
        """[tokens] m of all blocks; -inf where there is none."""
        return self.xp.amax(self.xp.where(blocks.ones == 0, -INF, blocks.m), 0)

    def block_sums(self, m: Array, blocks: BlockStats) -> tuple[BlockSums, Array | None]:
        """Sums over blocks as terms of those that have `m`, no smaller, for maximum: exact, so that
        neither the order of blocks nor who adds them changes a bit; and the first column with it.
        """
        where, m = self.xp.where, m[None]
        none = blocks.ones == 0
        lower = where(none, -INF, blocks.m) < m  # false where either is NaN
        scale = where(none, 0.0, self.exp_difference(blocks.m, m))
        total = blocks.ones + blocks.s
        ones = where(lower, 0.0, blocks.ones).sum(0)
        s, sum_ed = self.words(where(lower, scale * total, blocks.s)), None
        if blocks.sum_ed is not None:
            moved = self.rounded(self.below(blocks, m) * total)
            sum_ed = self.words(-(scale * (blocks.sum_ed + moved)))
        first = None
        if blocks.top is not None:
            first = self.xp.amin(where(lower | none, INF, blocks.top), 0)
        return BlockSums(ones, s, sum_ed), first

    def words(self, x: Array) -> Array:
        """Exact sums, below 2^20 in size, of x over its first axis, as words [words, tokens]; words
        of several such sums add up to those of all."""
        x, words = self.wide(self.rounded(x)), []
        for bits in WORD_BITS[x.dtype.itemsize]:
            x = x * 2.0**bits
            word = self.xp.trunc(x)
            words.append(word.sum(0))
            x = x - word
        return self.xp.stack(words)

    def value(self, words: Array, like: Array) -> Array:
        """The number that words are of, in the dtype of `like`, rounded where they meet."""
        total = 0.0
        for word, bits in reversed(list(zip(words, WORD_BITS[words.dtype.itemsize], strict=True))):
            total = (total + word) * 2.0**-bits
        return self.cast(total, like)

    def together(self, blocks: BlockStats) -> NonTargetStats:
        """Statistics of all columns, where all blocks are here."""
        m = self.largest(blocks)
        m = self.xp.where(m == -INF, 0.0, m)
        sums, first = self.block_sums(m, blocks)
        return self.from_sums(m, sums, first, blocks.sum_d)

    def from_sums(
        self, m: Array, sums: BlockSums, top: Array | None, sum_d: Array | None
    ) -> NonTargetStats:
        sum_ed = None if sums.sum_ed is None else -self.value(sums.sum_ed, m)
        return NonTargetStats(m, sums.ones, self.value(sums.s, m), sum_ed, top, sum_d)

    def moved(self, sum_d: Array, weights: Array | float, a: Array, b: Array) -> Array:
        """Sums of d of some columns, with that weight, relative to b in place of a; a is -inf where
        there are none."""
        return sum_d + self.xp.where(a == -INF, 0.0, weights * (a - b))

    def token_stats(
        self, z_y: Array, rest: NonTargetStats, vocab_size: int, label: TargetInfo
    ) -> TokenStats:
        """Step 5, from the target's logit and the statistics of the rest."""
        xp = self.xp
        m_rest = xp.where(rest.ones == 0, -INF, rest.m)
        m = xp.maximum(z_y, m_rest)
        scale = xp.where(rest.ones == 0, 0.0, self.exp_difference(rest.m, m))
        r = self.rounded(scale * (rest.ones + rest.s))
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
            moved = self.rounded(self.below(rest, m) * (rest.ones + rest.s))
            rest_part = self.rounded(scale * (rest.sum_ed + moved))
            own_part = self.rounded(xp.where(t == 0, 0.0, t * (z_y - m)))
            entropy = log_total - (rest_part + own_part) / total
        if rest.sum_d is not None:
            others = label.total - label.weight
            target_part = label.weight * logprob
            mean_logp = (rest.sum_d + others * (rest.m - lse) + target_part) / vocab_size
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
        return self.regularised(nll, stats.lse, options)

    def regularised(self, nll: Array, lse: Array, options: LossOptions) -> tuple[Array, Array]:
        """Per token, of a loss of labels of either kind: with what the options add of lse, and the
        part of that which z-loss is."""
        loss, z_term = nll, self.xp.zeros_like(nll)
        if not is_zero(options.z_loss):
            z_term = options.z_loss * lse * lse
        return loss + z_term, z_term

    def lse_slope(self, lse: Array, options: LossOptions) -> Array | None:
        """The derivative by lse of what `regularised` adds; None where that is nothing."""
        slope = None
        if not is_zero(options.z_loss):
            slope = self.rounded(2.0 * options.z_loss * lse)
        return slope

    def values(self, stats: TokenStats, label: TargetInfo, options: LossOptions) -> Array:
        """[7, tokens]: loss, its z-loss part, logprob, entropy, lse, correct, predicted."""
        loss, z_term = self.token_loss(stats, label, options)
        predicted = self.xp.zeros_like(loss) if stats.predicted is None else stats.predicted
        values = (loss, z_term, stats.logprob, stats.entropy, stats.lse, stats.correct, predicted)
        return self.xp.stack(values)

    def coefficients(
        self,
        lse: Array,
        p_rest: Array,
        factor: Array,
        label: TargetInfo,
        options: LossOptions,
        vocab_size: int,
    ) -> Coefficients:
        """Step 6, per token: of dz times the factor."""
        eps, uniform = options.label_smoothing, options.label_smoothing / vocab_size
        extra = self.lse_slope(lse, options)
        if extra is None:
            extra = self.xp.zeros_like(lse)
        slope: Array = 1.0 + extra
        left: Array | float = eps - uniform
        if weighted(label):
            weighed = self.rounded((1.0 - eps) * label.weight)
            slope, left = weighed + extra, 0.0
            if uniform:  # 0 times a sum with inf is NaN: 1 / count of a class that is not there
                slope = weighed + self.rounded(uniform * label.total) + extra
                left = self.rounded(uniform * (label.total - label.weight))
        return Coefficients(
            alpha=factor * slope,
            beta=None,
            gamma=factor * uniform if uniform else None,
            # slope * p_y - (1 - eps) - eps / V with p_y = 1 - p_rest: exactly -p_rest without
            # options.
            target=factor * (extra + left - self.rounded(slope * p_rest)),
        )


def weighted(label: TargetInfo) -> bool:
    """Whether classes have weights."""
    return not isinstance(label.weight, float)


def is_zero(option: Any) -> bool:
    """Whether a trace knows it; of an array none does."""
    return isinstance(option, (int, float)) and option == 0
