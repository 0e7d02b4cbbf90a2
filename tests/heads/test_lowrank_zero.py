"""Heads with a low-rank part that DeepSpeed ZeRO-3 shards: matrices of one's own and PEFT's LoRA,
trained for two steps by a real `deepspeed.initialize` on gloo ranks, against one process that has
the whole batch and full logits."""

from __future__ import annotations

from dataclasses import replace
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
from helpers.wrapped import RANK, H  # noqa: E402
from helpers.zero_routes import Trained, changes_of_one_process  # noqa: E402

DEFAULT = 100_000  # elements: all of so small a model is whole on every rank
PLAIN = Trained(gather="head", road="LowRankHead")
LORA = replace(PLAIN, road="PEFT")
TWO = replace(PLAIN, steps=2)
SETUPS = {
    "plain": PLAIN,
    "bias, many chunks": replace(PLAIN, model=("bias",), chunk=8),
    "A persists": replace(PLAIN, persist=RANK * H),
    "all persists": replace(PLAIN, persist=DEFAULT),
    "per token": replace(TWO, function="chunked_logprobs"),
    "per token, A persists": replace(PLAIN, function="chunked_logprobs", persist=RANK * H),
    "two micro-batches": TWO,
    "rank without tokens": replace(PLAIN, idle=True),
    "frozen trunk": replace(PLAIN, frozen=True),
    "two calls": replace(PLAIN, calls=2),
    "checkpoint": replace(TWO, checkpoint=True),
    "checkpoint, per token": replace(PLAIN, checkpoint=True, function="chunked_logprobs"),
    "inside": replace(PLAIN, model=("inside",)),
    "TokenNormalizer": replace(PLAIN, steps=3, normalized=True),
    "a vocabulary that the ranks do not divide": replace(PLAIN, vocab=101),
    "PEFT": LORA,
    "PEFT, bias, inside": replace(LORA, model=("inside", "bias"), steps=2),
    "PEFT, per token": replace(LORA, function="chunked_logprobs", chunk=8),
    "PEFT, A persists": replace(LORA, persist=RANK * H),
    "PEFT, all persists": replace(LORA, persist=DEFAULT),
    "PEFT, frozen trunk": replace(LORA, frozen=True),
    "four ranks": replace(PLAIN, world=4),
    "four ranks, all persists": replace(PLAIN, world=4, persist=DEFAULT),
    "four ranks, PEFT, per token": replace(LORA, world=4, function="chunked_logprobs"),
}
# What one gather has, or two.
GATHERED = {
    "plain": 1,
    "PEFT": 1,
    "A persists": 1,
    "PEFT, A persists": 1,
    "per token": 2,
    "per token, A persists": 2,
    "all persists": 0,
}
KEPT = every_pair_of(SETUPS, named=GATHERED)


@pytest.fixture(scope="module")
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every setup, on two ranks or four: one start of each."""
    pytest.importorskip("peft")
    results: dict[str, list[Any]] = {}
    names = collected(request, SETUPS, *GATHERED)
    for world in (2, 4):
        setups = {name: SETUPS[name] for name in names if SETUPS[name].world == world}
        if not setups:
            continue
        ranks = torchrun(world, "helpers.zero_low", tmp_path_factory.mktemp("zero"), setups)
        results |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return results


@pytest.mark.parametrize("name", parameters(SETUPS, KEPT))
def test_training_is_that_of_one_process(found: Any, name: str) -> None:
    """A12, D7, M7: every trained parameter's change in two steps. Catches: adapters that are
    bypassed, and a gradient of theirs that is reduced twice or not."""
    want = changes_of_one_process(SETUPS[name])
    adapters = {x for x in want if x.startswith("head.")}
    assert len(adapters) == 2
    for rank in found[name]:
        got = rank["changes"]
        assert got.keys() == want.keys()
        for parameter, x in want.items():
            assert np.abs(x).max() > 0
            assert not failures(check("A9", got[parameter], x, metrics=("rho / u",))), parameter


def test_one_gather_of_all_that_is_sharded(found: Any) -> None:
    """A15, D7: the head and its adapters together, again for a backward that reads them; of what
    persists nothing. No gradient of the frozen head is reduced."""
    head, a, b = (4 * x for x in (PLAIN.vocab * H, RANK * H, PLAIN.vocab * RANK))
    whole = head + a + b
    for name, times in GATHERED.items():
        size = whole - a * ("A persists" in name) if times else 0
        trained = sum(x.size for x in changes_of_one_process(SETUPS[name]).values())
        for rank in found[name]:
            sent = rank["last sent"]
            if size:
                assert sent.count(("all_gather", size)) == times
            else:
                assert all(kind != "all_gather" for kind, _ in sent)
            assert sum(n for kind, n in sent if kind == "reduce_scatter") == 4 * trained


@pytest.mark.parametrize("gather", ["hidden", "stream"])
@pytest.mark.parametrize("road", ["LowRankHead", "PEFT"])
def test_other_routes_are_refused(found: Any, road: str, gather: str) -> None:
    """On every rank; ZeRO-3 cuts A between rows."""
    said = f"`weight` must be one array here; got a `LowRankHead` with gather={gather!r} under ZeRO"
    for rank in found["refused", road, gather]:
        assert rank.startswith(said), rank
