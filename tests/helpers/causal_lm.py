"""One step of a causal language model, and whether logits were made in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.tiny_models import V

__all__ = ["NONE", "Step", "step"]

# A gradient this much smaller than the whole model's is 0 in exact arithmetic, as that of a bias of
# keys is (1e-19 in float64): what is there are roundings.
NONE = 2.0**-40


class Step(NamedTuple):
    loss: Any
    gradients: dict[str, Any]  # by the name of the parameter, of those that have one
    logits: list[tuple[int, ...]]  # shapes of what has an entry for each class


def step(model: Any, inputs: dict[str, Any]) -> Step:
    """Loss and gradients; the same random numbers each time."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    seen = OfClasses(model)
    with seen:
        with Float64():
            loss = model(**inputs).loss
        loss.backward()
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return Step(loss.detach().numpy(), found, seen.shapes)


class OfClasses(TorchDispatchMode):
    """Keeps the shapes of tensors that have an entry for each class, but for those that have the
    shape of a parameter: the head, its gradient, its bias."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        # Of a vocabulary that is padded, the classes that the loss is over.
        self.classes = {V, getattr(model.config.get_text_config(), "unpadded_vocab_size", V)}
        known = {tuple(p.shape) for p in model.parameters()}
        known |= {(n, *shape[1:]) for n in self.classes for shape in known if shape[:1] == (V,)}
        self.known = known | {shape[::-1] for shape in known}
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else ()
            if self.classes & set(shape) and shape not in self.known:
                self.shapes.append(shape)
        return result


class Float64(TorchFunctionMode):
    """float64 wherever a forward says float32, so that two ways to one number agree beyond doubt:
    a router's scores in float32 are off by 2^-24, and its gradient by 800 times that."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = [self.widened(x) for x in args]
        return function(*args, **{name: self.widened(x) for name, x in (kwargs or {}).items()})

    def widened(self, x: Any) -> Any:
        return torch.float64 if x is torch.float32 else x

    def __enter__(self) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)
        torch.set_default_dtype(torch.float32)
