"""Vocabularies spread over ranks: `vocab_parallel=` against the dense answer, on gloo ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.ranks import launch
from helpers.vocab_shards import CASES, PLAIN, V, held
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import Outcome, run, run_logprobs
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, Upstream, build, logits_problem, upstream_of
from xentlib.tools.harness.ranks import DEVICE, Sharded, ShardedCall, run_calls
from xentlib.tools.parity.rows import sharded
from xentlib.ulp import bits_unequal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


# Sizes of the shards: even or not, a last one empty.
SPLITS = {
    1: [(157,)],
    2: [(79, 78), (100, 57), (157, 0)],
    3: [(53, 52, 52), (79, 78, 0)],
    4: [(40, 39, 39, 39), (53, 53, 51, 0)],
}
SETUPS = [(world, sizes) for world, splits in SPLITS.items() for sizes in splits]
AUDITED = [(79, 78), (79, 78, 0)]


@pytest.fixture(scope="module")
def results(request: Any) -> dict[tuple[Any, ...], Sharded]:
    """Both functions, of every case, over every split, in one chunk and in several; some of them in
    audit mode too. One start of four ranks for all."""
    splits = [sizes for _, sizes in SETUPS]
    plain = collected(request, splits, test="test_shards_give_the_dense_answer")
    audited = collected(request, AUDITED, test="test_audit_mode_does_not_know_of_shards")
    calls = {}
    for case in CASES:
        problem = build(case, 7)
        for function, upstream in (
            ("chunked_nll", None),
            ("chunked_logprobs", upstream_of(problem, 5)),
        ):
            for chunk in (None, 16):
                for audit, sizes in (*product([False], plain), *product([True], audited)):
                    key = (case.id, function, sizes, chunk, audit)
                    calls[key] = ShardedCall(function, problem, sizes, upstream, audit, chunk)
    return dict(zip(calls, run_calls("torch", list(calls.values()))))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize(("world", "sizes"), SETUPS, ids=str)
def test_shards_give_the_dense_answer(
    results: Any, world: int, sizes: tuple[int, ...], case: Case, chunk: int | None
) -> None:
    """A13 (M8, M9): d hidden is summed once, on every rank the same bits; label
    smoothing, z-loss, softcap, bias, temperature and entropy mean what they mean densely."""
    problem, low = build(case, 7), case.dtype == "bfloat16"
    upstream, rounding = upstream_of(problem, 5), {"dz_dtype": "bfloat16" if low else "float64"}
    for function, dense, reference in (
        ("chunked_nll", run("torch", problem), problem.reference(**rounding)),
        (
            "chunked_logprobs",
            run_logprobs("torch", problem, upstream),
            problem.per_token_reference(upstream, **rounding),
        ),
    ):
        outcome, unequal = results[case.id, function, sizes, chunk, False]
        assert unequal == 0
        for name in dense._fields:
            got, one = getattr(outcome, name), getattr(dense, name)
            held(name, got, one, reference, low=low, world=world)


def test_chunks_do_not_show_over_shards() -> None:
    """A10. Catches: a matrix product whose library depends on the number of rows in a chunk (47.7 %
    of d hidden had other bits in one chunk than in several)."""
    calls = sharded.chunked_calls("torch", 7)
    findings = Findings(("torch",))
    sharded.chunked(findings, "torch", calls, run_calls("torch", calls))
    assert len(findings.measurements) > 40
    assert not failures(findings.measurements)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("sizes", AUDITED, ids=str)
def test_audit_mode_does_not_know_of_shards(
    results: Any, sizes: tuple[int, ...], case: Case
) -> None:
    """A13, A1: in float64 the shards' sums round to the dense answer's bits."""
    problem = build(case, 7)
    upstream = upstream_of(problem, 5)
    for function, dense in (
        ("chunked_nll", run("torch", problem, audit=True)),
        ("chunked_logprobs", run_logprobs("torch", problem, upstream, audit=True)),
    ):
        for chunk in (None, 16):
            outcome = results[case.id, function, sizes, chunk, True].outcome
            for name, one in dense._asdict().items():
                if one is not None:
                    assert not failures(check("A1", getattr(outcome, name), one, quantity=name))


def padded(rank: int, world: int, layout: str) -> list[Any]:
    """Both functions with a head of 80 rows on each of two ranks, of which 157 are classes; entries
    whose bits NaN, inf and 3 in the other rows change from what zeros give."""
    from xentlib import PaddedVocab
    from xentlib.torch import chunked_logprobs, chunked_nll

    parallel = PaddedVocab(torch.distributed.group.WORLD, V)
    problem, found = build(PLAIN, 7), []
    mine = slice(0, 80) if rank == 0 else slice(80, None)
    for function in (chunked_nll, chunked_logprobs):
        both = []
        for fill in ((0.0, 0.0, 0.0), (np.nan, np.inf, 3.0)):
            rows = np.array(fill[: 3 * rank], np.float32)
            weight = np.concatenate([problem.weight[mine], np.tile(rows[:, None], 24)])
            bias = np.concatenate([problem.bias[mine], rows])
            leaves = [torch.tensor(x, requires_grad=True) for x in (problem.hidden, weight, bias)]
            head = leaves[1] if layout == "VH" else leaves[1].T.contiguous()
            out = function(
                leaves[0], head, torch.tensor(problem.labels), bias=leaves[2],
                vocab_parallel=parallel, max_chunk_bytes=16 * 81 * 4, weight_layout=layout,
            )  # fmt: skip
            (out.loss if function is chunked_nll else -out.logprobs.sum()).backward()
            grads = [leaf.grad.cpu().numpy() for leaf in leaves]
            assert not any(g[len(g) - 3 * rank :].any() for g in grads[1:])
            both.append([grads[0], *(g[: len(g) - 3 * rank] for g in grads[1:])])
        found.append([*both[1], sum(map(bits_unequal, *both))])
    return found


@pytest.mark.parametrize("layout", ["VH", "HV"])
def test_declared_padding_is_no_class(layout: str) -> None:
    """M4, M9: rows past the vocabulary have logits as large as any, inf or NaN, and no
    part in it."""
    problem = build(PLAIN, 7)
    ones = np.where(problem.valid, -1.0, 0.0).astype(np.float32)
    references = (
        problem.changed(upstream=1.0).reference(),
        problem.per_token_reference(Upstream(ones, None, None)),
    )
    for found, reference in zip(zip(*launch(2, padded, layout)), references):
        d_hidden = found[0][0]
        assert not any(unequal for *_, unequal in found)
        assert not failures(check("A5", d_hidden, reference.d_hidden, reference.bound_hidden))
        for index, name in ((1, "weight"), (2, "bias")):
            got = np.concatenate([rank[index] for rank in found])
            exact, bound = (getattr(reference, f"{part}_{name}") for part in ("d", "bound"))
            assert not failures(check("A6", got, exact, bound))


def compiled(rank: int, world: int) -> bool:
    from xentlib import VocabShard
    from xentlib.torch import chunked_logprobs, chunked_nll, vocab_parallel_logprobs

    group = torch.distributed.group.WORLD
    hidden, weight = torch.randn(32, 16), torch.randn(10, 16, requires_grad=True)
    torch.distributed.broadcast(hidden, 0)
    labels, logits = torch.arange(32) % 20, torch.randn(32, 10, requires_grad=True)
    shard = VocabShard(10 * rank, 10 * rank + 10, 20)
    steps = (
        lambda x: chunked_nll(hidden, x, labels, vocab_parallel=group).loss,
        lambda x: chunked_logprobs(hidden, x, labels, vocab_parallel=group).lse.sum(),
        lambda x: vocab_parallel_logprobs(x, labels, vocab_parallel=group, shard=shard).lse.sum(),
        lambda x: vocab_parallel_logprobs(x, labels, vocab_parallel=group).logprobs.sum(),
    )
    same = True
    for step, leaf in zip(steps, (weight, weight, logits, logits), strict=True):
        (want,) = torch.autograd.grad(step(leaf), leaf)
        fast = torch.compile(step, fullgraph=True, backend="aot_eager")
        (got,) = torch.autograd.grad(fast(leaf), leaf)
        same &= torch.equal(got, want)
    return same


@pytest.mark.slow
def test_shards_compile_into_one_graph() -> None:
    """D6: fullgraph, collectives and the exchange of sizes included; the same bits."""
    assert all(launch(2, compiled))


def dtensor(rank: int, world: int) -> list[Any]:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from xentlib.torch import chunked_nll

    mesh = torch.distributed.init_device_mesh(DEVICE, (world,))
    problem = build(PLAIN, 7)
    hidden = torch.tensor(problem.hidden, requires_grad=True)
    weight = torch.nn.Parameter(distribute_tensor(torch.tensor(problem.weight), mesh, [Shard(0)]))
    bias = problem.bias[:79] if rank == 0 else problem.bias[79:]
    loss = chunked_nll(
        hidden, weight, torch.tensor(problem.labels), bias=torch.tensor(bias), vocab_parallel=mesh
    ).loss
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    return [
        loss.detach().cpu().numpy(),
        hidden.grad.cpu().numpy(),
        weight.grad.full_tensor().cpu().numpy(),
    ]


def test_a_dtensor_head() -> None:
    """M8: a head sharded on its vocabulary as a DTensor, V not divisible by P."""
    problem = build(PLAIN, 7).changed(upstream=1.0)
    reference = problem.reference()
    for loss, d_hidden, d_weight in launch(2, dtensor):
        scale = reference.loss_magnitude
        assert not failures(check("A2", loss, reference.loss, magnitude=scale))
        assert not failures(check("A5", d_hidden, reference.d_hidden, reference.bound_hidden))
        assert not failures(check("A6", d_weight, reference.d_weight, reference.bound_weight))


def test_the_report_s_calls_over_an_empty_shard() -> None:
    """A13, in several chunks. Catches: a budget from a rank's own rows, of which one has none."""
    calls = [call for call in sharded.calls_for(7, False) if not all(call.sizes)]
    assert {call.chunk_tokens for call in calls} == {None, 64}
    findings = Findings(("torch",))
    for call, result in zip(calls, run_calls("torch", calls), strict=True):
        sharded._measure(findings, "torch", call, result)
    assert findings.measurements
    assert not failures(findings.measurements)


def test_the_report_holds_given_logits_to_their_own_row() -> None:
    """A13. Catches: an ULP of the largest logit of all rows, which lets a small row be wrong."""
    logits = np.float32([[2, 1, 0, -1], [4000, 1, 0, -1]])
    problem = logits_problem(logits, np.array([1, 0]), "a small row and a large one")
    call = ShardedCall("vocab_parallel_logprobs", problem, (2, 2), None, False)
    reference = problem.reference()
    right = reference.logprobs.astype(np.float32)
    for error, passes in ((0, True), (2.0**-12, False)):
        wrong = right + np.float32([error, 0])
        outcome = Outcome(logprobs=wrong, correct=reference.correct)
        findings = Findings(("torch",))
        sharded._measure(findings, "torch", call, Sharded(outcome, None))
        assert (failures(findings.measurements) == []) is passes


def test_an_ulp_is_of_the_log_probability_too() -> None:
    """A13: of -6.4 - 7.4, whose rounding is one ULP of either term, the next number holds and
    the third does not. Catches: an ULP of the terms alone, of which 1.97 were measured."""
    logits = np.float32([[-6.4, 7.4, -1, -2]])
    problem = logits_problem(logits, np.array([0]), "a difference in the next binade")
    call = ShardedCall("vocab_parallel_logprobs", problem, (2, 2), None, False)
    reference = problem.reference()
    right = reference.logprobs.astype(np.float32)
    away = np.float32(-np.inf if right < reference.logprobs else np.inf)
    for steps, passes in ((1, True), (3, False)):
        wrong = right
        for _ in range(steps):
            wrong = np.nextafter(wrong, away)
        outcome = Outcome(logprobs=wrong, correct=reference.correct)
        findings = Findings(("torch",))
        sharded._measure(findings, "torch", call, Sharded(outcome, None))
        assert (failures(findings.measurements) == []) is passes
