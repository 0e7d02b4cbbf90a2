"""A head spread over the stages of a pipeline, with the code that docs/pipeline.md shows."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers import stages  # noqa: E402
from helpers.held import hold_in_norm, hold_parameters  # noqa: E402
from helpers.ranks import launch  # noqa: E402
from helpers.stages import Kind, Setup, Step  # noqa: E402

if not stages.PAGE.is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

SETUPS = {
    2: {
        "1F1B": Setup("1F1B", 1, 5),
        "Interleaved1F1B": Setup(),
        "Interleaved1F1B, a stage a rank": Setup(stages=1, micro_batches=6),
        "two losses": Setup(ahead=True),
        "InterleavedZeroBubble": Setup("InterleavedZeroBubble"),
        "LoopedBFS": Setup("LoopedBFS", micro_batches=3),
    },
    4: {
        "1F1B": Setup("1F1B", 1, 5),
        "Interleaved1F1B": Setup(micro_batches=8),
        "two losses": Setup("1F1B", 1, 4, ahead=True),
    },
}
CASES = [(world, name) for world, found in SETUPS.items() for name in found]


def all_setups(rank: int, world: int) -> dict[str, Step]:
    return {name: stages.run(rank, world, setup) for name, setup in SETUPS[world].items()}


@pytest.fixture(scope="module")
def on_ranks() -> dict[int, list[dict[str, Step]]]:
    return {world: launch(world, all_setups) for world in SETUPS}


def hold(found: list[Step], world: int, setup: Setup) -> None:
    loss, want = stages.one_process(world, setup)
    got = {name: x for step in found for name, x in step.gradients.items()}
    got["head"] = np.concatenate([step.gradients["head"] for step in found])
    hold_parameters(got, want)
    hold_in_norm([found[-1].loss], [loss])
    hold_in_norm([found[-1].evaluated], [loss])


@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_step_is_that_of_one_process(on_ranks: Any, world: int, name: str) -> None:
    """A12: the loss and every parameter's gradient, against full logits in float64. Uneven rows,
    uneven micro-batches, one without a valid token; a loss of 1 or of 2 tokens ahead."""
    hold([found[name] for found in on_ranks[world]], world, SETUPS[world][name])


@pytest.mark.parametrize(("world", "name"), CASES)
def test_collectives_of_a_loss(on_ranks: Any, world: int, name: str) -> None:
    """A15: on every rank the same in each micro-batch, with valid tokens or none."""
    for found in on_ranks[world]:
        counts = found[name].counts
        assert counts == SETUPS[world][name].micro_batches * [{"broadcast": 1, "all_reduce": 3}]
