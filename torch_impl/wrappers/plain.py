"""How gradients are reduced where no wrapper shards them: a model that nothing wraps, and DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xentlib.accumulate import UnsupportedWrapperError, WindowStateError, reduction_of


class NoWrapper:
    """A model that nothing wraps; what a wrapper does differently is its class's own."""

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

    awaited: Any = None  # handle of the hook that sees the wrapper's forward
    forwarded = False

    def await_forward(self) -> None:
        """From here to `check_forward` the wrapper's own forward has to run.

        A forward pre-hook sees it, which is there for this time alone: nothing of it is saved or
        copied with the model. DDP counts its forwards in C++ and shows the number to nobody;
        `require_forward_param_sync`, which it writes in each, says no more about one that
        synchronises when another follows without gradients, as a reference model's in RL. The hook
        runs under `torch.compile` of the wrapper, of the module inside and of a function around
        both, however late it comes, and costs no graph there (2.13: as many as without it).
        """
        self.forget_forward()
        self.forwarded = False
        self.awaited = self.model.register_forward_pre_hook(self._see_forward)

    def _see_forward(self, model: Any, inputs: Any) -> None:
        # One without gradients, or inside `no_sync`, prepares nothing.
        if torch.is_grad_enabled() and getattr(model, "require_backward_grad_sync", True):
            self.forwarded = True

    def check_forward(self) -> None:
        """Before a backward: refuse one that would not be reduced."""
        awaited = self.awaited is not None
        self.forget_forward()
        if awaited and not self.forwarded:
            raise WindowStateError(
                f"`window.backward` must come after a forward of the {type(self.model).__name__} "
                f"itself, which prepares how gradients are reduced; got none with gradients in "
                f"this micro-batch. Call the object that `TokenNormalizer` was given, not the "
                f"module inside of it, and no `no_sync`."
            )

    def forget_forward(self) -> None:
        if self.awaited is not None:
            self.awaited.remove()
        self.awaited = None

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

    def slots(self) -> list[tuple[Any, str]]:
        """Where gradients are kept: objects, and the names of their attributes."""
        return [(p, "grad") for p in self.parameters()]

    def gradients(self) -> list[tuple[Any, str, Tensor]]:
        """Those that are there."""
        gradients = [(*place, getattr(*place, None)) for place in self.slots()]
        return [(x, name, g) for x, name, g in gradients if g is not None]

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


class DDP(NoWrapper):
    """DistributedDataParallel."""

    def __init__(self, model: Any, scaler: Any, sums: bool | None) -> None:
        super().__init__(model, scaler)
        hooks = own_hooks(model)
        if hooks and sums is None:
            name = getattr(hooks[0], "__name__", repr(hooks[0]))
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
        if last:  # The others are not reduced, whoever runs the forward.
            self.await_forward()

    def restore(self) -> None:
        self.forget_forward()
        self.model.require_backward_grad_sync = True


AVERAGING = ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook")


def refuse_scaler(scaler: Any, whose: str) -> None:
    if scaler is not None:
        raise UnsupportedWrapperError(
            f"`scaler` must be None with {whose} scales losses itself; got a scaler. Leave it out."
        )


def own_hooks(model: Any) -> list[Any]:
    """DDP's communication hooks, but for those of PyTorch's that are known to average."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return []
    theirs = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
    return [
        hook
        for hook, _ in model._comm_hooks
        if getattr(hook, "__module__", "") != theirs or hook.__name__ not in AVERAGING
    ]
