"""Log-probabilities over a kept set, and of several classes of each token, written once for both
frameworks, which differentiate it: from the logits of the target and of K further classes, and the
log-sum-exp of all others.

The classes that are told apart are the target, every other one that is kept or asked for, and "the
rest" as one class whose logit is its log-sum-exp: K + 2 logits of a token. What `chunked_logprobs`
says of a whole vocabulary its given-logits twin says of these, confident tokens with all of their
digits included; -inf takes out what does not count.

Shapes: N tokens, K further classes: those that are kept, then those of `ids`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from xentlib.logprobs import LogprobOutput

Array = Any  # a tensor or an array of the backend
INF = float("inf")


class ClassLogits(NamedTuple):
    """Of each token, in the compute dtype."""

    z: Array  # [1 + K, N] of the target and of the further classes
    rest_lse: Array  # [N] of all other classes; -inf where there are none
    rest_entropy: Array  # of their own distribution; 0 where it was not asked for
    rest_largest: Array  # without a gradient


class Wanted(NamedTuple):
    """What is asked for, flat: of `labels` and what is valid [N], of the others [N, any]."""

    labels: Array
    valid: Array
    kept: Array | None  # ascending; a row of -1 alone is the whole vocabulary
    ids: Array | None
    entropy: bool

    @property
    def further(self) -> list[Array]:
        return [x for x in (self.kept, self.ids) if x is not None]


class Group(NamedTuple):
    """The classes of a token that are told apart, [N, K + 2] or [N, K]."""

    logits: Array  # -inf where one does not count
    counts: Array  # which of the further classes do
    whole: Array  # [N] the vocabulary is: the rest counts


class Classes(NamedTuple):
    """Bound to a framework: its namespace, `exp`, along rows `places`, `argsort` (stable), `search`
    (the first place not below) and `take`, `constant` without a gradient, and
    `logprobs(logits, labels, valid, entropy=)`, a `LogprobOutput` of given logits."""

    xp: Any
    exp: Any
    places: Any
    argsort: Any
    search: Any
    take: Any
    constant: Any
    logprobs: Any

    def first(self, ids: Array) -> Array:
        """Which ids are the first of their kind in their row."""
        order = self.argsort(ids)
        ascending = self.take(ids, order)
        first: Array = self.take(order, self.search(ascending, ids)) == self.places(ids)
        return first

    def member(self, ascending: Array, ids: Array) -> Array:
        """Which ids are in their row of a set."""
        place = self.xp.clip(self.search(ascending, ids), 0, ascending.shape[1] - 1)
        member: Array = self.take(ascending, place) == ids
        return member

    def outside(self, wanted: Wanted) -> Array:
        """[N] whose label is not among those kept."""
        labels, kept = wanted.labels[:, None], wanted.kept
        if kept is None:
            return self.xp.zeros_like(wanted.valid)
        outside: Array = wanted.valid & (kept[:, -1] >= 0) & ~(kept == labels).any(1)
        return outside

    def group(self, of: ClassLogits, wanted: Wanted) -> Group:
        """A class counts once, the target in its own column."""
        xp, labels = self.xp, wanted.labels[:, None]
        whole, counts = xp.ones_like(wanted.valid), []
        if wanted.kept is not None:
            kept = wanted.kept
            whole = kept[:, -1] < 0
            before = xp.concatenate((xp.full_like(kept[:, :1], -1), kept[:, :-1]), 1)
            counts.append(kept != before)
        if wanted.ids is not None:
            counts.append(self.first(wanted.ids) & whole[:, None])
        further = xp.concatenate(wanted.further, 1)
        counted = xp.concatenate(counts, 1) & (further >= 0) & (further != labels)
        z = of.z.T
        rest = xp.where(whole, of.rest_lse, -INF)
        more = xp.where(counted, z[:, 1:], -INF)
        return Group(xp.concatenate((z[:, :1], more, rest[:, None]), 1), counted, whole)

    def output(self, of: ClassLogits, wanted: Wanted) -> LogprobOutput[Array]:
        """[N] or [N, any] each, in the compute dtype."""
        xp, labels = self.xp, wanted.labels
        group = self.group(of, wanted)
        # The largest is put to 0, and is the one whose log-probability has all of its digits: of
        # the others, whose p is 1/2 at most, z - lse has.
        top = xp.argmax(group.logits, 1)
        shift = self.constant(self.take(group.logits, top[:, None]))
        shifted = group.logits - shift
        told = self.logprobs(shifted, top, wanted.valid, entropy=wanted.entropy)
        of_top, lse = told.logprobs, told.lse
        logprob = xp.where(top == 0, of_top, shifted[:, 0] - lse)
        entropy = told.entropy
        if wanted.entropy:
            last = group.logits.shape[1] - 1
            of_rest = xp.where(top == last, of_top, shifted[:, -1] - lse)
            entropy = entropy + self.exp(of_rest) * of.rest_entropy
        z = of.z.T
        others = xp.amax(group.logits[:, 1:-1], 1)
        others = xp.maximum(others, xp.where(group.whole, of.rest_largest, -INF))
        correct = (z[:, 0] > others) & wanted.valid
        ids_logprobs = None
        if wanted.ids is not None:
            ids = wanted.ids
            classes = xp.concatenate((labels[:, None], *wanted.further), 1)
            # Of the rest no class: then none of the ids is the largest.
            place = xp.clip(top, 0, classes.shape[1] - 1)[:, None]
            top_class = xp.where(top[:, None] < classes.shape[1], self.take(classes, place), -1)
            z_ids = xp.where(ids == labels[:, None], z[:, :1], z[:, z.shape[1] - ids.shape[1] :])
            ids_logprobs = xp.where(ids == top_class, of_top[:, None], z_ids - shift - lse[:, None])
            if wanted.kept is not None:
                there = group.whole[:, None] | self.member(wanted.kept, ids)
                ids_logprobs = xp.where(there, ids_logprobs, -INF)
            ids_logprobs = xp.where((ids >= 0) & wanted.valid[:, None], ids_logprobs, 0.0)
        bad = self.outside(wanted)
        lse = xp.where(wanted.valid, lse + shift[:, 0], 0.0)
        logprob = xp.where(wanted.valid, logprob, 0.0)
        entropy = None if entropy is None else xp.where(bad, xp.nan, entropy)
        logprob, lse = (xp.where(bad, xp.nan, x) for x in (logprob, lse))
        return LogprobOutput(logprob, entropy, lse, correct & ~bad, ids_logprobs)
