"""Which derivatives are wanted, and those that are refused because they would be dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from xentlib.checks.call import refuse_derivative


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


def not_transformed(function: str, *inputs: Any) -> None:
    """Refuse inputs that `torch.func.grad`, `vjp` or `jacrev` differentiates, for which PyTorch's
    custom operators have no rule: its own message asks for a `setup_context` instead. A compiler,
    which cannot ask this, ends in PyTorch's message."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if any(functorch.is_gradtrackingtensor(x) and x.requires_grad for x in layers(*inputs)):
        raise RuntimeError(
            f"`{function}` must be differentiated by `backward` or `torch.autograd.grad`; got an "
            f"input that `torch.func.grad`, `vjp` or `jacrev` differentiates. Call "
            f"`requires_grad_()` on the input and `torch.autograd.grad` instead."
        )


def layers(*inputs: Any) -> Iterator[Tensor]:
    """The tensors of a call, and what the transforms of `torch.func` have wrapped in them."""
    for given in inputs:
        x = given
        while isinstance(x, Tensor):
            yield x
            if torch.compiler.is_compiling() or not functorch.is_functorch_wrapped_tensor(x):
                break
            x = functorch.get_unwrapped(x)


def requires_grad(x: Tensor) -> bool:
    """An entry of `torch.func.vmap` says no although the batch that it is of requires grad. A
    compiler does not see the batch: inside a transform any may be differentiated."""
    inside = torch.compiler.is_compiling() and functorch.maybe_current_level() is not None
    return inside or any(layer.requires_grad for layer in layers(x))


def not_differentiable(**constants: Any) -> None:
    """Refuse gradients that would be dropped without a word."""
    if not torch.is_grad_enabled():
        return
    for name, value in constants.items():
        if any(x.requires_grad for x in layers(value)):
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
    return [on and x is not None and requires_grad(x) for x in leaves]


def without_gradient(name: str, value: Tensor, leaves: Sequence[Tensor | None]) -> Tensor:
    """A result of `chunked_nll` that depends on `leaves`, whose derivative is refused in a
    backward: an entropy bonus would add 0 to every gradient without a word. The values are the
    same, and none are saved. A compiler has to trace backwards that never run, and is left out."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return value
    active = [x for x in leaves if x is not None and x.requires_grad]
    # Entries of a batch have no graph of their own, and PyTorch no transform for this function.
    if not active or any(functorch.is_functorch_wrapped_tensor(x) for x in (value, *active)):
        return value
    refused: Tensor = _Refused.apply(name, [value], *active)  # type: ignore[no-untyped-call]
    return refused


class _Refused(torch.autograd.Function):
    """Of all leaves: `torch.autograd.grad` runs no node that does not lead to its inputs."""

    @staticmethod
    def forward(ctx: Any, name: str, value: list[Tensor], *leaves: Tensor) -> Tensor:
        ctx.name = name
        ctx.set_materialize_grads(False)
        return value[0].data  # from a list: a view of an input could not be written to

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        # A reentrant checkpoint fills in zeros for what was not used.
        if gradient is not None and bool(gradient.any()):
            refuse_derivative(ctx.name, f"{ctx.name}.detach()")
        return (None,) * len(ctx.needs_input_grad)
