"""Tokens that are spread over the ranks that share a head: `tokens_parallel`, and the routes of
`gather=`, with every option, against the oracle of all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.pairs import every_pair, parameters
from helpers.ranks import launch
from helpers.vocab_shards import CASES, PLAIN, held
from xentlib.budgets import check_budget
from xentlib.contract import check, failures
from xentlib.plan import stream_rows
from xentlib.tools.harness.backends import run, run_logprobs
from xentlib.tools.harness.problems import Case, build, upstream_of

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.routed import Routed, Routes, merged, on_ranks  # noqa: E402

# Tokens of each rank, a part of 61 or of fewer; rows of a head of 157 classes.
SPLITS = {
    2: ((40, 21), (79, 78)),
    3: ((61, 0, 0), (53, 104, 0)),
    4: ((15, 0, 24, 22), (40, 39, 39, 39)),
}
ROUTES = ("tokens_parallel", "hidden", "stream")
FUNCTIONS = ("chunked_nll", "chunked_logprobs")
# float16 has an exponent of its own on each rank, unless its factors are gathered first.
HALF = replace(PLAIN, id="fp16", dtype="float16")


def spread(tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The same shares of another number of tokens."""
    ends = np.minimum(np.cumsum(tokens), count)
    return tuple(int(x) for x in np.diff([0, *ends[:-1], count]))


def calls_of(case: Case, function: str) -> dict[tuple[Any, ...], Routed]:
    problem = build(case, 7)
    options = {k: v for k, v in problem.options.items() if k != "reduction"}
    problem = problem.changed(options=options)
    if case is PLAIN:  # a bias, which travels too, is in others
        problem = problem.changed(bias=None)
    divisor = float(run("torch", problem, gradient=False).weight_sum) or 1.0
    upstream = upstream_of(problem, 5) if function == "chunked_logprobs" else None
    found = {}
    for world, (tokens, rows) in SPLITS.items():
        for route in ROUTES:
            if route != "tokens_parallel" and case.layout == "HV":
                continue  # a wrapper shards [V, H]
            for chunk_bytes in (None, SMALL):
                if (case.id not in EVERYWHERE) and (world, chunk_bytes) != (4, SMALL):
                    continue
                own = spread(tokens, len(problem.labels))
                key = (case.id, function, world, route, chunk_bytes)
                found[key] = Routed(
                    *(route, function, problem, own, rows, divisor, upstream, chunk_bytes),
                    counted=case is PLAIN,
                )
                if (world, chunk_bytes) == (4, SMALL):
                    found[*key, "on a device"] = found[key]._replace(on_device=True)
    return found


# Chunks of 8 tokens of each rank, blocks of 3 rows of each of two.
SMALL, EVERYWHERE = 5000, ("plain", "options")
CALLS = {
    key: call
    for case in (*CASES, HALF)
    for function in FUNCTIONS
    for key, call in calls_of(case, function).items()
}


KEPT = every_pair(CALLS, together=3)


@pytest.fixture(scope="module")
def results(request: Any) -> dict[tuple[Any, ...], list[Routes]]:
    """Every call: one start of four ranks."""
    keys = collected(request, CALLS)
    ranks = launch(4, on_ranks, [CALLS[key] for key in keys])
    return {
        key: [found for found in every if found is not None]
        for key, every in zip(keys, zip(*ranks, strict=True), strict=True)
    }


@pytest.mark.parametrize("key", parameters(CALLS, KEPT))
def test_routes_give_the_dense_answer(results: Any, key: tuple[Any, ...]) -> None:
    """A2 to A7, A13, A16: of tokens and rows in any shares, a rank with none of either included.
    Catches: d hidden that is not summed, labels or factors of one rank, rows at the wrong place."""
    call, (_, function, world, *_) = CALLS[key], key
    problem, dtype = call.problem, call.problem.hidden.dtype.name
    low = dtype in ("bfloat16", "float16")
    rounding = {"dz_dtype": dtype if low else "float64"}
    if function == "chunked_nll":
        dense: Any = run("torch", problem)
        reference: Any = problem.reference(**rounding)
    else:
        dense = run_logprobs("torch", problem, call.upstream)
        reference = problem.per_token_reference(call.upstream, **rounding)
    got = merged(call, results[key])
    for name in dense._fields:
        if (
            name == "weight_sum" and name in got
        ):  # of parts, which need not add up to the bits of the whole
            assert not failures(
                check("A2", got[name], dense.weight_sum, magnitude=dense.weight_sum)
            )
            continue
        held(
            name, got.get(name), getattr(dense, name), reference, low=low, world=world, dtype=dtype
        )


def rounds_of(call: Routed) -> int:
    """Chunks of hidden states, or blocks of rows."""
    ranks, vocab = len(call.tokens), call.problem.weight.shape[0]
    budget = call.chunk_bytes or 64 << 20
    if call.route == "stream":
        each = -(-vocab // ranks)
        return -(-each // stream_rows(each, call.problem.hidden.shape[1], ranks, budget))
    valid = np.split(call.problem.valid | call.on_device, np.cumsum(call.tokens)[:-1])
    longest = max(int(x.sum()) for x in valid)
    rows = max(call.rows) if call.route == "tokens_parallel" else -(-vocab // ranks)
    tokens = min(budget // (4 * (rows + 1)), ranks * longest + 7) // ranks // 8 * 8
    return -(-longest // max(8, tokens))


@pytest.mark.parametrize("key", parameters([key for key in CALLS if key[0] == "plain"], KEPT))
def test_what_travels_is_the_same_on_all_ranks(results: Any, key: tuple[Any, ...]) -> None:
    """A15: whatever the tokens of a rank."""
    call, found = CALLS[key], results[key]
    name = "stream" if call.route == "stream" else "tokens over the ranks"
    if call.function == "chunked_logprobs":
        name += ", recompute"
    counts = [x.forward for x in found], [x.backward for x in found]
    assert not failures(check_budget(name, *counts, rounds=rounds_of(call)))


def test_a_label_out_of_range_on_a_device() -> None:
    """M9: NaN for its token, and for what is summed over tokens, on each route; one that is masked
    is as any other. On a CPU each is refused. Catches: a class looked up by such a label."""
    problem, bad, masked = build(PLAIN, 7), 3, 4
    rows = problem.weight.shape[0]
    labels, where = problem.labels.copy(), np.ones(len(problem.labels), bool)
    labels[[bad, masked]], where[masked] = (rows + 2, rows + 5), False
    problem = problem.changed(labels=labels, where=where, bias=None, options={})
    upstream = upstream_of(problem, 5)
    calls = [
        Routed(route, function, problem, *SPLITS[2], 1.0, ups, SMALL, on_device=True)
        for route in ROUTES
        for function, ups in (("chunked_nll", None), ("chunked_logprobs", upstream))
    ]
    ranks = launch(2, on_ranks, calls)
    for call, parts in zip(calls, zip(*ranks, strict=True), strict=True):
        got = merged(call, [*parts])
        gone = np.isnan(got["logprobs"])
        assert gone.nonzero()[0].tolist() == [bad], call.route
        assert np.isnan(got["d_hidden"]).any(axis=1).nonzero()[0].tolist() == [bad], call.route
        assert np.isnan(got["d_weight"]).any()
        if call.function == "chunked_nll":
            assert np.isnan(got["loss"])
            assert got["predicted"][bad] == got["predicted"][masked] == -1
