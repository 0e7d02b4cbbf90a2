"""A loop of one's own in plain PyTorch: the loss from hidden states and the head, no logits.

    python examples/train_torch.py

A two-layer transformer learns rows of uneven lengths, two documents in each, and is evaluated on
others. The gradients of the first step are compared with those of all logits. Five seconds; needs
`pip install 'xentlib[torch]'`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` takes the loss of all logits, of the same labels.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xentlib.torch import Evaluation, chunked_nll, next_token_labels  # xentlib

HIDDEN, BATCH = 64, 4


class LanguageModel(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states: the loss, and not the model, has the head."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden: Tensor = self.blocks(self.embedding(tokens), mask=mask, is_causal=True)
        return hidden


def batch(step: int, vocab: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens that go up by 3, and labels: each the next token, none across a document's end."""
    generator = torch.Generator().manual_seed(step)
    place = torch.arange(length)
    ends = torch.randint(length // 4, length, (BATCH, 1), generator=generator)
    documents = (place >= ends).long()
    starts = torch.randint(vocab, (BATCH, 2), generator=generator)
    tokens = (starts.gather(1, documents) + 3 * place) % vocab
    return tokens, next_token_labels(tokens, segment_ids=documents)  # xentlib


def full(model: LanguageModel, hidden: Tensor, labels: Tensor) -> Tensor:
    """The mean over valid tokens, of all logits."""
    return F.cross_entropy(model.head(hidden).flatten(0, 1), labels.flatten())


def distance(model: LanguageModel, tokens: Tensor, labels: Tensor) -> float:
    """Of all gradients, relative, to those of all logits."""
    want = torch.autograd.grad(full(model, model(tokens), labels), list(model.parameters()))
    got = torch.cat([p.grad.flatten() for p in model.parameters()])
    return float((got - torch.cat([g.flatten() for g in want])).norm() / got.norm())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = LanguageModel(options.vocab)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for step in range(options.steps):
        tokens, labels = batch(step, options.vocab, options.length)
        hidden = model(tokens)
        if options.full_logits:
            loss = full(model, hidden, labels)
        else:
            loss = chunked_nll(hidden, model.head, labels).loss  # xentlib
        loss.backward()
        if step == 0 and not (options.full_logits or options.skip_comparison):
            apart = distance(model, tokens, labels)
            assert apart < 1e-5, f"relative distance {apart:.1e} to full logits"
            print(f"relative distance of the gradients to full logits: {apart:.1e}")
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"step {step + 1:3}   loss {loss.item():.3f}", flush=True)

    if options.full_logits:
        return
    evaluation = Evaluation()  # xentlib
    with torch.no_grad():
        for k in range(2):
            tokens, labels = batch(-1 - k, options.vocab, options.length)
            out = chunked_nll(model(tokens), model.head, labels, reduction="sum")  # xentlib
            evaluation.add(out)  # xentlib
    print(f"evaluation   loss {evaluation.mean_loss():.3f}")  # xentlib


if __name__ == "__main__":
    main()
