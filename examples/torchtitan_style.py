"""torchtitan's tensor and sequence parallelism with FSDP2: the loss has the head, and no logits.

    torchrun --nproc-per-node 2 examples/torchtitan_style.py

Two CPU ranks share each layer and the vocabulary of a small model; FSDP2 goes around it, here with
one rank of data parallelism. A step has two micro-batches with very uneven numbers of tokens. The
loss takes hidden states and the head, as torchtitan's chunked loss does. The first step's loss and
all gradients are compared with those of one process that has full logits. Ten seconds on two cores;
needs `pip install 'xentlib[torch]'`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` trains with torch's own loss of sharded logits.
"""

from __future__ import annotations

import argparse
import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from xentlib.torch.integrations.torchtitan import HeadLoss  # xentlib

HIDDEN, LAYERS, ROWS, MICRO_BATCHES = 64, 2, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    _skip_lm_head = False  # torchtitan's name

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, HIDDEN)
        self.layers = nn.ModuleDict({str(k): Block() for k in range(LAYERS)})
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h)
        return h if self._skip_lm_head else self.lm_head(h)


def parallelize(model: Decoder) -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("fsdp", "tp"))
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    columns = {"output_layouts": Shard(-1), "use_local_output": False}
    head = ColwiseParallel(input_layouts=Shard(1), **columns)
    plan = {"tok_embeddings": rows, "norm": SequenceParallel(), "lm_head": head}
    for name in model.layers:
        plan[f"layers.{name}.norm"] = SequenceParallel()
        plan[f"layers.{name}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{name}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh["tp"], plan)
    for part in (*model.layers.values(), [model.norm, model.lm_head], model):
        fully_shard(part, mesh=mesh["fsdp"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # the loss divides by the tokens of all ranks


def batch(vocab: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens that go up by 3; labels are the next ones, few in most rows and many in some."""
    first = torch.randint(vocab, (ROWS, 1), generator=generator)
    tokens = (first + 3 * torch.arange(length + 1)) % vocab
    valid = 2 + (length - 2) * torch.rand(ROWS, 1, generator=generator) ** 4
    labels = torch.where(torch.arange(length) < valid, tokens[:, 1:], -100)
    return tokens[:, :-1], labels


def full_logits_loss(model: nn.Module, tokens: Tensor, labels: Tensor, total: int) -> Tensor:
    logits = model(tokens).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum") / total


def compare(model: nn.Module, alone: nn.Module, batches: list, total: int, got: float) -> None:
    """With one process that has the full logits."""
    losses = [full_logits_loss(alone, *x, total) for x in batches]
    sum(losses).backward()
    worst = abs(got / float(sum(losses)) - 1)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        worst = max(worst, float((p.grad.full_tensor() - q.grad).norm() / q.grad.norm()))
    assert worst < 1e-5, f"relative distance {worst:.1e} to one process"
    if dist.get_rank() == 0:
        print(f"loss and gradients: relative distance {worst:.1e} to full logits in one process")


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model, alone = Decoder(options.vocab), Decoder(options.vocab)
    alone.load_state_dict(model.state_dict())
    parallelize(model)
    loss_fn = HeadLoss()  # xentlib
    loss_fn.set_lm_head(model.lm_head)  # xentlib
    model._skip_lm_head = not options.full_logits  # xentlib
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        batches = [batch(options.vocab, options.length, generator) for _ in range(MICRO_BATCHES)]
        total, value = sum(int((labels != -100).sum()) for _, labels in batches), 0.0
        for tokens, labels in batches:
            with loss_parallel() if options.full_logits else nullcontext():
                if options.full_logits:
                    loss = full_logits_loss(model, tokens, labels, total)
                else:
                    loss, _ = loss_fn(model(tokens), labels, total)  # xentlib
                loss.backward()
            value += float(loss.full_tensor() if isinstance(loss, DTensor) else loss)
        if step == 0 and not (options.full_logits or options.skip_comparison):
            compare(model, alone, batches, total, value)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:2}   {total:4} tokens   loss {value:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)  # even: halves of it are sharded
    parser.add_argument("--steps", type=int, default=21)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(options)
    gc.collect()  # a model that is still there keeps gloo's threads, which need Python
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
