"""Heads under FSDP2 whose training goes on from a distributed checkpoint, on other ranks and by
another route of `gather=`, against one process that has trained without a pause.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from helpers.collected import collected
from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.fully_sharded import Sharded, wrapped  # noqa: E402
from helpers.wrapped import batch, model_of, part_of, run  # noqa: E402

HIDDEN = Sharded(gather="hidden", model=("bias",))
# How it is trained before the checkpoint, and how after it: 101 classes are split as 51 and 50 on
# two ranks, as 26, 26, 26 and 23 on four.
CROSSINGS = {
    "two ranks, four": (HIDDEN, replace(HIDDEN, world=4)),
    "a module on two ranks, four": (replace(HIDDEN, road="NLLHead"), replace(HIDDEN, world=4)),
    "replicas, two ranks": (replace(HIDDEN, mesh="replicas", world=4), HIDDEN),
    "stream on four ranks, replicas": (
        replace(HIDDEN, gather="stream", world=4),
        replace(HIDDEN, mesh="replicas", world=4),
    ),
}
ROUTES = ("head", "hidden", "stream")
# By another road to the head before it, once is enough.
CASES = [(k, x) for k in CROSSINGS for x in ROUTES if x == "hidden" or "module" not in k]
BEFORE, AFTER = range(2), range(2, 3)  # steps
MOMENTS = {"exp_avg", "exp_avg_sq", "step"}


def optimizer_of(model: Any) -> Any:
    # As large as gradients are: the bias of keys has one of rounding alone, of which AdamW with a
    # smaller epsilon makes a whole step.
    return torch.optim.AdamW(model.parameters(), lr=0.03, eps=1e-3)


def train(setup: Any, model: Any, optimizer: Any, steps: range, rank: int, world: int) -> None:
    """Each step on two batches, of which a rank has its rows."""
    part = part_of(rank, world)
    for step in steps:
        pair = [batch(setup, 2 * step), batch(setup, 2 * step + 1)]
        total = float(sum((labels != -100).sum() for _, labels in pair))
        for k, (ids, labels) in enumerate(pair):
            if world > 1:
                model.set_requires_gradient_sync(k == 1)
            run(setup, model, ids[part], labels[part], total / world).backward()
        optimizer.step()
        optimizer.zero_grad()


def names_in(state: dict[str, Any]) -> tuple[set[str], dict[str, set[str]]]:
    """Of the model's tensors, and of each parameter's in the optimizer."""
    return {*state["model"]}, {name: {*x} for name, x in state["optimizer"]["state"].items()}


def saved(rank: int, world: int, setups: list[tuple[Sharded, str]]) -> list[Any]:
    """What a checkpoint after two steps has in it, and would have in the middle of a window."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    found = []
    for setup, folder in setups:
        model, _ = wrapped(setup, world)
        optimizer = optimizer_of(model)
        train(setup, model, optimizer, BEFORE, rank, world)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=folder)
        model.set_requires_gradient_sync(False)
        ids, labels = (x[part_of(rank, world)] for x in batch(setup, 7))
        run(setup, model, ids, labels, 1.0).backward()
        found.append((*names_in(state), {*model.state_dict()}))
    return found


def loaded(rank: int, world: int, setups: list[tuple[Sharded, str]]) -> list[Any]:
    """By route, parameters after a step more, and what is in a checkpoint then."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    found = []
    for setup, folder in setups:
        model, _ = wrapped(setup, world)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.nan)
        optimizer = optimizer_of(model)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        train(setup, model, optimizer, AFTER, rank, world)
        named = {name: p.detach().full_tensor().numpy() for name, p in model.named_parameters()}
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        found.append((named, *names_in(state)))
    return found


@pytest.fixture(scope="module")
def found(
    request: Any, tmp_path_factory: Any
) -> tuple[dict[str, list[Any]], dict[tuple[str, str], list[Any]]]:
    """What is in every checkpoint, and what follows from it by every route: one start of each
    number of ranks to save, one to load."""
    folder = tmp_path_factory.mktemp("checkpoints")
    crossings = {name: CROSSINGS[name] for name in collected(request, CROSSINGS)}
    before: dict[str, list[Any]] = {}
    after: dict[tuple[str, str], list[Any]] = {}
    for world in (2, 4):
        setups = {k: (first, str(folder / k)) for k, (first, _) in crossings.items()}
        setups = {k: x for k, x in setups.items() if x[0].world == world}
        ranks = launch(world, saved, [*setups.values()]) if setups else []
        before |= {k: list(x) for k, x in zip(setups, zip(*ranks, strict=True), strict=True)}
    for world in (2, 4):
        goes_on = {
            (k, route): (replace(then, gather=route), str(folder / k))
            for k, (_, then) in crossings.items()
            if then.world == world
            for route in ROUTES
            if (k, route) in CASES
        }
        ranks = launch(world, loaded, [*goes_on.values()]) if goes_on else []
        after |= {k: list(x) for k, x in zip(goes_on, zip(*ranks, strict=True), strict=True)}
    return before, after


@pytest.mark.parametrize(("name", "route"), CASES)
def test_training_goes_on_from_a_checkpoint(found: Any, name: str, route: str) -> None:
    """A9, D7: parameters and moments, read by ranks that have other rows of the head. Catches: rows
    of another rank, moments of one rank or of none, what has been left unreduced."""
    setup = replace(HIDDEN, gather="head")
    model, start = model_of(setup), dict(model_of(setup).named_parameters())
    optimizer = optimizer_of(model)
    train(setup, model, optimizer, BEFORE, 0, 1)
    train(setup, model, optimizer, AFTER, 0, 1)
    for got, *_ in found[1][name, route]:
        assert got.keys() == start.keys()
        for parameter, p in model.named_parameters():
            before, after = start[parameter].detach().numpy(), p.detach().numpy()
            assert abs(after - before).max() > 0.01
            moved, want = got[parameter] - before, after - before
            measured = check("A9", moved, want, metrics=("rho / u",), quantity=parameter)
            assert not failures(measured)


@pytest.mark.parametrize("name", CROSSINGS)
def test_a_checkpoint_holds_what_the_plain_model_s_does(found: Any, name: str) -> None:
    """D7: names, after whole steps by any route and with gradients that wait for their sum."""
    plain = {*model_of(HIDDEN).state_dict()}
    moments = dict.fromkeys(plain, MOMENTS)
    before, after = found
    for in_model, in_optimizer, in_window in before[name]:
        assert in_model == in_window == plain
        assert in_optimizer == moments
    for route in [route for k, route in CASES if k == name]:
        for _, in_model, in_optimizer in after[name, route]:
            assert in_model == plain
            assert in_optimizer == moments
