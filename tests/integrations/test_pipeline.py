"""A head spread over the stages of a pipeline, with the code that docs/pipeline.md shows."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.distributed.pipelining import Schedule1F1B  # noqa: E402

from helpers import stages  # noqa: E402
from helpers.collected import collected  # noqa: E402
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


def run_all(rank: int, world: int, names: list[str]) -> dict[str, Step]:
    return {name: stages.run(rank, world, SETUPS[world][name]) for name in names}


@pytest.fixture(scope="module")
def on_ranks(request: Any) -> dict[int, list[dict[str, Step]]]:
    asked: dict[int, list[str]] = {}
    for world, name in collected(request, CASES):
        asked.setdefault(world, []).append(name)
    return {world: launch(world, run_all, names) for world, names in asked.items()}


def hold(found: list[Step], world: int, setup: Setup) -> None:
    loss, want = stages.one_process(world, setup)
    got = {name: x for step in found for name, x in step.gradients.items()}
    got["head"] = np.concatenate([step.gradients["head"] for step in found])
    hold_parameters(got, want)
    hold_in_norm([found[-1].loss], [loss])
    hold_in_norm([found[-1].evaluated], [loss])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_step_is_that_of_one_process(on_ranks: Any, world: int, name: str) -> None:
    """A12: the loss and every parameter's gradient, against full logits in float64. Uneven rows,
    uneven micro-batches, one without a valid token; a loss of 1 or of 2 tokens ahead."""
    hold([found[name] for found in on_ranks[world]], world, SETUPS[world][name])


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), CASES)
def test_collectives_of_a_loss(on_ranks: Any, world: int, name: str) -> None:
    """A15: on every rank the same in each micro-batch, with valid tokens or none; trained, and
    evaluated."""
    batches = SETUPS[world][name].micro_batches
    expected = [{"broadcast": 1, "all_reduce": count} for count in (3, 2) for _ in range(batches)]
    for found in on_ranks[world]:
        assert found[name].counts == expected


# --- what the check rejects -----------------------------------------------------------------------


class Wrong(stages.shown().HeadOverStages):  # type: ignore[misc]
    """One thing of it is wrong."""

    def __init__(self, *given: Any, what: str) -> None:
        super().__init__(*given)
        self.what, self.before = what, None

    def loss_fn(self, hidden: Any, labels: Any) -> Any:
        loss = super().loss_fn(hidden, labels)
        if self.what == "hidden states of another micro-batch" and self.before is not None:
            self.hidden = hidden + (self.before - hidden).detach()
        self.before = hidden.detach()
        return loss

    def __call__(self, action: Any, context: Any) -> None:
        reduce = torch.distributed.all_reduce

        def twice(x: Any, op: Any = torch.distributed.ReduceOp.SUM, **more: Any) -> Any:
            if op == torch.distributed.ReduceOp.SUM and torch.distributed.get_rank() == 0:
                x.mul_(2)
            return reduce(x, op, **more)

        if self.what == "sums of one shard twice":
            torch.distributed.all_reduce = twice
        elif self.what == "rows without their sum" and context.schedule_ref._has_backward:
            self.rows.grad = None
        elif self.what == "labels of another micro-batch":
            targets = context.target_mbs
            context = replace(context, target_mbs=[*targets[1:], targets[0]])
        elif self.what == "the mean of each micro-batch":
            self.options.pop("denominator", None)
        try:
            super().__call__(action, context)
        finally:
            torch.distributed.all_reduce = reduce


WRONG = (
    "",
    "hidden states of another micro-batch",
    "labels of another micro-batch",
    "sums of one shard twice",
    "rows without their sum",
    "the mean of each micro-batch",
)


def all_wrong(rank: int, world: int) -> dict[str, Step]:
    setup = SETUPS[2]["Interleaved1F1B"]
    return {what: stages.run(rank, world, setup, partial(Wrong, what=what)) for what in WRONG}


@pytest.mark.slow
def test_wrong_steps_are_rejected() -> None:
    """A14."""
    setup = SETUPS[2]["Interleaved1F1B"]
    ranks = launch(2, all_wrong)
    hold([found[""] for found in ranks], 2, setup)
    for what in WRONG[1:]:
        steps = [found[what] for found in ranks]
        with pytest.raises(AssertionError):
            hold([step._replace(evaluated=ranks[-1][""].evaluated) for step in steps], 2, setup)


# --- the order ------------------------------------------------------------------------------------

UNITS = {Kind.FORWARD: 2, Kind.FULL_BACKWARD: 4, stages.shown().LOSS: 1}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_ranks_wait_for_a_loss_no_longer_than_it_takes(ranks: int, number: int) -> None:
    """Of units of time: a step takes that of the same pipeline without a head, and its losses."""
    setup = Setup(stages=number, micro_batches=4 * ranks)
    without, order = (stages.of_ranks(setup, ranks, losses=x) for x in (False, True))
    more = setup.micro_batches * UNITS[stages.shown().LOSS]
    assert stages.duration(order, UNITS) == stages.duration(without, UNITS) + more


def test_with_as_few_micro_batches_in_flight_as_1f1b_ranks_wait() -> None:
    """Which is why the page does not show its order."""
    setup = Setup("1F1B", 1, 16)
    without, order = (stages.of_ranks(setup, 4, losses=x) for x in (False, True))
    more = setup.micro_batches * UNITS[stages.shown().LOSS]
    assert stages.duration(order, UNITS) > 1.3 * (stages.duration(without, UNITS) + more)


# --- what a hurried user does ---------------------------------------------------------------------

SAID = {
    "scale_grads": "scale_grads=False",
    "twice": "has losses already",
    "Schedule1F1B": "no attribute 'pipeline_order_with_comms'",
    "few rows": "must spread 101 classes over its ranks",
    "no options": "is not a mapping",
    "other options": "`softcap` must be the same on every rank",
    "other labels": "`labels` must be the same on every rank",
    "a loss left out": "`labels` must be the same on every rank",
    "rows of another dtype": "`hidden` must be the same on every rank",
}


def hurried(rank: int, world: int) -> tuple[dict[str, str], list[float]]:
    """What each says, and the losses of a schedule that has none inserted."""
    said = {}
    for what in SAID:
        group = torch.distributed.new_group()  # what is under way in another one is left there
        try:
            hurried_step(rank, what, group)
        except (ValueError, TypeError, AttributeError) as error:
            said[what] = str(error)
        # PyTorch 2.15 raises when what it sent has been received: in a program that ends, as here,
        # the other rank closes the connection.
        torch.distributed.destroy_process_group(group)
        del group
        gc.collect()
    group = torch.distributed.new_group()
    return said, [x.item() for x in hurried_step(rank, "no losses", group)]


def hurried_step(rank: int, what: str, group: torch.distributed.ProcessGroup) -> list[Any]:
    setup, page = Setup(stages=1), stages.shown()
    parts, head = stages.whole_model(2)
    rows = head.detach().split(stages.sizes_of(2))[rank].clone()
    rows = rows[:-1] if what == "few rows" else rows
    rows = rows.double() if what == "rows of another dtype" else rows
    over = page.HeadOverStages(rows.requires_grad_(), group, stages.V)
    stage = stages.PipelineStage(parts[rank], rank, 2, torch.device("cpu"), group=group)
    made = partial(stages.make_schedule, setup, [stage], over.loss_fn)
    schedule = made(scale_grads=True) if what == "scale_grads" else made()
    if what == "Schedule1F1B":
        schedule = Schedule1F1B(stage, 4, loss_fn=over.loss_fn, scale_grads=False)
    for _ in range({"no losses": 0, "twice": 2}.get(what, 1)):
        page.insert_losses(schedule, over)
    ids, labels = stages.batch(setup)
    if what != "no options":
        over.options = stages.loss_options(setup, labels)
    if rank == 0 and what == "other options":
        over.options["softcap"] = 5.0
    if rank == 0 and what == "other labels":
        labels = labels.roll(1, 0)
    if rank == 0 and what == "a loss left out":
        order = schedule.pipeline_order_with_comms[rank]
        order.remove(next(x for x in order if x.computation_type == page.LOSS))
    losses: list[Any] = []
    schedule.step(*((ids,) if rank == 0 else ()), target=labels, losses=losses)
    return losses


@pytest.mark.slow
def test_what_a_hurried_user_does() -> None:
    ranks = launch(2, hurried)
    for said, _ in ranks:
        for what, words in SAID.items():
            assert words in said[what], what
    assert np.isnan(ranks[-1][1]).tolist() == [True] * 4
