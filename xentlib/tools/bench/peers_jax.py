"""Ways to the loss of a language-model head in JAX: other libraries' and the plain ones.

Each is called as (hidden, weight, labels, softcap, reduction), see `Peer`; a library's function is
looked up when it is called.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax import chunked_logprobs, chunked_nll
from xentlib.plan import plan_chunks
from xentlib.tools.bench.contestant import OURS, Peer, not_installed


def ours(
    x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array, softcap: float | None, reduction: str
) -> jax.Array:
    if reduction == "none":
        logprobs_N: jax.Array = chunked_logprobs(x_NH, w_VH, y_N, softcap=softcap).logprobs
        return -logprobs_N
    loss: jax.Array = chunked_nll(x_NH, w_VH, y_N, softcap=softcap).loss
    return loss


def logits(x_NH: jax.Array, w_VH: jax.Array, softcap: float | None, dtype: Any) -> jax.Array:
    """float32, through `dtype`; XLA on a CPU leaves out a rounding that is undone at once."""
    z_NV = jnp.einsum(
        "nh,vh->nv",
        x_NH,
        w_VH,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    ).astype(jnp.float32)
    return z_NV if softcap is None else softcap * jnp.tanh(z_NV / softcap)


def full(
    x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array, softcap: float | None, reduction: str
) -> jax.Array:
    optax = import_module("optax")
    z_NV = logits(x_NH, w_VH, softcap, jnp.float32)
    nll_N: jax.Array = optax.softmax_cross_entropy_with_integer_labels(z_NV, y_N)
    return nll_N.mean() if reduction == "mean" else nll_N


def tokamax(
    x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array, softcap: None, reduction: str
) -> jax.Array:
    api = import_module("tokamax")
    # Its other implementation is a kernel for TPUs.
    loss: jax.Array = api.linear_softmax_cross_entropy_loss(
        x_NH, y_N, w_VH.T, reduction=reduction, implementation="xla"
    )
    return loss


# --- tiling as in MaxText -------------------------------------------------------------------------


def tiled(
    x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array, softcap: float | None, reduction: str
) -> jax.Array:
    """MaxText's vocabulary tiling, written from its formula: a scan over equal groups of tokens.

    One-hot labels; logits rounded to the inputs' dtype; the backward computes them again, and adds
    up d weight in the weight's dtype. Groups are as large as our chunks or smaller: N is a multiple
    of their number there.
    """
    num_tokens = x_NH.shape[0]
    fewest = max(2, plan_chunks(num_tokens, *w_VH.shape).num_chunks)
    num_tiles = next(k for k in range(fewest, num_tokens + 1) if num_tokens % k == 0)
    total: jax.Array = tiled_sum(softcap, num_tiles, x_NH, w_VH, y_N)
    return total / num_tokens


def tile_sum(softcap: float | None, x_TH: jax.Array, w_VH: jax.Array, y_T: jax.Array) -> jax.Array:
    z_TV = logits(x_TH, w_VH, softcap, x_TH.dtype)
    one_hot_TV = jax.nn.one_hot(y_T, w_VH.shape[0])
    return jnp.sum(jax.nn.logsumexp(z_TV, -1) - jnp.sum(z_TV * one_hot_TV, -1))


Tiles = tuple[jax.Array, jax.Array]


def tiles(num_tiles: int, x_NH: jax.Array, y_N: jax.Array) -> Tiles:
    return x_NH.reshape(num_tiles, -1, x_NH.shape[1]), y_N.reshape(num_tiles, -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def tiled_sum(
    softcap: float | None, num_tiles: int, x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array
) -> jax.Array:
    def step(total: jax.Array, tile: Tiles) -> tuple[jax.Array, None]:
        return total + tile_sum(softcap, tile[0], w_VH, tile[1]), None

    total: jax.Array = lax.scan(step, jnp.float32(0), tiles(num_tiles, x_NH, y_N))[0]
    return total


def tiled_forward(
    softcap: float | None, num_tiles: int, x_NH: jax.Array, w_VH: jax.Array, y_N: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return tiled_sum(softcap, num_tiles, x_NH, w_VH, y_N), (x_NH, w_VH, y_N)


def tiled_backward(
    softcap: float | None, num_tiles: int, kept: tuple[jax.Array, ...], upstream: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_NH, w_VH, y_N = kept

    def step(dw_VH: jax.Array, tile: Tiles) -> tuple[jax.Array, jax.Array]:
        gradient = jax.grad(partial(tile_sum, softcap), argnums=(0, 1))
        dx_TH, more_VH = gradient(tile[0], w_VH, tile[1])
        return dw_VH + more_VH, dx_TH

    dw_VH, dx_KTH = lax.scan(step, jnp.zeros_like(w_VH), tiles(num_tiles, x_NH, y_N))
    dx_NH = (dx_KTH.reshape(x_NH.shape) * upstream).astype(x_NH.dtype)
    return dx_NH, (dw_VH * upstream).astype(w_VH.dtype), None


tiled_sum.defvjp(tiled_forward, tiled_backward)


def peers() -> list[Peer]:
    """Ours first; whoever is not here has an excuse."""
    return [
        Peer(OURS, ours),
        Peer("optax, full logits", full, not_installed("optax")),
        Peer("tokamax, xla", tokamax, not_installed("tokamax"), softcap=False, per_token=False),
        Peer("MaxText-style tiling", tiled, per_token=False),
    ]
