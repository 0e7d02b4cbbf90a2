"""The model of `xentlib.tools.parity.training.model` in PyTorch; `model_jax.py` is its twin.

Shapes: B sequences, L positions, H hidden width, A attention heads, D = H / A.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xentlib.tools.parity.training.model import ModelSizes, Weights, rotary_angles


def rotate(x_BLAD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_BLAD.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        cos, sin = rotary_angles(sizes)
        self.register_buffer("cos", torch.from_numpy(cos), persistent=False)
        self.register_buffer("sin", torch.from_numpy(sin), persistent=False)

    def forward(self, x_BLH: Tensor, mask_B1LL: Tensor) -> Tensor:
        B, L, H = x_BLH.shape
        qkv = self.qkv(x_BLH).reshape(B, L, 3 * self.heads, H // self.heads)
        q_BLAD, k_BLAD, v_BLAD = qkv.chunk(3, dim=2)
        q_BLAD = rotate(q_BLAD, self.cos, self.sin)
        k_BLAD = rotate(k_BLAD, self.cos, self.sin)
        # PyTorch wants the heads before the positions.
        q_BALD, k_BALD, v_BALD = (x.transpose(1, 2) for x in (q_BLAD, k_BLAD, v_BLAD))
        mixed_BALD = F.scaled_dot_product_attention(q_BALD, k_BALD, v_BALD, attn_mask=mask_B1LL)
        out: Tensor = self.out(mixed_BALD.transpose(1, 2).reshape(B, L, H))
        return out


class Block(nn.Module):
    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.attention = Attention(sizes)
        self.norm_mlp = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.up = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.down = nn.Linear(sizes.mlp, sizes.hidden, bias=False)

    def forward(self, x_BLH: Tensor, mask_B1LL: Tensor) -> Tensor:
        x_BLH = x_BLH + self.attention(self.norm_attention(x_BLH), mask_B1LL)
        up = F.gelu(self.up(self.norm_mlp(x_BLH)), approximate="tanh")
        x_BLH = x_BLH + self.down(up)
        return x_BLH


class LanguageModel(nn.Module):
    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.layers)])
        self.norm = nn.RMSNorm(sizes.hidden, eps=1e-6)
        self.head = nn.Parameter(torch.zeros(sizes.vocab, sizes.hidden))

    def forward(self, tokens_BL: Tensor, segments_BL: Tensor) -> Tensor:
        """Hidden states [B, L, H]; the head is left to `chunked_nll`."""
        L = tokens_BL.shape[1]
        # Padding is a segment of its own, so that no row of the mask is empty.
        same_BLL = segments_BL[:, :, None] == segments_BL[:, None, :]
        mask_B1LL = (same_BLL & torch.ones(L, L, dtype=torch.bool).tril())[:, None]
        x_BLH: Tensor = self.embedding(tokens_BL)
        for block in self.blocks:
            x_BLH = block(x_BLH, mask_B1LL)
        x_BLH = self.norm(x_BLH)
        return x_BLH


def build(sizes: ModelSizes, weights: Weights) -> LanguageModel:
    """The model with copies of `weights`."""
    model = LanguageModel(sizes)
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return model
