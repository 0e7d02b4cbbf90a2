"""Parity runs as data, for the tests of their views."""

import math

from xentlib.tools.parity.result import Histogram, Measurement, ParityResult, Section, TrainingCurve

STATEMENTS = {
    "A1": "every gradient, torch against JAX",
    "A5": "d hidden · fp32",
    "A7": "gradients · bf16",
    "A9": "torch against JAX",
    "A13": "vocabulary shards",
}
HOSTILE = '<script>alert("1")</script> & <b>'


def measured(
    row, value, bound, *, at_least=False, backend="torch", case="N=33", metric="tau", **kw
):
    passed = value >= bound if at_least else value <= bound
    fields = {"quantity": "d hidden", "entries": 2112} | kw
    return Measurement(
        row=row,
        backend=backend,
        case=case,
        metric=metric,
        value=value,
        bound=bound,
        passed=passed,
        at_least=at_least,
        **fields,
    )


def a_run(*more):
    """Every kind of thing a run can hold, all of it within bounds; `more` is added."""
    operators = Section(
        "operators",
        (
            measured(
                "A1", 0.0, 0.0, backend="torch/jax", metric="unequal entries", entries=24_733_308
            ),
            measured("A5", 3.0987654321987654, 4.0),
            measured("A5", 1.25, 4.0, backend="jax"),
            measured("A5", 34.5, 64.0, metric="rho / u"),
            measured("A7", 0.9973, 0.995, at_least=True, metric="correctly rounded"),
        ),
        (
            Histogram("A5", "torch", "d hidden", (0.0, 0.5, 1.0, math.inf), (9000, 17, 1)),
            Histogram("A5", "jax", "d hidden", (0.0, 0.5, 1.0, math.inf), (0, 0, 0)),
        ),
        seconds=140.0,
    )
    steps = (
        measured(
            "A9",
            30.0 + step,
            64.0,
            backend="torch/jax",
            case=f"training, fp32, step {step}",
            metric="rho / u",
            quantity="d weight",
        )
        for step in (1, 2, 3)
    )
    curve = measured("curve", 7e-6, 1e-3, backend="torch/jax", metric="relative", quantity="loss")
    training = Section(
        "training",
        (*steps, curve, *more),
        curves=(
            TrainingCurve("torch", (9.0, 8.0, 7.25), (400, 410, 399), 2.5),
            TrainingCurve("jax", (9.0, 8.000001, 7.25), (400, 410, 399), 3.5),
        ),
        seconds=60.125,
    )
    return ParityResult(
        sections=[operators, training],
        planned=["operators", "training"],
        environment={"torch": "2.13.0+cpu", "seed": "0", "text": "the standard library"},
    )


def failed(run, name="operators", error="RuntimeError: 2 ranks were late\nTraceback of <it>"):
    """The same run, with a section that could not be run."""
    run.add(Section(name, error=error, seconds=9.0))
    return run


def unfinished(run):
    run.planned = [*run.planned, "more", "most"]
    return run


FAILURES = {
    "above": measured("A5", 4.0004, 4.0, backend="jax"),
    "below": measured("A7", 0.994999, 0.995, at_least=True, metric="correctly rounded"),
    "NaN": measured("A5", math.nan, 4.0),
    "infinite": measured("A5", math.inf, 4.0),
}
