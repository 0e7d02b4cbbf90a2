"""The rows of `chunked_logprobs`: as in `nll.py`, with a random gradient for every token
and output."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF
from xentlib.reference import LogprobReference
from xentlib.tools.harness.backends import PerToken, run_logprobs
from xentlib.tools.harness.cases import few_chunks_of
from xentlib.tools.harness.findings import BOTH, GRADIENT_ROWS, Findings, part_of
from xentlib.tools.harness.problems import Problem, Upstream, logits_problem, upstream_of
from xentlib.tools.parity.mutants import array_mutants
from xentlib.tools.parity.rows import invariance

Array = npt.NDArray[Any]
SEED = 5


def _label(name: str) -> str:
    return f"{name.replace('_', ' ')} of per-token outputs"


def against_oracle(findings: Findings, problem: Problem) -> None:
    """Gradients of one problem: A0, A5, A6 of float32, A7 or A16 of 16 bits; and A9 where both
    backends run."""
    upstream, dtype = upstream_of(problem, SEED), problem.hidden.dtype.name
    rounded = {"dz_dtype": dtype} if dtype in ROW_OF else {}
    reference = problem.per_token_reference(upstream, **rounded)
    outcomes = {backend: run_logprobs(backend, problem, upstream) for backend in findings.backends}
    if dtype not in ROW_OF:
        for backend, outcome in outcomes.items():
            _exact(findings, problem, outcome, reference, backend)
    findings.gradients(outcomes, reference, problem, _label)


def _exact(
    findings: Findings,
    problem: Problem,
    outcome: PerToken,
    reference: LogprobReference,
    backend: str,
) -> None:
    values = np.stack([outcome.logprobs, np.asarray(outcome.entropy), outcome.lse])
    gone = ~problem.valid
    rows, d_hidden = values[:, gone], outcome.gradients()["d_hidden"][gone]
    exact: dict[str, tuple[Any, Any]] = {
        "correct": (outcome.correct, reference.correct),
        "invalid rows": (rows, np.zeros_like(rows)),
        "d hidden of invalid rows": (d_hidden, np.zeros_like(d_hidden)),
        "log-probabilities above 0": (np.int64((outcome.logprobs > 0).sum()), np.int64(0)),
    }
    for name, (got, expected) in exact.items():
        details = {"backend": backend, "case": problem.text, "quantity": _label(name)}
        findings.check("A0", got, expected, **details)


def audit(findings: Findings, problem: Problem) -> None:
    """A1: bit for bit in audit mode."""
    upstream = upstream_of(problem, SEED)
    ours, theirs = (
        run_logprobs(backend, problem, upstream, audit=True) for backend in ("torch", "jax")
    )
    for name in PerToken._fields:
        got, other = getattr(ours, name), getattr(theirs, name)
        if got is not None:
            findings.check("A1", got, other, backend=BOTH, case=problem.text, quantity=_label(name))


def logits(findings: Findings, item: tuple[str, Array, Array]) -> None:
    """A3 and A4 of logits that are given; entropy is not asked for."""
    text, given, labels = item
    problem = logits_problem(given, labels, text)
    rows = np.arange(len(labels))
    upstream = Upstream(np.ones(len(labels), np.float32), None, None)
    reference = problem.per_token_reference(upstream)
    peak = given.max(axis=1).astype(np.float64)
    scale = np.maximum(np.abs(peak), reference.lse - peak)
    for backend in findings.backends:
        outcome = run_logprobs(backend, problem, upstream)
        details: dict[str, Any] = {"backend": backend, "case": text}
        findings.check("A3", outcome.lse, reference.lse, magnitude=scale, **details)
        got = outcome.gradients()["d_weight"][labels, rows]
        pairs = {
            "log-probability": (outcome.logprobs, reference.logprobs),
            "target gradient": (got, reference.d_weight[labels, rows]),
        }
        for name, (value, oracle) in pairs.items():
            findings.check("A4", value, oracle, quantity=_label(name), **details)


def chunks(findings: Findings, problem: Problem) -> None:
    """A10."""
    names = ("logprobs", "entropy", "lse", "correct", "d_hidden")
    invariance.chunks(findings, problem.text, _call(problem), few_chunks_of, names, _label)


def repeat(findings: Findings, problem: Problem) -> None:
    """A11, run to run."""
    invariance.repeat(findings, problem.text, _call(problem), _label)


def _call(problem: Problem) -> partial[PerToken]:
    return partial(run_logprobs, problem=problem, upstream=upstream_of(problem, SEED))


def mutants(findings: Findings, problem: Problem) -> None:
    """A14: gradients as known bugs would have returned them (M1, M12)."""
    upstream = upstream_of(problem, SEED)
    reference = problem.per_token_reference(upstream)
    d_logprobs, d_entropy, d_lse = (np.asarray(g) for g in upstream)
    wrong_upstream = {
        "entropy without gradient": upstream._replace(d_entropy=0 * d_entropy),
        "entropy with the wrong sign": upstream._replace(d_entropy=-d_entropy),
        "lse without gradient": upstream._replace(d_lse=0 * d_lse),
        "one gradient for all tokens": upstream._replace(
            d_logprobs=np.full_like(d_logprobs, d_logprobs.mean())
        ),
    }
    shifted = problem.changed(
        labels=np.where(problem.valid, (problem.labels + 1) % reference.d_bias.size, problem.labels)
    )
    for backend in findings.backends:
        right = run_logprobs(backend, problem, upstream)
        for name, got in right.gradients().items():
            oracle, bound = part_of(reference, name, "d"), part_of(reference, name, "bound")
            wrong = array_mutants(got, oracle)
            for text, changed in wrong_upstream.items():
                other = problem.per_token_reference(changed)
                wrong[text] = part_of(other, name, "d").astype(got.dtype)
            other = shifted.per_token_reference(upstream)
            wrong["labels off by one"] = part_of(other, name, "d").astype(got.dtype)
            findings.reject(
                GRADIENT_ROWS[name],
                wrong,
                oracle,
                bound,
                backend=backend,
                quantity=_label(name),
                named=False,
            )
