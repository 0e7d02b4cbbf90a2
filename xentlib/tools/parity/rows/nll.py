"""The rows of `chunked_nll`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF
from xentlib.reference import NLLReference
from xentlib.tools.harness.backends import Outcome, run
from xentlib.tools.harness.cases import chunks_of
from xentlib.tools.harness.findings import BOTH, Findings, label
from xentlib.tools.harness.problems import Problem, logits_problem
from xentlib.tools.parity.rows import invariance

Array = npt.NDArray[Any]


def against_oracle(findings: Findings, problem: Problem) -> None:
    """The loss and gradients of one problem: A0, A2, A5, A6 of float32, A8 and A7 or A16 of 16
    bits; and A9 where both backends run."""
    reference, low = oracle_of(problem), problem.hidden.dtype.name in ROW_OF
    outcomes = {backend: findings.run(backend, problem) for backend in findings.backends}
    for backend, outcome in outcomes.items():
        details = {"backend": backend, "case": problem.text}
        if not low:
            exact(findings, problem, outcome, reference, **details)
        loss, scale = reference.loss, reference.loss_magnitude
        findings.check("A8" if low else "A2", outcome.loss, loss, magnitude=scale, **details)
    findings.gradients(outcomes, reference, problem, count=True)


def oracle_of(problem: Problem) -> NLLReference:
    """With the gradients of logits rounded as 16-bit products take them."""
    dtype = problem.hidden.dtype.name
    return problem.reference(dz_dtype=dtype) if dtype in ROW_OF else problem.reference()


def exact(
    findings: Findings, problem: Problem, outcome: Outcome, reference: NLLReference, **details: Any
) -> None:
    """A0: counts, masks, dtypes, invalid rows, the loss of no valid token."""
    if outcome.num_tokens is not None:
        findings.check(
            "A0",
            outcome.num_tokens.astype(np.int64),
            np.asarray(reference.num_tokens, np.int64),
            quantity="token count",
            **details,
        )
        per_token(findings, problem, outcome, reference, **details)
    d_hidden = outcome.gradients()["d_hidden"]
    rows = d_hidden[~problem.valid]
    findings.check("A0", rows, np.zeros_like(rows), quantity="d hidden of invalid rows", **details)
    of = {name: getattr(problem, name.removeprefix("d_")).dtype for name in outcome.gradients()}
    wrong = int(outcome.loss.dtype != np.float32)
    wrong += sum(x.dtype != of[name] for name, x in outcome.gradients().items())
    findings.check("A0", np.int64(wrong), np.int64(0), quantity="dtypes", **details)
    if not problem.valid.any():
        nothing = np.concatenate(
            [np.ravel(x).astype(np.float64) for x in (outcome.loss, *outcome.gradients().values())]
        )
        findings.check(
            "A0",
            nothing,
            np.zeros_like(nothing),
            quantity="loss and gradients of nothing",
            **details,
        )


def per_token(
    findings: Findings, problem: Problem, outcome: Outcome, reference: NLLReference, **details: Any
) -> None:
    """A0 of the outputs that there is one of for each token."""
    findings.check("A0", outcome.correct, reference.correct, quantity="correct", **details)
    sure = ~(reference.margin < 2.0**-16)  # closer logits are equal in float32, or the other way
    assert outcome.predicted is not None
    predicted = np.where(sure, outcome.predicted, 0), np.where(sure, reference.predicted, 0)
    findings.check("A0", *predicted, quantity="predicted", **details)
    given = [getattr(outcome, name) for name in ("logprobs", "entropy", "lse")]
    invalid = np.stack(given)[:, ~problem.valid]
    findings.check(
        "A0", invalid, np.zeros_like(invalid), quantity="outputs of invalid rows", **details
    )
    wrong = sum(x.dtype != np.float32 for x in given)
    findings.check("A0", np.int64(wrong), np.int64(0), quantity="dtypes of outputs", **details)


def audit(findings: Findings, problem: Problem) -> None:
    """A1: everything that the two backends return in audit mode, bit for bit; which logit is the
    largest where float64 can tell."""
    ours, theirs = (run(backend, problem, audit=True) for backend in ("torch", "jax"))
    sure = ~(problem.reference().margin < 2.0**-40)
    for name in (*Outcome._fields,):
        got, other = getattr(ours, name), getattr(theirs, name)
        if got is None:
            continue
        if name == "num_tokens":
            got, other = got.astype(np.int64), other.astype(np.int64)
        if name in ("correct", "predicted"):
            got, other = got[sure], other[sure]
        findings.check("A1", got, other, backend=BOTH, case=problem.text, quantity=label(name))


def logits(findings: Findings, item: tuple[str, Array, Array]) -> None:
    """A3 and A4: lse, log-probability and target gradient of logits that are given."""
    text, logits, labels = item
    problem = logits_problem(logits, labels, text)
    reference = problem.reference()
    rows = np.arange(len(labels))
    peak = np.abs(logits.max(axis=1).astype(np.float64))
    scale = np.maximum(peak, reference.lse - logits.max(axis=1))
    oracle = reference.d_weight[labels, rows]
    for backend in findings.backends:
        outcome = run(backend, problem)
        details = {"backend": backend, "case": text}
        gradient = outcome.gradients()["d_weight"][labels, rows]
        findings.check("A3", outcome.lse, reference.lse, magnitude=scale, **details)
        findings.count_ulps("A3", backend, "lse", outcome.lse, reference.lse)
        findings.check(
            "A4", outcome.logprobs, reference.logprobs, quantity="log-probability", **details
        )
        findings.count_ulps("A4", backend, "log-probability", outcome.logprobs, reference.logprobs)
        findings.check("A4", gradient, oracle, quantity="target gradient", **details)


def chunks(findings: Findings, problem: Problem) -> None:
    """A10: per-token outputs and d hidden under chunks of 8 rows and more."""
    names = ("logprobs", "entropy", "lse", "correct", "predicted", "d_hidden")
    call = partial(run, problem=problem)
    invariance.chunks(findings, problem.text, call, chunks_of, names, label)


def repeat(findings: Findings, problem: Problem) -> None:
    """A11: run to run, and PyTorch on two threads against one."""
    call = partial(run, problem=problem)
    invariance.repeat(findings, problem.text, call, label, two_threads=True)
