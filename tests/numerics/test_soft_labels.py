"""Class probabilities as labels against the oracle, row by row of the contract, in both backends;
the measurements are the parity run's own (`parity/rows/soft.py`). And against PyTorch's own
definition, of its own samples."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.measured import few_programs, hold
from xentlib.contract import check, failures
from xentlib.labels import SoftLabels
from xentlib.tools.harness.backends import run, run_given
from xentlib.tools.harness.cases import logit_sets, low_precision
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build, logits_problem, upstream_of
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.soft import BATCH, GRID, MUTATED, given, mutants, soft


@pytest.mark.parametrize("case", few_programs(GRID, ("probs-of-few-weighted",)))
def test_fp32_against_the_oracle(backend: str, case: Case) -> None:
    """A0, A2, A5, A6."""
    hold(soft.against_oracle, (backend,), build(case, 7))


def test_class_and_token_weights_together(backend: str) -> None:
    """A2, A5, A6, A9: a token counts with its own weight alone. Catches: with that of class 0,
    which stands where a label would."""
    case = Case("probs-both-weights", 67, 12, 101, soft="dense", class_weights=True,
                token_weights=True)  # fmt: skip
    problem = build(case, 7)
    hold(soft.against_oracle, (backend,), problem)
    exact = problem.soft_reference().weight_sum
    got = run(backend, problem).weight_sum
    assert not failures(check("A9", got, exact, metrics=("rho / u",)))


@pytest.mark.torch
def test_the_bound_has_the_length_of_the_sum() -> None:
    """A6: of many tokens within half of it. Without the length tau is 7.6 here."""
    pytest.importorskip("torch")
    problem = build(replace(GRID[0], id="probs-1024", tokens=1024), 0)
    got, o = run("torch", problem), problem.soft_reference()
    half = check("A5", got.d_weight, o.d_weight, o.bound_weight, metrics=("tau",))
    assert not failures(half)


def test_outputs_are_of_the_probabilities_as_given(backend: str) -> None:
    """A9: with label smoothing and class weights too, which are the loss's."""
    problem = build(GRID[1], 7)
    got, reference = run(backend, problem), problem.soft_reference()
    for name in ("logprobs", "entropy", "lse"):
        exact = getattr(reference, name)
        assert not failures(check("A9", getattr(got, name), exact, metrics=("rho / u",)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full(backend="jax"))]
)
def test_16_bits_against_the_oracle(backend: str, dtype: str) -> None:
    """A7, A8, A16."""
    hold(soft.against_oracle, (backend,), build(low_precision(GRID[:1], dtype)[0], 7))


SETS = [
    pytest.param(item, id=item[0], marks=[] if k == 1 else pytest.mark.full(backend="jax"))
    for k, item in enumerate(logit_sets(7))
]


@pytest.mark.parametrize("item", SETS)
def test_values_of_given_logits(backend: str, item: Any) -> None:
    """A3, A4. Catches: lse - z of a rounded lse, where one class has nearly all."""
    hold(given, (backend,), item)


@pytest.mark.full(backend="jax")
def test_every_check_rejects_its_mutants(backend: str) -> None:
    """A14."""
    hold(mutants, (backend,), build(MUTATED, 0))


@pytest.mark.cpu  # rows A10 and A17 are of CPUs
@pytest.mark.torch
@pytest.mark.optimized
def test_chunks_and_company_do_not_show() -> None:
    """A10, A17."""
    pytest.importorskip("torch")
    hold(soft.chunks, ("torch",), build(GRID[2], 7))
    findings = Findings(("torch",))
    invariant.batch(soft, findings, "torch", build(replace(BATCH, tokens=209), 3))
    assert not failures(findings.measurements)


@pytest.mark.jax
@pytest.mark.optimized
@pytest.mark.full
def test_chunks_do_not_show_in_a_program() -> None:
    """A10; A17 of three tokens among others."""
    pytest.importorskip("jax")
    problem = build(BATCH, 3)
    whole, every = run("jax", problem), np.arange(301)
    for chunk, places in ((64, every), (None, every[:3]), (None, every[290:293])):
        got = run("jax", problem.of_tokens(places), chunk_tokens=chunk)
        names = ("logprobs", "entropy", "lse", "d_hidden")
        for name in names:
            assert not failures(check("A10", getattr(got, name), getattr(whole, name)[places]))


@pytest.mark.slow
def test_audit_mode_bit_for_bit() -> None:
    """A1."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    hold(soft.audit, ("torch", "jax"), build(GRID[1], 0))


def test_one_hot_probabilities_are_class_indices(backend: str) -> None:
    """A9, tokens whose loss is 1e-6 and less among them: 1 - p is not a difference."""
    problem = build(Case("one-hot", 64, 16, 157, std=3.0, ignored=0.0, confident=0.8), 3)
    problem = problem.changed(hidden=problem.hidden * np.float32(3))
    ids = np.stack((problem.labels, np.full_like(problem.labels, -1)), 1)
    eye = np.eye(157, dtype=np.float32)[problem.labels]
    right = run(backend, problem, outputs=("logprobs",))
    assert np.abs(right.logprobs).min() < 1e-6
    for probs in (eye, SoftLabels(ids, np.ones(ids.shape, np.float32))):
        got = run(backend, problem.changed(soft=probs), outputs=("logprobs",))
        for name in ("loss", "logprobs", "d_hidden", "d_weight", "d_bias"):
            exact = getattr(right, name).astype(np.float64)
            assert not failures(check("A9", getattr(got, name), exact, metrics=("rho / u",)))


def equal(got: Any, right: Any) -> bool:
    """In float64."""
    pair = got.detach().cpu().numpy(), right.detach().cpu().numpy()
    return not failures(check("A9", *pair, metrics=("rho / u",)))


@pytest.mark.torch
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_torch_has_the_same_definition(reduction: str, eps: float, weighted: bool) -> None:
    """Of `F.cross_entropy` in float64: its mean divides by the number of tokens, whatever the class
    weights, and probabilities need not sum to 1. Leading dimensions, and one token of none."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_nll, vocab_parallel_logprobs

    torch.manual_seed(1)
    wide = {"dtype": torch.float64}
    hidden, weight = torch.randn(2, 5, 7, **wide), torch.randn(31, 7, **wide)
    probs = torch.rand(2, 5, 31, **wide)
    probs[0, 1], probs[1, 2, 3] = 0.0, 2.0
    classes = torch.rand(31, **wide) if weighted else None
    hidden.requires_grad_()
    logits = hidden @ weight.T
    how = {"reduction": reduction, "label_smoothing": eps}
    right = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), probs.flatten(0, 1), classes, **how
    )
    (want,) = torch.autograd.grad(right, hidden)
    out = chunked_nll(hidden, weight, probs, class_weights=classes, **how)
    (got,) = torch.autograd.grad(out.loss, hidden)
    assert equal(out.loss, right)
    assert equal(got, want)
    assert out.num_tokens == 10
    assert out.weight_sum == 10
    if not weighted and reduction == "sum":
        of_logits = vocab_parallel_logprobs(hidden @ weight.T, probs, label_smoothing=eps)
        assert equal(-of_logits.logprobs.sum(), right)
        assert of_logits.logprobs.shape == (2, 5)


def test_gradients_of_given_logits(backend: str) -> None:
    """A22's bound of dz, of all three outputs, in float32."""
    for kind in ("dense", "few"):
        problem = build(Case("probs-given", 96, 32, 301, std=3.0, soft=kind), 5)
        logits = (problem.hidden @ problem.weight.T).astype(np.float32)
        given_problem = logits_problem(logits, problem.labels, kind).changed(
            soft=problem.soft, where=problem.where
        )
        upstream = upstream_of(given_problem, 2)
        only = {"d_entropy": None, "d_lse": None}
        alone = run_given(backend, given_problem, upstream._replace(**only))
        reference = given_problem.soft_reference(d_logprobs=upstream.d_logprobs)
        gradient, bound = reference.d_weight.T, reference.bound_weight.T
        assert not failures(check("A22", alone.d_logits, gradient, bound, metrics=("tau",)))
        every = run_given(backend, given_problem, upstream)
        others = given_problem.changed(soft=None).per_token_reference(
            upstream._replace(d_logprobs=None)
        )
        exact = gradient + others.d_weight.T
        bound = bound + others.bound_weight.T
        assert not failures(check("A22", every.d_logits, exact, bound, metrics=("tau",)))


def test_of_one_class(backend: str) -> None:
    """A0: p is 1, whatever the logit. Catches: sums over 128 columns of a block, which XLA makes
    of one that it has broadcast (127 in each gradient)."""
    rng = np.random.default_rng(2)
    logits, labels = rng.standard_normal((26, 1)).astype(np.float32), np.zeros(26, np.int64)
    one = logits_problem(logits, labels, "few").changed(
        soft=SoftLabels(labels[:, None].astype(np.int32), rng.random((26, 1)).astype(np.float32))
    )
    got = run_given(backend, one, upstream_of(one, 2)._replace(d_lse=None))
    for x in (got.logprobs, got.entropy, got.d_logits):
        assert not failures(check("A0", np.abs(x), np.zeros_like(x)))


def test_nothing_valid_is_0(backend: str) -> None:
    """A0: the loss, and gradients that are exactly +0."""
    problem = build(replace(GRID[1], tokens=12, ignored=1.0), 3)
    got = run(backend, problem)
    for x in (got.loss, *got.gradients().values()):
        assert not failures(check("A0", x, np.zeros_like(x)))


@pytest.mark.parametrize("of_logits", [False, True])
def test_a_row_of_no_class(backend: str, of_logits: bool) -> None:
    """A10, D3: refused where it can be read; in a program no token, as with `where`. Catches: one
    of loss 0, which counts in the mean."""
    rng = np.random.default_rng(3)
    hidden, weight = (rng.standard_normal(x).astype(np.float32) for x in ((11, 5), (37, 5)))
    hidden = hidden @ weight.T if of_logits else hidden
    ids, probs = rng.integers(37, size=(11, 2)), rng.random((11, 2)).astype(np.float32)
    none = ids.copy()
    none[[0, 7]] = -1
    where = (none >= 0).any(1)
    if backend == "torch":
        torch = pytest.importorskip("torch")
        import xentlib.torch as x

        array = torch.tensor
        torch.compiler.reset()
        program: Any = partial(torch.compile, fullgraph=True, backend="aot_eager")
    else:
        jax = pytest.importorskip("jax")
        import xentlib.jax as x

        array, program = jax.numpy.asarray, jax.jit

    def call(hidden: Any, ids: Any, where: Any) -> Any:
        labels = x.SoftLabels(ids, probs)
        if of_logits:
            return tuple(x.vocab_parallel_logprobs(hidden, labels, where=where))[:3]
        return tuple(x.chunked_nll(hidden, weight, labels, where=where))[:3]

    arrays = (hidden, weight, ids, probs, none, where)
    hidden, weight, ids, probs, none, where = map(array, arrays)
    call(hidden, none, where)
    with pytest.raises(ValueError, match="`ids` must hold a class of each valid token; got 2"):
        call(hidden, none, None)
    right = program(call)(hidden, ids, where)
    for got, exact in zip(program(call)(hidden, none, None), right):
        if exact is not None:
            assert not failures(check("A10", np.asarray(got), np.asarray(exact)))
