"""D3: a NaN logit of a valid token is NaN in each of its numbers and gradients, wherever it is."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from helpers.nan_logits import ALL, COLUMNS, LOSSES, OF_LOGITS, arrays, hidden_in, on_shards
from helpers.ranks import launch


def total(name: str, values: list[Any]) -> Any:
    """Of what may be differentiated: the loss alone of those that have one."""
    return sum(x.sum() for x in values[: 1 if name in LOSSES else None])


def walked(backend: str, name: str, column: int) -> tuple[list[Any], Any]:
    """Values, and the gradient by the hidden states or logits of their sum."""
    a, leaf = arrays(column), "logits" if name in OF_LOGITS else "hidden"
    if backend == "torch":
        torch = pytest.importorskip("torch")
        import xentlib.torch as X

        a = {k: torch.from_numpy(v) for k, v in a.items()}
        a[leaf].requires_grad_()
        values = ALL[name](X, a)
        total(name, values).backward()
        return [x.detach().numpy() for x in values], a[leaf].grad.numpy()
    gradient, values = step(name)(a.pop(leaf), a)
    return [np.asarray(x) for x in values], np.asarray(gradient)


@functools.cache
def step(name: str) -> Any:
    """One program of JAX, for every column."""
    jax = pytest.importorskip("jax")
    import xentlib.jax as X

    leaf = "logits" if name in OF_LOGITS else "hidden"

    def loss(x: Any, a: Any) -> Any:
        values = ALL[name](X, a | {leaf: x})
        return total(name, values), values

    return jax.jit(jax.grad(loss, has_aux=True))


@pytest.mark.parametrize("name", ALL)
def test_a_nan_logit_shows(backend: str, name: str) -> None:
    """Catches: one that is left out with the places of a set that is not kept."""
    for column in COLUMNS:
        values, gradient = walked(backend, name, column)
        assert not hidden_in(name, values), column
        assert not hidden_in(name, [gradient[:, :1]]), column


@pytest.mark.slow
@pytest.mark.torch
def test_over_shards() -> None:
    """Catches: the NaN of another rank."""
    pytest.importorskip("torch")
    for of_rank in launch(2, on_shards):
        assert len(of_rank) == len(ALL) * len(COLUMNS)
        assert not {key: wrong for key, wrong in of_rank.items() if wrong}


# Of divergences each kind and each teacher: how shards meet is the same for the others.
MET = ("forward_kl from top", "reverse_kl from head", "jsd from logits")
OF_KINDS = [name for name in ALL if " from " in name and name not in MET]
# Which `ids` have beside them.
OVER_DEVICES = [name for name in ALL if name not in (*OF_KINDS, "top_k, no kept set")]


@pytest.mark.slow
@pytest.mark.jax
@pytest.mark.parametrize("name", OVER_DEVICES)
def test_over_devices(name: str) -> None:
    """Catches: the NaN of another device."""
    jax = pytest.importorskip("jax")
    from jax.sharding import PartitionSpec as P

    import xentlib.jax as X

    mesh = jax.make_mesh((4,), ("x",), (jax.sharding.AxisType.Auto,))
    specs = dict.fromkeys(arrays(0), P())
    specs |= dict.fromkeys(("logits", "dense"), P(None, "x"))
    specs |= dict.fromkeys(("weight", "teacher_weight", "bias"), P("x"))
    step = jax.jit(
        jax.shard_map(
            lambda a: ALL[name](X, a, vocab_parallel="x"),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=P(),
        )
    )
    for column in COLUMNS:
        assert not hidden_in(name, step(arrays(column))), column


@pytest.mark.jax
def test_column_0_of_probabilities_over_devices() -> None:
    """Catches: XLA's maximum of two numbers, which loses a NaN there, so that lse is a number."""
    jax = pytest.importorskip("jax")
    from jax.sharding import PartitionSpec as P

    from xentlib.jax import vocab_parallel_logprobs

    mesh = jax.make_mesh((2,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    logits, probs = np.zeros((2, 4), np.float32), np.full((2, 4), 0.25, np.float32)
    logits[0, 0] = np.nan
    columns = P(None, "x")

    def lse(logits: Any, probs: Any) -> Any:
        return vocab_parallel_logprobs(logits, probs, vocab_parallel="x").lse

    over = jax.shard_map(lse, mesh=mesh, in_specs=(columns, columns), out_specs=P())
    assert np.isnan(np.asarray(jax.jit(over)(logits, probs))).tolist() == [True, False]
