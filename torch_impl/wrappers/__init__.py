"""Wrappers, a file each. Here: what a wrapper has left on a head, without loading the file that
knows the wrapper, and classes of packages that are never imported here."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

# Where a module that Accelerate's `dispatch_model` has given a forward keeps the one that it calls.
OLD_FORWARD = "_old_forward"


def is_loaded(package: str) -> bool:
    """Of what is not, nothing can be there."""
    return package in sys.modules


def is_a(module: str, name: str, x: object) -> bool:
    """Whether `x` is of a class that a module has, if that module is loaded."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(x, kind)


def kept_by_zero(*parameters: Any) -> list[Any]:
    """Those that ZeRO-3 keeps, each once; some may be whole now, and sharded in the backward."""
    kept: list[Any] = []
    for p in parameters:
        if hasattr(p, "ds_status") and all(p is not q for q in kept):
            kept.append(p)
    return kept


def keeps_forward(module: nn.Module) -> bool:
    """Whether the forward on a module is Accelerate's, which calls that of its class."""
    return OLD_FORWARD in vars(module)
