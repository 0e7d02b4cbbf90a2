"""Every two choices of how FSDP2 has a head and how a loss takes it, on gloo ranks, against one
process that has the whole batch: alone, over replicas, behind tensor parallelism with or without
sequences that are spread over it; in a `fully_shard` of its own, with other modules, or the root's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from helpers.collected import collected
from helpers.held import hold_parameters
from helpers.pairs import pairwise
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.fully_sharded import Sharded, on_each_world  # noqa: E402
from helpers.wrapped import gradients_of_one_process  # noqa: E402

CHOICES: dict[str, tuple[Any, ...]] = {
    "route": ("head", "hidden", "stream", "nodes"),
    "ranks": ("shards", "replicas", "shards, tp", "shards, tp, sequence"),
    "wrap": ("own", "group", "tied group", "root"),
    "reshard": (True, False, 2),
    "policy": ("", "bf16", "bf16 alone", "reduced in fp32"),
    "micro-batches": ("one", "three", "three, summed over shards"),
    "offload": (False, True),
    "checkpoint": (False, True),
    "divide": (None, 1.0),
    "fixed": ((), ("bias",), ("weight", "bias")),
    "function": ("chunked_nll", "chunked_nll, recompute", "chunked_logprobs"),
    "chunk": (None, 8),
    "idle": (False, True),  # a rank has no token that counts
}
WRAPS: dict[str, dict[str, Any]] = {
    "own": {"model": ("bias",)},
    "group": {"model": ("bias",), "beside": ("layer",)},
    "tied group": {"model": ("tied",), "beside": ("embedding", "layer")},
    "root": {"model": ("bias",), "own": False},
}
PARALLEL = ("shards, tp", "shards, tp, sequence")
# What there is not: rows over nodes are those of one dimension, and a stream's tokens a rank's own.
# FSDP2 shards over fewer ranks after a forward where its mesh has several, and no DTensor.
MISSING = {
    *((("route", "nodes"), ("ranks", ranks)) for ranks in ("replicas", *PARALLEL)),
    (("route", "stream"), ("ranks", PARALLEL[1])),
    *((("ranks", ranks), ("wrap", "tied group")) for ranks in PARALLEL),
    *((("ranks", ranks), ("reshard", 2)) for ranks in ("replicas", *PARALLEL)),
    *((("wrap", "tied group"), ("fixed", fixed)) for fixed in (("bias",), ("weight", "bias"))),
}


def possible(row: dict[str, Any]) -> bool:
    return not MISSING & {*combinations(row.items(), 2)}


def setup_of(row: dict[str, Any]) -> Sharded:
    nodes, ranks = row["route"] == "nodes", row["ranks"]
    policies = [row["policy"]] * bool(row["policy"]) + ["offload"] * row["offload"]
    return Sharded(
        gather="hidden" if nodes else row["route"],
        nodes=2 if nodes else 0,
        world=4 if nodes or ranks != "shards" or row["reshard"] == 2 else 2,
        mesh=ranks.removesuffix(", sequence"),
        sequence="sequence" in ranks,
        wrap=(("reshard_after_forward", row["reshard"]),),
        policy=", ".join(policies),
        steps=1 if row["micro-batches"] == "one" else 3,
        partly="summed" in row["micro-batches"],
        checkpoint=row["checkpoint"],
        divide=row["divide"],
        fixed=row["fixed"],
        function=row["function"].removesuffix(", recompute"),
        recompute=row["function"].endswith("recompute"),
        chunk=row["chunk"],
        idle=row["idle"],
        **WRAPS[row["wrap"]],
    )


ROWS = pairwise(CHOICES, possible)
SETUPS = {", ".join(f"{k} {v}" for k, v in row.items() if v): setup_of(row) for row in ROWS}


def test_every_two_choices_meet() -> None:
    met = {pair for row in ROWS for pair in combinations(row.items(), 2)}
    for (a, xs), (b, ys) in combinations(CHOICES.items(), 2):
        for x in xs:
            for y in ys:
                assert (((a, x), (b, y)) in met) != (((a, x), (b, y)) in MISSING)
    assert len(ROWS) <= 28


def simplest(setup: Sharded) -> Sharded:
    """The same loss of a gathered head, in the same dtypes."""
    policy = setup.policy.removesuffix(", offload")
    names = ("model", "beside", "steps", "fixed", "function", "recompute", "idle")
    kept = {name: getattr(setup, name) for name in names}
    return Sharded(policy=policy, **kept)


IN_16_BITS = {name for name, setup in SETUPS.items() if "bf16" in setup.policy}


@pytest.fixture(scope="module")
def found(request: Any) -> dict[str, list[Any]]:
    names = collected(request, SETUPS)
    others = [simplest(SETUPS[name]) for name in names if name in IN_16_BITS]
    return on_each_world({name: SETUPS[name] for name in names} | {repr(x): x for x in others})


@pytest.mark.parametrize("name", SETUPS)
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    """A9, A12, D7: all gradients on every rank; in 16 bits as near to them as those of a gathered
    head. Catches a route that fails, or is off, where a policy, a wrapper or a way to accumulate
    meets it."""
    setup = SETUPS[name]
    expected = gradients_of_one_process(replace(setup, gather="head"))
    for grads, _ in found[name]:
        if name not in IN_16_BITS:
            hold_parameters(grads, expected)
            continue
        (others, _), *_ = found[repr(simplest(setup))]
        assert grads.keys() == expected.keys()
        for key, want in expected.items():
            measured = check(
                "A9", grads[key], want, other=others[key], metrics=("error ratio",), quantity=key
            )
            assert not failures(measured)
