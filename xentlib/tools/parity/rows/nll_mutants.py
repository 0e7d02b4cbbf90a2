"""A14 of the rows of `chunked_nll`: every check with a right answer and its mutants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF
from xentlib.reference import NLLReference
from xentlib.tools.harness.backends import Outcome
from xentlib.tools.harness.cases import BASE, low_precision
from xentlib.tools.harness.findings import BETWEEN, GRADIENT_ROWS, Findings, label, part_of
from xentlib.tools.harness.problems import Problem, build
from xentlib.tools.parity.mutants import array_mutants, problem_mutants
from xentlib.tools.parity.rows.nll import oracle_of

Array = npt.NDArray[Any]


def mutants(findings: Findings, problem: Problem) -> None:
    """A14: every check with a right answer and its mutants; counts those it lets pass."""
    reference = problem.reference()
    lows = [build(case, 0) for dtype in ROW_OF for case in low_precision((BASE,), dtype)]
    for backend in findings.backends:
        right = findings.run(backend, problem)
        for short in lows:
            low(findings, short, backend)
        for name, wrong, oracle, bound in single(findings, problem, right, reference, backend):
            details: dict[str, Any] = {"backend": backend, "quantity": label(name)}
            got = getattr(right, name)
            findings.reject("A12", wrong, oracle, bound, **details)
            for row in ("A1", "A10", "A11"):
                findings.reject(row, wrong, got, **details)
            fp32 = {"other": got, "metrics": BETWEEN["float32"]}
            findings.reject("A9", wrong, oracle, **fp32, **details)
        loss(findings, "A2", problem, right, reference, backend)
        counts = {"N_total": np.asarray(problem.labels.size), "zero": np.asarray(0)}
        count = np.asarray(reference.num_tokens)
        findings.reject("A0", counts, count, backend=backend, quantity="token count")
        lse, logprobs = np.asarray(right.lse), np.asarray(right.logprobs)
        scale = np.maximum(np.abs(reference.lse), 1.0)
        wrong = array_mutants(lse, reference.lse)
        findings.reject(
            "A3", wrong, reference.lse, magnitude=scale, backend=backend, quantity="lse"
        )
        wrong = {
            **array_mutants(logprobs, reference.logprobs),
            **problem_mutants(problem, lambda ref: ref.logprobs, logprobs.dtype),
        }
        del wrong["N_total for N_valid"]  # a log-probability knows no denominator
        findings.reject(
            "A4", wrong, reference.logprobs, backend=backend, quantity="log-probability"
        )


def single(
    findings: Findings, problem: Problem, right: Outcome, reference: NLLReference, backend: str
) -> Iterator[tuple[str, dict[str, Array], Array, Array]]:
    """A14 of the rows of float32 gradients; each with its mutants, for other rows."""
    for name in right.gradients():

        def pick(ref: NLLReference, name: str = name) -> Array:
            return part_of(ref, name)

        got = getattr(right, name)
        oracle, bound = pick(reference), part_of(reference, name, "bound")
        wrong = {**array_mutants(got, oracle), **problem_mutants(problem, pick, got.dtype)}
        row = GRADIENT_ROWS[name]
        findings.reject(row, wrong, oracle, bound, backend=backend, quantity=label(name))
        yield name, wrong, oracle, bound


def low(findings: Findings, problem: Problem, backend: str) -> None:
    """A14 of the rows of one 16-bit problem."""
    dtype = problem.hidden.dtype.name
    right, reference = findings.run(backend, problem), oracle_of(problem)
    for name, got in right.gradients().items():

        def pick(ref: NLLReference, name: str = name) -> Array:
            return part_of(ref, name)

        oracle, magnitude = pick(reference), part_of(reference, name, "magnitude")
        wrong = {
            **array_mutants(got, oracle),
            **problem_mutants(problem, pick, got.dtype, dz_dtype=dtype),
        }
        details: dict[str, Any] = {"backend": backend, "quantity": label(name)}
        bound = part_of(reference, name, "bound")
        findings.reject(ROW_OF[dtype], wrong, oracle, bound, magnitude=magnitude, **details)
        if dtype == "bfloat16":
            details |= {"quantity": f"{label(name)} bf16", "other": got}
            findings.reject("A9", wrong, oracle, metrics=BETWEEN[dtype], **details)
    loss(findings, "A8", problem, right, reference, backend)


def loss(
    findings: Findings,
    row: str,
    problem: Problem,
    right: Outcome,
    reference: NLLReference,
    backend: str,
) -> None:
    """A14 of a loss."""
    wrong = {
        **array_mutants(right.loss, reference.loss),
        **problem_mutants(problem, lambda ref: ref.loss, np.float32),
    }
    scale, quantity = reference.loss_magnitude, f"loss of {problem.hidden.dtype.name}"
    findings.reject(row, wrong, reference.loss, magnitude=scale, backend=backend, quantity=quantity)
