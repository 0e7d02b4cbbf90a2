"""Heads with a low-rank part whose rows stay on their ranks while tokens travel: `tokens_parallel`
with `vocab_parallel`, on gloo ranks against the oracle of all tokens.

Shapes: N tokens, V vocabulary, H hidden width, R rank of the low-rank part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.lowrank import LowProblem, held_to, hold, low_problem, oracle, rejected
from helpers.ranks import launch
from helpers.vocab_shards import PLAIN, V
from xentlib.budgets import check_budget
from xentlib.contract import failures
from xentlib.parity.backends import run
from xentlib.parity.cases import EXTRAS, OPTIONS
from xentlib.parity.problem import Case, upstream_of

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.routed import Routed, Routes, merged, on_ranks  # noqa: E402

R, H = 3, 27  # a mask's last byte is not full
ROUTES = ("tokens_parallel",)
FUNCTIONS = ("chunked_nll", "chunked_logprobs")
# Tokens of each rank, of 61; rows of the head; a rank with none of either.
SPLITS = {2: ((40, 21), (79, 78)), 4: ((9, 0, 35, 17), (40, 77, 0, 40))}
SMALL = 5000  # bytes: chunks of 8 tokens of each rank
CASES = {
    "plain": (replace(PLAIN, hidden=H, bias=False), 0.0),
    "masked": (replace(PLAIN, hidden=H, bias=False), 0.4),
    "options": (Case("low", 61, H, V, std=3.0, options=OPTIONS, **EXTRAS), 0.0),
    "kernel": (Case("low", 61, H, V, layout="HV", options={"z_loss": 1e-3}), 0.4),
    "bf16": (Case("low", 61, H, V, dtype="bfloat16"), 0.4),
    "fp16": (Case("low", 61, H, V, dtype="float16"), 0.0),
    "no token": (Case("low", 61, H, V, ignored=1.0), 0.0),
}
Key = tuple[str, str, int, str]


def problem_of(name: str) -> LowProblem:
    case, dropped = CASES[name]
    p = low_problem(case, R, dropped=dropped)
    options = {k: v for k, v in p.base.options.items() if k != "reduction"}
    return p._replace(base=p.base.changed(options=options))


def calls_of(name: str, function: str) -> dict[Key, Routed]:
    p, found = problem_of(name), {}
    divisor = float(run("torch", p.base, gradient=False).weight_sum) or 1.0
    upstream = None if function == "chunked_nll" else upstream_of(p.base, 5)
    for world, (tokens, rows) in SPLITS.items():
        for route in ROUTES:
            if route == "tokens_parallel" or p.base.options.get("weight_layout") != "HV":
                found[name, function, world, route] = Routed(
                    route, function, p.base, tokens, rows, divisor, upstream, SMALL, low=p
                )
    return found


CALLS = {k: call for name in CASES for f in FUNCTIONS for k, call in calls_of(name, f).items()}


@pytest.fixture(scope="module")
def results() -> dict[Key, list[Routes]]:
    """Every call: one start of four ranks."""
    ranks = launch(4, on_ranks, list(CALLS.values()))
    return {
        key: [found for found in every if found is not None]
        for key, every in zip(CALLS, zip(*ranks, strict=True), strict=True)
    }


@pytest.mark.parametrize("key", CALLS, ids=str)
def test_routes_give_the_dense_answer(results: Any, key: Key) -> None:
    """A2, A3, A5 to A7, A13: tokens and rows in any shares. Catches: d A of one rank's rows, the
    mask of another rank's tokens, upstream gradients of none."""
    call, (name, function, *_) = CALLS[key], key
    p = problem_of(name)
    sixteen = name in ("bf16", "fp16")
    dtype = p.base.hidden.dtype.name
    reference = oracle(p, call.upstream, dtype if sixteen else "float64")
    found = merged(call, results[key])
    assert found["d_weight"] is None
    if function == "chunked_nll":
        held_to("A2", found["loss"], reference.loss, magnitude=max(reference.loss_magnitude, 1.0))
    scale = np.fmax(np.abs(reference.lse), 4.0)
    held_to("A3", found["lse"], np.where(p.base.valid, reference.lse, 0.0), magnitude=scale)
    got = {"hidden": found["d_hidden"], "a": found["a"], "b": found["b"]}
    hold(reference, got, {"bf16": "A7", "fp16": "A16"}.get(name))
    if name == "plain":
        for key_of, x in got.items():
            for wrong in (0 * x, -x, x * 1.001, np.roll(x, 1, 0)):
                assert rejected(reference, {key_of: wrong})
    if name == "masked":
        assert rejected(oracle(p._replace(keep=None), call.upstream), got)


@pytest.mark.parametrize("key", CALLS, ids=str)
def test_what_travels_is_the_same_on_all_ranks(results: Any, key: Key) -> None:
    """A15: one SUM of d A, and with a mask one more gather of each chunk."""
    name, function, *_ = key
    call, found = CALLS[key], results[key]
    valid = np.split(call.problem.valid, np.cumsum(call.tokens)[:-1])
    rounds = -(-max(int(x.sum()) for x in valid) // 8)
    twice = "softcap" in call.problem.options and rounds > 1
    if twice or not rounds:
        for of_rank in found[1:]:
            assert (of_rank.forward, of_rank.backward) == (found[0].forward, found[0].backward)
        return
    budget = "tokens over the ranks, low rank"
    budget += ", mask" * (CASES[name][1] > 0)
    budget += ", recompute" * (function == "chunked_logprobs")
    counts = [x.forward for x in found], [x.backward for x in found]
    assert not failures(check_budget(budget, *counts, rounds=rounds))
