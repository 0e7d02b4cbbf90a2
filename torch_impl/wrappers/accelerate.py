"""Accelerate: what it does to gradients beside the wrapper that it has prepared."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from xentlib.accumulate import Reduction, UnsupportedWrapperError
from xentlib.torch.wrappers.deepspeed import Engine
from xentlib.torch.wrappers.plain import Plain

__all__ = ["Accelerated"]


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
