"""Windows of `TokenNormalizer` under Accelerate, DDP, FSDP2 and DeepSpeed on real ranks: what each
needs that the others do not.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.held import hold_in_norm
from helpers.ranks import launch
from xentlib.accumulate import WindowStateError
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.windows import (  # noqa: E402
    H,
    N,
    V,
    attempt,
    batch_of,
    net,
    of_one_batch,
    one,
    raising,
    run_window,
    token_losses,
)
from helpers.windows_ranks import (  # noqa: E402
    INNER,
    NONE_RAN,
    apart,
    calling,
    engine_of,
    near,
    refused,
    stepped,
    unchecked,
    window_of,
    wrapped,
)
from xentlib.torch import NLLHead, TokenNormalizer  # noqa: E402
from xentlib.torch.wrappers.plain import NoWrapper  # noqa: E402


def accelerated(rank: int, world: int) -> list[Any]:
    import accelerate

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    norm = TokenNormalizer(model, accelerator=accelerator)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="in the middle"):
        attempt(norm, model, [batch_of(0), batch_of(1)], raising)
    assert all((p.grad == 1).all() for p in model.parameters())
    optimizer.zero_grad()
    run_window(norm, model, [batch_of(10 * rank + k, 9 - 4 * rank - k) for k in range(4)])
    optimizer.step()
    steps = [(a - b.detach()).numpy() for a, b in zip(before, model.parameters(), strict=True)]
    # FSDP2, whose gradients are not where the model's parameters are.
    sharded = wrapped("FSDP2")
    with pytest.raises(RuntimeError, match="in the middle"):
        attempt(TokenNormalizer(sharded, accelerator=accelerator), sharded, window_of(1), raising)
    norm = TokenNormalizer(sharded, accelerator=accelerator, nonfinite="drop")
    run_window(norm, sharded, window_of(rank, 1))
    return [steps, stepped("FSDP2", sharded)]


def test_accelerate() -> None:
    """D8: its backward divides by its accumulation steps, its optimizer waits for its flag.
    Gradients from before an interrupted window are what they were."""
    pytest.importorskip("accelerate")
    batches = [batch_of(10 * rank + k, 9 - 4 * rank - k) for rank in range(2) for k in range(4)]
    rest = [b for rank in range(2) for k, b in enumerate(window_of(rank)) if k != 1]
    for steps, sharded in launch(2, accelerated):
        hold_in_norm(steps, of_one_batch(batches))
        hold_in_norm(sharded, of_one_batch(rest))


def unstepped(rank: int, world: int) -> dict[str, Any]:
    """DeepSpeed's loss scale at the start, after a window, and in the next window's micro-batch;
    and what is refused: the next window before a step too."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    engine = engine_of(zero_optimization={"stage": 2})
    norm = TokenNormalizer(engine, mode="postscale")
    scales = [float(engine.optimizer.loss_scale)]
    run_window(norm, engine, [batch_of(0, 0)])  # no token: nobody steps
    window = run_window(norm, engine, [batch_of(0)])
    scales.append(float(engine.optimizer.loss_scale))
    with pytest.raises(WindowStateError, match=r"`engine.step\(\)` must come before the next"):
        run_window(norm, engine, [batch_of(1)])
    assert float(engine.optimizer.loss_scale) == N  # for the step that comes after all
    window.abort()

    def see(window: Any, model: Any, x: Any, y: Any) -> None:
        scales.append(float(engine.optimizer.loss_scale))
        one(window, model, x, y)

    attempt(norm, engine, [batch_of(1)], see)
    engine.step()
    scales.append(float(engine.optimizer.loss_scale))
    low = engine_of(
        zero_optimization={"stage": 1},
        bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
    )
    TokenNormalizer(low)
    said = {
        "bf16": refused(low, mode="postscale"),
        "drop": refused(low, nonfinite="drop"),
        "scaler": refused(engine, scaler=object()),
    }
    if importlib.util.find_spec("accelerate"):
        from accelerate import Accelerator, DeepSpeedPlugin

        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", LOCAL_WORLD_SIZE=str(world))
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
        plugin = accelerator.state.deepspeed_plugin
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        both = accelerator.prepare(model, optimizer)[0]
        said["both"] = refused(both, accelerator=accelerator)
    return {"scales": scales, "refused": said}


@pytest.mark.slow
def test_deepspeed() -> None:
    """A loss scale that nobody has stepped on would multiply the next window's losses. D8:
    refusals, with the way out."""
    pytest.importorskip("deepspeed")
    (found,) = launch(1, unstepped)
    assert found["scales"] == [1.0, N, 1.0, 1.0]
    said = found["refused"]
    assert "ZeRO-1 in bf16 steps on a copy of the gradients" in said["bf16"]
    assert said["bf16"].endswith("Use mode='precount'.")
    assert "`nonfinite` must be 'keep' here" in said["drop"]
    assert "which scaling does not reach. Use nonfinite='keep'." in said["drop"]
    assert "`scaler` must be None with DeepSpeed" in said["scaler"]
    if "both" in said:
        assert "steps inside its backward" in said["both"]
        assert "Pass the engine of `deepspeed.initialize`" in said["both"]


def in_half_precision(rank: int, world: int) -> list[Any]:
    """Of each ZeRO stage: the loss scales of its windows until one is stepped on, the gradient of
    that step, and what post-scale says."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    # DeepSpeed does not offer fp16 on CPUs; PyTorch computes in it there.
    device = get_accelerator()
    device.is_fp16_supported = lambda: True
    device.supported_dtypes = lambda: [torch.float, torch.half]

    def half(window: Any, model: Any, x: Any, y: Any) -> None:
        one(window, lambda x: model(x.half()).float(), x, y)

    found = []
    for stage in (1, 2, 3):
        engine = engine_of(
            zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
            fp16={"enabled": True, "initial_scale_power": 22, "hysteresis": 1},
            gradient_clipping=0.0,
        )

        def values(engine: Any = engine) -> list[Any]:
            return [safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]

        norm, before, scales = TokenNormalizer(engine), values(), []
        while len(scales) < 20 and all(map(torch.equal, before, values())):
            attempt(norm, engine, [batch_of(0), batch_of(1, 3)], half)
            scales.append(float(engine.optimizer.loss_scale))
            engine.step()
        steps = [(a - b).numpy() for a, b in zip(before, values(), strict=True)]
        found.append((scales, steps, refused(engine, mode="postscale")))
    return found


@pytest.mark.slow
def test_half_precision_under_deepspeed() -> None:
    """D8: windows whose gradient overflows are not stepped on, the scale is halved, and the
    step that comes is right; a loss scale that moves cannot be borrowed for post-scale."""
    pytest.importorskip("deepspeed")
    want = of_one_batch([batch_of(0), batch_of(1, 3)])
    reference = net().half()
    x, y = (torch.cat(parts) for parts in zip(batch_of(0), batch_of(1, 3), strict=True))
    (token_losses(reference(x.half()).float(), y).sum() / 13).backward()
    alone = [p.grad.double().numpy() for p in reference.parameters()]
    for scales, steps, said in launch(1, in_half_precision)[0]:
        assert len(scales) > 2
        assert scales == [2.0 ** (22 - k) for k in range(len(scales))]
        for got, other, oracle in zip(steps, alone, want, strict=True):
            # No further from the truth than one process in fp16, times four.
            assert not failures(check("A9", got, oracle, other=other, metrics=("error ratio",)))
        assert "in fp16 the loss scale is DeepSpeed's own, and moves" in said


def reread(rank: int, world: int) -> dict[str, Any]:
    """Wrappers that change after the normalizer is made; and such as cannot be read."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    found: dict[str, Any] = {}
    mine = [batch_of(10 * rank + k, 9 - 3 * k - rank) for k in range(3)]
    sharded = wrapped("FSDP2")
    norm = TokenNormalizer(sharded)
    for module in (sharded[1], sharded):
        module.set_gradient_divide_factor(4.0)
        module.set_force_sum_reduction_for_comms(True)  # all that gloo can do
    run_window(norm, sharded, mine)
    found["FSDP2"] = stepped("FSDP2", sharded)
    engine = wrapped("ZeRO-1")
    norm = TokenNormalizer(engine)
    engine.set_train_batch_size(8)
    run_window(norm, engine, mine)
    found["ZeRO-1"] = stepped("ZeRO-1", engine)
    # The engine is as it was: three micro-batches by its own count, of which none steps here.
    found["engine"] = engine._is_gradient_accumulation_boundary, "step" in vars(engine)
    # The module inside of an engine: ZeRO-3 misses the engine's forward, also in the first
    # micro-batch alone.
    engine = wrapped("ZeRO-3")
    hooks, turns = len(engine._forward_pre_hooks), iter([engine.module, engine, engine])
    for body in (INNER, calling(lambda _: next(turns))):
        with pytest.raises(WindowStateError) as caught:
            attempt(TokenNormalizer(engine), engine, mine, body)
        found["inner"] = str(caught.value)
    with pytest.raises(ZeroDivisionError):
        attempt(TokenNormalizer(engine), engine, mine, lambda *_: 1 / 0)
    assert len(engine._forward_pre_hooks) == hooks
    with unchecked(NoWrapper, "check_forward"):
        engine = wrapped("ZeRO-3")
        attempt(TokenNormalizer(engine), engine, mine, INNER)
    found["unseen"] = stepped("ZeRO-3", engine)
    for name in ("ZeRO-1 inner", "ZeRO-2 inner"):
        engine = wrapped(name[:6])
        attempt(TokenNormalizer(engine), engine, mine, INNER)
        found[name] = stepped(name[:6], engine)
    hooked = net()
    fully_shard(hooked)
    hooked.set_all_reduce_hook(lambda x: None)
    found["refused"] = {
        "replicate": refused(replicate(net())),
        "hook": refused(hooked),
    }
    return found


@pytest.mark.slow
def test_a_wrapper_is_read_for_each_window() -> None:
    """Divide factors and accumulation steps may change between. Each backward of ZeRO-3 follows a
    forward of the engine, or is refused; ZeRO-1 and 2 are right without."""
    pytest.importorskip("deepspeed")
    good = [batch_of(10 * rank + k, 9 - 3 * k - rank) for rank in range(2) for k in range(3)]
    want = of_one_batch(good)
    for rank in launch(2, reread):
        hold_in_norm(rank["FSDP2"], want)
        for got, oracle in zip(rank["ZeRO-1"], want, strict=True):
            assert np.linalg.norm(got - oracle) < 1e-5 * np.linalg.norm(oracle)
        assert rank["engine"] == (None, False)
        assert NONE_RAN.format("DeepSpeedEngine") in rank["inner"]
        assert apart(rank["unseen"], want) > 0.01
        for name in ("ZeRO-1 inner", "ZeRO-2 inner"):
            near(name, rank[name], want)
        said = rank["refused"]
        assert "got `replicate`" in said["replicate"]
        assert "FSDP2 with an all-reduce hook" in said["hook"]


def means(rank: int, world: int) -> dict[str, Any]:
    """What a window says to the mean and to the sum that a wrapped model's own forward returns."""
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), DS_ACCELERATOR="cpu")
    x, y = batch_of(rank)
    found = {}
    for name in ("DDP", "FSDP2", "ZeRO-3"):
        head = NLLHead(H, V)
        if name == "DDP":
            model = torch.nn.parallel.DistributedDataParallel(head, static_graph=True)
        elif name == "FSDP2":
            model = fully_shard(head)
        else:
            model = engine_of(head, zero_optimization={"stage": 3})
        norm = TokenNormalizer(model)

        def body(window: Any, model: Any, x: Any, y: Any, how: str = "sum") -> None:
            window.backward(model(x, y, reduction=how))

        with pytest.raises(ValueError, match="got one that `chunked_nll` has divided"):
            attempt(norm, model, [(x, y)], partial(body, how="mean"))
        found[name] = int(attempt(norm, model, [(x, y)], body).stats.num_tokens)
    return found


@pytest.mark.slow
def test_an_output_that_a_wrapper_hands_on_says_what_it_is() -> None:
    """DDP, FSDP2 and DeepSpeed take outputs apart and put them together again."""
    pytest.importorskip("deepspeed")
    for rank in launch(2, means):
        assert rank == dict.fromkeys(("DDP", "FSDP2", "ZeRO-3"), 2 * N)
