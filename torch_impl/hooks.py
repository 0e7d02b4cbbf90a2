"""Who looks at the calls of `chunked_nll`, in PyTorch: nobody, or the steps of `CrossCheck`s."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

Gradients = dict[str, Tensor | None]
# Of this rank's tokens, of all whose tokens are in the head's gradients, and what those are times.
Upstream = tuple[Tensor, Tensor | None, float]


class LossHook(Protocol):
    """Sees a call as its operator has it, and then, if a backward comes, its gradients."""

    def forward(self, call: Any, loss: Any, output: tuple[Tensor, ...]) -> Any: ...
    def compiled(self, call: Any, loss: Any, output: tuple[Tensor, ...]) -> None: ...
    def backward(self, record: Any, upstream: Upstream, gradients: Gradients) -> None: ...
    def close(self) -> None: ...


LOSS_HOOKS: list[LossHook] = []
EAGER: list[bool] = []  # a call under way that is looked at from outside of its operator


def run_forward_hooks(call: Any, loss: Any, output: tuple[Tensor, ...]) -> None:
    """After the operator. What a compiler traces has no numbers to look at: `run_compiled_hooks`
    does, as the operator runs."""
    if torch.compiler.is_compiling() or not LOSS_HOOKS:
        return
    EAGER.clear()
    of_observers = [(observer, observer.forward(call, loss, output)) for observer in LOSS_HOOKS]
    node = output[0].grad_fn
    if node is not None:
        node.observed = of_observers  # type: ignore[attr-defined]  # its context in the backward


def in_compiled(call: Any) -> bool:
    """Whether a compiled program has called an operator that is looked at. A CUDA graph that is
    recorded has no numbers, and what it replays calls nobody."""
    if not LOSS_HOOKS or EAGER:
        return False
    return not (call.hidden.is_cuda and torch.cuda.is_current_stream_capturing())


def run_compiled_hooks(call: Any, loss: Any, output: tuple[Tensor, ...]) -> None:
    """At the end of such an operator: its outputs, gradients and the mask."""
    for observer in LOSS_HOOKS:
        observer.compiled(call, loss, output)


def run_backward_hooks(ctx: Any, upstream: Upstream, gradients: Gradients) -> None:
    """Of a backward of the operator whose forward was looked at."""
    for observer, record in getattr(ctx, "observed", ()):
        observer.backward(record, upstream, gradients)
