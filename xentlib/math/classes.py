"""Log-probabilities over a kept set, and of several classes of each token, written once for both
frameworks: from the logits of the target and of K further classes, which have been taken out of
their rows, and the statistics of all others, "the rest".

A class that counts is a block of one column, the rest is another block, and they are put together
as the blocks of a vocabulary are: exactly, whatever their order. Where a set is kept the rest does
not count.

With p_k the probability of a class, G the sum of all gradients of log-probabilities of a token and
own_k those of class k,

    dz_k = own_k - p_k G + p_k [g_lse - g_entropy (log p_k + entropy)]

for the classes told apart, of the largest own_t (1 - p_t) - p_t (G - own_t) with 1 - p_t as step 5
has it; and for each class of the rest, whose own_k is 0, alpha and beta of step 6.

Shapes: N tokens, K further classes: those that are kept, in ascending order, then those of `ids`;
M candidates for the `top_k` most probable ones, which are further classes behind these.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xentlib.math.softmax import FLOOR, INF, Algebra, BlockStats, NonTargetStats, TargetInfo

Array = Any  # a tensor or an array of the backend
# A tail's log-probability stands no lower where its p divides: exp(80) is a float32, and classes of
# a smaller tail have a p that is as good as 0.
LEAST_TAIL = -80.0
FAR = 2.0**100  # above all logits
NO_CLASS = 2**31 - 1  # stands behind all classes


class Wanted(NamedTuple):
    """Classes of a call, flat."""

    labels: Array  # [N]
    valid: Array  # [N]
    ids: Array  # [N, K], -1 for none
    kept: int  # how many of them are of a kept set; -1: no set is kept, all classes are


class Values(NamedTuple):
    """[N] each, but for `ids_logprobs` [N, K less those kept]."""

    logprob: Array
    entropy: Array
    lse: Array
    correct: Array
    ids_logprobs: Array
    tail: Array  # log-probability of all classes but `ids`, where no set is kept


class Top(NamedTuple):
    """Of `top_k`: [N, top_k] each."""

    ids: Array  # the largest first, of several that are equal the lowest; -1 for none
    logprobs: Array


class Residuals(NamedTuple):
    """What a backward needs beside the inputs."""

    log_p: Array  # [1 + K, N], of the target and the further classes; -inf where one does not count
    lse: Array  # [N], as are the next
    entropy: Array
    top: Array  # which of them is the largest
    rest_of_top: Array  # 1 - p of that one
    tail: Array


class Upstream(NamedTuple):
    """Gradients of the values; 0 for tokens that are not valid."""

    logprob: Array
    entropy: Array | None
    lse: Array
    ids_logprobs: Array
    tail: Array | None = None


class Gradients(NamedTuple):
    """Of the logits: [1 + K, N] of the target and the further classes, and of the rest
    dz_v = p_v (alpha + beta (z_v - lse)), [N] each."""

    z: Array
    alpha: Array
    beta: Array | None


class Classes(NamedTuple):
    """Bound to a framework: its namespace, steps 4 and 5 of tokens, and along rows `places`,
    `argsort` (stable), `search` (the first place not below), `take` and `sum` in their order."""

    xp: Any
    algebra: Algebra
    positions: Any
    argsort: Any
    search: Any
    take: Any
    sum: Any

    def first(self, ids: Array) -> Array:
        """Which ids are the first of their kind in their row."""
        order = self.argsort(ids)
        ascending = self.take(ids, order)
        first: Array = self.take(order, self.search(ascending, ids)) == self.positions(ids)[None]
        return first

    def member(self, ascending: Array, ids: Array) -> Array:
        """Which ids are in their row of a set."""
        place = self.xp.clip(self.search(ascending, ids), 0, ascending.shape[1] - 1)
        member: Array = self.take(ascending, place) == ids
        return member

    def whole(self, want: Wanted) -> Array:
        """[N] where no set is kept."""
        if want.kept < 0:
            return self.xp.ones_like(want.valid)
        whole: Array = want.ids[:, want.kept - 1] < 0
        return whole

    def outside(self, want: Wanted) -> Array:
        """[N] whose label is not among those kept."""
        of_label = (want.ids[:, : max(0, want.kept)] == want.labels[:, None]).any(1)
        outside: Array = want.valid & ~self.whole(want) & ~of_label
        return outside

    def counts(self, want: Wanted) -> Array:
        """[N, K] which further classes count: each class once, and the target in its own column."""
        xp, kept, ids = self.xp, want.ids[:, : max(0, want.kept)], want.ids[:, max(0, want.kept) :]
        of_ids = self.first(ids) & self.whole(want)[:, None]
        counts: Array = xp.concatenate((self.ascends(kept), of_ids), 1)
        return counts & (want.ids >= 0) & (want.ids != want.labels[:, None])

    def values(self, z: Array, rest: NonTargetStats, want: Wanted) -> tuple[Values, Residuals]:
        """From logits [1 + K, N] and what the others have."""
        xp, algebra, whole = self.xp, self.algebra, self.whole(want)
        counts = xp.concatenate((xp.ones_like(want.valid)[None], self.counts(want).T))
        counted = xp.where(counts, z, -INF)
        top = algebra.cast(xp.argmax(counted, 0), want.labels)
        z_top = xp.amax(counted, 0)
        of_top = self.positions(z.T)[:, None] == top[None]
        there = xp.where(of_top | (counted == -INF), xp.zeros_like(z), 1.0)
        none, ones = xp.zeros_like(z), xp.where(whole, rest.ones, 0.0)
        blocks = BlockStats(
            m=xp.concatenate((xp.where(counts, z, 0.0), rest.m[None])),
            ones=xp.concatenate((there, ones[None])),
            s=xp.concatenate((none, xp.where(whole, rest.s, 0.0)[None])),
            sum_ed=None
            if rest.sum_ed is None
            else xp.concatenate((none, xp.where(whole, rest.sum_ed, 0.0)[None])),
        )
        others = algebra.together(blocks)
        stats = algebra.token_stats(z_top, others, 1, TargetInfo(top, 1.0, 1.0))
        # Both terms are negative: the sum keeps their digits.
        log_p = xp.where(of_top, stats.logprob[None], (z - z_top[None]) + stats.logprob[None])
        log_p = xp.where(z == -INF, -INF, log_p)
        total = xp.where(rest.ones > 0, rest.ones, 1.0) - 1.0 + rest.s
        of_rest = (rest.m - z_top) + (xp.log1p(total) + stats.logprob)
        of_rest = xp.where(rest.ones > 0, of_rest, -INF)
        tail = xp.logaddexp(of_rest, xp.where(self.labelled(want), -INF, log_p[0]))
        bad = self.outside(want)
        largest = xp.amax(xp.where(counts[1:], z[1:], -INF), 0)
        largest = xp.maximum(largest, xp.where(whole & (rest.ones > 0), rest.m, -INF))
        values = Values(
            self.clean(log_p[0], want, bad),
            self.clean(stats.entropy, want, bad),
            self.clean(stats.lse, want, bad),
            want.valid & ~bad & (z[0] > largest),
            self.of_ids(log_p[1 + max(0, want.kept) :].T, want, whole),
            xp.where(want.valid, tail, 0.0),
        )
        log_p = xp.where(counts, log_p, -INF)
        return values, Residuals(log_p, stats.lse, stats.entropy, top, stats.p_rest, tail)

    def values_and_top(
        self, z: Array, rest: NonTargetStats, want: Wanted, candidates: Array, top_k: int
    ) -> tuple[Values, Residuals, Top]:
        """The same with the `top_k` largest, of the candidates of a pass, [2, M, N]: classes as
        numbers of the compute dtype, -1 for none, and their logits. All that were taken out of a
        row count in its values; a backward needs the largest alone."""
        known, number = want.ids.shape[1], max(0, want.kept)
        z, want = self.with_candidates(z, want, candidates)
        values, kept = self.values(z, rest, want)
        ids = want.ids[:, known : known + top_k]
        of_ids, of_top = values.ids_logprobs[:, : known - number], values.ids_logprobs
        of_top = of_top[:, known - number : known - number + top_k]
        of_top = self.xp.where((ids < 0) & want.valid[:, None], -INF, of_top)
        # The largest of all is among them; of a NaN it may be any place.
        top = self.xp.clip(kept.top, max=known + top_k)
        kept = kept._replace(log_p=kept.log_p[: 1 + known + top_k], top=top)
        return values._replace(ids_logprobs=of_ids), kept, Top(ids, of_top)

    def with_candidates(self, z: Array, want: Wanted, candidates: Array) -> tuple[Array, Wanted]:
        """Logits and classes with M candidates behind the others, in the order of `Top`: of a
        kept set its classes, of the whole vocabulary the candidates."""
        if not candidates.shape[1]:
            return z, want
        xp, number = self.xp, max(0, want.kept)
        whole, kept = self.whole(want)[:, None], want.ids[:, :number]
        offered = xp.where(whole, self.algebra.cast(candidates[0].T, want.ids), -1)
        offered = xp.concatenate((xp.where(self.ascends(kept), kept, -1), offered), 1)
        offered = xp.where(want.valid[:, None], offered, -1)
        z_offered = xp.concatenate((z[1 : 1 + number].T, candidates[1].T), 1)
        z_offered = xp.where(offered < 0, -INF, z_offered)
        # Sorted twice, as ties are decided by the class; the second sort is stable. A NaN is first,
        # or a row of which no set is kept would lose it with the places of a set.
        order = self.argsort(xp.where(offered < 0, NO_CLASS, offered))
        descending = -self.take(xp.where(xp.isnan(z_offered), INF, z_offered), order)
        order = self.take(order, self.argsort(descending))[:, : candidates.shape[1]]
        z = xp.concatenate((z, self.take(z_offered, order).T))
        return z, want._replace(ids=xp.concatenate((want.ids, self.take(offered, order)), 1))

    def ascends(self, kept: Array) -> Array:
        """Which classes of a kept set are not the one before."""
        before = self.xp.concatenate((self.xp.full_like(kept[:, :1], -1), kept[:, :-1]), 1)
        ascends: Array = kept != before
        return ascends

    def clean(self, x: Array, want: Wanted, bad: Array) -> Array:
        """NaN where the label was not kept, 0 where the token is not valid."""
        return self.xp.where(want.valid, self.xp.where(bad, self.xp.nan, x), 0.0)

    def of_ids(self, log_p: Array, want: Wanted, whole: Array) -> Array:
        """Log-probabilities of `ids`: 0 where there is none, -inf of what was not kept."""
        xp, ids = self.xp, want.ids[:, max(0, want.kept) :]
        return xp.where(self.asked(want), xp.where(self.there(ids, want, whole), log_p, -INF), 0.0)

    def labelled(self, want: Wanted) -> Array:
        """[N] whose label is one of `ids`."""
        labelled: Array = (want.ids[:, max(0, want.kept) :] == want.labels[:, None]).any(1)
        return labelled

    def asked(self, want: Wanted) -> Array:
        """Which of `ids` are any."""
        asked: Array = (want.ids[:, max(0, want.kept) :] >= 0) & want.valid[:, None]
        return asked

    def there(self, ids: Array, want: Wanted, whole: Array) -> Array:
        """Which ids are among the classes that count."""
        if want.kept < 0:
            return whole[:, None]
        there: Array = whole[:, None] | self.member(want.ids[:, : want.kept], ids)
        return there

    def lse_of_rest(self, kept: Residuals, want: Wanted) -> Array:
        """[N] what p of the rest is made with: where a set is kept no class outside of it counts,
        and one that is 89 above the set would be exp of it, inf, times 0."""
        return self.xp.where(self.whole(want), kept.lse, FAR)

    def gradients(self, g: Upstream, kept: Residuals, want: Wanted) -> Gradients:
        """Of what `values` was given."""
        xp, whole, number = self.xp, self.whole(want), max(0, want.kept)
        ids, labels = want.ids[:, number:], want.labels[:, None]
        valid = want.valid & ~self.outside(want)
        of_ids = self.asked(want) & self.there(ids, want, whole) & valid[:, None]
        of_ids = xp.where(of_ids, g.ids_logprobs, 0.0)
        g_logprob, g_lse = (xp.where(valid, x, 0.0) for x in (g.logprob, g.lse))
        # The target's among them are its own.
        to_label = self.sum(xp.where(ids == labels, of_ids, 0.0))
        g_classes = xp.concatenate(
            (
                (g_logprob + to_label)[None],
                xp.zeros_like(kept.log_p[1 : 1 + number]),
                xp.where(ids == labels, 0.0, of_ids).T,
            )
        )
        classes = xp.concatenate((labels, want.ids), 1).T
        top_class = self.take(classes.T, kept.top[:, None])[:, 0]
        of_top = classes == top_class[None]
        own_top = self.sum(xp.where(of_top, g_classes, 0.0).T)
        total = g_logprob + self.sum(of_ids)
        p, rounded = self.algebra.exp(kept.log_p), self.algebra.rounded
        slope, others = g_lse - total, g_lse - (total - own_top)
        beta = None
        if g.entropy is not None:
            g_entropy = xp.where(valid, g.entropy, 0.0)
            beta = xp.where(whole, -g_entropy, 0.0)
            above = xp.clip(kept.log_p, min=FLOOR) + kept.entropy[None]
            above = rounded(g_entropy[None] * above)
            slope_C, others_C = slope[None] - above, others[None] - above
            slope = slope - rounded(g_entropy * kept.entropy)
        else:
            slope_C, others_C = slope[None], others[None]
        of_rest = g_classes + rounded(p * slope_C)
        exactly = rounded(own_top * kept.rest_of_top)[None] + rounded(p * others_C)
        place = self.positions(g_classes.T)[:, None] == kept.top[None]
        z = xp.where(place, exactly, xp.where(of_top, 0.0, of_rest))
        if g.tail is not None:
            z, slope = self.with_tail(z, slope, xp.where(valid, g.tail, 0.0), p, kept, want)
        return Gradients(z, xp.where(whole, slope, 0.0), beta)

    def with_tail(
        self, z: Array, slope: Array, g: Array, p: Array, kept: Residuals, want: Wanted
    ) -> tuple[Array, Array]:
        """With the gradient of the tail: p_v / p_tail - p_v of its classes, -p_v of the others."""
        xp, rounded = self.xp, self.algebra.rounded
        weight = g * self.algebra.exp(-xp.clip(kept.tail, min=LEAST_TAIL))
        of_label = xp.where(self.labelled(want), 0.0, rounded(weight * p[0]))
        of_label = xp.concatenate((of_label[None], xp.zeros_like(z[1:])))
        return z + of_label - rounded(g[None] * p), slope + (weight - g)
