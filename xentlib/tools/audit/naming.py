"""Names for what was read: the defects of the table whose factors are those of the map.

The head is settled first, as the map is exact under the right one alone; then which labels and over
which ranks, by the tokens that have a part; then how much each counts. Numbers that are left over
are names too, one or two of them. What has been named is held against the gradient itself.

Rounding to 16 bits leaves no exact map, and has no numbers of its own, as nobody says in which
order it was done: it fits where the error points the way that rounding moves the exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from xentlib.contract import ROWS, U, rho
from xentlib.tools.audit.defects import DEFECTS, forms
from xentlib.tools.audit.hypotheses import DIVERGENCE, LABELS, Head, Hypothesis, Numbers
from xentlib.tools.audit.oracle import Oracle
from xentlib.tools.audit.problem import IGNORE, Array
from xentlib.tools.audit.reader import CLOSE, TERMS, Map, read, stacked
from xentlib.ulp import round_to

ROW = "A6"
(LIMIT,) = (bound for bound in ROWS[ROW].bounds if bound.metric == "rho / u")
# Of all numbers together a factor is known to 1 u or two.
FACTOR = 16.0
# The cosine of the angle between the error and what rounding does. Of a thousand entries, errors
# that have nothing to do with each other are at 0.03.
ALIKE = 0.5
# Logits of 4 to 8 move by up to 2^-7 in bfloat16, and their probabilities by as much of themselves;
# sums that cancel, such as those of d bias, by some times more. The number that is left over is
# off by less.
ROUNDED, LEFT_OVER = 2.0**-4 / U, 2.0**-8 / U
PLAIN = Hypothesis()
# A bias whose head's weight is right has the right logits.
OF_BIAS = ("labels", "divisor", "reduced", "terms", "lost", "scale")
OF_VALUES = ("labels", "divisor", "reduced", "head", "terms", "scale")

Predict = Callable[[Hypothesis], Sequence[Array]]


class Fit(NamedTuple):
    """Defects that together give what came; `factor` is a number left over that has no name."""

    names: tuple[str, ...]
    reading: Hypothesis
    distance: float  # rho / u to the reading's own numbers; of rounding 1 - cosine
    factor: float = 1.0
    rounded: bool = False

    @property
    def cost(self) -> float:
        return len(self.names) + (0.0 if self.factor == 1.0 else 2.5)


def distance(got: Sequence[Array], want: Sequence[Array]) -> float:
    """The largest rho / u of them; infinite where something is not finite."""
    distances = [rho(g, w) for g, w in zip(got, want, strict=True)]
    return max((x if np.isfinite(x) else np.inf for x in distances), default=0.0)


def of_head(numbers: Numbers, bias: bool = True) -> list[Array]:
    weight = np.asarray(numbers.d_weight, np.float64)
    if numbers.d_bias is None or not bias:
        return [weight]
    return [weight, np.asarray(numbers.d_bias, np.float64)]


# --- gradients ------------------------------------------------------------------------------------


def explain(
    oracle: Oracle, got: Sequence[Array], hidden: bool, beside: Array | None = None
) -> tuple[list[Fit], Map | None]:
    """The smallest sets of defects that give the gradients of the head, or of the hidden states;
    several where they cannot be told apart, none where nothing fits. And the map. `beside`: those
    of the hidden states, if it is of the head."""
    if not all(np.isfinite(x).all() for x in got) or not got[0].any():
        return [], None

    def predict(reading: Hypothesis) -> Sequence[Array]:
        if hidden:
            return [oracle.d_hidden(reading)]
        return of_head(oracle.numbers(reading), len(got) > 1)

    maps: list[tuple[tuple[str, ...], Map]] = []
    # Cheapest first: other heads for right tokens, before other tokens.
    for number, deep in ((0, False), (1, False), (0, True), (2, False), (1, True)):
        maps += [(n, read(oracle, got[0], head, hidden, deep)) for n, head in heads(oracle, number)]
        if any(one.exact for _, one in maps):
            break
    if not hidden and oracle.problem.ranks > 1 and not any(one.exact for _, one in maps):
        maps.append(((), read(oracle, got[0], Head(), rows=True)))
    exact = [(names, one) for names, one in maps if one.exact]
    best = min(maps, key=lambda x: x[1].residual * (1.0 + len(x[0])))[1]
    fits = [fit for names, one in exact for fit in _named(oracle, got, predict, names, one)]
    if not fits and len(got) > 1:  # the bias may have a defect of its own
        alone = [got[0]]
        fits = [fit for names, one in exact for fit in _named(oracle, alone, predict, names, one)]
    if not exact:
        fits = [] if hidden else [*_of_entries(oracle, got, predict)]
        fits = fits or _rounded(oracle, got, predict, best) or [*_stored(oracle, got, predict)]
    return _cheapest(fits), exact[0][1] if exact else best


def _of_entries(oracle: Oracle, got: Sequence[Array], predict: Predict) -> Iterator[Fit]:
    """What was done to the finished gradient, and leaves no factors."""
    right = predict(PLAIN)[0]
    decay = multiple(got[0] - right, np.broadcast_to(oracle.w, right.shape))
    clip = float(np.abs(got[0]).max() / np.abs(right).max())
    for name, reading in (
        ("weight decay in the gradient", PLAIN._replace(decay=decay)),
        ("each value clipped", PLAIN._replace(clip=clip)),
    ):
        away = distance(got, predict(reading))
        if LIMIT.holds(away):
            yield Fit((name,), reading, away)


def _stored(oracle: Oracle, got: Sequence[Array], predict: Predict) -> Iterator[Fit]:
    """Near the right gradient, and every entry is a number of 16 bits; further from it than one
    rounding moves it, if it was added up so."""
    away = distance(got, predict(PLAIN))
    for dtype, once in (("bfloat16", 2.0**-9), ("float16", 2.0**-12)):
        if away <= ROUNDED and np.array_equal(round_to(got[0], dtype), got[0]):
            added = away * U > once and oracle.problem.kind == "step"
            name = f"gradients {'added in' if added else 'rounded to'} 16 bits"
            yield Fit((name,), PLAIN, away)


def _cheapest(fits: list[Fit]) -> list[Fit]:
    """Several forms of one defect are one answer; of rounding the nearest."""
    least = min((fit.cost for fit in fits), default=0.0)
    fits = [fit for fit in fits if fit.cost == least]
    rounded = [fit.distance for fit in fits if fit.rounded]
    fits = [fit for fit in fits if not rounded or fit.distance <= min(rounded) + 1e-4]
    return list({frozenset(fit.names): fit for fit in reversed(fits)}.values())[::-1]


def _values(oracle: Oracle, axis: str) -> list[tuple[tuple[str, ...], Any]]:
    """The right choice, and those of all defects of an axis, each with its name."""
    if axis not in oracle.choices:
        choices: list[tuple[tuple[str, ...], Any]] = [((), getattr(PLAIN, axis))]
        for defect in DEFECTS:
            if defect.axis == axis:
                every = forms(defect, oracle.problem)
                choices += [((defect.name,), getattr(x, axis)) for x in every]
        oracle.choices[axis] = choices
    chosen: list[tuple[tuple[str, ...], Any]] = oracle.choices[axis]
    return chosen


def heads(oracle: Oracle, number: int) -> Iterator[tuple[tuple[str, ...], Head]]:
    """With so many defects, nothing rounded."""
    single = [x for x in _values(oracle, "head")[1:] if not x[1].dtype]
    plain = Head()
    for chosen in combinations(single, number):
        fields: dict[str, Any] = {}
        for _, head in chosen:
            own = {k: x for k, x in head._asdict().items() if x != getattr(plain, k)}
            if fields.keys() & own.keys() - {"changes"}:
                break
            own["changes"] = fields.get("changes", ()) + head.changes
            fields |= own
        else:
            names = [name for name, _ in fields["changes"]] if chosen else []
            if len(set(names)) == len(names):
                yield tuple(n for of, _ in chosen for n in of), Head(**fields)


def _readings(
    oracle: Oracle, token_map: Map, hidden: bool
) -> Iterator[tuple[tuple[str, ...], Hypothesis, float]]:
    """Whose factors are those of the map, up to a number; and how far they are from it."""
    factors, close = stacked(token_map.factors), token_map.close
    places = np.array([name in (*LABELS, DIVERGENCE) for name in TERMS])
    there = (np.abs(factors) > close)[places]
    # Under rounding a factor may be taken for none, or none for one.
    spared = 0 if token_map.exact else 0.1 * there.sum()
    right, *others = _values(oracle, "reduced")
    others = [] if hidden else [x for x in others if x[1].rows == token_map.rows]
    sums = others if token_map.rows else [right, *others]
    rest = [_values(oracle, axis) for axis in ("divisor", "terms", "upstream")]
    masks = oracle.choices.setdefault("masks", {})  # which do not depend on the head
    for i, (n1, labels) in enumerate(_values(oracle, "labels")):
        for n2, reduced in sums:
            reading = Hypothesis(labels=labels, reduced=reduced, head=token_map.head)
            if (i, reduced, hidden) not in masks:
                masks[i, reduced, hidden] = stacked(_of(oracle, reading, hidden))[places] != 0
            if (masks[i, reduced, hidden] != there).sum() > spared:
                continue
            for (n3, divisor), (n4, terms), (n5, upstream) in product(*rest):
                one = reading._replace(divisor=divisor, terms=terms, upstream=upstream)
                own = stacked(_of(oracle, one, hidden)) / close
                size = float(np.vdot(own, own))
                s = float(np.vdot(own, factors / close)) / size if size else 0.0
                away = float(np.abs(factors / close - s * own).max())
                if s and away <= 1.0:
                    yield (*n1, *n2, *n3, *n4, *n5), one, away


def _of(oracle: Oracle, reading: Hypothesis, hidden: bool) -> dict[str, Array]:
    factors = oracle.factors(reading)
    if hidden:
        return {name: oracle.of_hidden(x, reading)[None] for name, x in factors.items()}
    return factors


def _named(
    oracle: Oracle, got: Sequence[Array], predict: Predict, names: tuple[str, ...], token_map: Map
) -> Iterator[Fit]:
    hidden = got[0].ndim == 5
    readings = [x[:2] for x in _readings(oracle, token_map, hidden)]
    if not readings and not hidden:
        readings = [*_clipped(oracle, token_map)]
    for more, reading in readings:
        for lost in (False, True) if len(got) > 1 else (False,):
            one = reading._replace(lost=lost)
            every = (*more, *names, *["bias gradient lost"] * lost)
            yield from _fits(oracle, every, one, got, predict)


def _fits(
    oracle: Oracle,
    names: tuple[str, ...],
    reading: Hypothesis,
    got: Sequence[Array],
    predict: Predict,
) -> Iterator[Fit]:
    """The reading itself, or a multiple of it."""
    own = predict(reading)
    s = _multiple(got[0], own[0])
    away = np.inf if s is None else distance(got, [s * x for x in own[: len(got)]])
    if s is None or not LIMIT.holds(away):
        return
    for more in _numbers(oracle, reading, s, FACTOR):
        if names or more:
            yield Fit((*names, *more), reading._replace(scale=s), away)
    if not any(True for _ in _numbers(oracle, reading, s, FACTOR)):
        yield Fit(names, reading._replace(scale=s), away, factor=s)


def _numbers(
    oracle: Oracle, reading: Hypothesis, s: float, units: float
) -> Iterator[tuple[str, ...]]:
    """Names of a number: none, one, or two. Where other tokens than the right ones count, the sum
    may be divided by either number of them."""
    problem = oracle.problem
    took = reading.labels.labels
    counts = {1.0} if took is None else {1.0, (took != IGNORE).sum() / problem.count}
    clipped = reading.divisor == "clipped" or isinstance(reading.divisor, tuple)
    if clipped or any(_near(s, x, units) for x in counts):  # to any norm
        yield ()
        return
    named = _values(oracle, "scale")[1:]
    single = [name for name, x in named if any(_near(s, x * c, units) for c in counts)]
    pairs = [
        (*a, *b) for (a, x), (b, y) in combinations(named, 2) if a != b and _near(s, x * y, units)
    ]
    yield from dict.fromkeys(single or pairs)


def _clipped(oracle: Oracle, token_map: Map) -> Iterator[tuple[tuple[str, ...], Hypothesis]]:
    """Each micro-batch has a factor of its own, and its gradient, or what was added up so far, a
    norm that others have too."""
    factors = token_map.factors.get(oracle.declared[0])
    if factors is None or oracle.problem.micro_batches == 1:
        return
    of = np.indices(oracle.problem.ids.shape)[1].reshape(-1)
    for names, labels in _values(oracle, "labels"):
        reading = Hypothesis(labels=labels, head=token_map.head)
        weights = oracle.weights(reading)
        if not np.array_equal(weights[0] != 0, np.abs(factors[0]) > CLOSE * np.abs(factors).max()):
            continue
        each = [
            factors[0][(of == m) & (weights[0] != 0)] for m in range(oracle.problem.micro_batches)
        ]
        if any(np.ptp(x) > CLOSE * np.abs(factors).max() for x in each):
            continue
        own = np.array([x.mean() for x in each])
        for base in ("tokens", "micro-batches"):
            a = oracle.weights(reading._replace(divisor=base))[0]
            ratio = own / np.array([a[of == m].max() for m in range(len(own))])
            sums = oracle.sums(token_map.head, factors[0])
            so_far = np.cumsum(sums, axis=0) / np.append(ratio[1:], 1.0)[:, None]
            for norms, clipped in (
                (np.linalg.norm(sums, axis=1), ratio < 1 - CLOSE),
                (np.linalg.norm(so_far, axis=1), ratio < np.append(ratio[1:], 1.0) * (1 - CLOSE)),
            ):
                if clipped.sum() > 1 and np.ptp(norms[clipped]) < CLOSE * norms.max():
                    divisor = tuple(own.tolist())
                    yield (*names, "each micro-batch clipped"), reading._replace(divisor=divisor)
                    return


def _rounded(oracle: Oracle, got: Sequence[Array], predict: Predict, token_map: Map) -> list[Fit]:
    """Of any head that rounds, with what the map says as far as rounding lets it be read."""
    if token_map.residual > ROUNDED * U:
        return []
    fits = []
    near = sorted(_readings(oracle, token_map, got[0].ndim == 5), key=lambda x: x[2])[:3]
    plain = ((), Hypothesis(head=token_map.head), 0.0)
    for more, reading, _ in (plain, *(x for x in near if x[0])):
        exact = predict(reading)
        for names, head in _values(oracle, "head")[1:]:
            if not head.dtype:
                continue
            rounds = reading.head._replace(dtype=head.dtype, rounded=head.rounded)
            own = predict(reading._replace(head=rounds))
            s = _multiple(got[0], own[0])
            if s is None or distance(got, [s * x for x in own]) > ROUNDED:
                continue
            # Without what is a multiple of the exact numbers, in which two errors are always alike.
            errors = [x - multiple(x, exact[0]) * exact[0] for x in (got[0], own[0])]
            away = 1.0 - _cosine(*errors)
            if away <= 1.0 - ALIKE:
                fits += [
                    Fit((*more, *names, *x), reading._replace(scale=s), away, rounded=True)
                    for x in _numbers(oracle, reading, s, LEFT_OVER)
                ]
    return fits


def _multiple(got: Array, want: Array) -> float | None:
    """How many times `want` comes nearest to `got`; None where it does not come near at all."""
    size = float(np.vdot(want, want))
    s = float(np.vdot(got, want)) / size if size else 0.0
    gap = float(np.linalg.norm((got - s * want).ravel()))
    return s if s and gap <= abs(s) * np.sqrt(size) * U * ROUNDED else None


def multiple(got: Array, want: Array) -> float:
    """How many times `want` comes nearest to `got`."""
    return float(np.vdot(got, want) / (np.vdot(want, want) or 1.0))


def _cosine(x: Array, y: Array) -> float:
    size = float(np.linalg.norm(x.ravel()) * np.linalg.norm(y.ravel()))
    return float(np.vdot(x, y)) / size if size else 0.0


def _near(s: float, value: float, units: float) -> bool:
    return abs(s - value) <= units * U * abs(value)


# --- the loss, values, and the bias ---------------------------------------------------------------


def explain_values(
    oracle: Oracle, got: Array, predict: Predict, axes: Sequence[str] = OF_VALUES
) -> list[Fit]:
    """One defect that gives the loss, the values of every token, or the gradient of the bias. A
    number that is left over fits any loss, and so has no name here."""
    if not np.isfinite(got).all():
        return []
    fits = []
    for axis in axes:
        for names, value in _values(oracle, axis)[1:]:
            reading = PLAIN._replace(**{axis: value})
            away = distance([got], predict(reading))
            if LIMIT.holds(away):
                fits.append(Fit(names, reading, away))
    return _cheapest(fits)
