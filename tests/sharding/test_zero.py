"""Heads that DeepSpeed ZeRO shards: real `deepspeed.initialize` on gloo ranks, against one
process that has the whole batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.pairs import every_pair_of, parameters
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.torchrun import torchrun  # noqa: E402
from helpers.wrapped import Zero, gradients_of_one_process, mean_over_ranks  # noqa: E402

HELD = {
    "stage 1": Zero(model=("bias",), stage=1),
    "stage 1, NLLHead": Zero(road="NLLHead", stage=1),
    "stage 2": Zero(model=("bias",), stage=2),
    "stage 3": Zero(),
    "stage 3, bias": Zero(model=("bias",)),
    "stage 3, many chunks": Zero(chunk=8),
    "stage 3, rank without tokens": Zero(idle=True),
    "stage 3, per token": Zero(function="chunked_logprobs", chunk=8),
    "stage 3, recompute": Zero(recompute=True, chunk=8),
    "stage 3, inside": Zero(model=("inside", "bias")),
    "stage 3, inside, per token": Zero(model=("inside",), function="chunked_logprobs"),
    "stage 3, tied": Zero(model=("tied",)),
    "stage 3, tied, inside": Zero(model=("tied", "inside")),
    "stage 3, frozen trunk": Zero(frozen=True),
    "stage 3, two calls": Zero(calls=2, model=("bias",)),
    "stage 3, two calls, per token": Zero(calls=2, function="chunked_logprobs"),
    "stage 3, two calls, frozen trunk": Zero(calls=2, frozen=True),
    "stage 3, two calls, gathered": Zero(calls=2, road="gather_head"),
    "stage 3, two calls, tied": Zero(calls=2, model=("tied",)),
    "stage 3, three micro-batches": Zero(steps=3),
    "stage 3, NLLHead": Zero(road="NLLHead", model=("bias",)),
    "stage 3, NLLHead, recompute": Zero(road="NLLHead", recompute=True),
    "stage 3, NLLHead, per token": Zero(road="NLLHead", function="chunked_logprobs"),
    "stage 3, NLLHead, inside, tied": Zero(road="NLLHead", model=("tied", "inside")),
    "stage 3, NLLHead, frozen trunk": Zero(road="NLLHead", frozen=True),
    "stage 3, gathered": Zero(road="gather_head", model=("bias",)),
    "stage 3, gathered, per token": Zero(road="gather_head", function="chunked_logprobs"),
    "stage 3, gathered, inside, tied": Zero(road="gather_head", model=("tied", "inside")),
    "stage 3, gathered, frozen trunk": Zero(road="gather_head", frozen=True),
    "stage 3, gathered, three micro-batches": Zero(road="gather_head", steps=3),
    **{
        f"stage 3, the user gathers, {name}": Zero(road="GatheredParameters", **options)
        for name, options in {
            "bias": {"model": ("bias",)},
            "per token": {"function": "chunked_logprobs"},
            "frozen trunk": {"frozen": True},
            "two calls, tied": {"model": ("tied",), "calls": 2},
        }.items()
    },
    "stage 3, gathered, checkpoint": Zero(road="gather_head", checkpoint=True),
    "stage 3, checkpoint": Zero(checkpoint=True),
    "stage 3, checkpoint, per token": Zero(checkpoint=True, function="chunked_logprobs"),
    "stage 3, offload": Zero(offload=True, model=("bias",)),
    # A second copy of the parameters among some of the ranks; the step makes it stale.
    "hpZ": Zero(hpz=2, windows=2),
    "hpZ, bias, three micro-batches": Zero(hpz=2, windows=2, model=("bias",), steps=3),
    "hpZ, tied, per token": Zero(hpz=2, windows=2, model=("tied",), function="chunked_logprobs"),
    "hpZ, tied, bias": Zero(hpz=2, windows=2, model=("tied", "bias")),
    "hpZ, inside": Zero(hpz=2, windows=2, model=("inside", "bias")),
    "hpZ, NLLHead": Zero(hpz=2, windows=2, road="NLLHead", model=("bias",)),
    "hpZ, gathered": Zero(hpz=2, windows=2, road="gather_head", model=("bias",)),
    "hpZ, checkpoint": Zero(hpz=2, windows=2, checkpoint=True, function="chunked_logprobs"),
    "hpZ of two, four ranks": Zero(hpz=2, windows=2, world=4, model=("bias",)),
    "hpZ of two, four ranks, per token": Zero(
        hpz=2, windows=2, world=4, function="chunked_logprobs"
    ),
    "stage 1, four ranks": Zero(stage=1, world=4),
    "stage 2, four ranks": Zero(stage=2, world=4),
    "stage 3, four ranks": Zero(model=("bias",), world=4),
    "stage 3, four ranks, tied, per token": Zero(
        model=("tied",), function="chunked_logprobs", world=4
    ),
    "stage 3, four ranks, NLLHead": Zero(road="NLLHead", world=4),
}
# Against what each rank computes for itself, the mean in float64: to the bit.
EXACT = {
    "audit, stage 1": Zero(audit=True, stage=1),
    "audit, stage 2": Zero(audit=True, stage=2),
    "audit, stage 3": Zero(audit=True, model=("bias",)),
    "audit, stage 3, many chunks": Zero(audit=True, chunk=8),
    "audit, stage 3, per token": Zero(audit=True, function="chunked_logprobs"),
    "audit, stage 3, NLLHead": Zero(audit=True, road="NLLHead"),
    "audit, stage 3, gathered": Zero(audit=True, road="gather_head"),
}
SETUPS = HELD | EXACT
PROGRAM = "helpers.zero_ranks"
ONE_GATHER = tuple(
    f"stage 3{x}" for x in ("", ", many chunks", ", rank without tokens", ", bias", ", gathered")
)
KEPT = every_pair_of(SETUPS, named=(*ONE_GATHER, "stage 3, per token"))


@pytest.fixture(scope="module")
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every setup, on two ranks or four: one start of each."""
    results: dict[str, list[Any]] = {}
    names = collected(request, SETUPS, *ONE_GATHER, "stage 3, per token")
    for world in (2, 4):
        setups = {name: SETUPS[name] for name in names if SETUPS[name].world == world}
        if not setups:
            continue
        ranks = torchrun(world, PROGRAM, tmp_path_factory.mktemp("zero"), setups)
        results |= {name: [rank[name] for rank in ranks] for name in setups}
    return results


@pytest.mark.parametrize("name", parameters(HELD, KEPT))
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    """A12, D7, M7: all gradients, on every rank. Catches: a weight of no elements, a
    gradient that its parameter's hook never sees, one that is divided twice."""
    expected = gradients_of_one_process(SETUPS[name])
    for gradients, _ in found[name]:
        assert gradients.keys() == expected.keys()
        for parameter, want in expected.items():
            assert np.abs(gradients[parameter]).max() > 0
            measured = check("A9", gradients[parameter], want.numpy(), metrics=("rho / u",))
            assert not failures(measured), parameter


@pytest.mark.parametrize("name", parameters(EXACT, KEPT))
def test_head_gradients_have_the_bits_of_each_rank_alone(found: Any, name: str) -> None:
    """A12, A1: the mean over ranks of what each computes."""
    setup = SETUPS[name]
    expected = mean_over_ranks(setup, setup.world, torch.float32)
    for gradients, _ in found[name]:
        for parameter in ("head.weight", *(["head.bias"] if "bias" in setup.model else [])):
            assert not failures(check("A1", gradients[parameter], expected[parameter].numpy()))


def test_gathers_do_not_count_chunks_or_tokens(found: Any) -> None:
    """A15, D7, M5, M6 (TRL#6696): the same on every rank, whatever it computes."""
    gathers = {name: [n for _, n in ranks] for name, ranks in found.items()}
    for ranks in gathers.values():
        assert len(set(ranks)) == 1
    for name in ONE_GATHER:
        assert gathers[name] == gathers["stage 3"]
    # The head's values, for its backward.
    assert gathers["stage 3, per token"][0] == gathers["stage 3"][0] + 1
