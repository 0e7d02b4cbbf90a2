"""From what a step returned to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from xentlib.tools.audit.diagnose import LIMIT, Fit, distance, explain, holds, tell
from xentlib.tools.audit.hypotheses import Hypothesis, Numbers, Oracle
from xentlib.tools.audit.problem import Array, Options, Problem, build
from xentlib.tools.audit.report import Finding, Report

HEAD, HIDDEN = "gradients of the head", "gradient of the hidden states"


@lru_cache(maxsize=16)
def oracle_of(kind: str, options: Options, ranks: int = 1) -> Oracle:
    """The problem, and what it gives; the same for every step that says the same of itself."""
    return Oracle(build(kind, options, ranks))


@lru_cache(maxsize=16)
def _told(kind: str, options: Options, ranks: int) -> tuple[list[str], dict[str, str]]:
    oracle = oracle_of(kind, options, ranks)
    return tell(oracle, lambda reading: _of_head(oracle.numbers(reading)))


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
    problem = oracle.problem
    looked_for, unseen = _told(problem.kind, problem.options, problem.ranks)
    bias = got.d_bias is not None
    value = "values" if problem.kind == "logprobs" else "loss"

    def head(reading: Hypothesis) -> Sequence[Array]:
        return _of_head(oracle.numbers(reading), bias)

    findings: list[Finding] = []
    given = _of_head(got, bias)
    held = {HEAD: distance(given, head(Hypothesis()))}
    fits: list[Fit] = []
    if not holds(held[HEAD]):
        fits = explain(problem, given, head)
        findings.append(_finding(HEAD, held[HEAD], fits, _of_the_loss(oracle, got, fits)))
    missing = []
    if got.loss is None:
        missing.append(value)
    else:
        values = [np.asarray(got.loss, np.float64)]

        def losses(reading: Hypothesis) -> Sequence[Array]:
            return [_shown(oracle.numbers(reading), got)]

        held[value] = distance(values, losses(Hypothesis()))
        if not findings and not holds(held[value]):
            most = 1 if problem.kind == "step" else 2
            fits = [fit for fit in explain(problem, values, losses, most) if fit.factor == 1.0]
            findings.append(_finding(value, held[value], fits, "the head's gradients are right"))
    if got.d_hidden is None:
        missing.append(HIDDEN)
    else:
        held[HIDDEN] = _of_hidden(problem, got.d_hidden, oracle)
        if not findings and not holds(held[HIDDEN]):
            fits = explain(problem, [got.d_hidden], lambda r: [oracle.d_hidden(r)], 1)
            findings.append(_finding(HIDDEN, held[HIDDEN], fits, "the head's gradients are right"))
    whole: dict[str, list[Array | None]]
    whole = {HEAD: [*given], value: [got.loss], HIDDEN: [got.d_hidden]}
    for k, finding in enumerate(findings):
        if not finding.defects:
            notes = [finding.note, _hint(whole[finding.of], got, changed, again)]
            findings[k] = replace(finding, note="; ".join(x for x in notes if x))
    if problem.bias is not None and not bias:
        missing.append("gradient of the bias")
    return Report(
        backend=backend,
        kind=problem.kind,
        problem=problem.text,
        findings=tuple(findings),
        held=held,
        looked_for=tuple(looked_for),
        not_looked_for=unseen,
        not_compared=tuple(missing),
    )


def _of_head(numbers: Numbers, bias: bool = True) -> list[Array]:
    weight = np.asarray(numbers.d_weight, np.float64)
    if numbers.d_bias is None or not bias:
        return [weight]
    return [weight, np.asarray(numbers.d_bias, np.float64)]


def _of_hidden(problem: Problem, got: Array, oracle: Oracle) -> float:
    """Of a step in units of their own: a wrapper that takes the mean over ranks wants each rank's
    hidden states to have as many times the right gradient, and finished gradients may be scaled
    after the backward."""
    right = oracle.d_hidden(Hypothesis())
    scale = float(np.vdot(got, right) / np.vdot(right, right)) if problem.kind == "step" else 1.0
    return distance([got], [max(scale, 0.0) * right])


def _shown(right: Numbers, got: Numbers) -> Array:
    """Of the values of log-probabilities, those that were returned."""
    assert right.loss is not None
    assert got.loss is not None
    return right.loss[:, : got.loss.shape[1]] if right.loss.ndim > 1 else right.loss


def _of_the_loss(oracle: Oracle, got: Numbers, fits: list[Fit]) -> str:
    if got.loss is None:
        return ""
    if holds(distance([got.loss], [_shown(oracle.numbers(Hypothesis()), got)])):
        return "the loss is right"
    for fit in fits:
        own = [_shown(oracle.numbers(fit.reading), got)]
        if distance([got.loss], own) <= max(LIMIT.value, 4 * fit.distance):
            return "the loss is wrong in the same way"
    return "the loss is wrong too"


def _hint(
    wrong: Sequence[Array | None],
    got: Numbers,
    changed: Sequence[str],
    again: Callable[[], Numbers] | None,
) -> str:
    """What is seen in numbers that no defect gives."""
    there = [x for x in wrong if x is not None]
    if not all(np.isfinite(x).all() for x in there):
        return "it holds inf or NaN"
    if not any(x.any() for x in there):
        return "it is 0 everywhere: detached on the way, or cleared"
    if changed:
        return f"the step has written to what it was given: {', '.join(changed)}"
    if again is None:
        return ""
    try:
        other = again()
    except Exception as error:  # noqa: BLE001 - the step's own, which is said
        return f"a second call raised {type(error).__name__}"
    if holds(distance([other.d_weight], [np.asarray(got.d_weight, np.float64)])):
        return ""
    return "a second call gave other gradients: it draws at random (dropout?), or keeps state"


def _finding(of: str, off: float, fits: list[Fit], note: str) -> Finding:
    return Finding(
        of=of,
        defects=tuple(fit.names for fit in fits),
        factor=fits[0].factor if fits else 1.0,
        off=off,
        distance=min(fit.distance for fit in fits) if fits else None,
        note=note,
    )
