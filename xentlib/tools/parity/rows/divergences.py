"""The rows of divergences: of heads, by the same sections as the other two functions, and of what
only they have: logits that lie close together, equal ones, and mutants of their own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF
from xentlib.reference import divergence_reference
from xentlib.teacher import TeacherHead
from xentlib.tools.harness.backends import Outcome, run_divergence, run_given_divergence
from xentlib.tools.harness.cases import Extent
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Problem, Upstream, logits_problem
from xentlib.tools.harness.ranks import Sharded, ShardedCall
from xentlib.tools.parity.rows.head import HeadRows, Pairs, nothing
from xentlib.tools.parity.rows.invariant import batch
from xentlib.tools.parity.rows.mutants import array_mutants, gradients

Array = npt.NDArray[Any]
KINDS: tuple[dict[str, Any], ...] = (
    {"kind": "forward_kl"},
    {"kind": "reverse_kl"},
    {"kind": "jsd", "beta": 0.3},
)
OPTIONS: dict[str, Any] = {"softcap": 6.0, "logit_scale": 0.8, "temperature_squared": True}
OPTIONS["nll_weight"] = 0.3  # of logits without the temperature
MIXED: dict[str, Any] = {"nll_weight": 0.7, "reduction": "sum"}
EXTRAS: dict[str, Any] = {"where": True, "token_weights": True, "token_temperature": True}
GRID = tuple(
    Case(
        f"{name}-{how['kind']}", *sizes, std=std, teacher=teacher, options={**how, **more}, **extras
    )
    for how in KINDS
    for name, sizes, std, teacher, more, extras in (
        ("divergence", (261, 64, 1009), 1.0, 96, {}, {}),
        ("tempered", (131, 48, 1009), 2.0, 64, OPTIONS, EXTRAS),
        ("mixed", (131, 63, 1001), 1.0, 32, MIXED, {"layout": "HV"}),
    )
)
# Each kind once, with other sizes and options.
ONCE = tuple(GRID[3 * k + k % 3] for k in range(len(KINDS)))
# Gradients of heads in 16 bits whose hidden states are close.
CLOSE = tuple(
    Case(f"close-{far:g}-{how['kind']}", 128, 64, 8192, std=3.0, bias=False, ignored=0.0,
         teacher=64, far=far, dtype="bfloat16", options=how)
    for how in KINDS
    for far in (0.1, 0.01, 0.001)
)  # fmt: skip
# Of A17.
BATCH = Case(
    *("divergence-batch", 509, 32, 331),
    std=2.0,
    teacher=48,
    token_weights=True,
    token_temperature=True,
    options={"kind": "jsd", "beta": 0.5, "reduction": "sum", "softcap": 8.0},
)
DISTANCES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
FEW_DISTANCES = (1e-2, 1e-4)  # of the first the mutants are made
# Of the larger of two shards; the other has one less. No multiples of the 64 and 128 columns of a
# tile and of a block: with such rows divergences were once wrong, and the others right.
SHARD_ROWS = (26, 250, 12_576)


def exact_of_divergence(problem: Problem, outcome: Outcome, reference: Any) -> Pairs:
    count = np.asarray(reference.num_tokens, np.int64)
    yield "token count", outcome.num_tokens.astype(np.int64), count
    values = [outcome.divergence, outcome.entropy, outcome.teacher_entropy]
    yield "outputs of invalid rows", *nothing(np.stack(values)[:, ~problem.valid])
    yield "d hidden of invalid rows", *nothing(outcome.d_hidden[~problem.valid])
    wrong = sum(x.dtype != np.float32 for x in (outcome.loss, *values))
    yield "dtypes of outputs", *nothing(np.int64(wrong))


def run(backend: str, problem: Problem, **how: Any) -> Outcome:
    return run_divergence(backend, problem, **how)


divergences = HeadRows(
    run,
    Problem.divergence_reference,
    lambda problem: (),
    exact_of_divergence,
    of=" of a divergence",
    is_nll=False,
)


def against_oracle(findings: Findings, problem: Problem) -> None:
    """A0, A5, A6 of float32, A7 or A16 of 16 bits, A9; and A23."""
    reference, low = divergences.oracle(problem), problem.hidden.dtype.name in ROW_OF
    outcomes = {backend: run(backend, problem) for backend in findings.backends}
    for backend, outcome in outcomes.items():
        details: dict[str, Any] = {"backend": backend, "case": problem.text}
        if not low:
            divergences.exact(findings, problem, outcome, reference, **details)
            bound = reference.bound_divergence
            findings.check("A23", outcome.divergence, reference.divergence, bound, **details)
            findings.check(
                "A24", *nothing((outcome.divergence < 0).sum()), quantity="below 0", **details
            )
    findings.gradients(outcomes, reference, problem, divergences.label)


def close_heads(findings: Findings, problem: Problem) -> None:
    """A25."""
    reference = problem.divergence_reference()
    for backend in findings.backends:
        outcome = run(backend, problem)
        for name in ("d_hidden", "d_weight"):
            pair = getattr(outcome, name), getattr(reference, name)
            details = {"backend": backend, "case": problem.text}
            findings.check("A25", *pair, quantity=divergences.label(name), **details)


def given_logits(seed: int, far: float, vocab: int = 4099, tokens: int = 64) -> tuple[Array, ...]:
    """Logits of a student and of a teacher, so far apart, and an upstream gradient."""
    rng = np.random.default_rng([seed, 12, round(1 / far)])
    teacher = (3 * rng.standard_normal((tokens, vocab))).astype(np.float32)
    student = (teacher + far * rng.standard_normal(teacher.shape)).astype(np.float32)
    return student, teacher, rng.standard_normal(tokens).astype(np.float32)


def oracle_of(student: Array, teacher: Array, upstream: Array, **how: Any) -> Any:
    """Of given logits, as those of a head that multiplies exactly."""
    eye = np.eye(len(student), dtype=student.dtype)
    return divergence_reference(
        *(eye, student.T, eye, teacher.T),
        upstream=upstream,
        reduction="none",
        exact_logits=True,
        **how,
    )


def given(findings: Findings, extent: Extent) -> None:
    """A20 to A22 at five distances, or at two, A24, and what A14 has of them."""
    seed = extent.seed
    for how in KINDS:
        for far in FEW_DISTANCES if extent.few else DISTANCES:
            student, teacher, upstream = given_logits(seed, far)
            reference = oracle_of(student, teacher, upstream, **how)
            outcomes = {
                backend: run_given_divergence(backend, student, teacher, upstream, **how)
                for backend in findings.backends
            }
            for backend, outcome in outcomes.items():
                case = f"{how}, logits {far:g} apart"
                check_given(findings, outcome, reference, backend=backend, case=case)
            if far == 1e-2:
                reject(findings, how, student, teacher, upstream, outcomes)
        student, _, upstream = given_logits(seed, 1.0)
        for backend in findings.backends:
            outcome = run_given_divergence(backend, student, student, np.abs(upstream), **how)
            for name in ("divergence", "d_logits"):
                of = {"backend": backend, "case": f"{how}, equal logits", "quantity": name}
                findings.check("A24", *nothing(getattr(outcome, name)), **of)


def shard_calls(extent: Extent) -> list[ShardedCall]:
    """Of `vocab_parallel_divergence`: each kind over shards of each size, or of a few once each.
    All logits are far below 0, so that a column which is no class would be seen."""
    every = itertools.product(KINDS, SHARD_ROWS)
    calls = []
    for how, rows in zip(KINDS, itertools.cycle(SHARD_ROWS)) if extent.few else every:
        student, teacher, upstream = given_logits(extent.seed, 1e-2, 2 * rows - 1)
        problem = logits_problem(student - 20, np.zeros(len(student)), f"{how}, logits 0.01 apart")
        weight = np.ascontiguousarray(teacher.T - 20)
        pair = problem.changed(teacher=TeacherHead(problem.hidden, weight), options=how)
        of = Upstream(upstream, None, None)
        calls.append(ShardedCall("vocab_parallel_divergence", pair, (rows, rows - 1), of))
    return calls


def over_shards(
    findings: Findings, backend: str, calls: list[ShardedCall], results: list[Sharded]
) -> None:
    """A20, A22 and A24 of calls from `shard_calls`."""
    for call, (outcome, _) in zip(calls, results, strict=True):
        problem, of = call.problem, call.upstream
        assert problem.teacher is not None
        assert of is not None
        logits = problem.weight.T, problem.teacher.weight.T
        reference = oracle_of(*logits, np.asarray(of.d_logprobs), **problem.options)
        case = f"{problem.text}, shards of {call.sizes}"
        check_given(findings, outcome, reference, backend=backend, case=case)


def check_given(findings: Findings, outcome: Outcome, reference: Any, **details: Any) -> None:
    exact = reference.divergence
    for row, some in (("A20", exact >= 1e-7), ("A21", (exact >= 1e-9) & (exact < 1e-7))):
        if some.any():
            findings.check(row, outcome.divergence[some], exact[some], **details)
    bound, terms = reference.bound_dz, reference.terms_dz
    findings.check("A22", outcome.d_logits, reference.dz, bound, magnitude=terms, **details)
    findings.check("A24", *nothing((outcome.divergence < 0).sum()), quantity="below 0", **details)


def wrong_divergences(
    how: dict[str, Any], student: Array, teacher: Array, upstream: Array
) -> dict[str, Any]:
    """What known bugs return, as oracles of other problems or of float32 as it is often written."""
    half = student.shape[1] // 2
    wrong: dict[str, Any] = {
        "arguments swapped": oracle_of(teacher, student, upstream, **how),
        "the softmax of a shard": oracle_of(student[:, :half], teacher[:, :half], upstream, **how),
        "missing logits at 0": oracle_of(
            np.where(np.arange(student.shape[1]) < half, student, 0).astype(np.float32),
            teacher,
            upstream,
            **how,
        ),
        "a temperature of 1.01": oracle_of(student, teacher, upstream, temperature=1.01, **how),
    }
    if how["kind"] == "jsd":
        wrong["beta turned round"] = oracle_of(
            student, teacher, upstream, kind="jsd", beta=1 - how["beta"]
        )
    return wrong


def plainly(how: dict[str, Any], student: Array, teacher: Array) -> Array:
    """Values from a difference of two rounded log-softmaxes in float32."""
    log_s, log_t = (
        (
            z
            - (
                z.max(1, keepdims=True)
                + np.log(np.exp(z - z.max(1, keepdims=True)).sum(1))[:, None]
            )
        )
        for z in (student, teacher)
    )
    if how["kind"] == "forward_kl":
        terms = np.exp(log_t) * (log_t - log_s)
    elif how["kind"] == "reverse_kl":
        terms = np.exp(log_s) * (log_s - log_t)
    else:
        beta = np.float32(how["beta"])
        m = np.log(beta * np.exp(log_t) + (1 - beta) * np.exp(log_s))
        terms = beta * np.exp(log_t) * (log_t - m) + (1 - beta) * np.exp(log_s) * (log_s - m)
    total: Array = terms.sum(axis=1, dtype=np.float32)
    return total


def reject(
    findings: Findings,
    how: dict[str, Any],
    student: Array,
    teacher: Array,
    upstream: Array,
    outcomes: dict[str, Outcome],
) -> None:
    """A14 of A20 and A22."""
    reference = oracle_of(student, teacher, upstream, **how)
    others = wrong_divergences(how, student, teacher, upstream)
    for backend, right in outcomes.items():
        values = {x: o.divergence.astype(np.float32) for x, o in others.items()}
        values["difference of two rounded lse"] = plainly(how, student, teacher)
        values |= array_mutants(right.divergence, reference.divergence)
        details: dict[str, Any] = {"backend": backend, "quantity": f"divergence, {how['kind']}"}
        findings.reject("A20", values, reference.divergence, **details)
        dz = {x: o.dz for x, o in others.items() if o.dz.shape == reference.dz.shape}
        dz |= array_mutants(right.d_logits, reference.dz)
        details |= {"quantity": f"d logits, {how['kind']}", "magnitude": reference.terms_dz}
        findings.reject("A22", dz, reference.dz, reference.bound_dz, **details)


def mutants(findings: Findings, problem: Problem) -> None:
    """A14 of gradients from hidden states."""
    options, teacher = problem.options, problem.teacher
    assert teacher is not None
    changes: dict[str, Any] = {
        "T^2 missing": {"options": {**options, "temperature_squared": False}},
        "a teacher without its bias": {"teacher": teacher._replace(bias=None)},
        "a teacher of other tokens": {"teacher": teacher._replace(hidden=teacher.hidden[::-1])},
        "N_total for N_valid": {"options": {**options, "denominator": float(problem.valid.size)}},
    }
    dtype = problem.hidden.dtype.name
    others = {
        text: problem.changed(**change).divergence_reference() for text, change in changes.items()
    }
    assert dtype == "float32"
    for backend in findings.backends:
        gradients(findings, divergences, backend, problem, run(backend, problem), others)


audit = divergences.audit


def batches(rows: HeadRows, findings: Findings, problem: Problem, *, few: bool = False) -> None:
    """A17."""
    for backend in findings.backends:
        batch(rows, findings, backend, problem, few=few)
