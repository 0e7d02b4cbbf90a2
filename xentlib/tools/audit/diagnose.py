"""What a step returned, held against the oracle and, where it misses, read and named.

A result is right, or fits a reading, if it holds the contract's row of two implementations (A9,
rho / u). The gradients of the head are read first, as they say most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from xentlib.contract import U
from xentlib.tools.audit import reader
from xentlib.tools.audit.defects import DEFECTS, DIVERGENCE, forms
from xentlib.tools.audit.hypotheses import Hypothesis, Numbers, Oracle
from xentlib.tools.audit.naming import (
    FACTOR,
    LIMIT,
    Fit,
    distance,
    explain,
    explain_values,
    multiple,
    of_head,
)
from xentlib.tools.audit.problem import Array, Options, build
from xentlib.tools.audit.report import Finding, Report

HEAD, HIDDEN = "gradients of the head", "gradient of the hidden states"


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
    numbers = oracle.numbers(right)
    quantities = {
        HEAD: (of_head(got, bias), lambda: of_head(numbers, bias)),
        value: ([got.loss], lambda: [_shown(numbers, got)]),
        HIDDEN: ([got.d_hidden], lambda: [oracle.d_hidden(right)]),
    }
    findings: list[Finding] = []
    held: dict[str, float] = {}
    missing = []
    for of, (arrays, wanted) in quantities.items():
        if arrays[0] is None:
            missing.append(of)
            continue
        returned, want = [np.asarray(x, np.float64) for x in arrays], wanted()
        if of == HIDDEN and problem.kind == "step":
            want = [_own_multiples(returned[0], *want)]
        held[of] = distance(returned, want)
        off = abs(multiple(returned[0], want[0]) - 1.0) / U if of == HEAD else 0.0
        if findings or (LIMIT.holds(held[of]) and off <= FACTOR):
            continue
        found = None
        if of == value:
            fits = explain_values(oracle, returned[0], lambda r: [_shown(oracle.numbers(r), got)])
        else:
            fits, found = explain(oracle, returned, of == HIDDEN)
        note = _of_the_loss(oracle, got, fits) if of == HEAD else "the head's gradients are right"
        if not fits:
            note = "; ".join(x for x in (note, _hint(returned, got, changed, again)) if x)
        names = tuple(fit.names for fit in fits)
        factor = fits[0].factor if fits else 1.0
        nearest = min((fit.distance for fit in fits), default=None)
        lines = () if found is None else tuple(reader.printed(oracle, found))
        findings.append(Finding(of, names, factor, held[of], nearest, note, lines))
    if problem.bias is not None and not bias:
        missing.append("gradient of the bias")
    looked_for = visible(problem.kind, problem.options, problem.ranks)
    return Report(
        backend, problem.kind, problem.text, tuple(findings), held, *looked_for, tuple(missing)
    )


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
