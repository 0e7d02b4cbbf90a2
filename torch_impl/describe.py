"""What `xentlib.checks` may know of a torch tensor, and which derivatives are refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from xentlib.checks.operand import Operand

__all__ = [
    "as_tensor",
    "autocast_dtype",
    "describe",
    "differentiated_once",
    "dtype_name",
    "not_differentiable",
    "not_forward_mode",
    "same_tokens",
    "wanted",
]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(x: Any) -> Any:
    """`Operand` of a tensor; anything else as it is, for the check to accept or refuse."""
    if isinstance(x, Tensor):
        return Operand(tuple(x.shape), dtype_name(x.dtype), str(x.device))
    return x


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
    """A 0-d or per-token tensor for an operator; None where the value changes nothing."""
    if isinstance(value, Tensor):
        return value.to(like.device)
    if value is None or value == neutral:
        return None
    return torch.tensor(float(value), dtype=dtype, device=like.device)


def not_forward_mode(function: str, *inputs: Any) -> None:
    """Refuse tangents, which an operator without a rule for them drops without a word. A compiler
    does not see all of them, and takes a refusal for a reason to ask again in eager."""
    if forward_ad._current_level < 0:
        return
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if torch.compiler.is_compiling() or any(
        forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(
            f"`{function}` must be differentiated in reverse mode; got an input with a tangent "
            f"(`torch.func.jvp`, `jacfwd`, dual tensors), whose derivative it does not compute. "
            f"Use `backward` or `torch.autograd.grad`, or full logits."
        )


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


def differentiated_once(function: str, instead: str) -> None:
    """Refuse a backward whose own gradient is wanted."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            f"`{function}` must be differentiated once; got a backward with create_graph=True, "
            f"whose second derivatives it does not compute. Use full logits and {instead} for "
            f"those."
        )


def wanted(*leaves: Tensor | None) -> list[bool]:
    """Which gradients are: what is frozen costs no GEMM."""
    on = torch.is_grad_enabled()
    return [on and x is not None and x.requires_grad for x in leaves]
