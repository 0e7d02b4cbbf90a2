"""Wrong answers that look right: row A14 demands that the check of every other row rejects them.

Each is what a known bug would have returned (docs/failure-modes.md), made from the oracle or from
the right answer itself; none of them needs a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF
from xentlib.reference import NLLReference
from xentlib.tools.harness.backends import Outcome
from xentlib.tools.harness.cases import BASE, low_precision
from xentlib.tools.harness.findings import (
    BETWEEN,
    GRADIENT_ROWS,
    SHARE_OF,
    Findings,
    label,
    part_of,
)
from xentlib.tools.harness.problems import Problem, build
from xentlib.tools.parity.rows import softmaxes
from xentlib.tools.parity.rows.head import HeadRows, nll, per_token
from xentlib.ulp import FORMATS, round_to

Array = npt.NDArray[Any]


def array_mutants(got: Array, exact: Any, more: float = 1.001) -> dict[str, Array]:
    """0, -g, 1.001 g and a dropped row, in the dtype of `got`.

    1.001 times the exact value, rounded: 1.001 times a bf16 number rounds back to that number.
    """
    exact = np.asarray(exact, np.float64)
    dropped = np.array(got)
    mutants = {
        "zero": np.zeros_like(got),
        "negated": -got,
        f"times {more:g}": round_to(exact * more, got.dtype.name).astype(got.dtype),
    }
    if dropped.ndim:
        size = np.abs(exact).reshape(len(exact), -1).sum(axis=1)
        dropped[size.argmax()] = 0
        mutants["dropped row"] = dropped
    return mutants


def problem_mutants(problem: Problem) -> dict[str, NLLReference]:
    """What the oracle says of subtly different problems.

    The problem must have mean reduction and no token weights, so that each change matters; without
    ignored tokens two of them are left out.
    """
    valid, labels, options = problem.valid, problem.labels, problem.options
    vocab_size = problem.weight.shape[problem.vocab_axis]
    first_chunk = np.arange(valid.size) < valid.size // 4
    changes: dict[str, dict[str, Any]] = {
        "dropped chunk": {
            "labels": np.where(first_chunk, -100, labels),
            "options": {**options, "denominator": float(valid.sum())},
        },
        "labels off by one": {"labels": np.where(valid, (labels + 1) % vocab_size, labels)},
    }
    if not valid.all():  # else there is nothing to count or to mask
        changes["N_total for N_valid"] = {"options": {**options, "denominator": float(valid.size)}}
        changes["padding unmasked"] = {"labels": np.where(valid, labels, 0), "where": None}
    dtype = problem.hidden.dtype.name
    rounded = dtype if dtype in ROW_OF else "float64"
    return {
        name: problem.changed(**change).reference(dz_dtype=rounded)
        for name, change in changes.items()
    }


def answers(oracles: Mapping[str, Any], name: str, dtype: np.dtype[Any]) -> dict[str, Array]:
    """An output or a gradient of each of these oracles, in the dtype of an answer."""
    exact = {text: np.asarray(getattr(oracle, name)) for text, oracle in oracles.items()}
    return {text: round_to(x, dtype.name).astype(dtype) for text, x in exact.items()}


def nll_mutants(findings: Findings, problem: Problem) -> None:
    """A14: every check of `chunked_nll`; counts the mutants that it lets pass."""
    reference = problem.reference()
    softmaxes.mutants(findings)
    lows = [build(case, 0) for dtype in ROW_OF for case in low_precision((BASE,), dtype)]
    for backend in findings.backends:
        for low in lows:
            loss_and_gradients(findings, low, backend)
        right, wrong_of = loss_and_gradients(findings, problem, backend)
        for name, got in right.gradients().items():
            wrong, oracle = wrong_of[name], part_of(reference, name)
            details: dict[str, Any] = {"backend": backend, "quantity": label(name)}
            findings.reject("A12", wrong, oracle, part_of(reference, name, "bound"), **details)
            for row in ("A1", "A10", "A11", "A17", "A18"):
                findings.reject(row, wrong, got, **details)
            (between,) = BETWEEN["float32"].values()
            findings.reject("A9", wrong, oracle, other=got, metrics=between, **details)
        counts = {"N_total": np.asarray(problem.labels.size), "zero": np.asarray(0)}
        count = np.asarray(reference.num_tokens)
        findings.reject("A0", counts, count, backend=backend, quantity="token count")
        lse, wrong = reference.lse, array_mutants(right.lse, reference.lse)
        details = {"backend": backend, "magnitude": np.maximum(np.abs(lse), 1.0)}
        findings.reject("A3", wrong, lse, quantity="lse", **details)
        wrong = array_mutants(right.logprobs, reference.logprobs) | wrong_of["logprobs"]
        del wrong["N_total for N_valid"]  # a log-probability knows no denominator
        quantity = "log-probability"
        findings.reject("A4", wrong, reference.logprobs, backend=backend, quantity=quantity)


def loss_and_gradients(
    findings: Findings, problem: Problem, backend: str
) -> tuple[Outcome, dict[str, dict[str, Array]]]:
    """A14 of one problem in its dtype; its answer, and the mutants by the name of an output or a
    gradient."""
    right, reference = findings.run(backend, problem), nll.oracle(problem)
    dtype, others = problem.hidden.dtype.name, problem_mutants(problem)
    wrong_of = gradients(findings, nll, backend, problem, right, others)
    if dtype == "bfloat16":
        for name, got in right.gradients().items():
            for row, metrics in BETWEEN[dtype].items():
                unseen = "dropped row" if row == "A19" else "times 1.001"
                wrong = {text: x for text, x in wrong_of[name].items() if text != unseen}
                details: dict[str, Any] = {"backend": backend, "quantity": f"{label(name)} bf16"}
                details |= {"other": got, "metrics": metrics}
                findings.reject(row, wrong, part_of(reference, name), **details)
    exact, row = reference.loss, "A8" if dtype in ROW_OF else "A2"
    wrong = array_mutants(right.loss, exact) | answers(others, "loss", np.dtype(np.float32))
    details = {"backend": backend, "quantity": f"loss of {dtype}"}
    findings.reject(row, wrong, exact, magnitude=reference.loss_magnitude, **details)
    return right, {**wrong_of, "logprobs": answers(others, "logprobs", np.dtype(np.float32))}


def gradients(
    findings: Findings,
    rows: HeadRows,
    backend: str,
    problem: Problem,
    right: Outcome,
    others: Mapping[str, Any],
    **how: Any,
) -> dict[str, dict[str, Array]]:
    """A14 of the rows of each gradient; its mutants, of itself and of these other oracles. In 16
    bits 0.1 % is less than a rounding, which A19 sees; A7 and A16 see two of them, and one row of
    hundreds, which is no share of A19."""
    wrong_of, reference = {}, rows.oracle(problem)
    dtype = problem.hidden.dtype.name
    for name, got in right.gradients().items():
        oracle, bound, terms = (part_of(reference, name, x) for x in ("d", "bound", "magnitude"))
        others_of = answers(others, name, got.dtype)
        wrong_of[name] = wrong = array_mutants(got, oracle) | others_of
        row = ROW_OF.get(dtype) or GRADIENT_ROWS[name]
        details: dict[str, Any] = {"quantity": rows.label(name), "backend": backend, **how}
        if row in SHARE_OF:
            shown = {text: x for text, x in wrong.items() if text != "dropped row"}
            findings.reject("A19", shown, oracle, metrics=(SHARE_OF[row],), **details)
            wrong = array_mutants(got, oracle, 1 + 2.0 ** (1 - FORMATS[dtype][0])) | others_of
        findings.reject(row, wrong, oracle, bound, magnitude=terms, **details)
    return wrong_of


def per_token_mutants(findings: Findings, problem: Problem) -> None:
    """A14: gradients as known bugs would have returned them (M1, M12)."""
    (upstream,) = per_token.upstream(problem)
    d_logprobs, d_entropy, d_lse = (np.asarray(g) for g in upstream)
    wrong_upstream = {
        "entropy without gradient": upstream._replace(d_entropy=0 * d_entropy),
        "entropy with the wrong sign": upstream._replace(d_entropy=-d_entropy),
        "lse without gradient": upstream._replace(d_lse=0 * d_lse),
        "one gradient for all tokens": upstream._replace(
            d_logprobs=np.full_like(d_logprobs, d_logprobs.mean())
        ),
    }
    others = {text: problem.per_token_reference(wrong) for text, wrong in wrong_upstream.items()}
    vocab_size = problem.weight.shape[problem.vocab_axis]
    shifted = np.where(problem.valid, (problem.labels + 1) % vocab_size, problem.labels)
    others["labels off by one"] = per_token.oracle(problem.changed(labels=shifted))
    for backend in findings.backends:
        right = per_token.call(backend, problem)
        gradients(findings, per_token, backend, problem, right, others, named=False)
