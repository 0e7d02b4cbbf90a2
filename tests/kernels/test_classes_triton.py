"""Divergences, kept sets and further classes by Triton's programs, interpreted, as
`test_contract_triton.py` has losses and log-probabilities of the label."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from conftest import HAS_TORCH
from helpers.held import hold_in_norm
from helpers.in_triton import few, launches
from helpers.measured import by_id, hold
from xentlib.contract import ROW_OF, check, failures
from xentlib.math.softmax import BLOCK_COLUMNS
from xentlib.tools.harness.backends import run_given_divergence
from xentlib.tools.harness.cases import low_precision
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build, upstream_of
from xentlib.tools.harness.ranks import Sharded, ShardedCall, run_calls
from xentlib.tools.parity.rows import classes, divergences, invariant
from xentlib.tools.parity.rows.classes import of_classes
from xentlib.tools.parity.rows.head import same
from xentlib.tools.parity.rows.invariant import OF_SHARDS

if not HAS_TORCH:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch

from xentlib.torch import (
    TeacherHead,
    TeacherLogits,
    chunked_divergence,
    chunked_logprobs,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
)
from xentlib.torch.core.kernels import runnable

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        "triton" not in runnable(), reason="Triton is not installed, or finds no GPU"
    ),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XENTLIB_KERNELS", "triton")


def small(case: Case, tokens: int = 4) -> Case:
    """Of two of the program's tiles, which a JSD has half as many columns in."""
    vocab = BLOCK_COLUMNS + 13 if case.options["kind"] == "jsd" else 300
    return replace(few(case, tokens), vocab=vocab)


DIVERGING = [small(case) for case in divergences.GRID]
DIVERGING += [replace(small(case), bias=False) for case in divergences.GRID[2::3]]


@pytest.mark.parametrize("case", DIVERGING, ids=by_id)
def test_divergences(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A0, A5, A6, A23, A24; with a gradient of the bias, whose sums go through the teacher's
    logits, and without; a labels' NLL beside a temperature."""
    launched = launches(monkeypatch)
    hold(divergences.against_oracle, ("torch",), build(case, 7))
    assert {"pair_sums", "pair_dz"} <= set(launched)


def test_a_loss_of_each_token() -> None:
    """A5, A6: with an NLL beside a temperature. Catches: the lse of other logits in a backward."""
    (case,) = (x for x in divergences.GRID if x.id == "tempered-jsd")
    problem = build(replace(small(case, 3), options={**case.options, "reduction": "none"}), 7)
    upstream = np.random.default_rng(3).standard_normal(problem.labels.shape).astype(np.float32)
    hold(divergences.against_oracle, ("torch",), problem.changed(upstream=upstream))


@pytest.mark.parametrize("dtype", ROW_OF)
def test_divergences_in_16_bits(dtype: str) -> None:
    """A7, A16: dz over the upper half of its row of logits."""
    cases = [replace(small(case, 3), bias=False) for case in divergences.GRID[::4]]
    for case in low_precision(cases, dtype):
        hold(divergences.against_oracle, ("torch",), build(case, 7))


def test_divergences_of_equal_heads_are_0() -> None:
    """A24: gradients of +0, of a teacher's logits too; a loss of each token."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 8), torch.randn(BLOCK_COLUMNS + 3, 8)
    for how in divergences.KINDS:
        for teacher in (TeacherHead(hidden, weight), TeacherLogits(hidden @ weight.T)):
            leaf = hidden.clone().requires_grad_()
            out = chunked_divergence(leaf, weight, teacher, reduction="none", **how)
            out.loss.sum().backward()
            if isinstance(teacher, TeacherHead):
                assert not out.loss.any()
                assert leaf.grad is not None
                assert not leaf.grad.any()
            assert (out.loss >= 0).all()


@pytest.mark.parametrize("how", divergences.KINDS, ids=lambda how: how["kind"])
def test_divergences_of_close_logits(how: dict[str, Any]) -> None:
    """A20: products are exact; at 1000 the rounded lse are off by half of the log-ratios. A class
    at -inf in both takes no part. Catches: p without the correction of the two lse."""
    student, teacher, upstream = divergences.given_logits(7, 1e-2, 300, 3)
    student, teacher = student + np.float32(1000), teacher + np.float32(1000)
    oracle = divergences.oracle_of(student, teacher, upstream, **how)
    masked = np.insert(teacher, 3, -np.inf, axis=1)
    weight = torch.tensor(np.insert(student, 3, 0.0, axis=1).T.copy()).requires_grad_()
    bias = torch.zeros(301)
    bias[3] = -torch.inf
    teacher_logits = TeacherLogits(torch.tensor(masked))
    out = chunked_divergence(
        torch.eye(3), weight, teacher_logits, bias=bias, outputs=("divergence",), **how
    )
    out.loss.backward()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    assert not weight.grad[3].any()
    assert not failures(check("A20", out.divergence.detach().cpu().numpy(), oracle.divergence))


@pytest.mark.parametrize("how", divergences.KINDS, ids=lambda how: how["kind"])
def test_divergences_of_given_logits(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A20, A22, A24; then of logits whose rows are not dense, with a masked token of NaN."""
    launched = launches(monkeypatch)
    logits = divergences.given_logits(7, 1e-2, 301, 3)
    got = run_given_divergence("torch", *logits, **how)
    findings, oracle = Findings(("torch",)), divergences.oracle_of(*logits, **how)
    divergences.check_given(findings, got, oracle, backend="torch")
    assert not failures(findings.measurements)
    assert launched.count("pair_dz") == 1
    student, teacher, upstream = (torch.tensor(x) for x in logits)
    assert got.divergence is not None
    for where in (None, torch.arange(3) != 1):
        expected = np.column_stack((got.divergence, got.d_logits))
        if where is not None:
            student[1], expected[1] = torch.nan, 0.0
        leaf = student.T.contiguous().T.requires_grad_()
        out = vocab_parallel_divergence(leaf, TeacherLogits(teacher), where=where, **how).loss
        (gradient,) = torch.autograd.grad(out, leaf, upstream)
        assert np.array_equal(torch.column_stack((out.detach(), gradient)).cpu().numpy(), expected)


@cache
def over_ranks() -> list[tuple[ShardedCall, Sharded]]:
    """A divergence and further classes, in one start of ranks."""
    (case,) = (x for x in divergences.GRID if x.id == "mixed-jsd")
    problem = build(replace(case, tokens=9, hidden=8, vocab=37, teacher=8), 7)
    calls = [ShardedCall("chunked_divergence", problem, (19, 18, 0))]
    case = Case("shards", 5, 8, BLOCK_COLUMNS + 37, std=6.0, kept=12, ids=5, bias=True)
    problem = build(case, 7)
    sizes = (BLOCK_COLUMNS, 37, 0)
    calls.append(ShardedCall("chunked_logprobs", problem, sizes, upstream_of(problem, 5)))
    return [*zip(calls, run_calls("torch", calls), strict=True)]


@pytest.mark.cpu
def test_divergences_over_shards() -> None:
    """A5, A6, A13, A23: over ranks, of which one has no class."""
    (call, found), _ = over_ranks()
    problem = call.problem
    reference = problem.divergence_reference()
    assert found.unequal == 0
    findings, got = Findings(("torch",)), found.outcome
    findings.check("A23", got.divergence, reference.divergence, reference.bound_divergence)
    findings.gradients({"torch": got}, reference, problem, divergences.divergences.label)
    assert not failures(findings.measurements)


# All but a softcap and a scale, which eager operators compute.
CLASSES = [few(replace(case, options={}), 5) for case in classes.GRID]
OF_CLASSES = {"take_out_rows", "stats_rows", "dz_rows", "put_rows"}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CLASSES, ids=by_id)
def test_classes(case: Case, bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A0 to A6 over kept sets and of further classes."""
    launched = launches(monkeypatch)
    hold(of_classes.against_oracle, ("torch",), build(replace(case, bias=bias), 7))
    assert set(launched) == OF_CLASSES


@pytest.mark.parametrize("dtype", ROW_OF)
def test_classes_in_16_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A7, A16: dz of 16 bits beside its logits, and of further classes rounded once."""
    launched = launches(monkeypatch)
    for case in low_precision(CLASSES[:4:3], dtype):
        hold(of_classes.against_oracle, ("torch",), build(case, 7))
    assert set(launched) == OF_CLASSES


def test_classes_of_given_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A0, A3, A4: of a caller's logits, which stay as they are."""
    launched = launches(monkeypatch)
    rng = np.random.default_rng(3)
    logits, labels = rng.standard_normal((5, 300), dtype=np.float32), rng.integers(0, 300, 5)
    given, ids = torch.tensor(logits).requires_grad_(), torch.arange(10).view(5, 2)
    out = vocab_parallel_logprobs(given, torch.tensor(labels), ids=ids)
    out.ids_logprobs.sum().backward()
    assert torch.equal(torch.tensor(logits), given.detach())
    hold(classes.given, ("torch",), ("given", logits, labels))
    assert set(launched) == OF_CLASSES


@pytest.mark.cpu
def test_classes_over_shards() -> None:
    """A0, A5, A6, A13, A18: classes of a token are on one rank, on others or on none, and one rank
    has none at all."""
    _, (two, found) = over_ranks()
    problem, findings = two.problem, Findings(("torch",))
    assert two.upstream is not None
    dense = invariant.dense(two._replace(sizes=(sum(two.sizes),)), "torch")
    assert not found.unequal
    same(findings, "A18", found.outcome, dense, names=OF_SHARDS, backend="torch")
    reference = problem.per_token_reference(two.upstream)
    findings.gradients({"torch": found.outcome}, reference, problem)
    assert len(findings.measurements) > 4
    assert not failures(findings.measurements)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_is_named_twice(dtype: torch.dtype) -> None:
    """A7: its gradient is the sum, rounded once; the label among them."""
    torch.manual_seed(0)
    labels = torch.tensor([3, 7, 7])
    ids = torch.tensor([[5, 5, 9, 3], [7, -1, 2, 2], [299, 299, 299, 0]])
    got = []
    for kept in (None, torch.tensor([[3, 5, 5], [7, 2, 11], [7, 299, 299]])):
        hidden, weight = torch.randn(3, 8), torch.randn(300, 8)
        for kernels in ("eager", "triton"):
            leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
            with pytest.MonkeyPatch.context() as chosen:
                chosen.setenv("XENTLIB_KERNELS", kernels)
                out = chunked_logprobs(*leaves, labels, ids=ids, kept=kept, entropy=True)
                there = out.ids_logprobs.isfinite()
                total = out.logprobs.sum() + out.entropy.sum() + out.ids_logprobs[there].sum()
                got.append([out.ids_logprobs, *torch.autograd.grad(total, leaves)])
        eager, triton = (
            [x.detach().float().nan_to_num(0.0, 0.0, 0.0).cpu().numpy() for x in y]
            for y in got[-2:]
        )
        hold_in_norm(triton, eager)


def test_a_class_far_above_its_kept_set() -> None:
    """A10: as if it were not there. Catches: exp of its logit less lse of the set, inf, times 0."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 8), torch.randn(300, 8)
    kept, labels = torch.tensor([[0, 1, 2], [3, 9, 9]]), torch.tensor([1, 9])
    found = []
    for above in (0.0, 120.0):
        bias = torch.zeros(300)
        bias[299] = above
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = (hidden @ weight.T + bias).requires_grad_()
        out = chunked_logprobs(x, w, labels, bias=bias, kept=kept, entropy=True)
        of_logits = vocab_parallel_logprobs(logits, labels, kept=kept)
        total = out.logprobs.sum() + out.entropy.sum() + of_logits.logprobs.sum()
        found.append(torch.autograd.grad(total, (x, w, logits)))
    for got, right in zip(found[1], found[0], strict=True):
        assert not failures(check("A10", got.cpu().numpy(), right.cpu().numpy()))
