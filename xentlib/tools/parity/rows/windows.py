"""A12: a problem's tokens in a window of uneven micro-batches, one without a valid token, through
`TokenNormalizer`, `accumulate_grads` and `token_normalized`, against the oracle of one batch; A2:
through `Evaluation`."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.findings import BOTH, Findings, check_gradient, label
from xentlib.tools.harness.problems import Problem
from xentlib.tools.parity.micro_batches import ROADS, evaluated, micro_batches, run_window
from xentlib.tools.parity.mutants import array_mutants

Array = npt.NDArray[Any]


def windows(findings: Findings, problem: Problem) -> None:
    """Every path of each backend, and its evaluation."""
    reference = problem.reference()
    for backend in findings.backends:
        findings.check(
            "A2",
            evaluated(backend, problem).astype(np.float32),
            reference.loss,
            magnitude=reference.loss_magnitude,
            backend=backend,
            case=problem.text,
            quantity="loss of an evaluation",
        )
        for road in ROADS[backend]:
            details: dict[str, Any] = {"backend": backend, "case": f"{problem.text}, {road}"}
            outcome = run_window(backend, problem, road)
            findings.check(
                "A0",
                outcome.num_tokens.astype(np.int64),
                np.asarray(reference.num_tokens, np.int64),
                quantity="tokens of a window",
                **details,
            )
            if outcome.loss is not None:
                findings.check(
                    "A2",
                    outcome.loss.astype(np.float32),
                    reference.loss,
                    magnitude=reference.loss_magnitude,
                    quantity="loss of a window",
                    **details,
                )
            for name in ("hidden", "weight", "bias"):
                got = getattr(outcome, f"d_{name}")
                details["quantity"] = f"d {name}"
                findings.measurements += check_gradient(
                    "A12", f"d_{name}", got, reference, **details
                )
        oracle, bound = reference.d_bias, reference.bound_bias
        wrong = {**array_mutants(got, oracle), "mean of means": mean_of_means(problem)}
        findings.reject("A12", wrong, oracle, bound, backend=backend, quantity="d bias of a window")


def mean_of_means(problem: Problem) -> Array:
    """d bias of the field's bug: each micro-batch's mean, divided by their number."""
    rows, labels = micro_batches(problem)
    parts = [
        problem.changed(hidden=problem.hidden[r], labels=y).reference().d_bias
        for r, y in zip(rows, labels, strict=True)
    ]
    mean: Array = np.mean(parts, axis=0).astype(np.float32)
    return mean


def audit(findings: Findings, problem: Problem) -> None:
    """A1, A12: where each micro-batch is computed in float64 and rounded once, the sums over a
    window are the same float32 additions in both backends, and so is the product with 1 / T."""
    ours = run_window("torch", problem, "postscale", audit=True)
    for road in ROADS["jax"]:
        theirs = run_window("jax", problem, road, audit=True)
        for name in ("d_hidden", "d_weight", "d_bias"):
            findings.check(
                "A1",
                getattr(ours, name),
                getattr(theirs, name),
                backend=BOTH,
                case=f"{problem.text}, {road}",
                quantity=f"{label(name)} of a window",
            )
