"""Accelerate, under DDP where there are several ranks: `TokenNormalizer`.

    python examples/accelerate_ddp.py
    torchrun --nproc-per-node 2 examples/accelerate_ddp.py

Each step's gradient is that of the mean over all its tokens, of all micro-batches and ranks. Needs
`pip install 'xentlib[hf]'`. The lines to add or to change end in `# xentlib`.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from xentlib.torch import TokenNormalizer, chunked_nll, next_token_labels  # xentlib

VOCAB, LENGTH, BATCH, ACCUMULATE, STEPS = 256, 32, 4, 3, 10


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.body = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB, bias=False)

    def forward(self, tokens):
        return self.body(self.embedding(tokens))[0]  # hidden states, without head  # xentlib


# Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding.
torch.manual_seed(0)
tokens = (torch.randint(VOCAB, (240, 1)) + 3 * torch.arange(LENGTH)) % VOCAB
padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH, (240, 1))
labels = next_token_labels(tokens.masked_fill(padding, -100))  # xentlib

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
model = LanguageModel()
head = model.head
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = DataLoader(list(zip(tokens, labels)), batch_size=BATCH)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
normalizer = TokenNormalizer(model, accelerator=accelerator)  # xentlib
for step, *batches in zip(range(STEPS), *[iter(data)] * ACCUMULATE):
    with normalizer.window(labels=[y for _, y in batches]) as window:  # xentlib
        for tokens, labels in window.micro_batches(batches):  # xentlib
            out = chunked_nll(model(tokens), head, labels, reduction="sum")  # xentlib
            window.backward(out)  # xentlib
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}   loss {window.mean_loss():.3f}")  # xentlib
accelerator.end_training()
