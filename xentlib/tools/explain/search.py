"""Which causes explain a difference: all of it, or as much of it as can be explained.

A set of causes explains all where every token is within the tolerance of its reading; the smallest
sets are the answer, several where these tokens cannot distinguish them. Where none does, because
hidden states or head are others too, a set explains a part if

- its mean square remainder is less than a quarter of that of the difference. Log-probabilities that
  have nothing to do with each other lose half at most, to a reading that is all but constant;
- no set of as many causes leaves less than half of that;
- the difference has the effect of each cause once, not some multiple of it: its slope is 1 within
  four standard errors, and those are a fifth at most. The errors are those that hold whatever the
  remainder's size at each token (White's).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

import numpy as np

from xentlib.tools.explain.causes import CAUSES, Form, forms, pairs, reading
from xentlib.tools.explain.readings import BLOCK, NOISE, Array, Problem, Reading, Values, runs

Chosen = tuple[Form, ...]
ERRORS, WIDEST, TWICE = 4.0, 0.2, 2.0
# Of the mean square that may remain, at 32 tokens and at more.
SHARES = 0.5, 0.25
# Tokens that readings are held against first, and then at the least; causes of a set.
FEWEST, LEAST, MOST = 32, 96, 4


class Sample:
    """Values of readings at some tokens, each computed once; `place` are these among all."""

    def __init__(self, problem: Problem, at: Array, most: int) -> None:
        self.problem, self.place = problem, runs(len(at), most)
        self.at = at[self.place]
        self.values: dict[Reading, Values] = {}

    def compute(self, sets: Iterable[Chosen]) -> None:
        """At once, as some share a product."""
        wanted = {reading(self.problem, chosen) for chosen in sets} - self.values.keys()
        self.values |= self.problem.values(wanted, self.at)

    def of(self, chosen: Chosen) -> Values:
        self.compute([chosen])
        return self.values[reading(self.problem, chosen)]


class Search:
    """Readings are held against 32 tokens, then against some more, then against all."""

    def __init__(self, problem: Problem, at: Array) -> None:
        self.problem = problem
        some = max(LEAST, BLOCK // len(problem.heads["weight"]))
        self.samples = [Sample(problem, at, most) for most in (FEWEST, some, len(at))]
        _, self.some, self.all = self.samples
        self.looked_for: list[str] = []
        self.not_looked_for: dict[str, str] = {}
        self.visible: list[Form] = []
        every = forms(problem)
        # What does nothing beside kept ids may do something where these are not applied.
        self.bases: list[Chosen] = [(), *((form,) for form in every["kept ids not applied"])]
        for cause in CAUSES:
            shown = self._visible(every[cause.name])
            self.visible += shown
            if shown:
                self.looked_for.append(cause.name)
            else:
                why = "changes nothing here" if every[cause.name] else ""
                self.not_looked_for[cause.name] = why or f"needs {cause.needs}"

    def _visible(self, some: list[Form]) -> list[Form]:
        rest, shown = some, list[Form]()
        for base, sample in product(self.bases, self.samples[:2]):
            rest = [form for form in rest if form not in shown and (form,) != base]
            sample.compute([base, *((*base, form) for form in rest)])
            shown += [x for x in rest if differ(sample.of((*base, x)), sample.of(base))]
        return shown

    def explaining(self, sampled: Array) -> tuple[list[Chosen], bool]:
        """Sets that explain the log-probabilities of all tokens, and whether all of them."""
        alone: list[Chosen] = [(form,) for form in self.visible]
        both = [*pairs([form for form in self.visible if form.cause.paired])]
        for sets in (alone, both):
            whole = self._whole(sets, sampled)
            if whole:
                return whole, True
        best = self._parts(both, sampled) or self._parts(alone, sampled)
        while best and len(best[0]) < MOST:
            taken = {form.cause.field for form in best[0]}
            more = [(*best[0], form) for form in self.visible if form.cause.field not in taken]
            whole = self._whole(more, sampled)
            if whole:
                return whole, True
            further = self._parts(more, sampled)
            if not further:
                break
            best = further
        return best, False

    def one_rounding(self) -> float:
        """How far log-probabilities move in the mean where the hidden states have one rounding to
        bfloat16 more, as of other kernels before the head."""
        right = self.problem.right
        moved = self.problem.values([right, right._replace(operands=NOISE)], self.some.at)
        one, other = (values.logprobs for values in moved.values())
        return float(np.abs(one - other).mean())

    def _whole(self, sets: list[Chosen], sampled: Array) -> list[Chosen]:
        for sample in self.samples:
            sample.compute(sets)
            sets = [x for x in sets if within(sampled[sample.place], sample.of(x))]
        return _distinct(sets)

    def _parts(self, sets: list[Chosen], sampled: Array) -> list[Chosen]:
        """The set that explains most of it, and those that these tokens cannot distinguish from
        it."""
        for sample, share in zip(self.samples[:2], SHARES, strict=True):
            sample.compute(sets)
            rest = {x: remainder(sampled[sample.place], sample.of(x), sample.of(())) for x in sets}
            sets = [x for x in sets if rest[x] < share]
        sets = [x for x in sets if rest[x] <= TWICE * min(rest.values())]
        part = sorted((x for x in sets if self._has_each(x, sampled)), key=rest.__getitem__)
        return _distinct(x for x in part if not differ(self.some.of(x), self.some.of(part[0])))

    def _has_each(self, chosen: Chosen, sampled: Array) -> bool:
        """Whether the difference has the effect of each cause once."""
        values = self.some.of(chosen).logprobs
        with np.errstate(invalid="ignore"):  # classes that take no part
            moved = [values - self.some.of(without(chosen, form)).logprobs for form in chosen]
        rows = np.stack([sampled[self.some.place] - values, *moved])
        rows = rows[:, ~np.isnan(rows).any(axis=0)]
        if not np.isfinite(rows).all():
            return False
        slopes, errors = regressed(rows[0], rows[1:])
        return bool((errors <= WIDEST).all() and (np.abs(slopes) <= ERRORS * errors).all())


def _distinct(sets: Iterable[Chosen]) -> list[Chosen]:
    """Several forms of the same causes are one answer."""
    first: dict[tuple[str, ...], Chosen] = {}
    for chosen in sets:
        first.setdefault(tuple(form.cause.name for form in chosen), chosen)
    return [*first.values()]


def without(chosen: Chosen, form: Form) -> Chosen:
    return tuple(other for other in chosen if other is not form)


def regressed(rest: Array, effects: Array) -> tuple[Array, Array]:
    """Slopes of what remains on each effect, and White's standard errors; infinite errors where
    the effects are multiples of each other, or as many as tokens."""
    gram = effects @ effects.T
    if rest.size <= 2 * len(effects) or np.linalg.cond(gram) > 1e12:
        return np.zeros(len(effects)), np.full(len(effects), np.inf)
    inverse = np.linalg.inv(gram)
    slopes = inverse @ (effects @ rest)
    scored = effects * (rest - slopes @ effects)
    more = rest.size / (rest.size - len(effects))
    errors: Array = np.sqrt(more * np.diag(inverse @ (scored @ scored.T) @ inverse))
    return slopes, errors


def remainder(sampled: Array, values: Values, right: Values) -> float:
    """Mean square of what a reading leaves, by that of the whole difference; infinite where no
    token is compared."""
    rest, whole = sampled - values.logprobs, sampled - right.logprobs
    compared = ~np.isnan(rest + whole)
    if not compared.any():
        return np.inf
    size = max(float(np.mean(whole[compared] ** 2)), np.finfo(np.float64).tiny)
    return float(np.mean(rest[compared] ** 2)) / size


def within(sampled: Array, values: Values) -> bool:
    """Whether every token that is compared, half of them at least, is within its tolerance."""
    gap = np.abs(sampled - values.logprobs)
    compared = ~np.isnan(gap)
    return bool(2 * compared.sum() >= gap.size and (gap <= values.tolerance)[compared].all())


def differ(one: Values, other: Values) -> bool:
    """Whether a token can distinguish two readings."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(one.logprobs - other.logprobs)
    return bool((gap > one.tolerance + other.tolerance).any())
