"""Rows that are gathered over nodes, and meet the hidden states of their own node: "hidden" with a
mesh of nodes as `tokens_parallel`, on 4 gloo ranks, against the oracle of all tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.ranks import launch
from helpers.vocab_shards import CASES, PLAIN, held
from xentlib.budgets import check_budget
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import run, run_logprobs
from xentlib.tools.harness.problems import Case, build, logits_problem, upstream_of

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.routed import Routed, Routes, merged, on_ranks  # noqa: E402

WORLD = 4
TOKENS = (9, 0, 35, 17)
FUNCTIONS = ("chunked_nll", "chunked_logprobs")
# Chunks of 8 tokens of each rank.
SMALL = 5000
# float16 has an exponent of its own in each node.
SHARES = (3, 0, 4, 1)
HALF = replace(PLAIN, id="fp16", dtype="float16")
# 40 rows of each rank but the last, 2, 2, 1, 0 and 1, 1, 0, 0.
FEW = [Case(f"{v} classes", 61, 24, v) for v in (5, 2)]
NODES = {"2 nodes of 2": 2, "4 nodes of 1": 4, "1 node of 4": 1}


def calls_of(case: Case, function: str, nodes: int) -> dict[int | None, Routed]:
    problem = build(case, 7)
    options = {k: v for k, v in problem.options.items() if k != "reduction"}
    problem = problem.changed(options=options)
    if case is PLAIN:  # a bias, which travels too, is in others
        problem = problem.changed(bias=None)
    divisor = float(run("torch", problem, gradient=False).weight_sum) or 1.0
    upstream = upstream_of(problem, 5) if function == "chunked_logprobs" else None
    ends = np.minimum(np.cumsum(TOKENS), len(problem.labels))
    own = tuple(int(x) for x in np.diff([0, *ends[:-1], len(problem.labels)]))
    more = {"divisor": divisor, "upstream": upstream, "nodes": nodes}
    return {
        size: Routed("hidden", function, problem, own, (), chunk_bytes=size, **more)
        for size in (None, SMALL)
    }


CALLS = {
    (case.id, function, name, size): call
    for case in (*CASES, HALF, *FEW)
    for function in FUNCTIONS
    for name, nodes in NODES.items()
    if case.layout == "VH" and (nodes == 2 or case is PLAIN)
    for size, call in calls_of(case, function, nodes).items()
}


def tied() -> Routed:
    """Largest logits at several classes: of one rank, and of two where the first in the order of
    rows is not the first class."""
    logits = np.zeros((8, 16), np.float32)
    classes = ([3, 9], [3, 9], [0, 15], [7, 8], [7, 8], [4, 11, 12], range(16), [5])
    for row, equal in enumerate(classes):
        logits[row, list(equal)] = 1.0
    labels = np.array([3, 9, 15, 8, 7, 2, 6, -100], np.int32)
    return Routed(
        "hidden", "chunked_nll", logits_problem(logits, labels, "ties"), SHARES, (), nodes=2
    )


CALLS |= {
    (*key, "on a device"): call._replace(on_device=True)
    for key, call in CALLS.items()
    if key[2:] == ("2 nodes of 2", SMALL)
}
CALLS["ties", "chunked_nll", "2 nodes of 2", None] = tied()


@pytest.fixture(scope="module")
def results(request: Any) -> dict[tuple[Any, ...], list[Routes]]:
    """Every call: one start of four ranks."""
    keys = collected(request, CALLS)
    ranks = launch(WORLD, on_ranks, [CALLS[key] for key in keys])
    return dict(zip(keys, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("key", CALLS, ids=str)
def test_nodes_give_the_dense_answer(results: Any, key: tuple[Any, ...]) -> None:
    """A2 to A7, A13, A16: tokens in any shares, a rank without tokens or without rows included.
    Catches: labels in the order of the classes, d weight of one node, a column for a class."""
    call, (_, function, *_) = CALLS[key], key
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
            same = check("A2", got[name], dense.weight_sum, magnitude=dense.weight_sum)
            assert not failures(same)
            continue
        held(
            name, got.get(name), getattr(dense, name), reference, low=low, world=WORLD, dtype=dtype
        )


def rounds_of(call: Routed, node: int) -> int:
    """Chunks of a node's hidden states."""
    ranks = WORLD // call.nodes
    valid = np.split(call.problem.valid | call.on_device, np.cumsum(call.tokens)[:-1])
    longest = max(int(x.sum()) for x in valid[node * ranks :][:ranks])
    rows = call.nodes * -(-len(call.problem.weight) // WORLD)
    tokens = min((call.chunk_bytes or 64 << 20) // (4 * (rows + 1)), ranks * longest + 7)
    return -(-longest // max(8, tokens // ranks // 8 * 8))


@pytest.mark.parametrize("key", [key for key in CALLS if key[:1] == ("plain",)], ids=str)
def test_what_travels_is_the_same_on_all_ranks_of_a_node(results: Any, key: Any) -> None:
    """A15: whatever the tokens of a rank, and of another node."""
    call, found = CALLS[key], results[key]
    name = "tokens over the ranks" if call.nodes == 1 else "rows over nodes"
    if call.function == "chunked_logprobs":
        name += ", recompute"
    ranks = WORLD // call.nodes
    for node in range(call.nodes):
        own = found[node * ranks :][:ranks]
        counts = [x.forward for x in own], [x.backward for x in own]
        assert not failures(check_budget(name, *counts, rounds=rounds_of(call, node)))
