"""Implementations of a language-model head's loss in JAX, each one compiled program: other
libraries' and the plain ones.

Each is called as (hidden, weight, labels, softcap, reduction), see `Implementation`; a library's
function is looked up when it is called.

Shapes: N tokens, H hidden width, V vocabulary, K tiles of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array, lax

import xentlib.jax
from xentlib.plan import plan_chunks
from xentlib.tools.bench.cases import Arrays, OnHost
from xentlib.tools.bench.implementation import (
    PER_TOKEN,
    BareProducts,
    Implementation,
    Kind,
    Lineup,
    not_installed,
    ours,
)

Softcap = float | None
Tiles = tuple[Array, Array]


def logits(x_NH: Array, w_VH: Array, softcap: Softcap, dtype: Any) -> Array:
    """float32, through `dtype`; XLA on a CPU leaves out a rounding that is undone at once."""
    highest = lax.Precision.HIGHEST
    product = jnp.einsum("nh,vh->nv", x_NH, w_VH, precision=highest, preferred_element_type=dtype)
    z_NV = product.astype(jnp.float32)
    return z_NV if softcap is None else softcap * jnp.tanh(z_NV / softcap)


def full(x_NH: Array, w_VH: Array, y_N: Array, softcap: Softcap, reduction: str) -> Array:
    optax = import_module("optax")
    z_NV = logits(x_NH, w_VH, softcap, jnp.float32)
    nll_N: Array = optax.softmax_cross_entropy_with_integer_labels(z_NV, y_N)
    return nll_N.mean() if reduction == "mean" else nll_N


def tokamax(x_NH: Array, w_VH: Array, y_N: Array, _: None, reduction: str) -> Any:
    loss = import_module("tokamax").linear_softmax_cross_entropy_loss
    # Its other implementation is a kernel for TPUs.
    return loss(x_NH, y_N, w_VH.T, reduction=reduction, implementation="xla")


# --- tiling as in MaxText -------------------------------------------------------------------------


def tiled(x_NH: Array, w_VH: Array, y_N: Array, softcap: Softcap, _: str) -> Array:
    """MaxText's vocabulary tiling, written from its formula: a scan over equal groups of tokens.

    One-hot labels; logits rounded to the inputs' dtype; the backward computes them again, and adds
    up d weight in the weight's dtype. Groups are as large as our chunks or smaller: N is a multiple
    of their number there.
    """
    num_tokens = x_NH.shape[0]
    fewest = max(2, plan_chunks(num_tokens, *w_VH.shape).num_chunks)
    num_tiles = next(k for k in range(fewest, num_tokens + 1) if num_tokens % k == 0)
    total: Array = tiled_sum(softcap, num_tiles, x_NH, w_VH, y_N)
    return total / num_tokens


def tile_sum(softcap: Softcap, x_TH: Array, w_VH: Array, y_T: Array) -> Array:
    z_TV = logits(x_TH, w_VH, softcap, x_TH.dtype)
    one_hot_TV = jax.nn.one_hot(y_T, w_VH.shape[0])
    return jnp.sum(jax.nn.logsumexp(z_TV, -1) - jnp.sum(z_TV * one_hot_TV, -1))


def tiles(num_tiles: int, x_NH: Array, y_N: Array) -> Tiles:
    return x_NH.reshape(num_tiles, -1, x_NH.shape[1]), y_N.reshape(num_tiles, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tiled_sum(softcap: Softcap, num_tiles: int, x_NH: Array, w_VH: Array, y_N: Array) -> Array:
    def step(total: Array, tile: Tiles) -> tuple[Array, None]:
        return total + tile_sum(softcap, tile[0], w_VH, tile[1]), None

    total: Array = lax.scan(step, jnp.float32(0), tiles(num_tiles, x_NH, y_N))[0]
    return total


def tiled_forward(softcap: Softcap, num_tiles: int, *inputs: Array) -> tuple[Array, Any]:
    return tiled_sum(softcap, num_tiles, *inputs), inputs


def tiled_backward(softcap: Softcap, num_tiles: int, inputs: Any, upstream: Array) -> Any:
    x_NH, w_VH, y_N = inputs

    def step(dw_VH: Array, tile: Tiles) -> tuple[Array, Array]:
        gradient = jax.grad(partial(tile_sum, softcap), argnums=(0, 1))
        dx_TH, more_VH = gradient(tile[0], w_VH, tile[1])
        return dw_VH + more_VH, dx_TH

    dw_VH, dx_KTH = lax.scan(step, jnp.zeros_like(w_VH), tiles(num_tiles, x_NH, y_N))
    dx_NH = (dx_KTH.reshape(x_NH.shape) * upstream).astype(x_NH.dtype)
    return dx_NH, (dw_VH * upstream).astype(w_VH.dtype), None


tiled_sum.defvjp(tiled_forward, tiled_backward)


def implementations() -> list[Implementation]:
    """Ours first; whoever is not here has an excuse."""
    absent = not_installed("tokamax")
    return [
        ours(xentlib.jax),
        Implementation("optax, full logits", full, not_installed("optax")),
        Implementation("tokamax, xla", tokamax, absent, softcap=False, per_token=False),
        Implementation("MaxText-style tiling", tiled, per_token=False),
    ]


# --- how they are run ---------------------------------------------------------------------------


def place(device: str) -> jax.Device:
    return jax.devices()[0] if device == "auto" else jax.devices(device)[0]


def draws(device: str, seed: int) -> OnHost:
    where = place(device)
    return OnHost(seed) if where.platform == "cpu" else OnDevice(where, seed)


class OnDevice(OnHost):
    """NumPy would take ten seconds for the 660 million numbers of Llama's head."""

    def __init__(self, device: jax.Device, seed: int) -> None:
        self.key = jax.device_put(jax.random.key(seed), device)

    def next_key(self) -> Any:
        self.key, key = jax.random.split(self.key)
        return key

    def normal(self, *shape: int) -> Array:
        return jax.random.normal(self.next_key(), shape, np.float32)

    def integers(self, below: int, count: int) -> Array:
        return jax.random.randint(self.next_key(), (count,), 0, below)


class Field(Lineup):
    """The field of JAX."""

    def place(self, arrays: Arrays, device: str) -> tuple[list[Implementation], str]:
        where = place(device)
        dtype = np.float32 if arrays.dtype == "float32" else ml_dtypes.bfloat16
        self.device = "cpu" if where.platform == "cpu" else where.device_kind
        hidden_NH, weight_VH = arrays.hidden_NH.astype(dtype), arrays.weight_VH.astype(dtype)
        labels_N = arrays.labels_N.astype(np.int32)
        self.inputs = jax.device_put((hidden_NH, weight_VH, labels_N, arrays.upstream_N), where)
        return implementations(), where.platform

    def bare(self, *, reuse: bool) -> BareProducts:
        hidden_NH, weight_VH, *_ = self.inputs
        shapes = ((len(hidden_NH), len(weight_VH)), hidden_NH.shape, weight_VH.shape)
        buffers: list[Array | None] = [None, None, None]
        if reuse:
            buffers = [jnp.zeros(shape, jnp.float32, device=hidden_NH.device) for shape in shapes]
        dz_NV = None
        if hidden_NH.dtype != jnp.float32:
            dz_NV = jax.random.normal(jax.random.key(0), shapes[0], hidden_NH.dtype)

        def product(slot: int, a: Array, b: Array, axis_a: int, axis_b: int) -> Any:
            # One after the other: products that run at once get in each other's way.
            result = jax.block_until_ready(product_into(buffers[slot], a, b, axis_a, axis_b))
            if reuse:
                buffers[slot] = result
            return result

        return BareProducts(product, hidden_NH, weight_VH, dz_NV)

    def call(self, row: Implementation, kind: Kind) -> dict[str, Any]:
        reduction = "none" if kind == PER_TOKEN else "mean"

        def function(x_NH: Array, w_VH: Array, y_N: Array, upstream_N: Array) -> tuple[Array, ...]:
            def loss(x_NH: Array, w_VH: Array) -> Any:
                return row.run(x_NH, w_VH, y_N, self.softcap, reduction)

            if kind == "loss":
                return (loss(x_NH, w_VH),)
            value, pull = jax.vjp(loss, x_NH, w_VH)
            upstream = upstream_N if kind == PER_TOKEN else jnp.ones_like(value)
            return (value, *pull(upstream.astype(value.dtype)))

        program = Program(function, self.inputs)
        return {"run": program.run, "peak_bytes": program.bytes}

    def wait(self) -> None:
        jax.block_until_ready(self.inputs)

    def ready(self, result: Any) -> None:
        jax.block_until_ready(result)


class Program:
    """A function compiled for its inputs at the first call."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Array, ...]) -> None:
        self.function, self.inputs = function, inputs

    @cached_property
    def compiled(self) -> Any:
        return jax.jit(self.function).lower(*self.inputs).compile()

    def run(self) -> Any:
        return self.compiled(*self.inputs)

    def bytes(self) -> int:
        """Temporaries and results: XLA sets both aside before the program starts."""
        stats = self.compiled.memory_analysis()
        return int(stats.temp_size_in_bytes + stats.output_size_in_bytes)


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0, keep_unused=True)
def product_into(out: Array | None, a: Array, b: Array, axis_a: int, axis_b: int) -> Array:
    """Sum over one axis of each, float32; in the memory of `out` if there is one.

    That matters: the first touch of a new [N, V] buffer costs half of its GEMM on CPU (0.30 s
    against 0.19 s at N=2048, H=512, V=32,000).
    """
    axes = (((axis_a,), (axis_b,)), ((), ()))
    highest = lax.Precision.HIGHEST
    return lax.dot_general(a, b, axes, precision=highest, preferred_element_type=jnp.float32)
