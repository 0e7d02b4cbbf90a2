"""torchtitan's tensor parallelism with FSDP2: `HeadLoss` takes hidden states and the sharded head.

    python examples/torchtitan_style.py
    torchrun --nproc-per-node 2 examples/torchtitan_style.py

The model has the parts that torchtitan's has, and torchtitan itself is not needed. Needs
`pip install 'xentlib[torch]'`. The lines to add or to change end in `# xentlib`.
"""

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, parallel

from xentlib.torch.integrations.torchtitan import HeadLoss  # xentlib

VOCAB, LENGTH, BATCH, STEPS = 256, 64, 4, 20


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB, bias=False)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, tokens):
        return self.down(torch.relu(self.up(self.embed(tokens))))  # hidden states  # xentlib


def train():
    torch.manual_seed(0)
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("fsdp", "tp"))
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan = {"up": columns, "down": rows, "lm_head": columns}
    plan["embed"] = parallel.RowwiseParallel(input_layouts=Replicate())
    model = parallel.parallelize_module(Decoder(), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["fsdp"])
    model.set_gradient_divide_factor(1.0)  # `HeadLoss` divides by the tokens of all ranks
    loss_fn = HeadLoss()  # xentlib
    loss_fn.set_lm_head(model.lm_head)  # xentlib
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        # Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding.
        tokens = (torch.randint(VOCAB, (BATCH, 1)) + 3 * torch.arange(LENGTH + 1)) % VOCAB
        labels = tokens[:, 1:].where(torch.arange(LENGTH) <= LENGTH * torch.rand(BATCH, 1), -100)
        loss, _ = loss_fn(model(tokens[:, :-1]), labels, (labels != -100).sum())  # xentlib
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}   loss {loss.item():.3f}")


one = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # without torchrun: one process
dist.init_process_group("gloo", **({} if dist.is_torchelastic_launched() else one))
train()
gc.collect()  # the model, before Python ends: gloo's threads need Python
dist.destroy_process_group()
