"""A loop of your own in plain PyTorch: the loss of hidden states and the head.

    python examples/train_torch.py

Needs `pip install 'xentlib[torch]'`. The lines to add or to change end in `# xentlib`.
"""

import torch
from torch import nn

from xentlib.torch import Evaluation, chunked_nll, next_token_labels  # xentlib

VOCAB, LENGTH, BATCH, STEPS = 512, 64, 4, 40


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.body = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB, bias=False)

    def forward(self, tokens):
        return self.body(self.embedding(tokens))[0]  # hidden states, without head  # xentlib


def batch(step):
    """Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding."""
    generator = torch.Generator().manual_seed(step)
    first = torch.randint(VOCAB, (BATCH, 1), generator=generator)
    tokens = (first + 3 * torch.arange(LENGTH)) % VOCAB
    padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH, (BATCH, 1), generator=generator)
    return tokens, next_token_labels(tokens.masked_fill(padding, -100))  # xentlib


torch.manual_seed(0)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    tokens, labels = batch(step)
    loss = chunked_nll(model(tokens), model.head, labels).loss  # xentlib
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}   loss {loss.item():.3f}")

evaluation = Evaluation()  # xentlib
with torch.no_grad():
    for k in range(2):
        tokens, labels = batch(STEPS + k)
        evaluation.add(chunked_nll(model(tokens), model.head, labels, reduction="sum"))  # xentlib
print(f"evaluation   loss {evaluation.mean_loss():.3f}")  # xentlib
