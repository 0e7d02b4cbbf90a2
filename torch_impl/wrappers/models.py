"""Which wrapper a model has, read from the model, and what stands around it: Lightning Fabric's
module, and Accelerate. A wrapper that cannot be read is refused.

This file relies on attributes of Lightning 2.6 that are not public.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from xentlib.accumulate import UnsupportedWrapperError
from xentlib.torch.wrappers import is_a, with_attribute
from xentlib.torch.wrappers.deepspeed import DeepSpeed
from xentlib.torch.wrappers.fsdp2 import FSDP2
from xentlib.torch.wrappers.plain import DDP, NoWrapper, own_hooks, refuse_scaler

# As `lightning` and as `lightning-fabric` have it.
FABRIC = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


class Around:
    """What stands around a wrapper, with a backward of its own; all else is the wrapper's."""

    inner: Any = None  # on the class for `copy`, which asks for attributes before there are any

    def __init__(self, inner: NoWrapper | Around, name: str, why: str) -> None:
        if isinstance(inner, DeepSpeed):
            raise UnsupportedWrapperError(
                f"`model` must not be DeepSpeed's under {name}, {why}; got both. Pass the engine "
                f"of `deepspeed.initialize`, without {name}."
            )
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Accelerate(Around):
    """What Accelerate has prepared: its backward divides, and its optimizer steps at its flag."""

    def __init__(self, inner: NoWrapper, accelerator: Any) -> None:
        super().__init__(inner, "Accelerate", "which steps inside its backward")
        self.backward = accelerator.backward
        self.state = accelerator.gradient_state
        engine = inner.reduction.engine * self.state.num_steps
        self.reduction = replace(inner.reduction, engine=engine)

    def micro_batch(self, *, last: bool) -> None:
        self.state._set_sync_gradients(last)
        self.inner.micro_batch(last=last)

    def restore(self) -> None:
        self.state._set_sync_gradients(True)
        self.inner.restore()

    def finish(self) -> None:
        self.state._set_sync_gradients(True)
        self.inner.finish()


class Fabric(Around):
    """What Fabric has set up: its backward is its precision's, which may scale the loss."""

    def __init__(self, inner: NoWrapper | Around, model: Any) -> None:
        super().__init__(inner, "Fabric", "whose backward it wants")
        self.module = model

    def backward(self, loss: Tensor) -> None:
        # `fabric.backward`: a module does not know its Fabric.
        with with_attribute(sys.modules[type(self.module).__module__], "_in_fabric_backward", True):
            self.module._strategy.backward(loss, None)


def inside_fabric(model: Any) -> Any:
    """The wrapper that a module of Fabric's calls; None for another module."""
    kinds = tuple(sys.modules[name]._FabricModule for name in FABRIC if name in sys.modules)
    if not isinstance(model, kinds):
        return None
    # Given a compiled module, Fabric wraps what is inside of it and compiles the wrapper.
    called: Any = model._forward_module
    return getattr(called, "_orig_mod", called)


def detect_wrapper(
    model: Any, accelerator: Any, scaler: Any, sums: bool | None, gas: bool
) -> NoWrapper | Around:
    """The wrapper of a model; refused where it cannot be read."""
    inside = inside_fabric(model)
    if inside is not None:
        refuse_scaler(scaler, "Fabric, whose precision")
        return Fabric(detect_wrapper(inside, accelerator, None, sums, gas), model)
    hooks = own_hooks(model)
    if sums is not None and not hooks:
        raise UnsupportedWrapperError(
            f"`sums` must be None but for DDP with a communication hook of your own; got {sums} "
            f"for a {type(model).__name__}, whose reduction is read. Leave it out."
        )
    if accelerator is not None:
        refuse_scaler(scaler, "Accelerate, which")
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
    if accelerator is not None:
        return Accelerate(inner, accelerator)
    if getattr(model, "_is_accelerate_prepared", False):
        raise UnsupportedWrapperError(
            "`accelerator` must be given for a model that Accelerate has prepared, whose backward "
            "divides; got None. Pass `accelerator=accelerator`."
        )
    return inner
