"""Kept sets and log-probabilities of several classes against the oracle, row by row of the
contract, in both backends. The measurements are the parity run's own (`parity/rows/classes.py`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.measured import few_programs, hold
from xentlib.contract import ROW_OF, check, failures
from xentlib.tools.harness.backends import run_given, run_logprobs
from xentlib.tools.harness.cases import logit_sets, low_precision
from xentlib.tools.harness.device import numpy_of, on_jax
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Problem, Upstream, build, upstream_of
from xentlib.tools.parity.rows import classes, invariant
from xentlib.tools.parity.rows.classes import BATCH, GRID, MUTATED, of_classes
from xentlib.tools.parity.rows.head import OF_TOKENS, same

BOTH = GRID[2]
FEW = ("kept-sharp", "one-kept")


@pytest.mark.parametrize("case", few_programs(GRID, FEW))
def test_fp32_against_the_oracle(backend: str, case: Case) -> None:
    """A0, A5, A6: values are held by A3 and A4 below."""
    hold(of_classes.against_oracle, (backend,), build(case, 7))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ROW_OF)
def test_16_bits_against_the_oracle(backend: str, dtype: str) -> None:
    """A7, A16."""
    hold(of_classes.against_oracle, (backend,), build(low_precision((BOTH,), dtype)[0], 7))


SETS = [
    pytest.param(item, id=item[0], marks=[] if k in (1, 6) else pytest.mark.full(backend="jax"))
    for k, item in enumerate(logit_sets(7))
]


@pytest.mark.parametrize("item", SETS)
def test_values_of_given_logits(backend: str, item: Any) -> None:
    """A3, A4. Catches: a log-sum-exp of the rest that is rounded, whose p is off by 3e-6 70 below
    the largest; logits that are not taken relative to it (2 % at an offset of -1e6)."""
    hold(classes.given, (backend,), item)


def test_every_check_rejects_its_mutants(backend: str) -> None:
    """A14."""
    hold(classes.mutants, (backend,), build(MUTATED, 0))


@pytest.mark.torch
@pytest.mark.optimized
def test_chunks_and_company_do_not_show() -> None:
    """A10, A17."""
    pytest.importorskip("torch")
    hold(of_classes.chunks, ("torch",), build(BOTH, 7))
    findings = Findings(("torch",))
    invariant.batch(of_classes, findings, "torch", build(replace(BATCH, tokens=209), 3))
    assert not failures(findings.measurements)


@pytest.mark.jax
@pytest.mark.optimized
@pytest.mark.parametrize("company", ["threes", "twice"])
@pytest.mark.parametrize("vocab", [13, pytest.param(331, marks=pytest.mark.full)])
def test_company_does_not_show_in_few_programs(vocab: int, company: str) -> None:
    """A17. Catches: a sum over classes in an order that follows the number of rows; exp of three
    numbers, which fill no vector; exp that is fused into its sums, of a narrow vocabulary."""
    pytest.importorskip("jax")
    problem = build(replace(BATCH, vocab=vocab), 3)
    (upstream,), every = of_classes.upstream(problem), np.arange(509)
    rng = np.random.default_rng(2)

    def of(places: Any) -> Any:
        return of_classes.run("jax", problem.of_tokens(places), upstream.of_tokens(places))

    twice = np.concatenate([rng.permutation(every), every])  # each in two orders, one program
    whole = of(twice)
    companies = [rng.choice(every, 3, replace=False) for _ in range(60)]
    for places in [twice] if company == "twice" else companies:
        got = whole if company == "twice" else of(places)
        findings, right = Findings(("jax",)), invariant.of_tokens(whole, len(every) + places)
        same(findings, "A17", got, right, names=OF_TOKENS, backend="jax")
        assert len(findings.measurements) == 6
        assert not failures(findings.measurements)


def test_audit_mode_bit_for_bit() -> None:
    """A1."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    hold(of_classes.audit, ("torch", "jax"), build(replace(BOTH, vocab=331), 0))


def test_all_classes_are_the_whole_vocabulary(backend: str) -> None:
    """A row of -1 alone keeps all; so does a set of every class, and `ids` change nothing else."""
    problem = build(Case("whole", 61, 24, 157, std=3.0, confident=0.5, kept=157, ids=4), 3)
    assert problem.kept is not None
    ones = np.ones_like(problem.labels)[:, None]
    every = np.broadcast_to(np.arange(157, dtype=np.int32), problem.kept.shape)[:, ::-1]
    problem, upstream = problem.changed(d_ids=None), upstream_of(problem, 2)
    plain = run_logprobs(backend, problem.changed(kept=None, ids=None), upstream)
    of_ids = run_logprobs(backend, problem.changed(kept=None), upstream)
    for kept in (-ones, np.ascontiguousarray(every)):
        got = run_logprobs(backend, problem.changed(kept=kept.astype(np.int32), ids=None), upstream)
        for one in (got, of_ids):
            assert not failures(check("A0", one.correct, plain.correct))
            for name in ("logprobs", "entropy", "lse", "d_hidden", "d_weight", "d_bias"):
                exact = getattr(plain, name).astype(np.float64)
                pair = getattr(one, name), exact
                assert not failures(check("A9", *pair, metrics=("rho / u",)))


@pytest.mark.parametrize("kind", ["top-p 0.8", "top-p 0.95", "top-k 20"])
def test_the_ratio_to_a_sampler_is_1(backend: str, kind: str) -> None:
    """Importance ratios exp(log p - log q) of what a sampler drew, which kept a set: 1 over that
    set, and off by what it left out over the whole vocabulary, 5 % or more."""
    rng = np.random.default_rng(4)
    logits = (3 * rng.standard_normal((256, 2048))).astype(np.float32)
    order = np.argsort(-logits, axis=1)
    z = np.take_along_axis(logits, order, 1).astype(np.float64)
    p = np.exp(z - z[:, :1]) / np.exp(z - z[:, :1]).sum(1, keepdims=True)
    counts = np.full(len(p), 20)
    if kind.startswith("top-p"):
        counts = ((p.cumsum(1) - p) < float(kind.split()[1])).sum(1)
    # Room for the largest of all kinds, whose program is one in JAX.
    room = ((p.cumsum(1) - p) < 0.95).sum(1).max()
    there = np.arange(room) < counts[:, None]
    kept = np.where(there, order[:, :room], -1).astype(np.int32)
    q = np.where(there, p[:, :room], 0.0)
    q /= q.sum(1, keepdims=True)
    drawn = np.array([rng.choice(len(x), p=x) for x in q])
    rows = np.arange(len(q))
    of_sampler = np.log(q[rows, drawn])
    problem = Problem(np.eye(256, dtype=np.float32), logits.T.copy(), kept[rows, drawn], kept=kept)
    none = Upstream(np.ones(256, np.float32), None, None)
    off = {
        name: np.abs(np.exp(run_given(backend, x, none).logprobs - of_sampler) - 1)
        for name, x in {"kept": problem, "whole": problem.changed(kept=None)}.items()
    }
    assert off["kept"].max() < 3e-6
    assert off["whole"].mean() > 0.045


def test_a_label_that_was_not_kept_is_nan_in_a_program() -> None:
    """Where nothing can be read: its outputs are NaN, those of others are not."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_logprobs

    p = build(Case("outside", 8, 4, 11, ignored=0.0, kept=3, ids=2), 1)
    assert p.kept is not None
    kept = p.kept.copy()
    kept[2] = np.where(np.arange(3) < 2, (p.labels[2] + 1 + np.arange(3)) % 11, -1)
    arrays = [on_jax(x) for x in (p.hidden, p.weight, p.labels, kept, p.ids)]
    names = ("hidden", "weight", "labels", "kept", "ids")
    out = jax.jit(chunked_logprobs)(**dict(zip(names, arrays, strict=True)))
    for x in (out.logprobs, out.lse):
        assert (np.isnan(numpy_of(x)) == (np.arange(8) == 2)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_a_class_far_above_its_kept_set(backend: str, temperature: float) -> None:
    """A10: as if it were not there. Catches: exp of its logit less lse of the set, inf, times 0."""
    rng = np.random.default_rng(0)
    hidden, weight = (rng.standard_normal(x).astype(np.float32) for x in ((2, 4), (41, 4)))
    kept, labels = np.array([[0, 1, 2], [3, 9, 9]], np.int32), np.array([1, 9], np.int32)
    found = []
    for above in (0.0, 120.0 * temperature):
        bias = np.zeros(41, np.float32)
        bias[40] = above
        inputs = {
            "head": (hidden, weight, labels, kept),
            "logits": (np.dot(hidden, weight.T) + bias, labels, kept),
        }
        found.append([far(backend, x, temperature, bias) for x in inputs.values()])
    for got, right in zip(*found, strict=True):
        for one, other in zip(got, right, strict=True):
            assert not failures(check("A10", one, other))


def far(backend: str, inputs: Any, temperature: float, bias: Any) -> list[Any]:
    """Gradients of log-probabilities and entropies over a kept set."""
    of_head = len(inputs) == 4
    if backend == "torch":
        torch = pytest.importorskip("torch")
        import xentlib.torch as X

        arrays, heat = [torch.tensor(x) for x in inputs], temperature
    else:
        jax = pytest.importorskip("jax")
        import xentlib.jax as X

        arrays = [jax.numpy.asarray(x) for x in inputs]
        heat = jax.numpy.float32(temperature)  # one program for both

    def loss(*leaves: Any) -> Any:
        how = {"kept": arrays[-1], "entropy": True, "temperature": heat}
        if of_head:
            row = torch.tensor(bias) if backend == "torch" else bias
            out = X.chunked_logprobs(*leaves, arrays[2], bias=row, **how)
        else:
            out = X.vocab_parallel_logprobs(*leaves, arrays[1], **how)
        return (out.logprobs + out.entropy + out.lse).sum()

    leaves = arrays[:2] if of_head else arrays[:1]
    if backend == "torch":
        leaves = [x.requires_grad_() for x in leaves]
        return [x.numpy() for x in torch.autograd.grad(loss(*leaves), leaves)]
    places = tuple(range(len(leaves)))
    return [np.asarray(x) for x in jax.grad(loss, places)(*leaves)]
