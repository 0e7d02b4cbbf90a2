"""Which wrapper a model has, read from the model; a wrapper that cannot be read is refused."""

from __future__ import annotations

from typing import Any

from torch import nn

from xentlib.accumulate import UnsupportedWrapperError
from xentlib.torch.wrappers import is_a
from xentlib.torch.wrappers.accelerate import Accelerate
from xentlib.torch.wrappers.deepspeed import DeepSpeed
from xentlib.torch.wrappers.fabric import Fabric, inside_fabric
from xentlib.torch.wrappers.fsdp2 import FSDP2
from xentlib.torch.wrappers.plain import DDP, NoWrapper, own_hooks


def detect_wrapper(
    model: Any, accelerator: Any, scaler: Any, sums: bool | None, gas: bool
) -> NoWrapper:
    """The wrapper of a model; refused where it cannot be read."""
    inside = inside_fabric(model)
    if inside is not None:
        if scaler is not None:
            raise UnsupportedWrapperError(
                "`scaler` must be None with Fabric, whose precision scales losses itself; got a "
                "scaler. Leave it out."
            )
        return Fabric(detect_wrapper(inside, accelerator, None, sums, gas), model)
    own = own_hooks(model)
    if sums is not None and not own:
        raise UnsupportedWrapperError(
            f"`sums` must be None but for DDP with a communication hook of your own; got {sums} "
            f"for a {type(model).__name__}, whose reduction is read. Leave it out."
        )
    if accelerator is not None and scaler is not None:
        raise UnsupportedWrapperError(
            "`scaler` must be None with Accelerate, which scales losses itself; got a scaler. "
            "Leave it out."
        )
    inner: NoWrapper
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = DDP(model, scaler, sums)
    elif is_a("deepspeed.runtime.engine", "DeepSpeedEngine", model):
        inner = DeepSpeed(model, scaler, gas)
    elif is_a("torch.distributed.fsdp", "FSDPModule", model):
        inner = FSDP2(model, scaler)
    elif is_a("torch.distributed.fsdp", "FullyShardedDataParallel", model) or isinstance(
        model, nn.DataParallel
    ):
        raise UnsupportedWrapperError(
            f"`model` must be plain, DDP, FSDP2 (`fully_shard`) or a DeepSpeed engine; got "
            f"{type(model).__name__}, whose division of gradients is not read. Use `fully_shard`."
        )
    else:
        for name, module in model.named_modules():
            if is_a("torch.distributed._composable.replicate", "DDP", module):
                raise UnsupportedWrapperError(
                    "`model` must reduce gradients in a way that can be read; got `replicate`, "
                    "whose state is its own. Use DistributedDataParallel."
                )
            if isinstance(module, nn.parallel.DistributedDataParallel) or is_a(
                "torch.distributed.fsdp", "FSDPModule", module
            ):
                raise UnsupportedWrapperError(
                    f"`model` must be what the wrapper returned; got a {type(model).__name__} "
                    f"with a wrapper inside, at {name!r}. Pass the wrapped module itself."
                )
        inner = NoWrapper(model, scaler)
    prepared = getattr(model, "_is_accelerate_prepared", False)
    if accelerator is not None:
        return Accelerate(inner, accelerator)
    if prepared:
        raise UnsupportedWrapperError(
            "`accelerator` must be given for a model that Accelerate has prepared, whose backward "
            "divides; got None. Pass `accelerator=accelerator`."
        )
    return inner
