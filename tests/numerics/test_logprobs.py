"""`chunked_logprobs` of both backends against the oracle, row by row of the contract, and what
PyTorch does around it. The measurements are the parity run's own (`parity/rows/head.py`)."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.measured import CAPPED, SMALL, by_id, few_programs, hold, shared
from xentlib.contract import ROW_OF, check, failures
from xentlib.reference import logprobs_reference
from xentlib.tools.harness.backends import run, run_logprobs
from xentlib.tools.harness.cases import (
    AUDIT,
    BASE,
    CHUNK_CASES,
    WITH_OPTIONS,
    logit_sets,
    low_precision,
    named,
)
from xentlib.tools.harness.device import numpy_of
from xentlib.tools.harness.findings import GRADIENT_ROWS, check_gradient
from xentlib.tools.harness.problems import Case, Problem, Upstream, build, upstream_of
from xentlib.tools.parity.rows.head import per_token
from xentlib.tools.parity.rows.mutants import per_token_mutants

CASES = [shared(case) for case in SMALL]


# What a reduction or a class weighs has no say in per-token outputs.
@pytest.mark.parametrize("case", few_programs(CASES, ("sum", "denominator", "class-weights")))
def test_fp32_against_the_oracle(backend: str, case: Case) -> None:
    """A0, A5, A6; M1 (a gradient of its own for each token), M12, M13."""
    hold(per_token.against_oracle, (backend,), build(case, 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", few_programs([c for dtype in ROW_OF for c in low_precision(tuple(CASES), dtype)])
)
def test_bf16_against_the_oracle(backend: str, case: Case) -> None:
    """A7, A16."""
    hold(per_token.against_oracle, (backend,), build(case, 7))


@pytest.mark.parametrize("item", logit_sets(7), ids=lambda item: item[0])
def test_given_logits(backend: str, item: Any) -> None:
    """A3, A4."""
    hold(per_token.logits, (backend,), item)


@pytest.mark.cpu
@pytest.mark.optimized
@pytest.mark.parametrize(
    "case",
    # JAX walks as `chunked_nll` does, which has those of bf16 and with a softcap.
    few_programs(
        [*CHUNK_CASES, CAPPED], [x.id for x in (*CHUNK_CASES, CAPPED) if x.id != "chunks-odd"]
    ),
)
@pytest.mark.parametrize("chunks", [(8, 24, 64), (200,)], ids=str)
def test_chunks_do_not_show(
    backend: str, case: Case, chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A10. Catches: a softcap's derivative from `torch.cosh`, whose bits follow the tail."""
    if (backend, chunks) == ("jax", (200,)):
        pytest.skip("test_logprobs_jax.py has it")
    monkeypatch.setattr("xentlib.tools.harness.cases.FEW_CHUNKS", chunks)
    hold(per_token.chunks, (backend,), build(case, 7))


def test_run_to_run(backend: str) -> None:
    """A11."""
    hold(per_token.repeat, (backend,), build(WITH_OPTIONS, 7))


@pytest.mark.full(backend="jax")  # the checks are the same, and each mutant a program
def test_every_check_rejects_its_mutants(backend: str) -> None:
    """A14: an entropy gradient that is dropped (TRL) or has the wrong sign among them."""
    hold(per_token_mutants, (backend,), build(BASE, 0))


@pytest.mark.parametrize(
    "case",
    [
        *named(AUDIT, "audit-0"),
        # A user's program too.
        *(pytest.param(case, marks=pytest.mark.optimized) for case in named(AUDIT, "audit-9")),
        *(pytest.param(case, marks=pytest.mark.full) for case in named(AUDIT, "audit-3")),
    ],
    ids=by_id,
)
def test_audit_mode_bit_for_bit(case: Case) -> None:
    """A1."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    case = dataclasses.replace(case, vocab=997, hidden=64)
    hold(per_token.audit, ("torch", "jax"), build(case, 0))


@pytest.mark.optimized
@pytest.mark.slow
def test_the_same_values_and_gradients_as_the_loss(backend: str) -> None:
    """A sum of log-probabilities is minus `chunked_nll`: per-token values bit for bit."""
    problem = build(Case("loss", 61, 24, 157, confident=0.3, options={"reduction": "sum"}), 3)
    problem = problem.changed(upstream=1.0)
    minus = np.full(61, -1.0, np.float32)
    ours, theirs = run_logprobs(backend, problem, Upstream(minus, 0 * minus, None)), None
    theirs = run(backend, problem)
    for name in ("logprobs", "entropy", "lse", "correct"):
        assert not failures(check("A10", getattr(ours, name), getattr(theirs, name)))
    reference = problem.reference()
    for name, got in ours.gradients().items():
        bound = getattr(reference, name.replace("d_", "bound_"))
        assert not failures(
            check(GRADIENT_ROWS[name], got, getattr(reference, name), bound, metrics=("tau",))
        )


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 1e37])
@pytest.mark.parametrize("valid", [0, 1, 40])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_masked_reaches_nothing(
    backend: str, poison: float, valid: int, dtype: str
) -> None:
    """A0, M4: also an upstream gradient that is not finite there."""
    clean = build(Case("masked", 64, 24, 131, ignored=0.0, dtype=dtype), 3)
    gone = np.arange(64) >= valid
    labels = np.where(gone, -100, clean.labels).astype(np.int32)
    with np.errstate(over="ignore"):
        hidden = np.where(gone[:, None], clean.hidden.dtype.type(poison), clean.hidden)
    upstream = upstream_of(clean, 1)
    poisoned = Upstream(*(np.where(gone, np.float32(poison), g) for g in upstream))
    zeros = clean.changed(labels=labels, hidden=np.where(gone[:, None], 0 * clean.hidden, hidden))
    expected = run_logprobs(backend, zeros, upstream)
    got = run_logprobs(backend, zeros.changed(hidden=hidden), poisoned)
    for name, value in expected.by_name().items():
        assert not failures(check("A0", getattr(got, name), value))
    d_hidden = got.gradients()["d_hidden"][gone]
    assert not failures(check("A0", d_hidden, np.zeros_like(d_hidden)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [8, 64])
def test_d_weight_over_many_chunks(backend: str, chunk: int, dtype: str) -> None:
    """A6, A7, A19; M2. Catches: an accumulator in bf16, or one that a chunk overwrites."""
    low = dtype == "bfloat16"
    problem = build(dataclasses.replace(BASE, id=f"many-{dtype}", std=3.0, dtype=dtype), 5)
    upstream = upstream_of(problem, 2)
    reference = problem.per_token_reference(upstream, dz_dtype="bfloat16" if low else "float64")
    got = run_logprobs(backend, problem, upstream, chunk_tokens=chunk)
    for name, row in GRADIENT_ROWS.items():
        given = "A7" if low else row, name, getattr(got, name)
        assert not failures(check_gradient(*given, reference))


@pytest.mark.parametrize("tokens", [0, 1, 7, 65])
def test_any_number_of_tokens(backend: str, tokens: int) -> None:
    """M17, N = 0 too."""
    problem = build(Case("tokens", tokens, 24, 157, ignored=0.0), 3)
    upstream = upstream_of(problem, 2)
    got, reference = run_logprobs(backend, problem, upstream), problem.per_token_reference(upstream)
    for name, row in GRADIENT_ROWS.items():
        oracle, bound = getattr(reference, name), getattr(reference, name.replace("d_", "bound_"))
        assert not failures(check(row, getattr(got, name), oracle, bound, metrics=("tau",)))


def test_classes_at_minus_infinity(backend: str) -> None:
    """M3: classes that a bias takes out have no probability, no entropy, no gradient."""
    problem = build(Case("minus-inf", 64, 24, 17, ignored=0.0), 1)
    assert problem.bias is not None
    problem.bias[5:] = -np.inf
    problem = problem.changed(labels=np.zeros(64, np.int32))
    got = run_logprobs(backend, problem, upstream_of(problem, 4))
    assert got.entropy is not None
    assert np.isfinite(got.entropy).all()
    gradients = got.gradients()
    assert all(np.isfinite(g).all() for g in gradients.values())
    assert not np.any(gradients["d_bias"][5:])


def test_a_label_at_minus_infinity(backend: str) -> None:
    """M3: its log-probability is -inf; 0 * inf must not make the gradients NaN."""
    problem = build(Case("no-label", 64, 24, 17, ignored=0.0), 1)
    assert problem.bias is not None
    problem.bias[5:] = -np.inf
    problem = problem.changed(labels=np.full(64, 11, np.int32))
    got = run_logprobs(backend, problem, upstream_of(problem, 4))
    assert np.isneginf(got.logprobs).all()
    others = run_logprobs(
        backend, problem.changed(labels=0 * problem.labels), upstream_of(problem, 4)
    )
    assert np.abs(got.entropy - others.entropy).max() < 1e-5
    assert all(np.isfinite(g).all() for g in got.gradients().values())
    # A label without probability pulls at its own column, at no other's.
    assert np.abs(got.gradients()["d_bias"]).argmax() == 11


@pytest.mark.slow
def test_fp16_keeps_small_gradients(backend: str) -> None:
    """M14, M18: g * p is subnormal in fp16. Catches: dz without its power of two."""
    problem = build(Case("half", 128, 24, 157, std=3.0, ignored=0.0, dtype="float16"), 3)
    tiny = Upstream(*(g * np.float32(2.0**-12) for g in upstream_of(problem, 3)))
    tiny = tiny._replace(d_logprobs=0 * np.asarray(tiny.d_logprobs))  # the target's term is large
    reference = problem.per_token_reference(tiny)
    for name, got in run_logprobs(backend, problem, tiny).gradients().items():
        normal = np.abs(getattr(reference, name)) >= 2.0**-14  # XLA takes smaller results to 0
        off = np.abs(got.astype(np.float64) / np.where(normal, getattr(reference, name), 1) - 1)
        assert normal.mean() > 0.1
        # dz and the result are rounded to fp16 once each; a sum of 128 may cancel to an eighth.
        assert off[normal].max() <= 8 * 2 * 2.0**-11


def test_the_oracle_is_autograd() -> None:
    """The oracle's gradients against torch.float64 autograd through full logits."""
    torch = pytest.importorskip("torch")
    problem = build(
        Case("oracle", 23, 7, 31, token_temperature=True, where=True,
             options={"softcap": 3.0, "logit_scale": 0.7}), 5,
    )  # fmt: skip
    upstream = upstream_of(problem, 6)
    reference = problem.per_token_reference(upstream)
    assert problem.bias is not None
    leaves = [
        torch.tensor(x.astype(np.float64), requires_grad=True)
        for x in (problem.hidden, problem.weight, problem.bias)
    ]
    temperature = torch.tensor(problem.options["temperature"].astype(np.float64))[:, None]
    logits = 3.0 * torch.tanh(0.7 * (leaves[0] @ leaves[1].T + leaves[2]) / 3.0) / temperature
    log_p = logits.log_softmax(1)
    labels = torch.tensor(np.where(problem.valid, problem.labels, 0)).long()
    values = (log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(1))
    total = sum(
        (torch.tensor(g.astype(np.float64)) * value)[torch.tensor(problem.valid)].sum()
        for g, value in zip(upstream, (*values, logits.logsumexp(1)))
    )
    for name, got in zip(GRADIENT_ROWS, torch.autograd.grad(total, leaves)):
        exact = getattr(reference, name)
        assert np.abs(numpy_of(got) - exact).max() <= 1e-12 * np.abs(exact).max()


def test_the_oracle_is_the_loss_oracle() -> None:
    """d logprob = -1 / N for every token is the mean loss."""
    problem = build(BASE, 2).changed(upstream=1.0)
    count = problem.valid.sum()
    ours = logprobs_reference(
        problem.hidden, problem.weight, problem.labels, bias=problem.bias, d_logprobs=-1.0 / count
    )
    theirs = problem.reference()
    for name in GRADIENT_ROWS:
        exact = getattr(theirs, name)
        assert np.abs(getattr(ours, name) - exact).max() <= 1e-14 * np.abs(exact).max()


# --- PyTorch around the operator -----------------------------------------------------------------

SIZES = Case("behaviour", 61, 24, 157, ignored=0.2, confident=0.3)
CHUNKED = {"max_chunk_bytes": 16 * 157 * 4}


def torch_call(problem: Problem, *, entropy: bool = True) -> tuple[Any, list[Any], Any]:
    torch = pytest.importorskip("torch")
    from xentlib.torch import chunked_logprobs

    leaves = [
        torch.tensor(x, requires_grad=True) for x in (problem.hidden, problem.weight, problem.bias)
    ]

    labels = torch.tensor(problem.labels)

    def call(*leaves: Any) -> Any:
        hidden, weight, bias = leaves
        return chunked_logprobs(hidden, weight, labels, bias=bias, entropy=entropy, **CHUNKED)

    return torch, leaves, call


def summed(out: Any, upstream: list[Any]) -> Any:
    return sum((x * g).sum() for x, g in zip(out, upstream))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_torch_compiles_into_one_graph() -> None:
    """D6: `torch.compile(fullgraph=True)`, the same bits."""
    problem = build(SIZES, 3)
    torch, leaves, call = torch_call(problem)
    upstream = [torch.tensor(g) for g in upstream_of(problem, 1)]

    def step(*leaves: Any) -> Any:
        return summed(call(*leaves), upstream)

    want = torch.autograd.grad(step(*leaves), leaves)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(want, got))


GEMMS = {
    "forward": ((), 1),
    "everything": ((0, 1, 2), 4),
    "frozen head": ((0,), 3),
    "frozen trunk": ((1, 2), 3),
    "bias only": ((2,), 2),
}


@pytest.mark.torch
@pytest.mark.parametrize("name", GEMMS)
def test_torch_gemm_count(name: str) -> None:
    """D5, M18: four GEMMs, fewer where a side is frozen, one without a gradient."""
    wanted, expected = GEMMS[name]
    problem = build(replace(SIZES, vocab=SIZES.vocab // 8 * 8), 3)  # in whole lines of memory
    torch, leaves, _ = torch_call(problem)
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import chunked_logprobs

    for k, leaf in enumerate(leaves):
        leaf.requires_grad_(k in wanted)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        out = chunked_logprobs(*leaves[:2], torch.tensor(problem.labels), bias=leaves[2])
        if wanted:
            out.logprobs.sum().backward()
    gemms = ("aten::mm", "aten::addmm", "aten::addmm_", "mkldnn::_linear_pointwise")
    assert sum(e.count for e in profiler.key_averages() if e.key in gemms) == expected


@pytest.mark.torch
def test_torch_second_backward_is_right_and_double_backward_loud() -> None:
    """M10: inputs and saved tensors are not written to."""
    problem = build(SIZES, 3)
    torch, leaves, call = torch_call(problem)
    upstream = [torch.tensor(g) for g in upstream_of(problem, 1)]
    versions = [leaf._version for leaf in leaves]
    out = call(*leaves)
    loss = summed(out, upstream)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert [leaf._version for leaf in leaves] == versions
    with pytest.raises(RuntimeError, match=r"`chunked_logprobs` must be differentiated once"):
        torch.autograd.grad(loss, leaves, create_graph=True)


@pytest.mark.torch
def test_torch_residuals_are_inputs_and_four_numbers_a_token() -> None:
    """Recompute: what is saved beside the inputs does not grow with the vocabulary."""
    problem = build(SIZES, 3)
    torch, leaves, call = torch_call(problem)
    saved: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        call(*leaves)
    given = {leaf.data_ptr() for leaf in leaves}
    extra = [x for x in saved if x.is_floating_point() and x.data_ptr() not in given]
    assert sum(x.numel() for x in extra) == 4 * len(problem.labels)


@pytest.mark.torch
def test_torch_refuses_a_gradient_it_does_not_compute() -> None:
    problem = build(SIZES, 3)
    torch, leaves, _ = torch_call(problem)
    from xentlib.torch import chunked_logprobs

    labels = torch.tensor(problem.labels)
    with pytest.raises(ValueError, match=r"`temperature` must be a constant"):
        chunked_logprobs(*leaves[:2], labels, temperature=torch.tensor(1.5, requires_grad=True))
    with pytest.raises(TypeError, match=r"`entropy` must be True or False; got 1"):
        chunked_logprobs(*leaves[:2], labels, entropy=1)
    with pytest.raises(TypeError, match=r"`vocab_parallel` must be a ProcessGroup or a one-dim"):
        chunked_logprobs(*leaves[:2], labels, vocab_parallel="tp")
