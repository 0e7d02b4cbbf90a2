"""A call of a public function and its gradients, in PyTorch and in JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.device import numpy_of, on_jax, on_torch

Array = npt.NDArray[Any]
Wrap = Callable[[Any, int], Any] | None
# Outputs by name, and the gradients of the leaves; None of what is not there.
Found = tuple[dict[str, Any], list[Any]]


class Call(NamedTuple):
    """One call of a public function, in NumPy arrays."""

    function: str
    leaves: tuple[Array | None, ...]  # hidden, weight and bias of a head; or logits
    labels: Array
    keywords: dict[str, Any]

    def of(self, ours: Any, leaves: Any, labels: Any, keywords: dict[str, Any]) -> Any:
        """The function of a backend, of these arguments as that backend has them."""
        function = getattr(ours, self.function)
        if len(leaves) == 1:
            return function(leaves[0], labels, **keywords)
        return function(leaves[0], leaves[1], labels, bias=leaves[2], **keywords)


def runner_of(backend: str) -> Callable[[Call, Mapping[str, Any], Wrap], Found]:
    """What runs a call and, for the gradients of its outputs by name, those of its leaves; without
    any, forward alone. `wrap` is for JAX: what becomes of the function of the leaves."""
    return _torch if backend == "torch" else _jax


def _torch(call: Call, upstream: Mapping[str, Any], wrap: Wrap) -> Found:
    import torch

    from xentlib import torch as ours

    leaves = [on_torch(x) for x in call.leaves]
    there = [leaf for leaf in leaves if leaf is not None]
    for leaf in there:
        leaf.requires_grad_(bool(upstream))
    keywords = {name: on_torch(value) for name, value in call.keywords.items()}
    result = call.of(ours, leaves, on_torch(call.labels), keywords)
    if upstream:
        used = [getattr(result, name) for name in upstream]
        given = [
            torch.as_tensor(on_torch(g), dtype=x.dtype, device=x.device)
            for x, g in zip(used, upstream.values(), strict=True)
        ]
        torch.autograd.backward(used, given)
    values = {name: None if x is None else x.detach() for name, x in result._asdict().items()}
    return _crossed(values), _crossed_list([None if x is None else x.grad for x in leaves])


def _jax(call: Call, upstream: Mapping[str, Any], wrap: Wrap) -> Found:
    import jax

    from xentlib import jax as ours

    leaf_dtype = np.asarray(call.leaves[0]).dtype.name
    with jax.enable_x64("float64" in (call.keywords.get("compute_dtype"), leaf_dtype)):
        cross = on_jax if wrap is None else _on_no_device
        keywords = {name: cross(value) for name, value in call.keywords.items()}
        labels = cross(call.labels)

        def function(*leaves: Any) -> tuple[Any, Any]:
            result = call.of(ours, leaves, labels, keywords)
            return [getattr(result, name) for name in upstream], result

        leaves = [cross(x) for x in call.leaves]
        wrapped = function if wrap is None else wrap(function, len(leaves))
        gradients: Any = [None] * len(leaves)
        if upstream:
            used, pull, result = jax.vjp(wrapped, *leaves, has_aux=True)
            given = [cross(g) for g in upstream.values()]
            gradients = pull([jax.numpy.asarray(g, x.dtype) for x, g in zip(used, given)])
        else:
            _, result = wrapped(*leaves)
        names, values = result._fields, [*result]
        if wrap is not None:  # off the devices that they are spread over
            values, gradients = jax.device_get(values), jax.device_get([*gradients])
        return _crossed(dict(zip(names, values, strict=True))), _crossed_list(gradients)


def _on_no_device(x: Any) -> Any:
    """A NumPy array in JAX, on no device in particular, as what is spread over several must be."""
    import jax

    return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x


def _crossed(values: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(values, _crossed_list(values.values())))


def _crossed_list(values: Any) -> list[Any]:
    return [None if x is None else numpy_of(x) for x in values]
