"""The rows of `chunked_logprobs`: as in `nll.py`, with a random gradient for every token
and output."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF
from xentlib.reference import LogprobReference
from xentlib.tools.harness.backends import run_logprobs
from xentlib.tools.harness.cases import few_chunks_of
from xentlib.tools.harness.findings import BETWEEN, BOTH, GRADIENT_ROWS, Findings, part_of
from xentlib.tools.harness.outcomes import PerToken
from xentlib.tools.harness.problems import Problem, Upstream, logits_problem, upstream_of
from xentlib.tools.parity.mutants import array_mutants
from xentlib.tools.parity.rows import invariance

Array = npt.NDArray[Any]
SEED = 5


def _label(name: str) -> str:
    return f"{name.replace('_', ' ')} of per-token outputs"


def single(findings: Findings, problem: Problem) -> None:
    """A0, A5, A6 of one fp32 problem, and A9 where both backends run."""
    upstream = upstream_of(problem, SEED)
    reference = problem.per_token_reference(upstream)
    found = {backend: run_logprobs(backend, problem, upstream) for backend in findings.backends}
    for backend, outcome in found.items():
        details: dict[str, Any] = {"backend": backend, "case": problem.text}
        exact: dict[str, tuple[Any, Any]] = {"correct": (outcome.correct, reference.correct)}
        values = np.stack([outcome.logprobs, np.asarray(outcome.entropy), outcome.lse])
        gone = ~problem.valid
        exact["invalid rows"] = (values[:, gone], np.zeros_like(values[:, gone]))
        d_hidden = outcome.gradients()["d_hidden"][gone]
        exact["d hidden of invalid rows"] = (d_hidden, np.zeros_like(d_hidden))
        exact["log-probabilities above 0"] = (np.int64((outcome.logprobs > 0).sum()), np.int64(0))
        for name, (got, expected) in exact.items():
            findings.check("A0", got, expected, quantity=_label(name), **details)
        for name, got in outcome.gradients().items():
            oracle, bound = part_of(reference, name, "d"), part_of(reference, name, "bound")
            findings.check(
                GRADIENT_ROWS[name], got, oracle, bound, quantity=_label(name), **details
            )
    _between(findings, problem, reference, found, BETWEEN["float32"])


def low(findings: Findings, problem: Problem) -> None:
    """A7 or A16 of one 16-bit problem; A9 where both backends run, of bf16 in bits."""
    upstream, dtype = upstream_of(problem, SEED), problem.hidden.dtype.name
    reference = problem.per_token_reference(upstream, dz_dtype=dtype)
    found = {backend: run_logprobs(backend, problem, upstream) for backend in findings.backends}
    for backend, outcome in found.items():
        for name, got in outcome.gradients().items():
            findings.check(
                ROW_OF[dtype],
                got,
                part_of(reference, name, "d"),
                part_of(reference, name, "bound"),
                magnitude=part_of(reference, name, "magnitude"),
                backend=backend,
                case=problem.text,
                quantity=_label(name),
            )
    _between(findings, problem, reference, found, BETWEEN[dtype])


def _between(
    findings: Findings,
    problem: Problem,
    reference: LogprobReference,
    found: dict[str, PerToken],
    metrics: tuple[str, ...],
) -> None:
    if len(found) < 2:
        return
    for name, got in found["torch"].gradients().items():
        findings.check(
            "A9",
            got,
            part_of(reference, name, "d"),
            other=getattr(found["jax"], name),
            metrics=metrics,
            backend=BOTH,
            case=problem.text,
            quantity=_label(name),
        )


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
