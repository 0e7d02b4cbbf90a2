"""Which derivatives are wanted, and those that are refused because they would be dropped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

__all__ = ["differentiated_once", "not_differentiable", "not_forward_mode", "wanted"]


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
