"""Lightning Fabric: the module that `fabric.setup` returns, around a wrapper.

This file relies on attributes of Lightning 2.6 that are not public.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from xentlib.accumulate import UnsupportedWrapperError
from xentlib.torch.wrappers.deepspeed import DeepSpeed
from xentlib.torch.wrappers.plain import Around, NoWrapper

# As `lightning` and as `lightning-fabric` have it.
MODULES = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")


def inside_fabric(model: Any) -> Any:
    """The wrapper that a module of Fabric's calls; None for another module."""
    kinds = tuple(sys.modules[name]._FabricModule for name in MODULES if name in sys.modules)
    if not isinstance(model, kinds):
        return None
    # Given a compiled module, Fabric wraps what is inside of it and compiles the wrapper.
    called: Any = model._forward_module
    return getattr(called, "_orig_mod", called)


class Fabric(Around):
    """What Fabric has set up: its backward is its precision's, which may scale the loss."""

    def __init__(self, inner: NoWrapper, model: Any) -> None:
        if isinstance(inner, DeepSpeed):
            raise UnsupportedWrapperError(
                "`model` must not be DeepSpeed's under Fabric, whose backward it wants; got both. "
                "Pass the engine of `deepspeed.initialize`, without Fabric."
            )
        super().__init__(inner)
        self.strategy = model._strategy
        self.module: Any = sys.modules[type(model).__module__]

    def backward(self, loss: Tensor) -> None:
        # `fabric.backward`: a module does not know its Fabric.
        self.module._in_fabric_backward = True
        try:
            self.strategy.backward(loss, None)
        finally:
            self.module._in_fabric_backward = False
