"""Accelerate: what it does to gradients beside the wrapper that it has prepared, and to the forward
of what it spreads over devices."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor

from xentlib.accumulate import Reduction, UnsupportedWrapperError
from xentlib.torch.wrappers import OLD_FORWARD, keeps_forward
from xentlib.torch.wrappers.deepspeed import DeepSpeed
from xentlib.torch.wrappers.plain import Around, NoWrapper


def set_class(module: Any, kind: Any) -> None:
    """Another class for a module, whose forward Accelerate then calls, too."""
    module.__class__ = kind
    if keeps_forward(module):
        setattr(module, OLD_FORWARD, MethodType(kind.forward, module))


class Accelerate(Around):
    """What Accelerate has prepared: its backward divides, and its optimizer steps at its flag."""

    def __init__(self, inner: NoWrapper, accelerator: Any) -> None:
        super().__init__(inner)
        self.accelerator = accelerator
        if isinstance(inner, DeepSpeed):
            raise UnsupportedWrapperError(
                "`model` must not be DeepSpeed's under Accelerate, which steps inside its "
                "backward; got both. Pass the engine of `deepspeed.initialize`, without Accelerate."
            )
        steps = accelerator.gradient_state.num_steps
        self.reduction = Reduction(
            inner.reduction.wrapper, inner.reduction.divisor, inner.reduction.engine * steps
        )

    def micro_batch(self, *, last: bool) -> None:
        self.accelerator.gradient_state._set_sync_gradients(last)
        super().micro_batch(last=last)

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def restore(self) -> None:
        self.accelerator.gradient_state._set_sync_gradients(True)
        super().restore()

    def finish(self) -> None:
        self.accelerator.gradient_state._set_sync_gradients(True)
        super().finish()
