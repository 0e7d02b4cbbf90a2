"""Wrappers, a file each. Here: what a wrapper has left on a head, without loading the file that
knows the wrapper, and classes of packages that are never imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

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
    return list({id(p): p for p in parameters if hasattr(p, "ds_status")}.values())


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """That of a parameter, whole or in pieces: ZeRO-3 leaves it empty."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def split_by_auto_tp(*parameters: Any) -> bool:
    """Whether DeepSpeed AutoTP has left a part of one on each of its ranks."""
    return bool([p for p in parameters if hasattr(p, "ds_is_replaced_module")])


def keeps_forward(module: nn.Module) -> bool:
    """Whether the forward on a module is Accelerate's, which calls that of its class."""
    return OLD_FORWARD in vars(module)


def set_class(module: Any, kind: Any) -> None:
    """Another class for a module, whose forward Accelerate then calls, too."""
    module.__class__ = kind
    if keeps_forward(module):
        setattr(module, OLD_FORWARD, MethodType(kind.forward, module))


@contextmanager
def with_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An object's own attribute is another one inside of the block, and after it what it was, or
    not there."""
    attributes = vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    attributes[name] = value
    try:
        yield
    finally:
        if before:
            attributes.update(before)
        else:
            del attributes[name]


def differentiable(result: Any) -> list[Tensor]:
    """The tensors of what a function has returned that have a gradient."""
    parts = result if isinstance(result, tuple) else (result,)
    return [x for x in parts if isinstance(x, Tensor) and x.requires_grad]
