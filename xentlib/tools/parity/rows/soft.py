"""The rows of class probabilities as labels: by the sections of `chunked_nll`, and of
`vocab_parallel_logprobs` of given logits and mutants of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from xentlib.tools.harness.backends import Outcome, run, run_given
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Problem, logits_problem, upstream_of
from xentlib.tools.parity.rows.head import HeadRows, Pairs, nothing
from xentlib.tools.parity.rows.mutants import array_mutants, gradients

SEED = 5
# Exact sums know 2^-73 of a token's largest probability, which are 5e-7 of this.
LEAST = 2.0**-50
GRID = (
    Case("probs", 261, 64, 1009, std=3.0, soft="dense", token_weights=True),
    Case("probs-options", 131, 48, 1001, soft="dense", layout="HV", class_weights=True,
         token_temperature=True, options={"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 5.0}),
    Case("probs-of-few", 261, 64, 1009, std=3.0, soft="few",
         options={"reduction": "sum", "label_smoothing": 0.2}),
    Case("probs-of-few-weighted", 131, 63, 1001, std=3.0, soft="few", class_weights=True,
         options={"logit_scale": 0.7}),
)  # fmt: skip
MUTATED = Case("probs-mutants", 509, 64, 1009, ignored=0.2, soft="few", class_weights=True,
               options={"label_smoothing": 0.1})  # fmt: skip
# Of A17.
BATCH = Case(
    *("probs-batch", 301, 32, 331),
    std=3.0,
    soft="few",
    token_temperature=True,
    options={"softcap": 8.0, "reduction": "sum", "label_smoothing": 0.1},
)


def exact(problem: Problem, outcome: Outcome, reference: Any) -> Pairs:
    count = np.asarray(reference.num_tokens, np.int64)
    yield "token count", outcome.num_tokens.astype(np.int64), count
    values = np.stack([outcome.logprobs, outcome.entropy, outcome.lse])
    yield "outputs of invalid rows", *nothing(values[:, ~problem.valid])
    yield "d hidden of invalid rows", *nothing(outcome.d_hidden[~problem.valid])


soft = HeadRows(run, Problem.soft_reference, lambda problem: (), exact, of=" of probabilities")


def given(findings: Findings, item: tuple[str, Any, Any]) -> None:
    """A3 and A4 of given logits, whose labels are class probabilities."""
    text, logits, labels = item
    rng, vocab = np.random.default_rng([SEED, logits.shape[1]]), logits.shape[1]
    probs = rng.dirichlet(np.full(vocab, 0.1), len(logits)).astype(np.float32)
    probs[::2] = np.eye(vocab, dtype=np.float32)[labels[::2]]
    problem = logits_problem(logits, labels, text).changed(soft=probs)
    upstream = upstream_of(problem, SEED)._replace(d_entropy=None, d_lse=None)
    reference = problem.soft_reference(d_logprobs=upstream.d_logprobs)
    # Every second token has one class alone, whose gradient is that of a class index.
    every = np.arange(len(labels))
    one = every[(every % 2 == 0) & (np.abs(reference.logprobs) >= LEAST)]
    of_index = problem.changed(soft=None).per_token_reference(upstream).d_weight[labels[one], one]
    peak = logits.max(axis=1).astype(np.float64)
    scale = np.maximum(np.abs(peak), reference.lse - peak)
    for backend in findings.backends:
        outcome = run_given(backend, problem, upstream)
        details: dict[str, Any] = {"backend": backend, "case": f"{text}, probabilities"}
        findings.check("A3", outcome.lse, reference.lse, magnitude=scale, **details)
        details["quantity"] = "sum of q log p"
        sure = np.abs(reference.logprobs) >= LEAST
        findings.check("A4", outcome.logprobs[sure], reference.logprobs[sure], **details)
        details["quantity"] = "target gradient of one class"
        findings.check("A4", outcome.d_logits[one, labels[one]], of_index, **details)
        others = np.abs(outcome.logprobs[~sure] - reference.logprobs[~sure]) < LEAST
        findings.check("A0", others, np.ones_like(others), **details)


def mutants(findings: Findings, problem: Problem) -> None:
    """A14: what known bugs return."""
    ids, probs = problem.soft
    options = problem.options
    others = {
        "the likeliest class alone": {"probs": 1.0 * (probs == np.nanmax(probs, 1)[:, None])},
        "a class less": {"probs": np.where(np.arange(probs.shape[1]) == 1, 0, probs)},
        "probabilities of other tokens": {"probs": probs[::-1]},
        "probabilities of other classes": {"ids": np.where(ids > 0, ids - 1, ids)},
    }
    wrong = {
        text: problem.changed(soft=problem.soft._replace(**change)).soft_reference()
        for text, change in others.items()
    }
    wrong["class weights left out"] = problem.changed(class_weights=None).soft_reference()
    plain = {x: y for x, y in options.items() if x != "label_smoothing"}
    wrong["smoothing left out"] = problem.changed(options=plain).soft_reference()
    total = {**options, "denominator": float(problem.valid.size)}
    wrong["N_total for N_valid"] = problem.changed(options=total).soft_reference()
    for backend in findings.backends:
        right = soft.call(backend, problem)
        gradients(findings, soft, backend, problem, right, wrong)
        exactly = problem.soft_reference().loss
        values = {text: np.asarray(x.loss, np.float32) for text, x in wrong.items()}
        values |= array_mutants(right.loss, exactly)
        findings.reject("A2", values, exactly, backend=backend, quantity="loss of probabilities",
                        magnitude=problem.soft_reference().loss_magnitude)  # fmt: skip
