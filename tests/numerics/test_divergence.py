"""Divergences of both backends against the oracle, row by row of the contract, by the parity run's
own measurements; and what only one of its arguments changes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

from conftest import INSTALLED
from helpers.measured import hold
from helpers.oracle import tau_bound, units
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import run_divergence, run_given_divergence
from xentlib.tools.harness.cases import Extent, low_precision, named
from xentlib.tools.harness.device import nothing_read
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build
from xentlib.tools.parity.rows import divergences as rows

TEMPERED = "tempered-forward_kl"
# In JAX each case is a program of two seconds: of one kind without options, of each with.
FEW = [
    pytest.param(
        case,
        id=case.id,
        marks=[pytest.mark.full(backend="jax")] * (case.id.startswith(("divergence", "mixed-r"))),
    )
    for case in rows.GRID
]


@pytest.mark.parametrize("case", FEW)
def test_fp32_against_the_oracle(backend: str, case: Case) -> None:
    """A0, A5, A6, A23, A24."""
    hold(rows.against_oracle, (backend,), build(case, 7))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_against_the_oracle(backend: str, dtype: str) -> None:
    """A7, A16."""
    grid = named(rows.GRID, TEMPERED, "divergence-reverse_kl", "mixed-jsd")
    for case in low_precision(grid if backend == "torch" else grid[:1], dtype):
        hold(rows.against_oracle, (backend,), build(case, 7))


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.slow
@pytest.mark.parametrize("how", rows.KINDS, ids=str)
def test_given_logits(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A20, A21, A22, A24, and A14 of the first three: both backends beside one oracle, which takes
    half of the time."""
    monkeypatch.setattr(rows, "KINDS", (how,))
    hold(rows.given, tuple(INSTALLED), Extent(7))


@pytest.mark.slow
@pytest.mark.parametrize("case", rows.CLOSE[::4], ids=lambda case: case.id)
def test_close_heads_in_bf16(backend: str, case: Case) -> None:
    """A25."""
    hold(rows.close_heads, (backend,), build(case, 7))


@pytest.mark.cpu  # rows A10 and A17 are of CPUs
@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.full(backend="jax")  # half a minute of programs, which the parity run has too
def test_any_chunk_has_the_same_bits(backend: str) -> None:
    """A10; A17 with what else a call has."""
    hold(partial(rows.batches, rows.divergences), (backend,), build(rows.BATCH, 7))
    if backend == "torch":
        hold(rows.divergences.chunks, (backend,), build(rows.GRID[1], 7))


@pytest.mark.torch
@pytest.mark.jax
@pytest.mark.slow
def test_audit_mode_is_equal_bit_for_bit() -> None:
    """A1."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    for case in low_precision(named(rows.GRID, TEMPERED, "tempered-jsd")):
        hold(rows.audit, ("torch", "jax"), build(case, 7))


def test_mutants(backend: str) -> None:
    """A14 of gradients from hidden states."""
    (case,) = named(rows.GRID, TEMPERED)
    hold(rows.mutants, (backend,), build(case, 7))


@pytest.mark.slow
@pytest.mark.full(backend="jax")
def test_no_divergence_is_negative(backend: str) -> None:
    """A24: 0 of 1,000,000 tokens, at distances down to what float32 has no digit of."""
    tokens, vocab = 125_000, 8
    for k, how in enumerate((*rows.KINDS, {"kind": "jsd", "beta": 0.9})):
        for far in (1e-3, 1e-7):
            student, teacher, upstream = rows.given_logits(k, far, vocab, tokens)
            got = run_given_divergence(backend, student, teacher, upstream, **how)
            assert got.divergence.shape == (tokens,)
            assert (got.divergence >= 0).all()
            assert np.isfinite(got.d_logits).all()
        # All but equal: a constant apart, which rounds.
        teacher = (3 * student).astype(np.float32)
        got = run_given_divergence(backend, teacher + np.float32(3.7), teacher, upstream, **how)
        assert (got.divergence >= 0).all()


@pytest.mark.parametrize("how", rows.KINDS, ids=lambda how: how["kind"])
def test_an_offset_of_the_logits(backend: str, how: dict[str, Any]) -> None:
    """A20, A22: at 1000 the rounded lse are off by 3e-5, half of the log-ratios of 0.01."""
    student, teacher, upstream = (x + np.float32(1000) for x in rows.given_logits(7, 1e-2))
    upstream = upstream - np.float32(1000)
    oracle = rows.oracle_of(student, teacher, upstream, **how)
    got = run_given_divergence(backend, student, teacher, upstream, **how)
    measured = check("A20", got.divergence, oracle.divergence)
    measured += check("A22", got.d_logits, oracle.dz, oracle.bound_dz, metrics=("tau",))
    assert not failures(measured)


@pytest.mark.parametrize("how", rows.KINDS, ids=lambda how: how["kind"])
def test_float64(backend: str, how: dict[str, Any]) -> None:
    """A23 in units of 2^-53: series have the terms that float64 needs. The oracle has as many
    digits, and its own rounding."""
    student, teacher, upstream = (x.astype(np.float64) for x in rows.given_logits(7, 0.1, 61))
    oracle = rows.oracle_of(student, teacher, upstream, **how)
    got = run_given_divergence(backend, student, teacher, upstream, **how)
    assert got.divergence.dtype == np.float64
    assert units(got.divergence, oracle.divergence, oracle.bound_divergence) <= tau_bound("A23")


MASKED = np.array([[1.0, -np.inf, 2.0, 0.5], [1.0, -np.inf, -np.inf, 0.5]], np.float32)
PLAIN = np.array([[0.5, 1.0, 2.0, 0.5], [1.5, 0.0, 0.5, 0.5]], np.float32)


@pytest.mark.parametrize("how", rows.KINDS, ids=lambda how: how["kind"])
def test_classes_at_minus_infinity(backend: str, how: dict[str, Any]) -> None:
    """A20, A22: of both they take no part; of the teacher alone its p is 0; of the student alone a
    KL from the teacher is infinite."""
    upstream = np.ones(2, np.float32)
    # Both: as without these classes.
    for student, teacher in ((MASKED + PLAIN, MASKED), (PLAIN, MASKED), (MASKED, PLAIN)):
        got = run_given_divergence(backend, student, teacher, upstream, **how)
        infinite = {"forward_kl": np.isinf(student) & ~np.isinf(teacher)}
        infinite["reverse_kl"] = np.isinf(teacher) & ~np.isinf(student)
        expected = infinite.get(how["kind"], np.zeros_like(PLAIN, bool)).any(axis=1)
        assert (np.isinf(got.divergence) == expected).all()
        assert (got.divergence[~expected] >= 0).all()
        # Of a KL from the teacher it is p_S - p_T; of one to the teacher there is none.
        finite = np.isfinite(got.d_logits).all(axis=1)
        assert (finite == ~(expected & (how["kind"] == "reverse_kl"))).all()
        if not expected.any():
            assert np.isfinite(got.d_logits).all()
            low = np.where(np.isinf(student), np.float32(-200), student)
            other = np.where(np.isinf(teacher), np.float32(-200), teacher)
            oracle = rows.oracle_of(low, other, upstream, **how)
            there = np.isfinite(student)
            of_dz = (x[there] for x in (got.d_logits, oracle.dz, oracle.bound_dz))
            measured = check("A20", got.divergence, oracle.divergence)
            measured += check("A22", *of_dz, metrics=("tau",))
            assert not failures(measured)
            assert not got.d_logits[~there].any()


def test_a_loss_of_each_token_is_that_of_a_sum(backend: str) -> None:
    """`reduction="none"`, A5 and A6: with one upstream gradient its gradients are the sum's."""
    for case in named(rows.GRID, "mixed-forward_kl", "tempered-jsd"):
        if backend == "jax" and case.id.startswith("mixed"):
            continue
        problem = build(case, 7)
        total = problem.changed(options={**problem.options, "reduction": "sum"}, upstream=1.0)
        rng = np.random.default_rng(3)
        each = problem.changed(
            options={**problem.options, "reduction": "none"},
            upstream=rng.standard_normal(problem.labels.shape).astype(np.float32),
        )
        ones = each.changed(upstream=np.ones(problem.labels.shape, np.float32))
        got = run_divergence(backend, ones)
        findings, reference = Findings((backend,)), total.divergence_reference()
        findings.gradients({backend: got}, reference, total)
        findings.gradients(
            {backend: run_divergence(backend, each)}, each.divergence_reference(), each
        )
        assert not failures(findings.measurements)
        assert got.loss.shape == problem.labels.shape
        assert not got.loss[~problem.valid].any()


def test_a_teacher_has_a_temperature_of_its_own(backend: str) -> None:
    """Bits of half the scale; without one it is the student's."""
    (case,) = named(rows.GRID, "divergence-forward_kl")
    problem = build(case, 7)
    assert problem.teacher is not None
    own, scaled = (
        problem.teacher._replace(**x) for x in ({"temperature": 2.0}, {"logit_scale": 0.5})
    )
    got, other = (run_divergence(backend, problem.changed(teacher=x)) for x in (own, scaled))
    assert not failures(check("A10", got.divergence, other.divergence))
    assert not failures(check("A10", got.d_hidden, other.d_hidden))
    plain = run_divergence(backend, problem)
    assert failures(check("A10", got.divergence, plain.divergence))


@pytest.mark.parametrize("how", rows.KINDS, ids=lambda how: how["kind"])
def test_given_logits_of_masked_tokens_and_a_temperature(backend: str, how: dict[str, Any]) -> None:
    """A10: of NaN where a token is masked nothing is left; a temperature of 2 halves the logits,
    and then the gradient. In PyTorch also as on a GPU, which computes masked tokens too."""
    student, teacher, upstream = rows.given_logits(7, 0.1, 61)
    half = np.float32(0.5)
    plain = run_given_divergence(backend, half * student, half * teacher, upstream, **how)
    where = np.arange(len(student)) % 3 > 0
    for logits in (student, teacher):
        logits[~where] = np.nan
    tempered = np.full(len(student), 2, np.float32)
    for way in (nullcontext, nothing_read) if backend == "torch" else (nullcontext,):
        with way():
            got = run_given_divergence(
                *(backend, student, teacher, upstream), where=where, temperature=tempered, **how
            )
        assert not failures(check("A10", got.divergence[where], plain.divergence[where]))
        assert not failures(check("A10", got.d_logits[where], half * plain.d_logits[where]))
        assert not got.divergence[~where].any()
        assert not got.d_logits[~where].any()


@pytest.mark.jax
def test_a_head_that_is_filled_up_beside_given_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A9: as on a GPU, whose products take heads of whole multiples of 8 columns. The teacher's
    logits have none there."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import TeacherLogits, chunked_divergence
    from xentlib.jax.core import device

    rng = np.random.default_rng(5)
    hidden, weight, logits = (
        rng.standard_normal(x).astype(np.float32) for x in ((24, 16), (59, 16), (24, 59))
    )
    how: dict[str, Any] = {"kind": "jsd", "beta": 0.3, "outputs": ("divergence",)}

    def results(reduction: Any) -> list[Any]:
        def loss(hidden: Any, weight: Any) -> Any:
            teacher = TeacherLogits(logits)
            out = chunked_divergence(hidden, weight, teacher, reduction=reduction, **how)
            return out.loss.sum(), out.divergence

        gradients, divergence = jax.grad(loss, (0, 1), has_aux=True)(hidden, weight)
        return [np.asarray(x) for x in (divergence, *gradients)]

    plain = [results(reduction) for reduction in ("sum", "none")]
    jax.clear_caches()
    filled = device.KINDS["cpu"]._replace(column_multiple=8)
    monkeypatch.setitem(device.KINDS, "cpu", filled)
    for reduction, exact in zip(("sum", "none"), plain, strict=True):
        for ours, right in zip(results(reduction), exact, strict=True):
            pair = ours, right.astype(np.float64)
            assert not failures(check("A9", *pair, metrics=("rho / u",), backend="jax"))
    jax.clear_caches()


@pytest.mark.parametrize("larger", ["student", "teacher"])
def test_classes_that_both_have(backend: str, larger: str) -> None:
    """`vocab="intersect"`, A9: as the heads without the rows of padding of either, which have a
    gradient of exactly 0."""
    (case,) = named(rows.GRID, "mixed-forward_kl")
    whole = build(case, 7)
    assert whole.teacher is not None
    count = case.vocab - 9
    if larger == "student":  # beside which an NLL would be over fewer classes than its own
        whole = whole.changed(options={**whole.options, "nll_weight": 0.0})
    both = {"options": {**whole.options, "vocab": "intersect"}}
    labels = np.where(whole.valid, np.minimum(whole.labels, count - 1), whole.labels)
    whole = whole.changed(labels=labels)
    assert whole.bias is not None
    axis = whole.vocab_axis
    few = {"weight": np.take(whole.weight, range(count), axis), "bias": whole.bias[:count]}
    cut = whole.teacher._replace(weight=whole.teacher.weight[:count])
    cut = cut._replace(bias=None if cut.bias is None else cut.bias[:count])
    right = run_divergence(backend, whole.changed(**few, teacher=cut))
    given = whole.changed(teacher=cut) if larger == "student" else whole.changed(**few)
    got = run_divergence(backend, given.changed(**both))
    for name in ("loss", "nll", "divergence", "d_hidden", "d_weight", "d_bias"):
        ours, exact = getattr(got, name), getattr(right, name)
        if name in ("d_weight", "d_bias") and larger == "student":
            ours = ours if name == "d_bias" or axis == 0 else ours.T
            exact = exact if name == "d_bias" or axis == 0 else exact.T
            assert not ours[count:].any()
            ours = ours[:count]
        pair = ours, exact.astype(np.float64)
        assert not failures(check("A9", *pair, metrics=("rho / u",)))
