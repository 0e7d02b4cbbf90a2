"""Ways to the loss of a language-model head in JAX, each one compiled program.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from xentlib.tools.bench.cases import Arrays, Draws, OnHost
from xentlib.tools.bench.contestant import (
    ALL,
    PER_TOKEN,
    REUSED,
    TRAINING,
    Contestant,
    Kind,
    Lineup,
    Peer,
    Wanted,
    contestants_of,
    floors,
)
from xentlib.tools.bench.peers_jax import peers

Inputs = tuple[jax.Array, ...]


def place(device: str) -> jax.Device:
    return jax.devices()[0] if device == "auto" else jax.devices(device)[0]


def draws(device: str, seed: int) -> Draws:
    where = place(device)
    return OnHost(seed) if where.platform == "cpu" else OnDevice(where, seed)


class OnDevice:
    """NumPy would take ten seconds for the 660 million numbers of Llama's head."""

    def __init__(self, device: jax.Device, seed: int) -> None:
        self.device, self.key = device, jax.random.key(seed)

    def normal(self, *shape: int) -> jax.Array:
        with jax.default_device(self.device):
            self.key, key = jax.random.split(self.key)
            return jax.random.normal(key, shape, np.float32)

    def integers(self, below: int, count: int) -> jax.Array:
        with jax.default_device(self.device):
            self.key, key = jax.random.split(self.key)
            return jax.random.randint(key, (count,), 0, below)

    def rounded(self, x: jax.Array) -> jax.Array:
        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def build(arrays: Arrays, device: str = "auto", wanted: Wanted = ALL) -> Lineup:
    """The field of JAX."""
    where = place(device)
    dtype = np.float32 if arrays.dtype == "float32" else ml_dtypes.bfloat16
    inputs = (
        jax.device_put(arrays.hidden_NH.astype(dtype), where),
        jax.device_put(arrays.weight_VH.astype(dtype), where),
        jax.device_put(arrays.labels_N.astype(np.int32), where),
        jax.device_put(arrays.upstream_N, where),
    )

    def floor(name: str) -> Floor:
        return Floor(inputs[0], inputs[1], reuse=name == REUSED)

    def make(peer: Peer, kind: Kind) -> Contestant:
        program = Program(function_of(peer, kind, arrays.softcap), inputs)
        return Contestant(peer.name, kind, program.run, program.bytes)

    contestants = [
        *floors(wanted, floor),
        *contestants_of(peers(), wanted, where.platform, arrays.softcap, make),
    ]
    return Lineup(
        tuple(contestants),
        "cpu" if where.platform == "cpu" else where.device_kind,
        partial(jax.block_until_ready, inputs),
        jax.block_until_ready,
        None,
    )


# --- the floor ----------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=2, keep_unused=True)
def product(
    a: jax.Array, b: jax.Array, out: jax.Array | None, axis_a: int, axis_b: int
) -> jax.Array:
    """Sum over one axis of each, float32; in the memory of `out` if there is one.

    That matters: the first touch of a new [N, V] buffer costs half of its GEMM on CPU (0.30 s
    against 0.19 s at N=2048, H=512, V=32,000).
    """
    return lax.dot_general(
        a,
        b,
        (((axis_a,), (axis_b,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


class Floor:
    """The three products that every loss needs: float32 results, dz in the input dtype.

    Into buffers that are already there if `reuse`.
    """

    def __init__(self, hidden_NH: jax.Array, weight_VH: jax.Array, *, reuse: bool) -> None:
        self.hidden_NH, self.weight_VH = hidden_NH, weight_VH
        shape = (hidden_NH.shape[0], weight_VH.shape[0])
        shapes = (shape, hidden_NH.shape, weight_VH.shape)
        self.old: list[jax.Array | None] = [None, None, None]
        if reuse:
            self.old = [jnp.zeros(s, jnp.float32, device=hidden_NH.device) for s in shapes]
        # float32: the logits stand in for their own gradient, as in a head that works in place.
        self.dz_NV: jax.Array | None = None
        if hidden_NH.dtype != jnp.float32:
            self.dz_NV = jax.random.normal(jax.random.key(0), shape, hidden_NH.dtype)

    def _product(self, slot: int, a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> Any:
        # One after the other: products that run at once get in each other's way.
        made = jax.block_until_ready(product(a, b, self.old[slot], axis_a, axis_b))
        if self.old[slot] is not None:
            self.old[slot] = made
        return made

    def loss(self) -> tuple[jax.Array]:
        return (self._product(0, self.hidden_NH, self.weight_VH, 1, 1),)

    def loss_and_gradient(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        (z_NV,) = self.loss()
        dz_NV = z_NV if self.dz_NV is None else self.dz_NV
        dx_NH = self._product(1, dz_NV, self.weight_VH, 1, 0)
        return z_NV, dx_NH, self._product(2, dz_NV, self.hidden_NH, 0, 0)


# --- the peers ----------------------------------------------------------------------------------


def function_of(peer: Peer, kind: Kind, softcap: float | None) -> Callable[..., Any]:
    """What is compiled: of hidden, weight, labels and the upstream gradient of each token."""

    def value(x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array, _: jax.Array) -> Any:
        return (peer.run(x_NH, w_VH, y_N, softcap, "mean"),)

    def value_and_gradient(x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array, _: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(
            lambda x, w: peer.run(x, w, y_N, softcap, "mean"), argnums=(0, 1)
        )(x_NH, w_VH)
        return (loss, *gradients)

    def per_token(x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array, upstream_N: jax.Array) -> Any:
        nll_N, pull = jax.vjp(lambda x, w: peer.run(x, w, y_N, softcap, "none"), x_NH, w_VH)
        return (nll_N, *pull(upstream_N.astype(nll_N.dtype)))

    functions: dict[Kind, Callable[..., Any]] = {
        "loss": value,
        TRAINING: value_and_gradient,
        PER_TOKEN: per_token,
    }
    return functions[kind]


class Program:
    """A function compiled for its inputs at the first call."""

    def __init__(self, function: Callable[..., Any], inputs: Inputs) -> None:
        self.function, self.inputs = function, inputs

    @cached_property
    def compiled(self) -> Any:
        return jax.jit(self.function).lower(*self.inputs).compile()

    def run(self) -> tuple[jax.Array, ...]:
        result: tuple[jax.Array, ...] = self.compiled(*self.inputs)
        return result

    def bytes(self) -> int:
        """Temporaries and results: XLA sets both aside before the program starts."""
        stats = self.compiled.memory_analysis()
        return int(stats.temp_size_in_bytes + stats.output_size_in_bytes)
