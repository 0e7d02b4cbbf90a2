"""The rows of kept sets and of several classes a token: by the sections of per-token outputs, and
values of given logits and mutants of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.backends import run_given
from xentlib.tools.harness.cases import LogitSet
from xentlib.tools.harness.findings import GRADIENT_ROWS, Findings
from xentlib.tools.harness.problems import (
    Case,
    Problem,
    Upstream,
    logits_problem,
    upstream_of,
    with_classes,
)
from xentlib.tools.parity.rows.head import HeadRows, per_token
from xentlib.tools.parity.rows.mutants import array_mutants, gradients

Array = npt.NDArray[Any]
SEED = 5
EXTRAS: dict[str, Any] = {"where": True, "token_temperature": True}
GRID = (
    Case("kept", 261, 64, 1009, std=3.0, kept=20),
    Case("ids", 131, 48, 1009, ids=6, layout="HV"),
    Case("kept-and-ids", 131, 63, 1001, std=3.0, confident=0.5, kept=12, ids=5, **EXTRAS,
         options={"softcap": 5.0, "logit_scale": 0.8}),
    Case("kept-sharp", 131, 64, 1001, std=6.0, confident=0.7, kept=9, ids=4),
    Case("all-classes", 64, 32, 131, std=3.0, kept=131, ids=131),
    Case("one-kept", 64, 32, 301, std=3.0, kept=1, ids=1),
)  # fmt: skip
MUTATED = Case("kept-mutants", 509, 64, 1009, ignored=0.0, kept=12, ids=5)
# Of A17.
BATCH = Case(
    *("classes-batch", 509, 32, 331),
    std=3.0,
    confident=0.3,
    kept=7,
    ids=4,
    token_temperature=True,
    options={"softcap": 8.0},
)
of_classes: HeadRows = per_token._replace(of=" over classes")


def given(findings: Findings, item: LogitSet) -> None:
    """A3 and A4 of given logits: lse, log-probabilities of the label and of further classes, and
    the target's gradient, over kept sets."""
    text, logits, labels = item
    vocab, rows = logits.shape[1], np.arange(len(labels))
    case = Case(text, len(logits), 1, vocab, kept=min(vocab, 20), ids=min(vocab, 6))
    plain = logits_problem(logits, labels, text)
    problem = with_classes(plain, case, np.random.default_rng([SEED, vocab])).changed(d_ids=None)
    ones = Upstream(np.ones(len(labels), np.float32), None, None)
    reference = problem.per_token_reference(ones)
    peak = np.where(reference.lse == 0, 0, np.abs(logits).max(axis=1)).astype(np.float64)
    for backend in findings.backends:
        outcome = run_given(backend, problem, ones)
        details: dict[str, Any] = {"backend": backend, "case": f"{text}, kept"}
        scale = np.maximum(peak, np.abs(reference.lse))
        findings.check("A3", outcome.lse, reference.lse, magnitude=scale, **details)
        exact = np.asarray(reference.ids_logprobs)
        there = np.isfinite(exact)
        same = np.isneginf(outcome.ids_logprobs) == ~there
        details["quantity"] = "classes that were not kept"
        findings.check("A0", same, np.ones_like(same), **details)
        pairs = {
            "log-probability": (outcome.logprobs, reference.logprobs),
            "log-probabilities of ids": (outcome.ids_logprobs[there], exact[there]),
            "target gradient": (
                outcome.d_logits[rows, labels],
                reference.d_weight[labels, rows],
            ),
        }
        for name, (got, oracle) in pairs.items():
            details["quantity"] = f"{name} over classes"
            findings.check("A4", got, oracle, **details)


def mutants(findings: Findings, problem: Problem) -> None:
    """A14: what known bugs of a kept set return."""
    kept, ids = problem.kept, problem.ids
    assert kept is not None
    assert ids is not None
    upstream = upstream_of(problem, SEED)
    others = {
        "the whole vocabulary": problem.changed(kept=None),
        "kept sets of other tokens": problem.changed(kept=with_label(problem, kept[::-1])),
        "one class less": problem.changed(kept=with_label(problem, kept[:, 1:])),
        "-1 as class 0": problem.changed(kept=np.where(kept == -1, 0, kept)),
        "ids of other tokens": problem.changed(ids=ids[::-1]),
    }
    wrong = {text: other.per_token_reference(upstream) for text, other in others.items()}
    # An entropy over the whole vocabulary beside log-probabilities over the kept.
    without = problem.per_token_reference(upstream._replace(d_entropy=None))
    only = Upstream(None, upstream.d_entropy, None)
    whole = problem.changed(kept=None, d_ids=None).per_token_reference(only)
    entropy = {name: getattr(without, name) + getattr(whole, name) for name in GRADIENT_ROWS}
    wrong["entropy over the whole vocabulary"] = without._replace(**entropy)
    for backend in findings.backends:
        right = of_classes.call(backend, problem)
        gradients(findings, of_classes, backend, problem, right, wrong, named=False)
        exact = np.asarray(problem.per_token_reference(upstream).ids_logprobs)
        finite = np.isfinite(exact)
        oracle, values = np.where(finite, exact, 0.0), {}
        for text, other in wrong.items():
            if text != "entropy over the whole vocabulary":
                values[text] = np.where(finite, np.asarray(other.ids_logprobs), 0.0)
        of_ids = values | array_mutants(np.where(finite, right.ids_logprobs, 0.0), oracle)
        findings.reject("A4", of_ids, oracle, backend=backend, quantity="ids over classes")


def with_label(problem: Problem, kept: Array) -> Array:
    """With the label where there is anything."""
    kept = kept.copy()
    labels = np.where(problem.valid, problem.labels, 0)
    there = (kept >= 0).any(axis=1)
    kept[:, 0] = np.where(there, labels, -1)
    return kept
