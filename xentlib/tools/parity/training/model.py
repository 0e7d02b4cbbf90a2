"""The language model that both frameworks train: sizes, seeded weights, rotary angles.

`model_torch.py` and `model_jax.py` are the same network, line by line. A decoder-only transformer:

    x = embedding[tokens]
    x = x + attention(norm(x))          causal, within a document only
    x = x + down(gelu(up(norm(x))))     two such blocks
    hidden = norm(x)                    goes into `chunked_nll` with the untied head [V, H]

Shapes: B sequences, L positions, H hidden width, A attention heads, D = H / A.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Weights = dict[str, npt.NDArray[np.float32]]


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
    """Every parameter by its torch name, [out, in] as torch keeps it, in a fixed order.

    Normal of standard deviation 0.02, what writes into the residual stream scaled down by
    sqrt(2 * layers) as in GPT-2; the first loss is then log V within a hundredth.
    """
    rng = np.random.default_rng(seed)
    H = sizes.hidden

    def normal(*shape: int, std: float = 0.02) -> npt.NDArray[np.float32]:
        return rng.normal(0.0, std, shape).astype(np.float32)

    residual = 0.02 / (2 * sizes.layers) ** 0.5
    weights = {"embedding.weight": normal(sizes.vocab, H)}
    for i in range(sizes.layers):
        weights |= {
            f"blocks.{i}.norm_attention.weight": np.ones(H, np.float32),
            f"blocks.{i}.attention.qkv.weight": normal(3 * H, H),
            f"blocks.{i}.attention.out.weight": normal(H, H, std=residual),
            f"blocks.{i}.norm_mlp.weight": np.ones(H, np.float32),
            f"blocks.{i}.up.weight": normal(sizes.mlp, H),
            f"blocks.{i}.down.weight": normal(H, sizes.mlp, std=residual),
        }
    return weights | {"norm.weight": np.ones(H, np.float32), "head": normal(sizes.vocab, H)}


def rotary_angles(
    sizes: ModelSizes,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """cos and sin [L, 1, D / 2] (arXiv 2104.09864), computed once in float64 for both frameworks.

    Only differences of positions count, so documents packed into one row need no positions of
    their own.
    """
    half = sizes.hidden // sizes.heads // 2
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(sizes.length)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
