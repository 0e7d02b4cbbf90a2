"""Heads that FSDP2 shards and nobody gathers: routes of `gather=`, on gloo ranks, against one
process that has the whole batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.held import hold_parameters
from helpers.pairs import every_pair_of, parameters
from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.fully_sharded import Sharded, on_each_world  # noqa: E402
from helpers.wrapped import (  # noqa: E402
    batch,
    batches,
    gradients_of_one_process,
    loss_of,
    model_of,
    part_of,
)
from xentlib.tools.harness.ranks import DEVICE  # noqa: E402

PIECES = (("reshard_after_forward", True),)
HIDDEN = Sharded(gather="hidden")
HELD = {
    "plain": replace(HIDDEN, model=("bias",)),
    "many chunks": replace(HIDDEN, chunk=8),
    "rank without tokens": replace(HIDDEN, idle=True),
    "per token": replace(HIDDEN, function="chunked_logprobs", chunk=8, model=("bias",)),
    "recompute": replace(HIDDEN, recompute=True, chunk=8, model=("bias",)),
    "recompute, rank without tokens": replace(HIDDEN, recompute=True, idle=True),
    "inside": replace(HIDDEN, model=("inside",)),
    "frozen trunk": replace(HIDDEN, frozen=True),
    "two calls": replace(HIDDEN, calls=2),
    "two calls, per token": replace(HIDDEN, calls=2, function="chunked_logprobs"),
    "checkpoint": replace(HIDDEN, checkpoint=True),
    "checkpoint, per token": replace(HIDDEN, checkpoint=True, function="chunked_logprobs"),
    "three micro-batches": replace(HIDDEN, steps=3),
    "divided by 1": replace(HIDDEN, divide=1.0),
    "offload": replace(HIDDEN, policy="offload"),
    "NLLHead": replace(HIDDEN, road="NLLHead", model=("bias",)),
    "NLLHead, per token": replace(HIDDEN, road="NLLHead", function="chunked_logprobs"),
    "root": replace(HIDDEN, own=False, wrap=PIECES),
    "root, tied": replace(HIDDEN, own=False, model=("tied",), wrap=PIECES),
    "replicas": replace(HIDDEN, mesh="replicas", world=4, model=("bias",)),
    "replicas, three micro-batches": replace(HIDDEN, mesh="replicas", world=4, steps=3),
    "replicas, per token": replace(
        HIDDEN, mesh="replicas", world=4, function="chunked_logprobs", steps=2
    ),
    "four ranks, many chunks, rank without tokens": replace(HIDDEN, world=4, chunk=8, idle=True),
    "four ranks, per token": replace(HIDDEN, world=4, function="chunked_logprobs"),
}
EXACT = {
    "audit": replace(HIDDEN, audit=True, model=("bias",)),
    "audit, many chunks": replace(HIDDEN, audit=True, chunk=8),
    "audit, per token": replace(HIDDEN, audit=True, function="chunked_logprobs"),
    "audit, four ranks": replace(HIDDEN, audit=True, world=4),
    "audit, replicas": replace(HIDDEN, audit=True, mesh="replicas", world=4, policy="fp64"),
}
# In how many chunks, and by which road, is not the stream's concern.
HELD |= {
    f"stream, {name}": replace(setup, gather="stream")
    for name, setup in HELD.items()
    if name not in ("inside", "NLLHead, per token", "checkpoint", "two calls, per token")
}
EXACT |= {f"stream, {name}": replace(setup, gather="stream") for name, setup in EXACT.items()}
# "compiled" is a set-up of test_fsdp2.py, beside others that share the compiler's first start.
SETUPS = HELD | EXACT
KEPT = every_pair_of(SETUPS)


@pytest.fixture(scope="module")
def found(request: Any) -> dict[str, list[Any]]:
    """Every setup, on two ranks or four: one start of each."""
    return on_each_world({name: SETUPS[name] for name in collected(request, SETUPS)})


@pytest.mark.parametrize("name", parameters(HELD, KEPT))
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    """A12, D7: all gradients, on every rank, the wrapper's mean over ranks included."""
    expected = gradients_of_one_process(replace(SETUPS[name], gather="head"))
    for grads, _ in found[name]:
        hold_parameters(grads, expected)


@pytest.mark.parametrize("name", parameters(EXACT, KEPT))
def test_head_gradients_are_one_sum_of_all_tokens(found: Any, name: str) -> None:
    """A12, A1: in float64, of the hidden states that the ranks have, rounded once."""
    setup = replace(SETUPS[name], gather="head")
    model, (((ids, labels),), total) = model_of(setup), batches(setup)
    copies = 2 if setup.mesh == "replicas" else 1  # each of which rounds a sum of its own
    ranks = setup.world // copies
    want: dict[str, Any] = {}
    for first in range(0, setup.world, ranks):
        parts = [part_of(rank, setup.world) for rank in range(first, first + ranks)]
        with torch.no_grad():
            hidden = torch.cat([model(ids[part]) for part in parts])
        here = torch.cat([labels[part] for part in parts])
        model.head.zero_grad()
        loss_of(setup, here, total, hidden, model.head).backward()
        for parameter, p in model.head.named_parameters():
            want[parameter] = want.get(parameter, 0) + p.grad.double()
    for grads, _ in found[name]:
        for parameter, x in want.items():
            assert not failures(check("A1", grads[f"head.{parameter}"], x.float().cpu().numpy()))


def trained(rank: int, world: int, gathers: list[str], replicas: int) -> list[dict[str, Any]]:
    """Parameters after three windows of two micro-batches, with `TokenNormalizer` and clipping."""
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch import TokenNormalizer, chunked_nll

    shape = (replicas, world // replicas) if replicas > 1 else (world,)
    names = ("replica", "shard")[-len(shape) :]
    mesh = torch.distributed.init_device_mesh(DEVICE, shape, mesh_dim_names=names)
    found = []
    for gather in gathers:
        model = model_of(HIDDEN)
        for module in (model.head, model):
            fully_shard(module, mesh=mesh)
        # Of steps ten times smaller a parameter's own rounding was 192 u of what it moved by.
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0, momentum=0.9)
        normalizer = TokenNormalizer(model)
        for step in range(3):
            pairs = [batch(HIDDEN, 2 * step), batch(HIDDEN, 2 * step + 1)]
            part = part_of(rank, world)
            with normalizer.window([labels[part] for _, labels in pairs]) as window:
                for ids, labels in window.micro_batches(pairs):
                    hidden = model(ids[part])
                    window.backward(
                        chunked_nll(
                            hidden,
                            model.head.weight,
                            labels[part],
                            reduction="sum",
                            gather=gather,
                        )
                    )
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        named = model.named_parameters()
        found.append({name: p.detach().full_tensor().cpu().numpy() for name, p in named})
    return found


@pytest.mark.parametrize(("world", "replicas"), [(2, 1), (4, 2)])
def test_windows_and_optimizers_see_no_difference(world: int, replicas: int) -> None:
    """A9, D7: `TokenNormalizer` divides what the route has left to divide, gradients of several
    micro-batches add up, over replicas once, and clipping sees their norm."""
    for head, *others in launch(world, trained, ["head", "hidden", "stream"], replicas):
        before = dict(model_of(HIDDEN).named_parameters())
        for got in others:
            for name, want in head.items():
                moved, by = want - before[name].detach().cpu().numpy(), got[name] - want
                assert np.abs(moved).max() > 0
                measured = check("A9", moved + by, moved, metrics=("rho / u",), quantity=name)
                assert not failures(measured)


def by_itself(rank: int, world: int, counts: list[int]) -> list[int]:
    """Bytes of the all-gathers of a call of 8 tokens with `gather="auto"`, whatever is promised."""
    from torch.distributed.fsdp import fully_shard

    from xentlib.torch import chunked_nll, count_collectives

    head = torch.nn.Linear(512, 64_000, bias=False)
    fully_shard(head, mesh=torch.distributed.init_device_mesh(DEVICE, (world,)))
    hidden, labels = torch.randn(8, 512), torch.arange(8)
    found: list[int] = []
    more: dict[str, Any] = {"gather": "auto", "max_chunk_bytes": 1 << 30}
    for count in counts:
        with torch.no_grad(), count_collectives() as sent:
            chunked_nll(hidden, head.weight, labels, tokens_per_rank=count, **more)
        found.append(sent.bytes("all_gather"))
    return found


def test_auto_goes_by_what_all_ranks_are_told() -> None:
    """A15: few tokens travel themselves, to many the head does; of a call's own tokens it is not
    asked."""
    whole = 64_000 * 512 * 4
    for few, many in launch(2, by_itself, [8, 1_000_000]):
        assert few < whole / 100
        assert many == whole
