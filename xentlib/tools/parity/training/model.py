"""The language model that both frameworks train: sizes, seeded weights, and the network, once for
both. A decoder-only transformer:

    x = embedding[tokens]
    x = x + attention(norm(x))          causal, within a document only
    x = x + down(gelu(up(norm(x))))     two such blocks
    hidden = norm(x)                    goes into `chunked_nll` with the untied head [V, H]

Shapes: B sequences, L positions, H hidden width, A attention heads, D = H / A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]
EPSILON = 1e-6  # of the norms


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Integers that fix the network."""

    vocab: int
    length: int = 128
    hidden: int = 128
    heads: int = 4
    layers: int = 2
    mlp: int = 512


def initial_weights(sizes: ModelSizes, seed: int = 0) -> Weights:
    """Every parameter by name, matrices [out, in] as torch keeps them, in a fixed order.

    Normal of standard deviation 0.02, what writes into the residual stream scaled down by
    sqrt(2 * layers) as in GPT-2; the first loss is then log V within a hundredth.
    """
    rng = np.random.default_rng(seed)
    H = sizes.hidden

    def normal(*shape: int, std: float = 0.02) -> npt.NDArray[np.float32]:
        return rng.normal(0.0, std, shape).astype(np.float32)

    residual = 0.02 / (2 * sizes.layers) ** 0.5
    weights = {"embedding": normal(sizes.vocab, H)}
    for i in range(sizes.layers):
        weights |= {
            f"block{i}_norm_attention": np.ones(H, np.float32),
            f"block{i}_qkv": normal(3 * H, H),
            f"block{i}_out": normal(H, H, std=residual),
            f"block{i}_norm_mlp": np.ones(H, np.float32),
            f"block{i}_up": normal(sizes.mlp, H),
            f"block{i}_down": normal(H, sizes.mlp, std=residual),
        }
    return weights | {"norm": np.ones(H, np.float32), "head": normal(sizes.vocab, H)}


def rotary_angles(sizes: ModelSizes) -> list[npt.NDArray[np.float32]]:
    """cos and sin [L, 1, D / 2] (arXiv 2104.09864), computed once in float64 for both frameworks.

    Only differences of positions count, so documents packed into one row need no positions of
    their own.
    """
    half = sizes.hidden // sizes.heads // 2
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(sizes.length)[:, None, None] * frequencies
    return [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]


class Operators(NamedTuple):
    """What the network is made of, in one framework."""

    xp: Any  # what both name alike
    embedding: Callable[..., Any]  # of tokens and the table
    linear: Callable[..., Any]  # of x and a matrix, as the framework keeps it
    norm: Callable[..., Any]  # of x and the factors of its root mean square
    gelu: Callable[..., Any]
    attention: Callable[..., Any]  # of q, k and v [B, L, A, D], and the mask [B, 1, L, L]
    split: Callable[..., Any]  # of x, the number of parts and the dimension


def hidden_states(
    operators: Operators,
    weights: Mapping[str, Any],
    sizes: ModelSizes,
    tokens_BL: Any,
    segments_BL: Any,
) -> Any:
    """Hidden states [B, L, H]; the head is left to `chunked_nll`."""
    xp, embedding, linear, norm, gelu, attention, split = operators
    B, L = tokens_BL.shape
    A, H = sizes.heads, sizes.hidden
    cos, sin = (xp.asarray(x) for x in rotary_angles(sizes))
    # Padding is a segment of its own, so that no row of the mask is empty.
    same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
    mask_B1LL = (same_BLL & xp.tril(xp.ones((L, L), dtype=xp.bool)))[:, None]

    def rotate(x_BLAD: Any) -> Any:
        a, b = split(x_BLAD, 2, -1)
        return xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x_BLH = embedding(tokens_BL, weights["embedding"])
    for i in range(sizes.layers):
        normed_BLH = norm(x_BLH, weights[f"block{i}_norm_attention"])
        qkv = linear(normed_BLH, weights[f"block{i}_qkv"]).reshape(B, L, 3 * A, H // A)
        q_BLAD, k_BLAD, v_BLAD = split(qkv, 3, 2)
        mixed_BLAD = attention(rotate(q_BLAD), rotate(k_BLAD), v_BLAD, mask_B1LL)
        x_BLH = x_BLH + linear(mixed_BLAD.reshape(B, L, H), weights[f"block{i}_out"])
        up = gelu(linear(norm(x_BLH, weights[f"block{i}_norm_mlp"]), weights[f"block{i}_up"]))
        x_BLH = x_BLH + linear(up, weights[f"block{i}_down"])
    return norm(x_BLH, weights["norm"])
