"""How a wrapper reduces gradients, read from the wrapper; and what it wants done in a window.

FSDP2 and DeepSpeed have no public way to all of it; theirs was read in torch 2.11 to 2.15 and in
DeepSpeed 0.19.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xentlib.accumulate import Reduction, UnsupportedWrapperError, reduction_of
from xentlib.torch.fsdp2 import groups_of

__all__ = ["Plain", "read"]


class Plain:
    """A model that nothing wraps, and what the wrappers below do differently."""

    def __init__(self, model: nn.Module, scaler: Any) -> None:
        self.model: Any = model
        self.scaler = scaler
        first = next(model.parameters(), None)
        if first is None:
            raise UnsupportedWrapperError(
                f"`model` must have parameters; got a {type(model).__name__} without any. Pass the "
                f"module that is trained."
            )
        self.device = first.device
        self.reduction = reduction_of("plain")
        self.ranks = 1
        self.group: dist.ProcessGroup | None = None

    unstepped = False  # whether a finished window has gradients in it that only a step takes out

    def settle(self) -> None:
        """What a finished window has left until its step, if no step has come."""

    def micro_batch(self, *, last: bool) -> None:
        """Flags for the forward and the backward of one."""

    def backward(self, loss: Tensor) -> None:
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def parameters(self) -> list[Any]:
        """That gradients are put on."""
        return list(self.model.parameters())

    def leaves(self) -> list[Any]:
        """That a backward reaches."""
        return [p for p in self.parameters() if p.requires_grad]

    @contextmanager
    def gradients_if(self, fine: Tensor) -> Iterator[None]:
        """A backward whose gradients are zeros where it is not `fine`, a bool [] on the device.

        What it communicates is what it always does. Not a factor of 0 on the loss: of what is NaN
        in the graph it would make NaN.
        """

        def hook(gradient: Tensor) -> Tensor:
            if gradient.is_sparse:  # of an embedding
                return torch.sparse_coo_tensor(
                    gradient._indices(),
                    hook(gradient._values()),
                    gradient.shape,
                    check_invariants=False,
                )
            return torch.where(fine.to(gradient.device), gradient, torch.zeros_like(gradient))

        handles = [p.register_hook(hook) for p in self.leaves()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def places(self) -> list[tuple[Any, str]]:
        """Where gradients are kept: objects, and the names of their attributes."""
        return [(p, "grad") for p in self.parameters()]

    def gradients(self) -> list[tuple[Any, str, Tensor]]:
        """Those that are there."""
        found = [(*place, getattr(*place, None)) for place in self.places()]
        return [(x, name, g) for x, name, g in found if g is not None]

    def refusal(self) -> str:
        """Why finished gradients cannot be scaled; empty where they can."""
        for name, p in self.model.named_parameters():
            if getattr(p, "_post_accumulate_grad_hooks", None):
                return f"{name!r} has a hook that runs in the backward, a step perhaps"
            if getattr(p, "main_grad", None) is not None:
                return f"gradients of {name!r} are added up in its `main_grad`, beside autograd"
        return self.reduction.refusal

    def scale_gradients(self, factor: Tensor) -> None:
        for p in self.parameters():
            if p.grad is not None:
                # In 16 bits the factor itself would be rounded, to 2^-9 of itself in bf16.
                wide = torch.promote_types(p.grad.dtype, torch.float32)
                p.grad.copy_(p.grad.to(wide) * factor.to(wide))

    def restore(self) -> None:
        """Flags, as they were: after the last micro-batch, or an exception."""

    def finish(self) -> None:
        """After the last micro-batch."""
        self.restore()

    def zero_gradients(self) -> None:
        for x, name, _ in self.gradients():
            setattr(x, name, None)


class Replicated(Plain):
    """DistributedDataParallel."""

    def __init__(self, model: Any, scaler: Any, sums: bool | None) -> None:
        super().__init__(model, scaler)
        own = _own_hooks(model)
        if own and sums is None:
            name = getattr(own[0], "__name__", repr(own[0]))
            raise UnsupportedWrapperError(
                f"`model` must reduce gradients in a way that can be read; got DDP with the "
                f"communication hook {name!r}, which may or may not take the mean. "
                f"Pass `sums=True` for a hook that adds up, `sums=False` for one that averages."
            )
        self.ranks = dist.get_world_size(model.process_group)
        self.group = model.process_group
        self.reduction = reduction_of("DDP", ranks=self.ranks, sums=bool(sums))

    def micro_batch(self, *, last: bool) -> None:
        # As `no_sync` does, whose context would stay open where a window ends by an exception and
        # somebody holds its iterator.
        self.model.require_backward_grad_sync = last

    def restore(self) -> None:
        self.model.require_backward_grad_sync = True


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
        self.groups = groups = [g for state in _fsdp_states(model) for g in groups_of(state)]
        # With `set_reshard_after_backward(False)` the model's parameters are whole by now.
        held = {
            id(x)
            for group in groups
            for p in group.fsdp_params
            for x in (p.sharded_param, getattr(p, "_unsharded_param", None))
        }
        loose = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in held]
        if loose:
            raise UnsupportedWrapperError(
                f"`model` must keep all its parameters in FSDP2; got {loose[0]!r} outside of it, "
                f"whose gradient is not reduced over the ranks. Call `fully_shard(model)` on the "
                f"root."
            )
        if any(group._all_reduce_hook is not None for group in groups):
            raise UnsupportedWrapperError(
                "`model` must reduce gradients in a way that can be read; got FSDP2 with an "
                "all-reduce hook, whose effect on the mean is unknown. Use a two-dimensional mesh "
                "for replicas."
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

    def parameters(self) -> list[Any]:
        # Not the model's: with `set_reshard_after_backward(False)` those are whole, without .grad.
        return [p.sharded_param for group in self.groups for p in group.fsdp_params]

    def leaves(self) -> list[Any]:
        whole = [p for _, p in self._whole()]
        return [p for p in whole if p.requires_grad]

    def _whole(self) -> list[tuple[Any, Any]]:
        """FSDP2's parameters that have been gathered once, with what was gathered."""
        held = [p for group in self.groups for p in group.fsdp_params]
        return [(p, p._unsharded_param) for p in held if hasattr(p, "_unsharded_param")]

    def places(self) -> list[tuple[Any, str]]:
        # Those that have not been reduced yet, too: `zero_grad` does not see them.
        return [
            *super().places(),
            *((group, "_partial_reduce_output") for group in self.groups),
            *((p, "unsharded_accumulated_grad") for p, _ in self._whole()),
            *((whole, "grad") for _, whole in self._whole()),
        ]

    def micro_batch(self, *, last: bool) -> None:
        self.model.set_requires_gradient_sync(last)

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
        self.lent: dict[str, Any] | None = None  # what the engine had before a window
        if engine.sequence_parallel_size > 1:
            raise UnsupportedWrapperError(
                f"`model` must have whole sequences on each rank; got DeepSpeed with sequences "
                f"over {engine.sequence_parallel_size} ranks, which its stages divide differently. "
                f"Count and divide yourself: `chunked_nll(..., denominator=)`."
            )
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

    def micro_batch(self, *, last: bool) -> None:
        if self.lent is None:
            self.lent = {"boundary": self.model._is_gradient_accumulation_boundary}
        self.model.set_gradient_accumulation_boundary(last)

    @property
    def unstepped(self) -> bool:  # type: ignore[override]
        return self.lent is not None and "step" in self.lent

    def gradients(self) -> list[tuple[Any, str, Tensor]]:
        # ZeRO keeps them in its own buffers, and scales them by its loss scale alone.
        return [] if hasattr(self.model.optimizer, "loss_scale") else super().gradients()

    def refusal(self) -> str:
        return self.reduction.refusal

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=self.scale_wrt_gas)

    def scale_gradients(self, factor: Tensor) -> None:
        optimizer = self.model.optimizer
        if not hasattr(optimizer, "loss_scale"):
            super().scale_gradients(factor)
            return
        number = float(factor)
        if number and self.lent is not None:  # else no token, and gradients of 0
            # The optimizer divides by its loss scale in `step`.
            self.lent["loss_scale"] = optimizer.loss_scale
            optimizer.loss_scale /= number

    def finish(self) -> None:
        """`engine.step()` comes next and is the window's; after it all is as it was."""
        engine = self.model
        if self.lent is None:  # no micro-batch
            return
        engine.set_gradient_accumulation_boundary(True)
        step = engine.step
        self.lent["step"] = vars(engine).get("step")

        def once(*args: Any, **kwargs: Any) -> Any:
            try:
                return step(*args, **kwargs)
            finally:
                self.settle()

        engine.step = once

    def settle(self) -> None:
        engine, lent, self.lent = self.model, self.lent, None
        if lent is None:
            return
        if "loss_scale" in lent:
            engine.optimizer.loss_scale = lent["loss_scale"]
        if lent.get("step") is not None:
            engine.step = lent["step"]
        elif "step" in lent:
            del engine.step
        engine._is_gradient_accumulation_boundary = lent["boundary"]

    def restore(self) -> None:
        self.settle()

    def zero_gradients(self) -> None:
        optimizer = self.model.optimizer
        optimizer.zero_grad()
        if getattr(optimizer, "partition_gradients", False) and hasattr(
            optimizer, "all_grad_tensors"
        ):  # ZeRO-2 keeps what it has not reduced yet beside the parameters
            optimizer.all_grad_tensors.clear()
            optimizer.averaged_gradients.clear()
            optimizer.micro_step_id = -1


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

    def parameters(self) -> list[Any]:
        return self.inner.parameters()

    def leaves(self) -> list[Any]:
        return self.inner.leaves()

    def places(self) -> list[tuple[Any, str]]:
        return self.inner.places()

    def micro_batch(self, *, last: bool) -> None:
        self.accelerator.gradient_state._set_sync_gradients(last)
        self.inner.micro_batch(last=last)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def restore(self) -> None:
        self.accelerator.gradient_state._set_sync_gradients(True)
        self.inner.restore()

    def finish(self) -> None:
        self.accelerator.gradient_state._set_sync_gradients(True)
        self.inner.finish()


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
            if _is("torch.distributed._composable.replicate", "DDP", module):
                raise UnsupportedWrapperError(
                    "`model` must reduce gradients in a way that can be read; got `replicate`, "
                    "whose state is its own. Use DistributedDataParallel."
                )
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
    """Without importing a module that is not loaded yet."""
    found = sys.modules.get(module)
    return found is not None and isinstance(x, getattr(found, name, ()))
