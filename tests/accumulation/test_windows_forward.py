"""Which object a window of `TokenNormalizer` is given, and which one is called: what reduces
gradients, on real ranks.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch
from xentlib.accumulate import UnsupportedWrapperError, WindowStateError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.windows import attempt, net, of_one_batch, one, run_window  # noqa: E402
from helpers.windows_ranks import (  # noqa: E402
    INNER,
    NONE_RAN,
    apart,
    calling,
    everything,
    numbers,
    refused,
    stepped,
    unchecked,
    window_of,
)
from xentlib.torch import TokenNormalizer  # noqa: E402
from xentlib.torch.wrappers.fsdp2 import FSDP2  # noqa: E402
from xentlib.torch.wrappers.plain import NoWrapper  # noqa: E402

# --- a model that nothing wraps -------------------------------------------------------------------


def plain(rank: int, world: int) -> dict[str, Any]:
    from torch import distributed as dist

    found: dict[str, Any] = {}
    inner = net()
    model = torch.nn.parallel.DistributedDataParallel(inner)
    everybody = dist.group.WORLD
    found["refused"] = {
        "plain": refused(inner),
        "wrapped": refused(model, alone=True),
        "both": refused(inner, alone=True, count_group=everybody),
    }
    # Said to be alone while DDP reduces it, in each micro-batch.
    run_window(TokenNormalizer(inner, alone=True), model, window_of(rank))
    found["not alone"] = numbers(inner)
    single = net()
    run_window(TokenNormalizer(single, alone=True), single, window_of(rank))
    found["alone"] = numbers(single)
    own = net()
    run_window(TokenNormalizer(own, count_group=everybody), own, window_of(rank))
    for p in own.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world
    found["own reduction"] = numbers(own)
    return found


def test_a_plain_model_on_several_ranks(ranks: Any) -> None:
    """D12: the inner module of a wrapper is 1 / T of this rank's tokens, which nobody means. On one
    rank, and where it is said who reduces, it is taken."""
    for rank, found in enumerate(each["plain"] for each in ranks):
        said = found["refused"]
        assert "reduces gradients over the 2 ranks; got a Sequential that nothing" in said["plain"]
        assert "Pass the DDP, FSDP2 or DeepSpeed object that is called" in said["plain"]
        assert "must be False for a DistributedDataParallel, which reduces" in said["wrapped"]
        assert "must be False with `count_group`" in said["both"]
        assert apart(found["not alone"], everything()) > 0.01
        hold_in_norm(found["alone"], of_one_batch(window_of(rank)))
        hold_in_norm(found["own reduction"], everything())


def one_rank(rank: int, world: int) -> list[Any]:
    model = net()
    run_window(TokenNormalizer(model), model, window_of(rank))
    return numbers(model)


def test_a_plain_model_on_one_rank_of_a_group() -> None:
    """Nobody could reduce it."""
    (found,) = launch(1, one_rank)
    hold_in_norm(found, of_one_batch(window_of(0)))


# --- the forward of what reduces ------------------------------------------------------------------


def without_sync(window: Any, model: Any, x: Any, y: Any) -> None:
    with model.no_sync():
        one(window, model, x, y)


def past(window: Any, model: Any, x: Any, y: Any) -> None:
    """DDP for a look, its module for the gradient."""
    with torch.no_grad():
        model(x)
    one(window, model.module, x, y)


def reference_after(window: Any, model: Any, x: Any, y: Any) -> None:
    """Trained, and asked once more without gradients: a reference model in RL."""

    def call(x: Any) -> Any:
        logits = model(x)
        with torch.no_grad():
            model(x)
        return logits

    one(window, call, x, y)


WRONG = {"inner": INNER, "no_sync": without_sync, "no_grad": past}


def replicated(rank: int, world: int) -> dict[str, Any]:
    def ddp(**options: Any) -> Any:
        return torch.nn.parallel.DistributedDataParallel(net(), **options)

    def inner_compiled() -> Any:
        module = net()
        module.compile(backend="eager")
        return torch.nn.parallel.DistributedDataParallel(module)

    found: dict[str, Any] = {"refused": {}, "silent": {}, "right": {}}
    for name, body in WRONG.items():
        model = ddp()
        norm = TokenNormalizer(model)
        with pytest.raises(WindowStateError) as caught:
            attempt(norm, model, window_of(rank), body)
        found["refused"][name] = str(caught.value)
        # Before the backward, and as new.
        assert all(p.grad is None for p in model.parameters())
        assert model.require_backward_grad_sync
        assert not model._forward_pre_hooks
        run_window(norm, model, window_of(rank))
        found["right"][f"after {name}"] = numbers(model)
        assert not model._forward_pre_hooks
    with unchecked(NoWrapper, "check_forward"):
        for name, body in WRONG.items():
            model = ddp()
            attempt(TokenNormalizer(model), model, window_of(rank), body)
            found["silent"][name] = numbers(model)
    model = ddp()
    with pytest.raises(ZeroDivisionError):
        attempt(TokenNormalizer(model), model, window_of(rank)[:1], lambda *_: 1 / 0)
    assert not model._forward_pre_hooks
    attempt(TokenNormalizer(model), model, window_of(rank), reference_after)
    found["right"]["reference"] = numbers(model)
    for name, make, call in (
        ("unused", lambda: ddp(find_unused_parameters=True), lambda model: model),
        ("inner compiled", inner_compiled, lambda model: model),
        ("compiled", ddp, lambda model: torch.compile(model, backend="eager")),
    ):
        model = make()
        called = call(model)
        with torch.no_grad():
            called(window_of(rank)[0][0])  # compiled before the normalizer is made
        attempt(TokenNormalizer(model), model, window_of(rank), calling(lambda _, c=called: c))
        found["right"][name] = numbers(model)
        with pytest.raises(WindowStateError):
            attempt(TokenNormalizer(model), model, window_of(rank), INNER)
    return found


def test_ddp_is_called_and_not_its_module(ranks: Any) -> None:
    """D12: past its forward DDP reduces nothing, and replicas drift apart. Compiled or not."""
    two, want = [each["replicated"] for each in ranks], everything()
    for found in two:
        for name, said in found["refused"].items():
            assert NONE_RAN.format("DistributedDataParallel") in said, name
            assert "Call the object that `TokenNormalizer` was given" in said
        for name, grads in found["right"].items():
            hold_in_norm(grads, want, name)
        for name, grads in found["silent"].items():
            assert apart(grads, want) > 0.01, name
    for name, grads in two[0]["silent"].items():
        assert apart(grads, two[1]["silent"][name]) > 0.01, name


class Outer(torch.nn.Module):
    """A module around the net."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()

    def forward(self, x: Any) -> Any:
        return self.body(x)


def sharded(rank: int, world: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    def whole() -> Any:
        """Gathered by the root's forward, which nobody backs up from."""
        model = fully_shard(Outer())
        model(window_of(rank)[0][0])
        return model

    def one_by_one() -> Any:
        model = net()
        for module in (model[0], model[1], model):
            fully_shard(module)
        return model

    wrong = {
        "inner": (whole, calling(lambda model: model.body)),
        "forward": (whole, calling(lambda model: model.forward)),
    }
    found: dict[str, Any] = {"refused": {}, "unreduced": {}}
    for name, (make, body) in wrong.items():
        model = make()
        with pytest.raises(WindowStateError) as caught:
            attempt(TokenNormalizer(model), model, window_of(rank), body)
        found["refused"][name] = str(caught.value)
        assert not TokenNormalizer(model).wrapper.gradients()
        with unchecked(FSDP2, "check_reduced"):
            model = make()
            attempt(TokenNormalizer(model), model, window_of(rank), body)
        found["unreduced"][name] = [p.grad for p in TokenNormalizer(model).wrapper.parameters()]
    model = one_by_one()
    attempt(
        TokenNormalizer(model), model, window_of(rank), calling(lambda m: lambda x: m[1](m[0](x)))
    )
    found["one by one"] = stepped("FSDP2", model)
    # A window without micro-batches leaves what was not reduced before it.
    model = one_by_one()
    model.set_requires_gradient_sync(False)
    model(window_of(rank)[0][0]).sum().backward()
    run_window(TokenNormalizer(model), model, [])
    return found


def test_fsdp2_reduces_what_its_forwards_have_seen(ranks: Any) -> None:
    """D12: parameters that are gathered can be used past their module's forward."""
    for found in (each["sharded"] for each in ranks):
        for name, said in found["refused"].items():
            assert "got gradients that are not reduced at the end of the window" in said, name
            assert "not `.forward` or a module inside of it" in said
            assert found["unreduced"][name] == [None] * 4, name
        hold_in_norm(found["one by one"], everything())


def accelerated(rank: int, world: int) -> list[str]:
    if importlib.util.find_spec("accelerate") is None:
        return []
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # Accelerate looks, and uses none
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(net())
    norm = TokenNormalizer(model, accelerator=accelerator)
    with pytest.raises(WindowStateError) as caught:
        attempt(norm, model, window_of(rank), INNER)
    with pytest.raises(UnsupportedWrapperError) as unwrapped:
        TokenNormalizer(accelerator.unwrap_model(model))
    return [str(caught.value), str(unwrapped.value)]


def test_what_accelerate_has_prepared_is_called(ranks: Any) -> None:
    """And not `accelerator.unwrap_model(model)`."""
    pytest.importorskip("accelerate")
    for called, given in (each["accelerated"] for each in ranks):
        assert NONE_RAN.format("DistributedDataParallel") in called
        assert "got a Sequential that nothing wraps" in given


# --- all of it, on the same two ranks -------------------------------------------------------------


def on_rank(rank: int, world: int) -> dict[str, Any]:
    return {work.__name__: work(rank, world) for work in (plain, replicated, sharded, accelerated)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(2, on_rank)
