"""What a step returned, held against the oracle and, where it misses, read and named.

A result is right, or fits a reading, if it holds the contract's norm of a gradient (A6,
rho / u). The gradients of the head are read first, as they say most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial

import numpy as np

from xentlib.contract import U
from xentlib.tools.audit import reader
from xentlib.tools.audit.defects import DEFECTS, DIVERGENCE, forms
from xentlib.tools.audit.hypotheses import Hypothesis, Numbers
from xentlib.tools.audit.naming import (
    FACTOR,
    LIMIT,
    OF_BIAS,
    Fit,
    distance,
    explain,
    explain_values,
    heads,
    multiple,
    of_head,
)
from xentlib.tools.audit.oracle import Oracle
from xentlib.tools.audit.problem import EMPTY_RANK, PADDED, THERE, Array, Options, Problem, build
from xentlib.tools.audit.reader import Map
from xentlib.tools.audit.report import Finding, Report

HEAD, HIDDEN = "gradients of the head", "gradient of the hidden states"
BIAS = "gradient of the bias"
RIGHT = "the head's gradients are right"
RIGHT_BESIDE = {BIAS: "the gradient of the head's weight is right"}
LOCAL = "not reduced over ranks"
# Of logits of a hundred float32 has a 2^-17 of a probability; what breaks is off by more.
ROUGH = 2.0**-10
# Of what no factors give no more than this comes from rounding.
ROUNDED = 2.0**-7


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
    rerun: Callable[[], Numbers] | None = None,
    run: Callable[[Problem], Numbers] | None = None,
) -> Report:
    """Hold the numbers of a step, [R, ...] each, against those of the oracle.

    Gradients of the head come first, as they say most: the loss and the gradient of the hidden
    states are looked into where those are right. What has no name gets a hint. A step that is right
    is run on what breaks real runs.

    Args:
        changed: names of what the step was given and has written to.
        rerun: calls the step once more.
        run: calls it on another problem.
    """
    problem, bias = oracle.problem, got.d_bias is not None
    value = "values" if problem.kind == "logprobs" else "loss"
    findings: list[Finding] = []
    held: dict[str, float] = {}
    notes, missing = [], []
    for name, returned, want in _quantities(oracle, got):
        of = name
        if not returned:
            missing.append(of)
            continue
        held[of] = distance(returned, want)
        off = abs(multiple(returned[0], want[0]) - 1.0) / U if of == HEAD else 0.0
        if findings or (LIMIT.holds(held[of]) and off <= FACTOR):
            continue
        token_map, first = None, distance(returned[:1], want[:1])
        if of == HEAD and LIMIT.holds(first) and off <= FACTOR:
            of, held[BIAS] = BIAS, held[HEAD]
            own = partial(_of_bias, oracle)
            fits = explain_values(oracle, returned[1], own, OF_BIAS)
        elif of == value:
            fits = explain_values(oracle, returned[0], lambda r: [_shown(oracle.numbers(r), got)])
            if any(fit.names == (LOCAL,) for fit in fits):
                notes.append("the loss is each rank's own, not the mean of all: a log shows one's")
                continue
        else:
            fits, token_map = explain(oracle, returned, of == HIDDEN, _finite(got.d_hidden))
        notes = [_of_the_loss(oracle, got, fits) if of == HEAD else RIGHT_BESIDE.get(of, RIGHT)]
        alone = of == HEAD and bias and bool(fits) and not fits[0].rounded
        if alone and not LIMIT.holds(distance(returned[1:], _of_bias(oracle, fits[0].reading))):
            notes.append("the gradient of the bias is wrong in another way")
        if not fits:
            notes.append(_hint(returned, got, changed, rerun))
        if token_map is not None and not token_map.exact and not fits:
            notes.append(_left_over(oracle, token_map))
        note = "; ".join(x for x in notes if x)
        names = tuple(fit.names for fit in fits)
        factor = fits[0].factor if fits else 1.0
        nearest = min((fit.distance for fit in fits), default=None)
        rounded = any(fit.rounded for fit in fits)
        lines: tuple[str, ...] = ()
        if token_map is not None and token_map.exact:
            lines = tuple(reader.printed(oracle, token_map, factor))
        findings.append(Finding(of, names, factor, held[of], nearest, note, lines, rounded))
    if problem.bias is not None and not bias:
        missing.append("gradient of the bias")
    there, run_there = {}, []
    if run is not None and not findings:
        there = wrong_there(oracle, run, {value} if notes else set())
        run_there = [name for name in _there(problem) if name not in there]
        if PADDED in there:
            notes.append(f"with {PADDED}, {there.pop(PADDED)}: 0 times inf is NaN in a product")
    looked_for = visible(problem.kind, problem.options, problem.ranks)
    return Report(
        backend=backend,
        kind=problem.kind,
        problem=problem.text,
        findings=tuple(findings),
        held=held,
        looked_for=looked_for[0],
        not_looked_for=looked_for[1],
        not_compared=tuple(missing),
        there=there,
        right_there=tuple(run_there),
        notes=tuple(notes),
    )


def _of_bias(oracle: Oracle, reading: Hypothesis) -> list[Array]:
    return of_head(oracle.numbers(reading))[1:]


def _left_over(oracle: Oracle, token_map: Map) -> str:
    """Of a gradient that no factors give."""
    tried = [" and ".join(names) for names, _ in heads(oracle, 1)]
    logits = f", also with {', '.join(tried)}" if tried else ""
    left = token_map.residual
    rounding = ", or they are rounded" if left <= ROUNDED else ""
    return (
        f"no weighting of the tokens explains it ({left:.2g} of it is left over{logits}):"
        f" the logits, or their derivative, are others{rounding}"
    )


def _finite(x: Array | None) -> Array | None:
    there = x is not None and np.isfinite(x).all() and x.any()
    return np.asarray(x, np.float64) if there else None


def _quantities(oracle: Oracle, got: Numbers) -> Iterator[tuple[str, list[Array], list[Array]]]:
    """Name, what came (nothing where a step did not give it), and what is right."""
    right, bias = oracle.numbers(Hypothesis()), got.d_bias is not None
    yield HEAD, of_head(got, bias), of_head(right, bias)
    loss = [] if got.loss is None else [np.asarray(got.loss, np.float64)]
    yield "values" if oracle.each else "loss", loss, [_shown(right, got)] if loss else []
    if got.d_hidden is None:
        yield HIDDEN, [], []
        return
    hidden, want = np.asarray(got.d_hidden, np.float64), oracle.d_hidden(Hypothesis())
    if oracle.problem.kind == "step":
        want = _own_multiples(hidden, want)
    yield HIDDEN, [hidden], [want]


# --- on what breaks real runs ---------------------------------------------------------------------


def wrong_there(
    oracle: Oracle, run: Callable[[Problem], Numbers], spared: set[str]
) -> dict[str, str]:
    """What breaks a step that is right on plain numbers, and what it does there. All at once, and
    one by one where that is wrong; padding by itself. `spared`: what is not compared."""
    names = _there(oracle.problem)
    plain = tuple(name for name in names if name != PADDED)
    breaks: dict[str, str] = {}
    for together in (plain, (PADDED,)):
        sentence = _broken(oracle.problem, run, together, spared)
        if sentence:
            alone = {x: _broken(oracle.problem, run, (x,), spared) for x in together}
            breaks |= {x: y for x, y in alone.items() if y} or {" and ".join(together): sentence}
    return breaks


def _there(problem: Problem) -> tuple[str, ...]:
    return tuple(x for x in THERE if x != EMPTY_RANK or problem.ranks > 1)


def _broken(
    problem: Problem, run: Callable[[Problem], Numbers], there: tuple[str, ...], spared: set[str]
) -> str:
    """Nothing where it is right."""
    hard = Oracle(build(problem.kind, problem.options, problem.ranks, there=there))
    try:
        got = run(hard.problem)
    except Exception as error:
        if problem.ranks > 1:  # the others may wait for this one
            raise
        return f"the step raised {type(error).__name__}: {error}"
    for of, returned, want in _quantities(hard, got):
        if of in spared or not returned:
            continue
        if not all(np.isfinite(x).all() for x in returned):
            return f"{of}: inf or NaN"
        away = distance(returned, want)
        if away * U > ROUGH:
            return f"{of}: relative distance to the oracle {away * U:.2g}"
    return ""


def _own_multiples(got: Array, right: Array) -> Array:
    """The right gradient of hidden states in units of a step's own, of each rank and micro-batch: a
    wrapper that takes the mean over ranks wants each rank's to have as many times the right one,
    and finished gradients may be scaled after the backward, or kept as a running mean."""
    axes = (2, 3, 4)
    size = (right * right).sum(axis=axes, keepdims=True)
    times = (got * right).sum(axis=axes, keepdims=True) / np.where(size == 0, 1.0, size)
    multiples: Array = np.maximum(times, 0.0) * right
    return multiples


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
    rerun: Callable[[], Numbers] | None,
) -> str:
    """What is seen in numbers that no defect gives."""
    if not all(np.isfinite(x).all() for x in wrong):
        return "it holds inf or NaN"
    if not any(x.any() for x in wrong):
        return "it is 0 everywhere: detached on the way, or cleared"
    if changed:
        return f"the step has written to what it was given: {', '.join(changed)}"
    if rerun is None:
        return ""
    try:
        other = rerun()
    except Exception as error:  # noqa: BLE001 - the step's own, which is said
        return f"a second call raised {type(error).__name__}"
    if LIMIT.holds(distance([other.d_weight], [np.asarray(got.d_weight, np.float64)])):
        return ""
    return "a second call gave other gradients: it draws at random (dropout?), or keeps state"


@lru_cache(maxsize=16)
def visible(kind: str, options: Options, ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names of the defects that would show in this problem, and why the others would not."""
    oracle = oracle_of(kind, options, ranks)
    right = of_head(oracle.numbers(Hypothesis()))
    names, unseen = [], {}
    for defect in DEFECTS:
        if kind not in defect.kinds:
            continue
        variants = list(forms(defect, oracle.problem))
        gradients = (of_head(oracle.numbers(reading)) for reading in variants)
        if not variants:
            distils = oracle.problem.teacher is not None
            of_distilling = not distils and defect.needs.startswith(DIVERGENCE)
            unseen[defect.name] = f"needs {DIVERGENCE if of_distilling else defect.needs}"
        elif all(distance(x, right) > 2 * LIMIT.value for x in gradients):
            names.append(defect.name)
        else:
            unseen[defect.name] = "too small to show with these options"
    return tuple(names), unseen
