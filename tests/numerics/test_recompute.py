"""`chunked_nll` with `recompute`: a loss whose backward computes the logits again, with blocks and
groups of tokens that are small here. By the rows of the contract, in both backends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.blocks_of_classes import WHOLE, small_blocks, torch_blocks
from helpers.measured import CAPPED, SMALL, by_id, hold
from xentlib.contract import failures
from xentlib.tools.harness.backends import run
from xentlib.tools.harness.cases import AUDIT, WITH_OPTIONS, low_precision, named
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.head import recomputed

# Of eight blocks at most: the oracle's time is that of classes.
CASES = tuple(
    replace(case, vocab=min(case.vocab, 1009))
    for case in named(
        SMALL,
        *("options-peaked", "class-weights", "sum", "denominator", "kernel-layout", "one-class"),
        *("all-ignored", "one-token", "logits-1e4", "minus-infinity"),
    )
)
LOW = tuple(
    low_precision((case,), dtype)[0]
    for dtype in ("bfloat16", "float16")
    for case in named(SMALL, "peaked", "class-weights")
)
# Of both parts of a loss, and of what weighs a class: one program of JAX's for all comparisons of
# bits, whose two blocks of classes and a part of one no other tokens show in.
FULL: dict[str, Any] = {"class_weights": True, "token_weights": True, "where": True}
BITS: dict[str, Any] = {"z_loss": 1e-3, "denominator": 700.0}
BLOCKS = Case("blocks", 203, 24, 331, options=BITS, **FULL)


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_against_the_oracle(backend: str, case: Case) -> None:
    """A0, A2, A5, A6, A26. Catches: weights of classes, z-loss or label smoothing that the backward
    has not, a factor without the denominator."""
    hold(recomputed.against_oracle, (backend,), build(case, 7))


@pytest.mark.parametrize("case", LOW, ids=by_id)
def test_16_bits_against_the_oracle(backend: str, case: Case) -> None:
    """A7, A8, A16: gradients rounded once, whatever the upstream gradient. Catches: a power of two
    that is left in a gradient, d hidden that is rounded after each block."""
    hold(recomputed.against_oracle, (backend,), build(case, 7))


@pytest.mark.parametrize("case", named(AUDIT, "audit-9", "audit-fp16-options"), ids=by_id)
def test_audit_mode(case: Case) -> None:
    """A1: PyTorch and JAX bit for bit."""
    hold(recomputed.audit, ("torch", "jax"), build(replace(case, tokens=131, vocab=331), 7))


@pytest.mark.optimized
@pytest.mark.cpu
@pytest.mark.parametrize("case", [BLOCKS, CAPPED], ids=by_id)
def test_chunks_do_not_show(backend: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A10. In JAX a group is as large as a chunk may be, or all had 64 rows."""
    if backend == "jax":
        monkeypatch.setattr("xentlib.jax.core.logits.GROUP_TOKENS", 256)
    findings = Findings((backend,))
    recomputed.chunks(findings, build(case, 7), few=True)
    assert findings.measurements
    assert not failures(findings.measurements)


@pytest.mark.optimized
@pytest.mark.cpu
def test_other_tokens_do_not_show(backend: str) -> None:
    """A17: per-token outputs and d hidden, of groups that are not the same."""
    findings = Findings((backend,))
    problem = build(BLOCKS, 7)
    invariant.batch(recomputed, findings, backend, problem, few=backend == "jax")
    assert findings.measurements
    assert not failures(findings.measurements)


@pytest.mark.parametrize(("tokens", "upstream"), [(37, np.inf), (37, np.nan), (0, 1.0)])
def test_of_no_token_that_counts_gradients_are_0(
    backend: str, tokens: int, upstream: float
) -> None:
    """Whatever the upstream gradient, as of a mean over windows of which one is empty. Catches: 0
    times inf."""
    problem = build(Case("nothing", tokens, 24, 331, ignored=1.0), 7).changed(upstream=upstream)
    found = run(backend, problem, recompute=True)
    assert found.loss == 0
    for name, x in found.gradients().items():
        assert not x.any(), name


def test_run_to_run(backend: str) -> None:
    """A11."""
    hold(recomputed.repeat, (backend,), build(replace(WITH_OPTIONS, vocab=1009), 7))


@pytest.mark.optimized
@pytest.mark.cpu
def test_outputs_have_the_bits_of_a_loss_that_keeps_its_gradients(backend: str) -> None:
    """Statistics are exact sums of blocks of 128 columns, whoever adds them."""
    names = ("loss", "num_tokens", "weight_sum", "z_loss", "logprobs", "entropy", "lse")
    # Without options two programs more, whose outputs test_blocks_of_classes_jax.py compares
    for options in (BITS, {}) if backend == "torch" else (BITS,):
        problem = build(BLOCKS, 7).changed(options=options)
        found, want = (run(backend, problem, recompute=twice) for twice in (True, False))
        for name in (*names, "correct", "predicted"):
            assert np.array_equal(getattr(found, name), getattr(want, name)), name


@pytest.mark.optimized
@pytest.mark.cpu
def test_of_one_block_gradients_have_the_bits_of_both_ways(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rows, an upstream gradient of a power of two."""
    if backend == "torch":
        torch_blocks(monkeypatch, WHOLE)
    else:
        monkeypatch.setattr("xentlib.jax.binding.XLA_BLOCK_CLASSES", 0)
    problem = build(BLOCKS, 7).changed(upstream=0.5)
    found, want = (run(backend, problem, recompute=again) for again in (True, False))
    for name, x in found.gradients().items():
        assert np.array_equal(x, getattr(want, name)), name


def test_misuse_is_said(backend: str) -> None:
    problem = build(Case("small", 5, 3, 7), 7)
    with pytest.raises(TypeError, match="`recompute` must be True or False; got 1"):
        run(backend, problem, recompute=1)  # type: ignore[arg-type]


@pytest.mark.torch
def test_what_the_backward_reads_must_not_have_changed() -> None:
    """Catches: a head or hidden states that autograd does not know to be kept. A second backward of
    a graph that is kept gives the same."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_nll

    for changed in (0, 1):
        leaves = [torch.randn(n, 3, requires_grad=True) for n in (5, 7)]
        loss = chunked_nll(*leaves, torch.arange(5), recompute=True).loss
        first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
        with torch.no_grad():
            leaves[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
