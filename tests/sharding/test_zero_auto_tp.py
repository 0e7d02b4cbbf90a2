"""Heads that DeepSpeed AutoTP splits over a vocabulary: real `deepspeed.initialize` on gloo ranks,
against one process that has the whole head and batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.auto_tp_ranks import FACTOR, Net, Split, batch, leaves_logits_local  # noqa: E402
from helpers.collected import collected  # noqa: E402
from helpers.torchrun import torchrun  # noqa: E402

SETUPS = {
    "module": Split(),
    "module, bias": Split(bias=True),
    "parameter": Split(road="parameter", bias=True),
    "the caller's group": Split(road="group"),
    "per token": Split(function="chunked_logprobs"),
    "local logits": Split(head="local"),
    "tied": Split(head="local", tied=True),
    "tied, per token, parameter": Split(
        head="local", tied=True, function="chunked_logprobs", road="parameter"
    ),
    "divergence": Split(function="chunked_divergence"),
    "window": Split(road="window"),
    "stage 1": Split(stage=1, bias=True),
    "stage 2": Split(stage=2, head="local"),
    "stage 3": Split(stage=3, bias=True),
    "stage 3, per token": Split(stage=3, function="chunked_logprobs"),
    "stage 3, parameter": Split(stage=3, road="parameter"),
    "four ranks": Split(world=4),
    "four ranks, window": Split(world=4, road="window"),
    "four ranks, stage 1": Split(world=4, stage=1, bias=True),
    "four ranks, stage 3": Split(world=4, stage=3),
    "four ranks, stage 3, per token": Split(world=4, stage=3, function="chunked_logprobs"),
}
CASES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            setup.head == "local" and not leaves_logits_local(),
            reason="this DeepSpeed has no vocab_parallel_lm_head",
        ),
    )
    for name, setup in SETUPS.items()
]
# The dimension that two ranks share of each parameter.
CUT = {"up.weight": 0, "down.weight": 1, "lm_head.weight": 0, "lm_head.bias": 0}


@pytest.fixture(scope="module")
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every setup, and what refused calls say."""
    results: dict[str, list[Any]] = {}
    names = [
        name
        for name in collected(request, SETUPS)
        if SETUPS[name].head != "local" or leaves_logits_local()
    ]
    for world in (2, 4):
        setups: dict[str, Any] = {k: SETUPS[k] for k in names if SETUPS[k].world == world}
        if world == 2:
            setups["refused"] = None
        if not setups:
            continue
        folder = tmp_path_factory.mktemp("autotp")
        ranks = torchrun(world, "helpers.auto_tp_ranks", folder, setups)
        results |= {name: [rank[name] for rank in ranks] for name in setups}
    return results


def of_one_process(setup: Split) -> tuple[float, dict[str, Any]]:
    """The mean loss over all tokens and its gradients, in float64, of full logits."""
    model = Net(bias=setup.bias, tied=setup.tied).double()
    steps = [batch(step) for step in range(2 if setup.road == "window" else 1)]
    total = sum(int((labels != -100).sum()) for _, labels in steps)
    loss = torch.zeros((), dtype=torch.float64)
    for ids, labels in steps:
        hidden, y = model(ids).flatten(0, 1), labels.flatten()
        logits = model.lm_head(hidden)
        if setup.function == "chunked_divergence":
            with torch.no_grad():
                teacher = model.lm_head(FACTOR * hidden).log_softmax(-1)
            terms = torch.nn.functional.kl_div(
                logits.log_softmax(-1), teacher, reduction="none", log_target=True
            )
            loss = loss + terms[y != -100].sum()
        else:
            loss = loss + torch.nn.functional.cross_entropy(logits, y, reduction="sum")
    (loss / total).backward()
    return loss.item() / total, {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_one_process(found: Any, name: str) -> None:
    """A5, A6, D7: of every parameter, those before the head too."""
    setup = SETUPS[name]
    loss, expected = of_one_process(setup)
    pairs = [found[name][k : k + 2] for k in range(0, setup.world, 2)]
    mean = np.mean([rank[0] for rank, _ in pairs])
    if setup.road != "window":
        assert not failures(check("A9", mean, np.array(loss), metrics=("rho / u",)))
    for pair in pairs:
        assert pair[0][0] == pair[1][0]  # the same tokens
        parts = [gradients for _, gradients in pair]
        assert parts[0].keys() == expected.keys()
        for parameter, want in expected.items():
            cut = CUT.get(parameter)
            if parameter == "embed.weight" and setup.tied:
                cut = 0
            each = [part[parameter] for part in parts]
            for got in each if cut is None else [np.concatenate(each, cut)]:
                measured = check("A9", got, want, metrics=("rho / u",))
                assert not failures(measured), parameter


def test_a_head_that_is_no_whole_vocabulary_never_gives_a_loss(found: Any) -> None:
    """D7, D12: by name, on both ranks."""
    for rank, (said,) in enumerate(zip(found["refused"], strict=True)):
        for name in ("split over the width", "split over the width, its weight"):
            ours = "got [101, 7] of DeepSpeed AutoTP's LinearAllreduceWithReplicatedInput"
            theirs = "Training with explicit row-parallel output heads is not supported"
            assert ours in said[name] or (theirs in said[name] and not leaves_logits_local())
        for name in ("a cast copy", "transposed"):
            assert "got what was computed from it" in said[name]
        for name in ("a copy of the layer", "patch"):
            assert "deepspeed's LinearLayer, which DeepSpeed AutoTP has split" in said[name]
        assert f"got [{rank}]. Leave it out" in said["other ranks"]
        assert "`gather` must be 'head' with `vocab_parallel`" in said["hidden"]
        assert "one that DeepSpeed AutoTP has split over 2 ranks" in said["gather_head"]
        for name in ("a teacher", "a teacher of more classes"):
            assert "got one that DeepSpeed AutoTP has split" in said[name]
        assert "must have the classes of the head, with columns" in said["a whole teacher"]
        assert "LinearLayer.forward() takes 2 positional arguments" in said["NLLHead"]
