"""How a wrapper reduces gradients, read from the wrapper; and what it wants done in a window.

FSDP2 and DeepSpeed have no public road to all of it; theirs was read in torch 2.13 and 0.19.8.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xentlib.accumulate import Reduction, UnsupportedWrapperError, reduction_of

__all__ = ["Plain", "read"]


class Plain:
    """A model that nothing wraps, and what the wrappers below do differently."""

    def __init__(self, model: nn.Module, scaler: Any) -> None:
        self.model: Any = model
        self.scaler = scaler
        self.reduction = reduction_of("plain")
        self.ranks = 1
        self.group: dist.ProcessGroup | None = None

    def micro_batch(self, *, last: bool) -> Any:
        """A context for the forward and the backward of one."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def refusal(self) -> str:
        """Why finished gradients cannot be scaled; empty where they can."""
        for name, p in self.model.named_parameters():
            if getattr(p, "_post_accumulate_grad_hooks", None):
                return f"{name!r} has a hook that runs in the backward, a step perhaps"
        return self.reduction.refusal

    def scale_gradients(self, factor: Tensor) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                # In 16 bits the factor itself would be rounded, to 2^-9 of itself in bf16.
                wide = torch.promote_types(p.grad.dtype, torch.float32)
                p.grad.copy_(p.grad.to(wide) * factor.to(wide))

    def restore(self) -> None:
        """Flags, as they were."""

    def zero_gradients(self) -> None:
        self.model.zero_grad(set_to_none=True)


class Replicated(Plain):
    """DistributedDataParallel."""

    def __init__(self, model: Any, scaler: Any, sums: bool | None) -> None:
        super().__init__(model, scaler)
        own = _own_hooks(model)
        if own and sums is None:
            name = getattr(own[0], "__name__", repr(own[0]))
            raise UnsupportedWrapperError(
                f"`model` must reduce gradients in a way that can be read; got DDP with the "
                f"communication hook {name!r}, of which nobody can see whether it takes the mean. "
                f"Pass `sums=True` for a hook that adds up, `sums=False` for one that averages."
            )
        self.ranks = dist.get_world_size(model.process_group)
        self.group = model.process_group
        self.reduction = reduction_of("DDP", ranks=self.ranks, sums=bool(sums))

    def micro_batch(self, *, last: bool) -> Any:
        return nullcontext() if last else self.model.no_sync()


AVERAGING = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


def _own_hooks(model: Any) -> list[Any]:
    """DDP's communication hooks, but for those of PyTorch's that are known to average."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return []
    theirs = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    return [
        hook
        for hook, _ in model._comm_hooks
        if getattr(hook, "__module__", "") != theirs or hook.__name__ not in AVERAGING
    ]


class Sharded(Plain):
    """FSDP2: `fully_shard`, of one dimension or with replicas."""

    def __init__(self, model: Any, scaler: Any) -> None:
        super().__init__(model, scaler)
        groups = [group for state in _fsdp_states(model) for group in state._fsdp_param_groups]
        held = {id(p.sharded_param) for group in groups for p in group.fsdp_params}
        loose = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if loose:
            raise UnsupportedWrapperError(
                f"`model` must keep all its parameters in FSDP2; got {loose[0]!r} outside of it, "
                f"which nobody reduces over the ranks. Call `fully_shard(model)` on the root."
            )
        meshes = {id(group.mesh_info.mesh): group.mesh_info.mesh for group in groups}
        sizes = {mesh.size() for mesh in meshes.values()}
        factors = {group.gradient_divide_factor for group in groups}
        if len(sizes) > 1 or len(factors) > 1:
            what = "meshes" if len(sizes) > 1 else "gradient divide factors"
            found = sorted(map(str, sizes if len(sizes) > 1 else factors))
            raise UnsupportedWrapperError(
                f"`model` must divide all gradients by the same number; got {what} that differ "
                f"between its modules: {', '.join(found)}. `set_gradient_divide_factor` is not "
                f"recursive: call it on every FSDP module, or on none."
            )
        (self.ranks,), (divide,) = sizes, factors
        mesh = next(iter(meshes.values()))
        if mesh.ndim == 1:
            self.group = mesh.get_group()
        elif mesh.size() == dist.get_world_size():
            self.group = dist.group.WORLD
        self.reduction = reduction_of("FSDP2", ranks=self.ranks, divide=divide)

    def micro_batch(self, *, last: bool) -> Any:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()

    def restore(self) -> None:
        self.model.set_requires_gradient_sync(True)


def _fsdp_states(model: nn.Module) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    states: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            states[id(state)] = state
    return list(states.values())


class Engine(Plain):
    """DeepSpeed, ZeRO 0 to 3."""

    def __init__(self, engine: Any, scaler: Any, scale_wrt_gas: bool) -> None:
        super().__init__(engine, scaler)
        if scaler is not None:
            raise UnsupportedWrapperError(
                "`scaler` must be None with DeepSpeed, which scales losses itself; got a scaler. "
                "Leave it out."
            )
        self.scale_wrt_gas = scale_wrt_gas
        self.before: Any = None  # the loss scale, while a finished window has its own
        self.ranks, self.group = engine.dp_world_size, engine.data_parallel_group
        kind = type(engine.optimizer).__name__
        refusal = ""
        if kind == "BF16_Optimizer":
            refusal = (
                "ZeRO-1 in bf16 steps on a copy of the gradients, which scaling does not reach"
            )
        elif engine.fp16_enabled():
            refusal = "in fp16 the loss scale is DeepSpeed's own, and moves"
        self.reduction = reduction_of(
            "DeepSpeed",
            ranks=self.ranks,
            steps=engine.gradient_accumulation_steps() if scale_wrt_gas else 1,
            sums=not engine.gradient_average,
            refusal=refusal,
        )

    def micro_batch(self, *, last: bool) -> Any:
        self.unscale()  # of a window that was not stepped on
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def refusal(self) -> str:
        return self.reduction.refusal

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=self.scale_wrt_gas)

    def scale_gradients(self, factor: Tensor) -> None:
        optimizer, engine = self.model.optimizer, self.model
        if not hasattr(optimizer, "loss_scale"):
            super().scale_gradients(factor)
            return
        number = float(factor)
        if not number:  # no token, and gradients of 0
            return
        # The optimizer divides by its loss scale in `step`.
        self.before, step = optimizer.loss_scale, engine.step
        optimizer.loss_scale = self.before / number

        def once(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self.unscale()

        engine.step = once

    def unscale(self) -> None:
        """The optimizer's loss scale and the engine's `step`, as they were."""
        if self.before is not None:
            self.model.optimizer.loss_scale = self.before
            del self.model.step
            self.before = None

    def restore(self) -> None:
        self.unscale()
        # Not back to counting micro-batches: `engine.step()` comes next, and is the window's.
        self.model.set_gradient_accumulation_boundary(True)

    def zero_gradients(self) -> None:
        self.model.optimizer.zero_grad()


class Accelerated(Plain):
    """What Accelerate has prepared: its backward divides, and its optimizer steps at its flag."""

    def __init__(self, inner: Plain, accelerator: Any) -> None:
        super().__init__(inner.model, None)
        self.inner, self.accelerator = inner, accelerator
        self.ranks, self.group = inner.ranks, inner.group
        if isinstance(inner, Engine):
            raise UnsupportedWrapperError(
                "`model` must not be DeepSpeed's under Accelerate, which steps inside its "
                "backward; got both. Pass the engine of `deepspeed.initialize`, without Accelerate."
            )
        steps = accelerator.gradient_state.num_steps
        self.reduction = Reduction(
            inner.reduction.wrapper, inner.reduction.divisor, inner.reduction.engine * steps
        )

    def micro_batch(self, *, last: bool) -> Any:
        self.accelerator.gradient_state._set_sync_gradients(last)
        return self.inner.micro_batch(last=last)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def restore(self) -> None:
        self.accelerator.gradient_state._set_sync_gradients(True)
        self.inner.restore()


def read(model: Any, accelerator: Any, scaler: Any, sums: bool | None, gas: bool) -> Plain:
    """The wrapper of a model; refused where it cannot be read."""
    own = _own_hooks(model)
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
    inner: Plain
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = Replicated(model, scaler, sums)
    elif _is("deepspeed.runtime.engine", "DeepSpeedEngine", model):
        inner = Engine(model, scaler, gas)
    elif _is("torch.distributed.fsdp", "FSDPModule", model):
        inner = Sharded(model, scaler)
    elif _is("torch.distributed.fsdp", "FullyShardedDataParallel", model) or isinstance(
        model, nn.DataParallel
    ):
        raise UnsupportedWrapperError(
            f"`model` must be plain, DDP, FSDP2 (`fully_shard`) or a DeepSpeed engine; got "
            f"{type(model).__name__}, whose division of gradients is not read. Use `fully_shard`."
        )
    else:
        for name, module in model.named_modules():
            if isinstance(module, nn.parallel.DistributedDataParallel) or _is(
                "torch.distributed.fsdp", "FSDPModule", module
            ):
                raise UnsupportedWrapperError(
                    f"`model` must be what the wrapper returned; got a {type(model).__name__} "
                    f"with a wrapper inside, at {name!r}. Pass the wrapped module itself."
                )
        inner = Plain(model, scaler)
    prepared = getattr(model, "_is_accelerate_prepared", False)
    if accelerator is not None:
        return Accelerated(inner, accelerator)
    if prepared:
        raise UnsupportedWrapperError(
            "`accelerator` must be given for a model that Accelerate has prepared, whose backward "
            "divides; got None. Pass `accelerator=accelerator`."
        )
    return inner


def _is(module: str, name: str, x: Any) -> bool:
    """Without loading what nobody has loaded."""
    found = sys.modules.get(module)
    return found is not None and isinstance(x, getattr(found, name, ()))
