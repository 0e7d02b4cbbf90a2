"""Heads whose rows stay on their ranks in the wraps that trainers have: behind tensor parallelism,
with or without sequences that are spread over it, in a group with other modules, in the root's;
every two choices, on gloo ranks, against one process that has the whole batch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from helpers.held import hold_parameters
from helpers.pairs import pairwise

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.fully_sharded import Sharded, on_each_world  # noqa: E402
from helpers.wrapped import gradients_of_one_process  # noqa: E402

CHOICES: dict[str, tuple[Any, ...]] = {
    "route": ("head", "hidden", "stream"),
    "ranks": ("shards", "shards, tp", "shards, tp, sequence", "replicas"),
    "wrap": ("own", "group", "tied group", "root"),
    "reshard": (True, False, 2),
    "policy": ("", "reduced in fp32", "offload"),
    "micro-batches": (1, 3),
    "checkpoint": (False, True),
    "divide": (None, 1.0),
    "function": ("chunked_nll", "chunked_logprobs"),
    "chunk": (None, 8),
    "idle": (False, True),  # a rank has no token that counts
}
WRAPS: dict[str, dict[str, Any]] = {
    "own": {"model": ("bias",)},
    "group": {"model": ("bias",), "beside": ("layer",)},
    "tied group": {"model": ("tied",), "beside": ("embedding", "layer")},
    "root": {"model": ("bias",), "own": False},
}


def possible(row: dict[str, Any]) -> bool:
    tp = "tp" in row["ranks"]
    # Tied to an embedding that tensor parallelism does not shard: nobody does that.
    untied = row["wrap"] != "tied group" or not tp
    # FSDP2 itself takes a number of ranks only where its mesh has several, and shards no DTensor
    # over fewer ranks after a forward.
    whole = row["reshard"] != 2 or row["ranks"] == "shards"
    travels = row["route"] != "stream" or "sequence" not in row["ranks"]
    return untied and whole and travels


def setup_of(row: dict[str, Any]) -> Sharded:
    ranks = row["ranks"]
    return Sharded(
        gather=row["route"],
        world=4 if ranks != "shards" or row["reshard"] == 2 else 2,
        mesh=ranks.removesuffix(", sequence"),
        sequence="sequence" in ranks,
        wrap=(("reshard_after_forward", row["reshard"]),),
        policy=row["policy"],
        steps=row["micro-batches"],
        checkpoint=row["checkpoint"],
        divide=row["divide"],
        function=row["function"],
        chunk=row["chunk"],
        idle=row["idle"],
        **WRAPS[row["wrap"]],
    )


ROWS = pairwise(CHOICES, possible)
SETUPS = {", ".join(f"{k} {v}" for k, v in row.items() if v): setup_of(row) for row in ROWS}


def test_every_two_choices_meet() -> None:
    met = {pair for row in ROWS for pair in combinations(row.items(), 2)}
    missing = {
        ((a, x), (b, y))
        for (a, xs), (b, ys) in combinations(CHOICES.items(), 2)
        for x in xs
        for y in ys
        if ((a, x), (b, y)) not in met
    }
    tp = [("ranks", "shards, tp"), ("ranks", "shards, tp, sequence")]
    assert missing == {
        *((ranks, ("wrap", "tied group")) for ranks in tp),
        *((ranks, ("reshard", 2)) for ranks in [*tp, ("ranks", "replicas")]),
        (("route", "stream"), ("ranks", "shards, tp, sequence")),
    }
    assert len(ROWS) <= 24


@pytest.fixture(scope="module")
def found() -> dict[str, list[Any]]:
    return on_each_world(SETUPS)


@pytest.mark.parametrize("name", SETUPS)
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    """A12, D7: all gradients on every rank. Catches rows of the wrong mesh dimension, statistics
    over some of the shards, d hidden of one shard, a gradient that FSDP2 reduces a second time."""
    expected = gradients_of_one_process(replace(SETUPS[name], gather="head"))
    for grads, _ in found[name]:
        hold_parameters(grads, expected)


@pytest.mark.full
@pytest.mark.parametrize("gather", ["hidden", "stream"])
def test_replicas_of_shards_behind_tensor_parallelism(gather: str) -> None:
    """Eight ranks in three dimensions, micro-batches summed over shards alone but for the last."""
    cut = (("reshard_after_forward", True),)
    setup = Sharded(gather=gather, world=8, mesh="all", steps=2, partly=True, wrap=cut)
    expected = gradients_of_one_process(replace(setup, gather="head"))
    for grads, _ in on_each_world({"all": setup})["all"]:
        hold_parameters(grads, expected)
