"""Who looks at the calls of `chunked_nll`, in PyTorch: nobody, or the steps of `CrossCheck`s."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Gradients = dict[str, Tensor | None]


class LossHook(Protocol):
    """Sees a call as its operator has it, and then, if a backward comes, its gradients."""

    def forward(self, call: Any, loss: Any, output: tuple[Tensor, ...]) -> Any: ...
    def backward(self, record: Any, upstream: Tensor, gradients: Gradients) -> None: ...
    def close(self) -> None: ...


LOSS_HOOKS: list[LossHook] = []


def run_forward_hooks(call: Any, loss: Any, output: tuple[Tensor, ...]) -> None:
    """After the operator. What a compiler traces has no numbers to look at."""
    if torch.compiler.is_compiling() or not LOSS_HOOKS:
        return
    of_observers = [(observer, observer.forward(call, loss, output)) for observer in LOSS_HOOKS]
    node = output[0].grad_fn
    if node is not None:
        node.observed = of_observers  # type: ignore[attr-defined]  # its context in the backward


def run_backward_hooks(ctx: Any, upstream: Tensor, gradients: Gradients) -> None:
    """Of a backward of the operator whose forward was looked at."""
    for observer, record in getattr(ctx, "observed", ()):
        observer.backward(record, upstream, gradients)
