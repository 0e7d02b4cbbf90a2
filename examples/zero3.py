"""DeepSpeed ZeRO-3: the head is a module of its own, `NLLHead`, whose forward takes the labels.

    python examples/zero3.py
    torchrun --nproc-per-node 2 examples/zero3.py

Needs `pip install 'xentlib[deepspeed]'`. The first run compiles an operator with g++, for 20 s. The
lines to add or to change end in `# xentlib`.
"""

import gc
import os

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from xentlib.torch import NLLHead, next_token_labels  # xentlib

VOCAB, LENGTH, BATCH, STEPS = 512, 64, 4, 20  # BATCH: rows of all ranks


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 64)
        self.head = NLLHead.from_linear(nn.Linear(64, VOCAB, bias=False))  # xentlib

    def forward(self, tokens, labels, count):
        hidden = torch.tanh(self.embedding(tokens))
        return self.head(hidden, labels, denominator=count).loss  # xentlib


def train():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LanguageModel()
    config = {"train_micro_batch_size_per_gpu": BATCH // world}
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config["zero_allow_untested_optimizer"] = True
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        # Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding.
        tokens = (torch.randint(VOCAB, (BATCH, 1)) + 3 * torch.arange(LENGTH)) % VOCAB
        padding = torch.arange(LENGTH) >= torch.randint(2, LENGTH, (BATCH, 1))
        labels = next_token_labels(tokens.masked_fill(padding, -100))  # xentlib
        # ZeRO averages gradients over ranks: each divides its sum by all tokens / world.
        count = int((labels != -100).sum()) / world  # xentlib
        loss = engine(tokens[rank::world], labels[rank::world], count)
        engine.backward(loss)
        engine.step()
        print(f"step {step}   rank {rank}   loss {loss.item():.3f}")


os.environ.setdefault("LOCAL_RANK", "0")  # which DeepSpeed reads
one = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # without torchrun: one process
dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else one))
train()
gc.collect()  # the model, before Python ends: gloo's threads need Python
dist.destroy_process_group()
