"""What a step returned, held against the oracle and, where it misses, against every defect.

A result is right, or fits a reading, if it holds the contract's row of two implementations (A9,
rho / u). The fewest defects that fit are the answer: one alone, or one and a number that is left
over, then two, then three. Rounding to 16 bits has no numbers of its own, as nobody says in which
order it was done: it fits where the error points the way that rounding moves the exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from xentlib.contract import ROWS, U, rho
from xentlib.tools.audit.defects import DEFECTS, forms, scales
from xentlib.tools.audit.hypotheses import Hypothesis, Oracle
from xentlib.tools.audit.problem import Array, Problem

ROW = "A9"
(LIMIT,) = (bound for bound in ROWS[ROW].bounds if bound.metric == "rho / u")
# The cosine of the angle between the error and what rounding does. Of a thousand entries, errors
# that have nothing to do with each other are at 0.03.
ALIKE = 0.5
# Logits of 4 to 8 move by up to 2^-7 in bfloat16, and their probabilities by as much of themselves;
# sums that cancel, such as those of d bias, by some times more. The number that is left over is
# off by less.
ROUNDED, LEFT_OVER = 2.0**-4 / U, 2.0**-8 / U
AXES = ("labels", "divisor", "reduced", "head", "upstream")
# Of pairs and of triples, defects with no more forms than this, so that a search that finds nothing
# is over in seconds: not the ends of chunks of every length, and of triples no rounding.
MOST_FORMS = {0: 0, 1: 1000, 2: 20, 3: 4}

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
        return len(self.names) + (0.0 if self.factor == 1.0 else 1.5)


def distance(got: Sequence[Array], want: Sequence[Array]) -> float:
    """The largest rho / u of them; infinite where something is not finite."""
    distances = [rho(g, w) for g, w in zip(got, want, strict=True)]
    return max((x if np.isfinite(x) else np.inf for x in distances), default=0.0)


def holds(value: float) -> bool:
    return LIMIT.holds(value)


def tell(oracle: Oracle, predict: Predict) -> tuple[list[str], dict[str, str]]:
    """Names of the defects that would show in this problem, and why the others would not."""
    right, visible, unseen = predict(Hypothesis()), [], {}
    kind = oracle.problem.kind
    for defect in DEFECTS:
        if kind not in defect.kinds:
            continue
        readings_of_it = list(forms(defect, oracle.problem))
        if not readings_of_it:
            unseen[defect.name] = f"needs {defect.needs}"
        elif all(distance(predict(reading), right) > 2 * LIMIT.value for reading in readings_of_it):
            visible.append(defect.name)
        else:
            unseen[defect.name] = "too small to show with these options"
    return visible, unseen


def explain(problem: Problem, got: Sequence[Array], predict: Predict, most: int = 3) -> list[Fit]:
    """The smallest sets of up to `most` defects that give `got`; several where they cannot be told
    apart, none where nothing fits."""
    if not all(np.isfinite(x).all() for x in got):
        return []
    named = scales(problem)
    best: list[Fit] = []
    for number in range(most + 1):
        if best and best[0].cost < number:
            break
        for names, reading in readings(problem, number):
            for fit in _fits(names, reading, got, predict, named):
                if not best or fit.cost < best[0].cost:
                    best = [fit]
                elif fit.cost == best[0].cost:
                    best.append(fit)
    exact = [fit for fit in best if not fit.rounded]
    if not exact:
        best.sort(key=lambda fit: fit.distance)
        return best[:1]
    # Several forms of one defect are one answer.
    return list({fit.names: fit for fit in reversed(exact)}.values())[::-1]


def readings(problem: Problem, number: int) -> Iterator[tuple[tuple[str, ...], Hypothesis]]:
    """Every reading with so many defects, of different axes."""
    by_axis: dict[str, list[tuple[str, Any]]] = {axis: [] for axis in AXES}
    for defect in DEFECTS:
        variants = [getattr(reading, defect.axis, None) for reading in forms(defect, problem)]
        if defect.axis in AXES and len(variants) <= MOST_FORMS[number]:
            by_axis[defect.axis] += [(defect.name, value) for value in variants]
    for axes in combinations(AXES, number):
        for chosen in product(*(by_axis[axis] for axis in axes)):
            values = {axis: value for axis, (_, value) in zip(axes, chosen, strict=True)}
            yield tuple(name for name, _ in chosen), replace(Hypothesis(), **values)


def _fits(
    names: tuple[str, ...],
    reading: Hypothesis,
    got: Sequence[Array],
    predict: Predict,
    named: dict[str, list[float]],
) -> Iterator[Fit]:
    """The reading itself, or a multiple of it."""
    rounded = bool(reading.head.dtype)
    own = predict(reading)
    s = _multiple(got[0], own[0])
    if s is None:
        return
    tight = LEFT_OVER if rounded else LIMIT.value
    away = distance(got, [s * x for x in own])
    if away > (ROUNDED if rounded else LIMIT.value):
        return
    if rounded:
        exact = predict(replace(reading, head=reading.head._replace(dtype="")))
        away = 1.0 - _cosine(got[0] - s * exact[0], s * own[0] - s * exact[0])
        if away > 1.0 - ALIKE:
            return
    one = _near(s, 1.0, tight)
    close = [name for name, values in named.items() if any(_near(s, v, tight) for v in values)]
    if rounded and not one and not close:
        return
    if one:
        if names:
            yield Fit(names, reading, away, rounded=rounded)
    elif close:
        for name in close:
            yield Fit((*names, name), replace(reading, scale=s), away, rounded=rounded)
    else:
        yield Fit(names, replace(reading, scale=s), away, factor=s)


def _multiple(got: Array, want: Array) -> float | None:
    """How many times `want` comes nearest to `got`; None where it does not come near at all."""
    size = float(np.vdot(want, want))
    s = float(np.vdot(got, want)) / size if size else 0.0
    gap = float(np.linalg.norm((got - s * want).ravel()))
    return s if s and gap <= abs(s) * np.sqrt(size) * U * ROUNDED else None


def _cosine(x: Array, y: Array) -> float:
    size = float(np.linalg.norm(x.ravel()) * np.linalg.norm(y.ravel()))
    return float(np.vdot(x, y)) / size if size else 0.0


def _near(s: float, value: float, units: float) -> bool:
    return abs(s - value) <= units * U * abs(value)
