"""The model of `xentlib.tools.parity.training.model` in Flax NNX; `model_torch.py` is its twin.

Shapes: B sequences, L positions, H hidden width, A attention heads, D = H / A.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from xentlib.tools.parity.training.model import ModelSizes, Weights, rotary_angles

# `build` fills in the weights: nothing is drawn here.
Linear = partial(nnx.Linear, use_bias=False, kernel_init=nnx.initializers.zeros)
Embed = partial(nnx.Embed, embedding_init=nnx.initializers.zeros)
RMSNorm = partial(nnx.RMSNorm, epsilon=1e-6)


def rotate(x_BLAD: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x_BLAD, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs) -> None:
        self.heads = sizes.heads
        self.qkv = Linear(sizes.hidden, 3 * sizes.hidden, rngs=rngs)
        self.out = Linear(sizes.hidden, sizes.hidden, rngs=rngs)
        cos, sin = rotary_angles(sizes)
        self.cos = nnx.Variable(jnp.asarray(cos))
        self.sin = nnx.Variable(jnp.asarray(sin))

    def __call__(self, x_BLH: jax.Array, mask_B1LL: jax.Array) -> jax.Array:
        B, L, H = x_BLH.shape
        qkv = self.qkv(x_BLH).reshape(B, L, 3 * self.heads, H // self.heads)
        q_BLAD, k_BLAD, v_BLAD = jnp.split(qkv, 3, axis=2)
        q_BLAD = rotate(q_BLAD, self.cos[...], self.sin[...])
        k_BLAD = rotate(k_BLAD, self.cos[...], self.sin[...])
        mixed_BLAD = jax.nn.dot_product_attention(q_BLAD, k_BLAD, v_BLAD, mask=mask_B1LL)
        return self.out(mixed_BLAD.reshape(B, L, H))


class Block(nnx.Module):
    def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs) -> None:
        self.norm_attention = RMSNorm(sizes.hidden, rngs=rngs)
        self.attention = Attention(sizes, rngs)
        self.norm_mlp = RMSNorm(sizes.hidden, rngs=rngs)
        self.up = Linear(sizes.hidden, sizes.mlp, rngs=rngs)
        self.down = Linear(sizes.mlp, sizes.hidden, rngs=rngs)

    def __call__(self, x_BLH: jax.Array, mask_B1LL: jax.Array) -> jax.Array:
        x_BLH = x_BLH + self.attention(self.norm_attention(x_BLH), mask_B1LL)
        up = jax.nn.gelu(self.up(self.norm_mlp(x_BLH)), approximate=True)
        x_BLH = x_BLH + self.down(up)
        return x_BLH


class LanguageModel(nnx.Module):
    def __init__(self, sizes: ModelSizes, rngs: nnx.Rngs) -> None:
        self.embedding = Embed(sizes.vocab, sizes.hidden, rngs=rngs)
        self.blocks = nnx.List([Block(sizes, rngs) for _ in range(sizes.layers)])
        self.norm = RMSNorm(sizes.hidden, rngs=rngs)
        self.head = nnx.Param(jnp.zeros((sizes.vocab, sizes.hidden)))

    def __call__(self, tokens_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
        """Hidden states [B, L, H]; the head is left to `chunked_nll`."""
        L = tokens_BL.shape[1]
        # Padding is a segment of its own, so that no row of the mask is empty.
        same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
        mask_B1LL = (same_BLL & jnp.tril(jnp.ones((L, L), bool))[None])[:, None]
        x_BLH: jax.Array = self.embedding(tokens_BL)
        for block in self.blocks:
            x_BLH = block(x_BLH, mask_B1LL)
        x_BLH = self.norm(x_BLH)
        return x_BLH


def build(sizes: ModelSizes, weights: Weights) -> LanguageModel:
    """The model with copies of `weights`, found by their torch names; kernels are [in, out]."""
    model = LanguageModel(sizes, nnx.Rngs(0))
    for path, parameter in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        *place, kind = map(str, path)
        value = weights[".".join([*place, "weight"]) if place else kind]
        parameter.set_value(jnp.array(value.T if kind == "kernel" else value))
    return model
