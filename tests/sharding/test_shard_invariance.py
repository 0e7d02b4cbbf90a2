"""Row A18: over vocabulary shards of whole blocks of 128 columns a token has the bits that it has
without shards, on 1 to 8 gloo ranks and host devices, along every route of a sharded head."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from conftest import HAS_TORCH
from helpers.collected import collected
from helpers.invariance import problems
from helpers.pairs import every_pair
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import run, run_logprobs
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Problem, logits_problem, upstream_of
from xentlib.tools.harness.ranks import ShardedCall, run_calls
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.head import same
from xentlib.tools.parity.rows.invariant import OF_SHARDS, blocks, even

pytestmark = pytest.mark.slow
# Nine blocks, the last of 21 columns, which leave most of a product's tile empty.
VOCAB = 8 * 128 + 21
PROBLEMS = problems(35, 32, VOCAB)
FUNCTIONS = ("chunked_nll", "chunked_logprobs", "vocab_parallel_logprobs")
GIVEN = FUNCTIONS[2]
CUTS = {
    **{f"{ranks}": even(VOCAB, ranks) for ranks in (1, 2, 3, 4, 8)},
    "2 uneven": blocks(VOCAB, (7,)),
    "4 uneven": blocks(VOCAB, (1, 0, 6)),
    "8 uneven": blocks(VOCAB, (1, 2, 0, 1, 1, 0, 3)),
    "2 and an empty one": (*even(VOCAB, 2), 0),
}
Key = tuple[str, str, str, int | None]


def problem_of(function: str, name: str) -> Problem:
    """With its logits, made here, where a function is given them."""
    problem = PROBLEMS[name]
    if function != GIVEN:
        return problem
    weight = problem.weight.T if problem.vocab_axis == 0 else problem.weight
    logits = problem.hidden.astype(np.float32) @ weight.astype(np.float32)
    logits += 0 if problem.bias is None else problem.bias.astype(np.float32)
    given = logits_problem(logits, problem.labels, f"{problem.text}, given")
    return given.changed(where=problem.where, options=temperature_of(problem))


def temperature_of(problem: Problem) -> dict[str, Any]:
    return {k: x for k, x in problem.options.items() if k == "temperature"}


def call_of(key: Key) -> ShardedCall:
    function, name, cut, chunk = key
    problem = problem_of(function, name)
    upstream = None if function == FUNCTIONS[0] else upstream_of(problem, 5)
    return ShardedCall(function, problem, CUTS[cut], upstream, False, chunk)


KEYS: list[Key] = [
    (function, name, cut, chunk)
    for function in FUNCTIONS
    for name in PROBLEMS
    for cut in CUTS
    for chunk in ((None,) if function == GIVEN else (None, 8))
    if function != FUNCTIONS[1] or name != "class weights"
]
# In JAX each is a program, and shards but the last are of one size.
IN_JAX: list[Key] = [
    ("chunked_nll", "bf16, options", "8", None),
    ("chunked_nll", "class weights", "3", 24),
    ("chunked_logprobs", "-inf", "2", None),
    ("chunked_logprobs", "finfo.min", "2 and an empty one", 24),
    ("vocab_parallel_logprobs", "ties", "4", None),
]


@cache
def dense_of(backend: str, function: str, name: str) -> Any:
    """One for all cuts and chunks."""
    return invariant.dense(call_of((function, name, "1", None)), backend)


def hold_shards(backend: str, key: Key, got: Any) -> None:
    findings = Findings((backend,))
    function, name, *_ = key
    dense = dense_of(backend, function, name)
    same(findings, "A18", got.outcome, dense, names=OF_SHARDS, backend=backend, case=str(key))
    assert len(findings.measurements) >= 4
    assert not got.unequal
    assert not failures(findings.measurements)


@pytest.fixture(scope="module")
def in_torch(request: Any) -> dict[Key, Any]:
    """All calls of one start of eight ranks."""
    names = collected(request, PROBLEMS)
    keys = KEYS if request.config.getoption("--full") else every_pair(KEYS)
    keys = [key for key in keys if key[1] in names]
    return dict(zip(keys, run_calls("torch", [call_of(key) for key in keys]), strict=True))


@pytest.mark.torch
@pytest.mark.parametrize("name", PROBLEMS)
def test_gloo_ranks(in_torch: Any, name: str) -> None:
    """A18. Catches: a block or a sum of a shard's own, a sum that is rounded on a rank, a column of
    a rank in place of its class."""
    keys = [key for key in in_torch if key[1] == name]
    assert keys
    for key in keys:
        hold_shards("torch", key, in_torch[key])


@pytest.fixture(scope="module")
def in_jax(request: Any) -> dict[Key, Any]:
    """All calls of one process with eight devices."""
    keys = collected(request, IN_JAX)
    return dict(zip(keys, run_calls("jax", [call_of(key) for key in keys]), strict=True))


@pytest.mark.jax
@pytest.mark.optimized
@pytest.mark.parametrize("key", IN_JAX, ids=str)
def test_host_devices(in_jax: Any, key: Key) -> None:
    """A18, in JAX. Catches: padding that is taken for a block, a column of a device for a class."""
    hold_shards("jax", key, in_jax[key])


# --- routes of a sharded head --------------------------------------------------------------------

if HAS_TORCH:
    from helpers.ranks import launch
    from helpers.routed import Routed, merged, on_ranks

# `fully_shard` gives each rank ceil(V / ranks) rows: a multiple of 128, the last one fewer.
OF_RANKS = {2: 1023, 3: 1151, 4: 1022}
TOKENS = {2: (40, 21), 3: (31, 0, 30), 4: (9, 0, 35, 17)}
OF_ROUTES = ("tokens_parallel", "hidden", "stream", "nodes")


def routed(
    route: str, name: str, ranks: int, function: str, chunk_bytes: int | None
) -> tuple[Any, Problem]:
    problem = problems(61, 32, OF_RANKS[ranks])[name]
    options = {k: x for k, x in problem.options.items() if k != "reduction"}
    problem = problem.changed(options=options)
    upstream = None if function == "chunked_nll" else upstream_of(problem, 5)
    if route == "nodes":
        given = {"route": "hidden", "nodes": 2}
    else:
        given = {"route": route, "nodes": 0}
    rows = even(OF_RANKS[ranks], ranks)
    more = {"upstream": upstream, "chunk_bytes": chunk_bytes, "counted": False, **given}
    return Routed(
        function=function, problem=problem, tokens=TOKENS[ranks], rows=rows, **more
    ), problem


# Several chunks; of streamed rows several blocks, which are whole ones in no smaller budget.
SMALL = dict.fromkeys(OF_ROUTES, 40_000) | {"stream": 530_000}
ROUTED = every_pair(
    [
        (route, name, ranks, function, chunk_bytes)
        for route in OF_ROUTES
        for name in ("bias", "options", "class weights", "bf16", "-inf", "ties", "no token")
        for ranks in OF_RANKS
        for function in FUNCTIONS[:2]
        for chunk_bytes in (None, SMALL[route])
        if (route != "nodes" or ranks == 4)
        if (function == "chunked_nll" or name != "class weights")
    ]
)


@pytest.fixture(scope="module")
def over_routes(request: Any) -> dict[Any, Any]:
    routes = collected(request, OF_ROUTES)
    keys = [key for key in ROUTED if key[0] in routes]
    of_ranks = zip(*launch(4, on_ranks, [routed(*key)[0] for key in keys]), strict=True)
    return {key: [x for x in every if x is not None] for key, every in zip(keys, of_ranks)}


@pytest.mark.torch
@pytest.mark.parametrize("route", OF_ROUTES)
def test_routes(over_routes: Any, route: str) -> None:
    """A18: where rows of every rank are whole blocks. Catches: blocks that begin with a route's own
    rows, classes in the order of the rows."""
    measured = []
    for key in (key for key in ROUTED if key[0] == route):
        call, problem = routed(*key)
        got = merged(call, over_routes[key])
        if call.function == "chunked_nll":
            dense: Any = run("torch", problem)
        else:
            dense = run_logprobs("torch", problem, call.upstream)
        for name, want in dense.by_name().items():
            if name in OF_SHARDS and got.get(name) is not None:
                value = got[name].astype(want.dtype)
                measured += check("A18", value, want, case=str(key), quantity=name)
    assert len(measured) > 20
    assert not failures(measured)
