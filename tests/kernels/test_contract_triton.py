"""The contract with Triton's programs, interpreted: a choice of the parity run's cases, of few
tokens, as a program takes some 10 ms a row. `xentlib parity --kernels triton` has all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from conftest import HAS_TORCH
from helpers.held import hold_in_norm
from helpers.in_triton import few
from helpers.measured import CAPPED, SMALL, by_id, hold
from helpers.pairs import every_pair
from helpers.vocab_shards import held
from xentlib.contract import failures
from xentlib.math.softmax import BLOCK_COLUMNS
from xentlib.tools.harness.cases import BASE, CONFIDENT, WITH_OPTIONS, logit_sets, low_precision
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build, logits_problem, upstream_of
from xentlib.tools.harness.ranks import Sharded, ShardedCall, run_calls
from xentlib.tools.parity.rows import invariant, windows
from xentlib.tools.parity.rows.head import HeadRows, nll, per_token, same
from xentlib.tools.parity.rows.invariant import OF_SHARDS, blocks, even

if not HAS_TORCH:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch

from xentlib.torch import (
    chunked_nll,
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


CASES = [few(case) for case in SMALL if case.id not in ("flat", "sharp", "denominator")]
# With a gradient of the bias, for which step 5 is a program of its own.
CASES += [
    few(replace(case, id=f"{case.id}, d bias", bias=True))
    for case in SMALL
    if case.id == "class-weights"
]
LOW = low_precision((few(BASE), few(WITH_OPTIONS)))


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_fp32(case: Case) -> None:
    """A0, A2, A5, A6."""
    hold(nll.against_oracle, ("torch",), build(case, 7))


@pytest.mark.parametrize("case", LOW, ids=by_id)
def test_bf16(case: Case) -> None:
    """A7, A8."""
    hold(nll.against_oracle, ("torch",), build(case, 7))
    hold(per_token.against_oracle, ("torch",), build(case, 7))


@pytest.mark.parametrize("case", [few(BASE), few(WITH_OPTIONS)], ids=by_id)
def test_per_token(case: Case) -> None:
    """A0, A5, A6 of log-probabilities."""
    hold(per_token.against_oracle, ("torch",), build(case, 7))


@pytest.mark.parametrize("item", logit_sets(7), ids=lambda item: item[0])
@pytest.mark.parametrize("measure", [nll.logits, per_token.logits])
def test_given_logits(measure: Callable[..., None], item: Any) -> None:
    """A3, A4: every 96th row."""
    text, logits, labels = item
    hold(measure, ("torch",), (text, logits[::96].copy(), labels[::96].copy()))


@pytest.mark.cpu
@pytest.mark.parametrize("measure", [nll.chunks, per_token.chunks])
def test_chunks_do_not_show(measure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A10: one chunk, three with a part of one, and two."""
    for name in ("CHUNKS", "FEW_CHUNKS"):  # of 24 rows and more a chunk has all there are
        monkeypatch.setattr(f"xentlib.tools.harness.cases.{name}", (8, 16))
    hold(measure, ("torch",), build(replace(CAPPED, tokens=17), 7))


@pytest.mark.cpu
@pytest.mark.parametrize(("rows", "dtype"), [(nll, "float32"), (per_token, "bfloat16")])
def test_other_tokens_do_not_show(rows: HeadRows, dtype: str) -> None:
    """A17: of whole blocks of columns and a part of one."""
    case = replace(invariant.BATCH, tokens=9, hidden=16, vocab=200, dtype=dtype)
    findings = Findings(("torch",))
    # Chunks and twice the tokens of one function, as each token has a program.
    invariant.batch(rows, findings, "torch", build(case, 7), few=rows is per_token)
    assert not failures(findings.measurements)


@pytest.mark.parametrize("measure", [nll.repeat, per_token.repeat])
def test_run_to_run(measure: Callable[..., None]) -> None:
    """A11, with labels that several tokens share."""
    hold(measure, ("torch",), build(replace(few(WITH_OPTIONS), vocab=23, bias=True), 7))


def test_windows() -> None:
    """A12."""
    hold(windows.windows, ("torch",), build(replace(few(CONFIDENT), bias=True), 7))


# --- over ranks, whose start takes a second: all calls in one -----------------------------------

OF_HEADS = ("chunked_nll", "chunked_logprobs")
FUNCTIONS = [("chunked_nll", True), *((x, False) for x in (*OF_HEADS, "vocab_parallel_logprobs"))]
CUTS = ("one block", "three blocks", "an empty one")


def with_an_empty_one(name: str) -> ShardedCall:
    problem = build(Case("shards", 11, 8, 37, bias=True, options={"z_loss": 1e-3}), 7)
    upstream = None if name == "chunked_nll" else upstream_of(problem, 5)
    return ShardedCall(name, problem, (19, 18, 0), upstream, False, 8)


def cut_call(name: str, bias: bool, cut: str) -> ShardedCall:
    options = WITH_OPTIONS.options if name == "chunked_nll" else {"softcap": 9.0}
    # In one program, and in three; of one cut many tokens.
    tokens = 34 if (name, bias, cut) == ("chunked_nll", False, "one block") else 9
    case = Case("shards", tokens, 8, 3 * BLOCK_COLUMNS + 37, std=6.0, confident=0.7, bias=bias)
    problem = build(replace(case, options=options), 7)
    if name == "vocab_parallel_logprobs":
        logits = problem.hidden @ problem.weight.T
        problem = logits_problem(logits, problem.labels, "given")
    upstream = None if name == "chunked_nll" else upstream_of(problem, 5)
    cuts = {"one block": blocks(case.vocab, (1,)), "three blocks": blocks(case.vocab, (3,))}
    sizes = cuts.get(cut, (*even(case.vocab, 2), 0))
    return ShardedCall(name, problem, sizes, upstream, False, 8)


@cache
def over_ranks() -> dict[tuple[Any, ...], tuple[ShardedCall, Sharded]]:
    calls: dict[tuple[Any, ...], ShardedCall] = {(x,): with_an_empty_one(x) for x in OF_HEADS}
    calls |= {(*of, cut): cut_call(*of, cut) for of in FUNCTIONS for cut in CUTS}
    found = run_calls("torch", [*calls.values()])
    return {key: (call, got) for (key, call), got in zip(calls.items(), found, strict=True)}


@pytest.mark.cpu
@pytest.mark.parametrize("name", OF_HEADS)
def test_shards_with_an_empty_one(name: str) -> None:
    """A0, A5, A6, A13: over ranks, of which one has no class."""
    call, found = over_ranks()[(name,)]
    problem, upstream, dense = call.problem, call.upstream, call.run("torch", chunk_tokens=None)
    if upstream is None:
        reference: Any = problem.reference()
    else:
        reference = problem.per_token_reference(upstream)
    assert found.unequal == 0
    for field in dense._fields:
        whole = getattr(dense, field)
        held(field, getattr(found.outcome, field), whole, reference, low=False, world=3)


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "bias"), FUNCTIONS)
@pytest.mark.parametrize("cut", CUTS)
def test_shards_do_not_show(name: str, bias: bool, cut: str) -> None:
    """A18: over ranks a token has the bits that one program gives it without shards. Catches: a
    block that a tile's edge cuts; a sum that is rounded on one way and not on the other, seen in
    confident tokens."""
    call, found = over_ranks()[name, bias, cut]
    findings = Findings(("torch",))
    assert not found.unequal
    dense = invariant.dense(call, "torch")
    same(findings, "A18", found.outcome, dense, names=OF_SHARDS, backend="torch")
    assert len(findings.measurements) >= 4
    assert not failures(findings.measurements)


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, every other entry of some memory; in two dimensions turned as well."""
    turned = x.mT if x.ndim == 2 else x
    wide = torch.zeros(*turned.shape, 2, dtype=x.dtype, device=x.device)
    wide[..., 0] = turned
    return wide[..., 0].mT if x.ndim == 2 else wide[..., 0]


@pytest.mark.cpu  # cuBLAS has other programs for other strides
def test_any_strides() -> None:
    """A0: arguments that are views of others, in every position that has rows or columns."""
    torch.manual_seed(1)
    dense = {
        "hidden": torch.randn(9, 24),
        "weight": torch.randn(131, 24),
        "labels": torch.randint(0, 131, (9,)),
        "bias": torch.randn(131),
        "class_weights": torch.rand(131) + 0.5,
        "token_weights": torch.rand(9),
        "temperature": torch.rand(9) + 0.5,
        "where": torch.rand(9) > 0.3,
    }
    logits = {"logits": torch.randn(9, 131), "labels": dense["labels"]}
    found = []
    for view in (torch.Tensor.clone, strided):
        call = {name: view(x) for name, x in dense.items()}
        rows = {name: view(x) for name, x in logits.items()}
        for x in (call["hidden"], call["weight"], rows["logits"]):
            x.requires_grad_()
        loss = chunked_nll(**call, label_smoothing=0.1).loss
        loss = loss + vocab_parallel_logprobs(**rows).logprobs.sum()
        leaves = [call["hidden"], call["weight"], rows["logits"]]
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


EXTREME: dict[str, tuple[float, str]] = {
    "-inf": (-np.inf, ""),
    "inf": (np.inf, ""),
    "nan": (np.nan, ""),
    "finfo.min": (torch.finfo(torch.float32).min, ""),
    "finfo.min, temperature": (torch.finfo(torch.float32).min, "temperature"),
    "-inf, smoothed": (-np.inf, "label_smoothing"),
}
OF_EXTREME = {"temperature": 0.5, "label_smoothing": 0.1}
AT = ("all", "the label", "another", "several")
# Each value at each place, each option at each place and with its value.
EXTREMES = {(*EXTREME[name], at): f"{at}-{name}" for name in EXTREME for at in AT}
KEPT = every_pair(EXTREMES)


@pytest.mark.parametrize(
    ("value", "option", "at"),
    [
        pytest.param(*key, id=name, marks=[] if key in KEPT else pytest.mark.full)
        for key, name in EXTREMES.items()
    ],
)
def test_extremes_are_those_of_eager(
    monkeypatch: pytest.MonkeyPatch, value: float, option: str, at: str
) -> None:
    """A0, A9: what is finite, infinite or NaN, of every output and gradient, and the numbers."""
    options = {option: OF_EXTREME[option]} if option else {}
    torch.manual_seed(2)
    labels = torch.tensor([3, 16])
    bias = torch.zeros(17)
    places = {"all": range(17), "the label": (3,), "another": (7,), "several": (7, 8, 9)}
    bias[list(places[at])] = value
    found = []
    for kernels in ("eager", "triton"):
        monkeypatch.setenv("XENTLIB_KERNELS", kernels)
        torch.manual_seed(4)
        hidden, weight = torch.randn(2, 8).requires_grad_(), torch.randn(17, 8).requires_grad_()
        every = ("logprobs", "entropy", "lse", "correct", "predicted")
        out = chunked_nll(hidden, weight, labels, bias=bias, outputs=every, **options)
        leaf = (hidden @ weight.T + bias).detach().requires_grad_()
        rows = vocab_parallel_logprobs(leaf, labels, entropy=True, **options)
        made = [out.loss, out.z_loss, out.logprobs, out.entropy, out.lse, rows.logprobs, rows.lse]
        made += torch.autograd.grad(out.loss, (hidden, weight))
        made += torch.autograd.grad(rows.logprobs.sum(), leaf)
        kinds = [(x.isnan(), x == np.inf, x == -np.inf) for x in made]
        counts = (out.correct, *(() if out.loss.isnan() else (out.predicted,)))
        numbers = [x.detach().nan_to_num(0.0, 0.0, 0.0).cpu().numpy() for x in made]
        found.append(([*(x for kind in kinds for x in kind), *counts], numbers))
    (eager, want), (triton, got) = found
    assert all(torch.equal(a, b) for a, b in zip(eager, triton, strict=True))
    hold_in_norm(got, want)
