"""Windows of `TokenNormalizer` over modules of Lightning Fabric, on real ranks."""

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

from helpers.windows import attempt, net, run_window  # noqa: E402
from helpers.windows_ranks import (  # noqa: E402
    INNER,
    NONE_RAN,
    everything,
    near,
    numbers,
    refused,
    window_of,
)
from xentlib.torch import TokenNormalizer  # noqa: E402
from xentlib.torch.wrappers.models import DeepSpeed, Fabric  # noqa: E402

# Fabric, alone or inside of Lightning. It replaces `torch.compile`: ranks alone import it.
PACKAGES = [
    name
    for name in ("lightning_fabric", "lightning.fabric")
    if importlib.util.find_spec(name.partition(".")[0]) is not None
]


def sharded(model: Any, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for module in (model[1], model):
        fully_shard(module, mesh=mesh["data_parallel"])
    return model


def added_up(state, bucket):  # DDP reads annotations, which are text here
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def fabricated(rank: int, world: int) -> dict[str, Any]:
    # As torchrun has it; the process group is there already, and no port is opened.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0", TORCHELASTIC_RUN_ID="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    package = importlib.import_module(PACKAGES[0])
    strategies = package.strategies

    def setup(model: Any = None, strategy: Any = None, plugins: Any = None) -> Any:
        options = {"strategy": strategy or strategies.DDPStrategy(), "plugins": plugins}
        fabric = package.Fabric(accelerator="cpu", devices=world, **options)
        fabric.launch()
        return fabric.setup(model or net())

    found: dict[str, Any] = {}
    mine = window_of(rank)
    for name, options in {
        "precount": {},
        "postscale": {"mode": "postscale"},
        "drop": {"nonfinite": "drop"},
    }.items():
        model = setup()
        run_window(TokenNormalizer(model, **options), model, mine)
        found[name] = numbers(model)
    model = setup(torch.compile(net(), backend="eager"))
    run_window(TokenNormalizer(model), model, mine)
    found["compiled"] = numbers(model)
    sharding = strategies.ModelParallelStrategy(sharded, world, 1)
    model = setup(strategy=sharding)
    run_window(TokenNormalizer(model), model, mine)
    found["FSDP2"] = [p.grad.full_tensor().numpy() for p in model.parameters()]
    model = setup()
    model._forward_module.register_comm_hook(None, added_up)
    run_window(TokenNormalizer(model, sums=True), model, mine)
    found["sums"] = numbers(model)
    # Its backward scales the loss, and `loss.backward()` is refused by its own hook.
    low = package.plugins.MixedPrecision("16-mixed", "cpu")
    model = setup(plugins=low)
    run_window(TokenNormalizer(model), model, mine)
    assert low.scaler.get_scale() > 1
    found["fp16"] = [g / low.scaler.get_scale() for g in numbers(model)]
    with pytest.raises(WindowStateError) as caught:
        attempt(TokenNormalizer(model := setup()), model, mine, INNER)
    found["said"] = str(caught.value)
    found["refused"] = {
        "inner": refused(model.module),
        "alone": refused(model, alone=True),
        "scaler": refused(model, scaler=object()),
        "sums": refused(model, sums=True),
    }
    return found


@pytest.mark.skipif(not PACKAGES, reason="its package is not installed")
def test_a_module_of_fabric() -> None:
    """D8: what `fabric.setup` returns is read and called as the wrapper inside of it is."""
    want = everything()
    for found in launch(2, fabricated):
        for name in ("precount", "postscale", "drop", "compiled", "FSDP2", "sums"):
            hold_in_norm(found[name], want, name)
        near("bf16", found["fp16"], want)  # 2^-6, where a loss that is not scaled is 2^16 off
        assert NONE_RAN.format("DistributedDataParallel") in found["said"]
        said = found["refused"]
        assert "got a Sequential that nothing wraps" in said["inner"]
        assert "`alone` must be False for a _FabricModule" in said["alone"]
        assert "`scaler` must be None with Fabric" in said["scaler"]
        assert "`sums` must be None but for DDP with a communication hook" in said["sums"]


def test_deepspeed_under_fabric_is_refused() -> None:
    """D12: Fabric has it on GPUs alone, where no test has seen what its engine divides by."""
    with pytest.raises(UnsupportedWrapperError, match="DeepSpeed's under Fabric"):
        Fabric(object.__new__(DeepSpeed), None)
