"""What `xentlib.checks` may know of a torch tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.checks.arrays import refuse_array
from xentlib.checks.operand import Operand
from xentlib.torch.core.device import onto

__all__ = ["as_tensor", "autocast_dtype", "describe", "dtype_name", "only_tensors", "same_tokens"]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(x: Any) -> Any:
    """`Operand` of a tensor; anything else as it is, for the check to accept or refuse."""
    if isinstance(x, Tensor):
        return Operand(tuple(x.shape), dtype_name(x.dtype), str(x.device))
    return x


def only_tensors(**arguments: Any) -> None:
    """Refuse arrays of another framework, lists, and whatever else has to be a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            refuse_array(name, value)


def same_tokens(source: Tensor, *per_token: Any) -> None:
    """Under the compiler, sizes that it does not know are those of `source` [..., columns] where
    nothing says otherwise, and are compared when it runs; what differs, the checks refuse."""
    if not torch.compiler.is_compiling():
        return
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # loads sympy, 0.8 s

    for x in per_token:
        if isinstance(x, Tensor) and x.ndim == source.ndim - 1:
            for a, b in zip(x.shape, source.shape):
                if guard_or_true(a == b):
                    torch._check(a == b)


def autocast_dtype(x: Tensor) -> str | None:
    """Name of the dtype that an autocast region asks GEMMs of `x` to take, if one is active."""
    kind = x.device.type
    # `torch.amp.is_autocast_available` would say it of every device; torch 2.11 cannot compile it.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return dtype_name(torch.get_autocast_dtype(kind))


def as_tensor(value: Any, neutral: float | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A 0-d or per-token tensor for an operator; None where the value changes nothing.

    No device is waited for: `torch.tensor` would copy a number there from pageable memory and wait
    for the stream, and could not be captured in a CUDA graph.
    """
    if isinstance(value, Tensor):
        return onto(value, like.device)
    if value is None or value == neutral:
        return None
    return torch.full((), float(value), dtype=dtype, device=like.device)
