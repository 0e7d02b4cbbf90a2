"""FSDP2 (`fully_shard`) with a head that is read where it lies: no logits, and one gather a call.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Two CPU ranks train a small transformer on rows of uneven lengths. The loss is taken outside of the
model's forward, where the head is a sharded DTensor. The gradients of the first step are compared
with those of one process that has the whole batch and all logits. Ten seconds on two cores; needs
`pip install 'xentlib[torch]'`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` trains without them.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from xentlib.torch import chunked_nll  # xentlib

HIDDEN, BATCH = 64, 4  # rows of all ranks


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
    """Tokens that go up by 3, and labels [BATCH, length] that are -100 past a row's end."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(vocab, (BATCH, 1), generator=generator)
    tokens = (start + 3 * torch.arange(length + 1)) % vocab
    ends = torch.randint(length // 4, length, (BATCH, 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(length) >= ends, -100)


def full(logits: Tensor, labels: Tensor, count: float) -> Tensor:
    """The loss of all logits."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def distance(model: nn.Module, alone: LanguageModel, tokens: Tensor, labels: Tensor) -> float:
    """Of all gradients, relative, to those of one process with the whole batch and all logits."""
    full(alone.head(alone(tokens)), labels, int((labels != -100).sum())).backward()
    got = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
    want = torch.cat([p.grad.flatten() for p in alone.parameters()])
    return float((got - want).norm() / want.norm())


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, alone = LanguageModel(options.vocab), LanguageModel(options.vocab)
    alone.load_state_dict(model.state_dict())
    for part in (*model.blocks.layers, model.head, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for step in range(options.steps):
        tokens, labels = batch(step, options.vocab, options.length)
        # FSDP2 takes the mean over ranks: over the valid tokens of all ranks, divided by their
        # number, the gradient is that of the mean over all tokens.
        count = int((labels != -100).sum()) / world
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        hidden = model(tokens[mine])
        if options.full_logits:
            loss = full(model.head(hidden), labels[mine], count)
        else:
            loss = chunked_nll(hidden, model.head, labels[mine], denominator=count).loss  # xentlib
        loss.backward()
        if step == 0 and not (options.full_logits or options.skip_comparison):
            apart = distance(model, alone, tokens, labels)
            assert apart < 1e-5, f"relative distance {apart:.1e} to full logits"
            if rank == 0:
                print(f"relative distance of the gradients to full logits: {apart:.1e}")
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3}   loss {loss / world:.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train(parser.parse_args())
    # A model that is still there keeps gloo's threads, which need Python after Python has ended.
    gc.collect()
    dist.destroy_process_group()
