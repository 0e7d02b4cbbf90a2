"""Heads that DeepSpeed ZeRO-3 shards and nobody gathers: routes of `gather=`, trained for two
steps by a real `deepspeed.initialize` on gloo ranks, against one process that has the whole batch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.plan import head_routes

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.collected import collected  # noqa: E402
from helpers.torchrun import torchrun  # noqa: E402
from helpers.wrapped import H, loss_of  # noqa: E402
from helpers.zero_routes import Trained, changes_of_one_process, net, window_of  # noqa: E402

TWO = Trained(steps=2)
CLIPPED = replace(TWO, clip=0.2, rate=5.0)
HELD = {
    "plain": Trained(model=("bias",)),
    "many chunks": Trained(chunk=8),
    "rank without tokens": Trained(idle=True),
    "per token": Trained(function="chunked_logprobs", chunk=8, model=("bias",)),
    "recompute": Trained(recompute=True, chunk=8, model=("bias",)),
    "two micro-batches": TWO,
    "two micro-batches, clipped": CLIPPED,
    "two micro-batches, per token": replace(TWO, function="chunked_logprobs"),
    "two micro-batches, a step by hand": replace(TWO, unmanaged=True),
    "three micro-batches, TokenNormalizer": Trained(steps=3, normalized=True),
    "frozen trunk": replace(TWO, frozen=True),
    "frozen head": Trained(frozen_head=True),
    "tied": replace(TWO, model=("tied",)),
    "tied, inside, per token": replace(
        TWO, model=("tied", "inside"), road="module", function="chunked_logprobs"
    ),
    "two calls": replace(TWO, calls=2),
    "beside a call that gathers": replace(TWO, also=True),
    "checkpoint": replace(TWO, checkpoint=True),
    "checkpoint, per token": replace(TWO, checkpoint=True, function="chunked_logprobs"),
    "module, inside": replace(TWO, road="module", model=("inside", "bias")),
    "NLLHead, inside": replace(TWO, road="NLLHead", model=("inside", "bias")),
    "NLLHead, per token": Trained(road="NLLHead", function="chunked_logprobs"),
    **{f"odd: {odd}": replace(TWO, odd=odd) for odd in ("given up", "logged", "late")},
    "a bias that persists": Trained(model=("bias",), persist=200),
}
STREAMED = ("plain", "two micro-batches, clipped", "two micro-batches, per token", "tied")
HELD |= {f"stream, {name}": replace(HELD[name], gather="stream") for name in STREAMED}
GATHERED = {
    "gathered": replace(HELD["plain"], gather="head"),
    "gathered, clipped": replace(CLIPPED, gather="head"),
}
LOW = {
    "bf16": Trained(low=True),
    "bf16, two micro-batches": replace(TWO, low=True),
    "bf16, summed in float32": replace(TWO, low=True, sums="fp32"),
}
LOW |= {f"{name}, gathered": replace(setup, gather="head") for name, setup in LOW.items()}
EXACT = {
    "audit": Trained(audit=True, model=("bias",)),
    "audit, many chunks": Trained(audit=True, chunk=8),
    "audit, per token": Trained(audit=True, function="chunked_logprobs"),
    "audit, stream": Trained(audit=True, gather="stream"),
    "audit, bf16": Trained(audit=True, low=True),
    "audit, bf16, summed in float32": Trained(audit=True, low=True, sums="fp32"),
}
EXACT = {name: replace(setup, windows=1) for name, setup in EXACT.items()}  # none is asked for more
MUTANTS = {
    name: replace(setup, mutant=name, windows=2 if name == "of the last window" else 1)
    for name, setup in {
        "sum over ranks": Trained(),
        "overwritten": TWO,
        "of the last window": Trained(),
        "given up": Trained(odd="given up"),
        "a row down": Trained(),
        "the other's rows": Trained(),
        "not reduced before": replace(TWO, model=("tied",)),
    }.items()
}
SETUPS = HELD | GATHERED | LOW | EXACT | MUTANTS
SAME = [("plain", "gathered"), ("two micro-batches, clipped", "gathered, clipped")]
COUNTED = ("gathered", "plain", "rank without tokens", "per token", "stream, plain")
SETUPS = {name: replace(setup, counted=name in COUNTED) for name, setup in SETUPS.items()}

SHOWN = "where another route has not been shown to be right; got 'hidden'. Leave it out."
WHOLE = "`gather` must be 'head' for a head that ZeRO-3 has gathered already; got 'hidden'."
ROWS = "`gather` must be 'head' unless ZeRO-3 keeps as many whole rows of `weight` [V, H] on each"
REFUSED = {
    "a vocabulary that the ranks do not divide": f"{ROWS} rank; got 'hidden' with [101, 16]",
    "layout": f"{ROWS} rank; got 'hidden' with [102, 16], weight_layout='HV' and 2 ranks",
    "nodes": "`tokens_parallel` must be None, with `gather='hidden'`, for a head of ZeRO-3; got a",
    "a bias of one's own": f"under ZeRO-3 with a weight or a bias that it does not keep, {SHOWN}",
    "offloaded optimizer": f"parameters or optimizer states that are offloaded, {SHOWN}",
    "offloaded parameters": f"parameters or optimizer states that are offloaded, {SHOWN}",
    "hpZ": f"under ZeRO-3 with ZeRO++ (hpZ, quantised weights or gradients), {SHOWN}",
    "persistent": WHOLE,
    "stage 2": "`gather` must be 'head' for a head that is whole on this rank; got 'hidden'",
    "a loss scale of one's own": f"with fp16, or a loss scale that moves, {SHOWN}",
    "predivided": f"under ZeRO-3 with `gradient_predivide_factor`, {SHOWN}",
    "read inside": WHOLE,
    "a hook": WHOLE,
    "gathered": WHOLE,
    "coalesced": f"under ZeRO-3 with `coalesce_grad_reduction`, {SHOWN}",
    "leaf module": f"under ZeRO-3 with a leaf module, {SHOWN}",
    "no optimizer": f"under ZeRO-3 with no optimizer, {SHOWN}",
    "evaluation": "nothing",
    "reentrant": "inside of `torch.utils.checkpoint` with `use_reentrant=True` under ZeRO-3",
    "autocast": f"with `torch_autocast`, which gathers in another dtype, {SHOWN}",
}


FLOAT32 = ("dtype", "head_dtype", "reduce_dtype", "param_dtype")
PLANNED: dict[str, Any] = {"zero3": True, "bias": True, "platform": "cpu"}
PLANNED |= dict.fromkeys(FLOAT32, "float32")


@pytest.fixture(scope="module")
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every setup on two ranks, and what is refused: one start."""
    tests = {item.originalname for item in request.session.items}
    counted = COUNTED if test_the_head_is_not_gathered.__name__ in tests else ()
    names = collected(request, SETUPS, *counted)
    others = {f"{name}, gathered" for name in names if name in LOW}
    others |= {f"stream, {name}" for name, _ in SAME if name in names}
    setups = {name: x for name, x in SETUPS.items() if name in {*names, *others}}
    refused = collected(request, REFUSED)
    return torchrun(2, "helpers.zero_routes", tmp_path_factory.mktemp("zero"), (setups, refused))


def apart(setup: Trained, found: dict[str, Any], want: dict[str, Any]) -> list[str]:
    """Which parameters are not where those of one process, or of another run, are."""
    assert found.keys() == want.keys()
    assert all(np.abs(x).max() > 0 for x in want.values())
    return [
        text
        for name, x in want.items()
        for text in failures(check("A9", found[name], x, metrics=("rho / u",), quantity=name))
    ]


@pytest.mark.parametrize("name", HELD)
def test_training_is_that_of_one_process(ranks: Any, name: str) -> None:
    """A12, D7, M7: every parameter's change in two steps, the engine's mean over ranks and
    micro-batches and its clipping included."""
    want = changes_of_one_process(SETUPS[name])
    for rank in ranks:
        assert not apart(SETUPS[name], rank[name]["changes"], want)


@pytest.mark.parametrize(("name", "gathered"), SAME)
def test_training_is_that_of_the_same_engine(ranks: Any, name: str, gathered: str) -> None:
    """A9, A2: with `gather="head"`; the loss of the first micro-batch too."""
    for rank in ranks:
        for route in (name, f"stream, {name}"):
            assert not apart(SETUPS[name], rank[route]["changes"], rank[gathered]["changes"])
            losses = rank[route]["loss"], rank[gathered]["loss"]
            assert not failures(check("A2", *losses, magnitude=losses[1]))


@pytest.mark.parametrize("name", [name for name in LOW if not name.endswith("gathered")])
def test_bf16_is_as_near_as_when_the_head_is_gathered(ranks: Any, name: str) -> None:
    """A9: the distance from a process in float32, of the parameters that have entries enough."""
    want = changes_of_one_process(SETUPS[name])
    for rank in ranks:
        got, other = (rank[x]["changes"] for x in (name, f"{name}, gathered"))
        for parameter in ("head.weight", "embedding.weight"):
            x, y = got[parameter], other[parameter]
            measured = check("A9", x, want[parameter], other=y, metrics=("error ratio",))
            assert measured
            assert not failures(measured)


@pytest.mark.parametrize("name", EXACT)
def test_head_gradients_are_one_sum_of_all_tokens(ranks: Any, name: str) -> None:
    """A12, A1: in float64, of the hidden states that the ranks have, rounded once."""
    setup = replace(SETUPS[name], gather="head")
    head, (((_, labels),), total) = net(setup).head, window_of(setup, 0)
    hidden = torch.cat([rank[name]["hidden"] for rank in ranks])
    loss_of(setup, labels, total, hidden, head).backward()
    for rank in ranks:
        for parameter, p in head.named_parameters():
            got = rank[name]["gradients"][f"head.{parameter}"]
            assert not failures(check("A1", got, p.grad.float().numpy()))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_gradient_of_rows_is_seen(ranks: Any, name: str) -> None:
    """A14."""
    want = changes_of_one_process(SETUPS[name])
    for rank in ranks:
        assert apart(SETUPS[name], rank[name]["changes"], want)


def sent(rank: Any, name: str) -> Any:
    return Counter(map(tuple, rank[name]["sent"]))


def test_the_head_is_not_gathered(ranks: Any) -> None:
    """A15, D7, M5: a micro-batch of the engine sends what it does with `gather="head"`, but for one
    gather of the head and its part of the reduction, and what the route sends."""
    whole = Trained().vocab * (H + 1) * 4  # of the head and its bias
    for rank in ranks:
        trunk = sent(rank, "gathered")
        reduced = max(size for kind, size in trunk if kind == "reduce_scatter")
        assert trunk["all_gather", whole] == 1
        trunk -= Counter([("all_gather", whole), ("reduce_scatter", reduced)])
        trunk["reduce_scatter", reduced - whole] += 1
        route = sent(rank, "plain")
        assert not trunk - route  # all of the trunk's is there
        extra = route - trunk
        kinds = Counter(kind for kind, _ in extra.elements())
        assert kinds == {"all_gather": 4, "all_reduce": 2, "reduce_scatter": 1}
        tokens = window_of(Trained(), 0)[0][0][1].numel()
        assert max(size for _, size in extra) == tokens * H * 4 < whole
        # And what is planned, to the byte.
        routes = head_routes(tokens // 2, Trained().vocab, H, 2, **PLANNED)
        of_head = [(x.kind, x.bytes) for x in routes["head"].exchanges]
        assert of_head == [("all_gather", whole), ("reduce_scatter", whole)]
        streamed = sent(rank, "stream, plain") - trunk
        for name, counted in (("hidden", extra), ("stream", streamed)):
            planned: Counter[Any] = Counter()
            for x in routes[name].exchanges:
                planned[x.kind, x.bytes // x.count] += x.count
            assert counted == planned
    # Alike whatever a rank computes.
    for name in COUNTED[1:]:
        assert ranks[0][name]["sent"] == ranks[1][name]["sent"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shown_right_is_refused(ranks: Any, name: str) -> None:
    """D7: in one sentence, on every rank."""
    for rank in ranks:
        assert REFUSED[name] in rank["refused"][name]
