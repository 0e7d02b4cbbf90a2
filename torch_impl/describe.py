"""What `xentlib.checks` may know of a torch tensor, and the scalars that operators take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.checks import Operand

__all__ = ["as_tensor", "autocast_dtype", "describe", "dtype_name", "not_differentiable"]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(x: Any) -> Any:
    """`Operand` of a tensor; anything else as it is, for the check to accept or refuse."""
    if isinstance(x, Tensor):
        return Operand(tuple(x.shape), dtype_name(x.dtype), str(x.device))
    return x


def autocast_dtype(x: Tensor) -> str | None:
    """Name of the dtype that an autocast region asks GEMMs of `x` to take, if one is active."""
    if not torch.is_autocast_enabled(x.device.type):
        return None
    return dtype_name(torch.get_autocast_dtype(x.device.type))


def as_tensor(value: Any, neutral: float | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A 0-d or per-token tensor for an operator; None where the value changes nothing."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    if value is None or value == neutral:
        return None
    return torch.tensor(float(value), dtype=dtype, device=like.device)


def not_differentiable(**constants: Any) -> None:
    """Refuse gradients that would be dropped without a word."""
    if not torch.is_grad_enabled():
        return
    for name, value in constants.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"`{name}` must be a constant; got a tensor that requires grad, whose gradient is "
                f"not computed. Pass `{name}.detach()`."
            )
