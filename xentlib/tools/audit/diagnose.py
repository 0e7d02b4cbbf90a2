"""What a step returned, held against the oracle and, where it misses, against every defect.

A result is right, or fits a reading, if it holds the contract's row of two implementations (A9,
rho / u). The fewest defects that fit are the answer: one alone, or one and a number that is left
over, then two, then three. Rounding to 16 bits has no numbers of its own, as nobody says in which
order it was done: it fits where the error points the way that rounding moves the exact numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np

from xentlib.contract import ROWS, U, rho
from xentlib.tools.audit.defects import DEFECTS, DIVERGENCE, forms
from xentlib.tools.audit.hypotheses import Hypothesis, Numbers, Oracle
from xentlib.tools.audit.problem import Array, Options, Problem, build
from xentlib.tools.audit.report import Finding, Report

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

HEAD, HIDDEN = "gradients of the head", "gradient of the hidden states"

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


# --- the report -----------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def oracle_of(kind: str, options: Options, ranks: int = 1) -> Oracle:
    """The problem, and what it gives; the same for every step that says the same of itself."""
    return Oracle(build(kind, options, ranks))


def judge(
    backend: str,
    oracle: Oracle,
    got: Numbers,
    changed: Sequence[str] = (),
    again: Callable[[], Numbers] | None = None,
) -> Report:
    """Hold the numbers of a step, [R, ...] each, against those of the oracle.

    Gradients of the head come first, as they say most: the loss and the gradient of the hidden
    states are looked into where those are right. What has no name gets a hint.

    Args:
        changed: names of what the step was given and has written to.
        again: calls the step once more.
    """
    problem, right, bias = oracle.problem, Hypothesis(), got.d_bias is not None
    value = "values" if problem.kind == "logprobs" else "loss"
    number = 1 if problem.kind == "step" else 2
    # Each with what a reading gives for it, and how many defects at most are looked for in it.
    quantities: tuple[tuple[str, list[Array | None], Predict, int], ...] = (
        (HEAD, [*_of_head(got, bias)], lambda r: _of_head(oracle.numbers(r), bias), 3),
        (value, [got.loss], lambda r: [_shown(oracle.numbers(r), got)], number),
        (HIDDEN, [got.d_hidden], lambda r: [oracle.d_hidden(r)], 1),
    )
    findings: list[Finding] = []
    held: dict[str, float] = {}
    missing = []
    for of, arrays, predict, most in quantities:
        returned = [np.asarray(x, np.float64) for x in arrays if x is not None]
        if not returned:
            missing.append(of)
            continue
        wanted = predict(right)
        if of == HIDDEN and problem.kind == "step":
            wanted = [_own_multiple(returned[0], *wanted)]
        held[of] = distance(returned, wanted)
        if findings or LIMIT.holds(held[of]):
            continue
        fits, note = explain(problem, returned, predict, most), "the head's gradients are right"
        if of == HEAD:
            note = _of_the_loss(oracle, got, fits)
        elif of == value:
            fits = [fit for fit in fits if fit.factor == 1.0]
        if not fits:
            note = "; ".join(x for x in (note, _hint(returned, got, changed, again)) if x)
        names = tuple(fit.names for fit in fits)
        factor = fits[0].factor if fits else 1.0
        nearest = min((fit.distance for fit in fits), default=None)
        findings.append(Finding(of, names, factor, held[of], nearest, note))
    if problem.bias is not None and not bias:
        missing.append("gradient of the bias")
    looked_for = visible(problem.kind, problem.options, problem.ranks)
    return Report(
        backend, problem.kind, problem.text, tuple(findings), held, *looked_for, tuple(missing)
    )


def _own_multiple(got: Array, right: Array) -> Array:
    """The right gradient of hidden states in units of a step's own: a wrapper that takes the mean
    over ranks wants each rank's to have as many times the right one, and finished gradients may be
    scaled after the backward."""
    multiple: Array = max(float(np.vdot(got, right) / np.vdot(right, right)), 0.0) * right
    return multiple


def _of_head(numbers: Numbers, bias: bool = True) -> list[Array]:
    weight = np.asarray(numbers.d_weight, np.float64)
    if numbers.d_bias is None or not bias:
        return [weight]
    return [weight, np.asarray(numbers.d_bias, np.float64)]


def _shown(right: Numbers, got: Numbers) -> Array:
    """Of the values of log-probabilities, those that were returned."""
    assert right.loss is not None
    assert got.loss is not None
    return right.loss[:, : got.loss.shape[1]] if right.loss.ndim > 1 else right.loss


def _of_the_loss(oracle: Oracle, got: Numbers, fits: list[Fit]) -> str:
    if got.loss is None:
        return ""
    if LIMIT.holds(distance([got.loss], [_shown(oracle.numbers(Hypothesis()), got)])):
        return "the loss is right"
    for fit in fits:
        own = [_shown(oracle.numbers(fit.reading), got)]
        if distance([got.loss], own) <= max(LIMIT.value, 4 * fit.distance):
            return "the loss is wrong in the same way"
    return "the loss is wrong too"


def _hint(
    wrong: Sequence[Array],
    got: Numbers,
    changed: Sequence[str],
    again: Callable[[], Numbers] | None,
) -> str:
    """What is seen in numbers that no defect gives."""
    if not all(np.isfinite(x).all() for x in wrong):
        return "it holds inf or NaN"
    if not any(x.any() for x in wrong):
        return "it is 0 everywhere: detached on the way, or cleared"
    if changed:
        return f"the step has written to what it was given: {', '.join(changed)}"
    if again is None:
        return ""
    try:
        other = again()
    except Exception as error:  # noqa: BLE001 - the step's own, which is said
        return f"a second call raised {type(error).__name__}"
    if LIMIT.holds(distance([other.d_weight], [np.asarray(got.d_weight, np.float64)])):
        return ""
    return "a second call gave other gradients: it draws at random (dropout?), or keeps state"


@lru_cache(maxsize=16)
def visible(kind: str, options: Options, ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the defects that would show in this problem, and why the others would not."""
    oracle = oracle_of(kind, options, ranks)
    right = _of_head(oracle.numbers(Hypothesis()))
    names, unseen = [], {}
    for defect in DEFECTS:
        if kind not in defect.kinds:
            continue
        variants = list(forms(defect, oracle.problem))
        gradients = (_of_head(oracle.numbers(reading)) for reading in variants)
        if not variants:
            distils = oracle.problem.teacher is not None
            of_distilling = not distils and defect.needs.startswith(DIVERGENCE)
            unseen[defect.name] = f"needs {DIVERGENCE if of_distilling else defect.needs}"
        elif all(distance(x, right) > 2 * LIMIT.value for x in gradients):
            names.append(defect.name)
        else:
            unseen[defect.name] = "too small to show with these options"
    return tuple(names), unseen


# --- which defects fit ----------------------------------------------------------------------------


def distance(got: Sequence[Array], want: Sequence[Array]) -> float:
    """The largest rho / u of them; infinite where something is not finite."""
    distances = [rho(g, w) for g, w in zip(got, want, strict=True)]
    return max((x if np.isfinite(x) else np.inf for x in distances), default=0.0)


def explain(problem: Problem, got: Sequence[Array], predict: Predict, most: int = 3) -> list[Fit]:
    """The smallest sets of up to `most` defects that give `got`; several where they cannot be told
    apart, none where nothing fits."""
    if not all(np.isfinite(x).all() for x in got):
        return []
    named = {
        defect.name: [reading.scale for reading in forms(defect, problem)]
        for defect in DEFECTS
        if defect.axis == "scale"
    }
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
            yield tuple(name for name, _ in chosen), Hypothesis(**values)


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
        exact = predict(reading._replace(head=reading.head._replace(dtype="")))
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
            yield Fit((*names, name), reading._replace(scale=s), away, rounded=rounded)
    else:
        yield Fit(names, reading._replace(scale=s), away, factor=s)


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
