"""What examples in PyTorch train: a small transformer that returns hidden states, and its text.

The model never makes logits: its head is a `torch.nn.Linear` whose weight is for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from xentlib.torch import next_token_labels


class LanguageModel(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        layer = nn.TransformerEncoderLayer(
            hidden, 4, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden: Tensor = self.norm(self.blocks(self.embedding(tokens), mask=mask, is_causal=True))
        return hidden


def uneven_batches(text: np.ndarray, size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels [size, length] of all ranks, rows of uneven lengths, without end."""
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, text.size - length, size)
        tokens = torch.from_numpy(np.stack([text[i : i + length] for i in starts])).long()
        labels = next_token_labels(tokens)
        for row, valid in enumerate(rng.integers(length // 4, length, size)):
            labels[row, valid:] = -100
        yield tokens, labels
