"""Calls of no token and of one, of every function: shapes with a 0 in them, and without leading
dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.tokenless import CALLS, SHAPES, arrays
from xentlib.contract import check, failures

BACKENDS = {"torch": "xentlib.torch", "jax": "xentlib.jax"}


def module(backend: str) -> Any:
    return pytest.importorskip(BACKENDS[backend])


def gradients(backend: str, call: Callable[..., Any], x: dict[str, Any]) -> tuple[Any, list[Any]]:
    """What a call returns, and the gradients of its `hidden`, or logits, and `weight`."""
    module(backend)
    if backend == "torch":
        import torch

        x = {name: torch.from_numpy(value) for name, value in x.items()}
        leaves = [x["hidden"].requires_grad_(), x["logits"].requires_grad_(), x["weight"]]
        x["weight"].requires_grad_()
        value = call(module(backend), **x)
        made = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        return value.detach().numpy(), [None if g is None else g.numpy() for g in made]
    import jax
    import jax.numpy as jnp

    x = {name: jnp.asarray(value) for name, value in x.items()}
    names = ("hidden", "logits", "weight")

    def summed(*leaves: Any) -> Any:
        value = call(module(backend), **(x | dict(zip(names, leaves))))
        return value.sum(), value

    made, value = jax.grad(summed, argnums=(0, 1, 2), has_aux=True)(*(x[n] for n in names))
    return np.asarray(value), [np.asarray(g) for g in made]


@pytest.mark.parametrize("name", CALLS)
def test_no_token(backend: str, name: str) -> None:
    """D3: the loss is 0, per-token results are empty, every gradient is there and 0. Catches: a
    reshape that infers a size out of nothing."""
    for leading in SHAPES:
        x = arrays(leading)
        value, made = gradients(backend, CALLS[name], x)
        assert not failures(check("A0", value, np.zeros_like(value)))
        assert value.shape in ((), leading) or value.shape[: len(leading)] == leading
        for leaf, gradient in zip(("hidden", "logits", "weight"), made):
            if gradient is not None:
                assert gradient.shape == x[leaf].shape
                assert not failures(check("A0", gradient, np.zeros_like(gradient)))


@pytest.mark.parametrize("name", CALLS)
def test_one_token_without_leading_dimensions(backend: str, name: str) -> None:
    """A10: as a row of one."""
    row = arrays((1,))
    flat = {k: v if k == "weight" else np.asarray(v[0]) for k, v in row.items()}
    flat |= {k: v for k, v in row.items() if k in ("teacher_weight", "low_in", "low_out")}
    ours, of_row = (gradients(backend, CALLS[name], x) for x in (flat, row))
    pairs = [(ours[0], of_row[0]), *zip(ours[1], of_row[1], strict=True)]
    for got, right in pairs:
        if right is not None:
            assert not failures(check("A10", np.asarray(got).reshape(right.shape), right))
