"""FSDP2 (`fully_shard`): the sharded head goes to the loss as it is.

    python examples/fsdp2.py
    torchrun --nproc-per-node 2 examples/fsdp2.py

Needs `pip install 'xentlib[torch]'`. The lines to add or to change end in `# xentlib`.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from xentlib.torch import chunked_nll, next_token_labels  # xentlib

VOCAB, LENGTH, BATCH, STEPS = 512, 64, 4, 20  # BATCH: rows of all ranks


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.body = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCAB, bias=False)

    def forward(self, tokens):
        return self.body(self.embedding(tokens))[0]  # hidden states, without head  # xentlib


def train():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LanguageModel()
    for part in (model.body, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        # Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding.
        tokens = (torch.randint(VOCAB, (BATCH, 1)) + 3 * torch.arange(LENGTH)) % VOCAB
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH, (BATCH, 1))
        labels = next_token_labels(tokens.masked_fill(padding, -100))  # xentlib
        # FSDP2 averages gradients over ranks: each divides its sum by all tokens / world.
        count = int((labels != -100).sum()) / world  # xentlib
        hidden, labels = model(tokens[rank::world]), labels[rank::world]
        loss = chunked_nll(hidden, model.head, labels, denominator=count).loss  # xentlib
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}   rank {rank}   loss {loss.item():.3f}")


one = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # without torchrun: one process
dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else one))
train()
gc.collect()  # the model, before Python ends: gloo's threads need Python
dist.destroy_process_group()
