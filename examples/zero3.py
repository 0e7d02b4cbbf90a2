"""DeepSpeed ZeRO-3 with the head as a module of its own: `NLLHead`, no logits.

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 examples/zero3.py

Two CPU ranks train a small transformer on rows of uneven lengths. The head's own forward takes the
labels, so that DeepSpeed's hooks gather it and reduce its gradient. The gradients of the first step
are compared with those of one process that has the whole batch and all logits. A quarter of a
minute on two cores, and 20 s more the first time, when DeepSpeed compiles an operator with g++;
needs `pip install 'xentlib[deepspeed]'`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` trains without them.
"""

from __future__ import annotations

import argparse
import copy
import gc

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from torch import Tensor, nn

from xentlib.torch import NLLHead  # xentlib

HIDDEN, BATCH = 64, 4  # rows of all ranks
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH // 2,
    "gradient_clipping": 0.0,
    # Parameters below the threshold are never partitioned: here the whole model would not be.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


class LanguageModel(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor, count: float) -> Tensor:
        """The sum of the losses of valid tokens, over a count."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.blocks(self.embedding(tokens), mask=mask, is_causal=True)
        if isinstance(self.head, NLLHead):  # xentlib
            return self.head(hidden, labels, denominator=count).loss  # xentlib
        logits = self.head(hidden).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), reduction="sum") / count


def batch(step: int, vocab: int, length: int) -> tuple[Tensor, Tensor]:
    """Tokens that go up by 3, and labels [BATCH, length] that are -100 past a row's end."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(vocab, (BATCH, 1), generator=generator)
    tokens = (start + 3 * torch.arange(length + 1)) % vocab
    ends = torch.randint(length // 4, length, (BATCH, 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].masked_fill(torch.arange(length) >= ends, -100)


def distance(model: nn.Module, alone: LanguageModel, tokens: Tensor, labels: Tensor) -> float:
    """Of all gradients, relative, to those of one process with the whole batch and all logits."""
    alone(tokens, labels, int((labels != -100).sum())).backward()
    got = torch.cat([safe_get_full_grad(p).flatten() for p in model.parameters()])
    want = torch.cat([p.grad.flatten() for p in alone.parameters()])
    return float((got - want).norm() / want.norm())


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LanguageModel(options.vocab)
    alone = copy.deepcopy(model)
    if not options.full_logits:
        model.head = NLLHead.from_linear(model.head)  # xentlib
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]

    for step in range(options.steps):
        tokens, labels = batch(step, options.vocab, options.length)
        # DeepSpeed takes the mean over ranks: over the valid tokens of all ranks, divided by their
        # number, the gradient is that of the mean over all tokens.
        count = int((labels != -100).sum()) / world
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        loss = engine(tokens[mine], labels[mine], count)
        engine.backward(loss)
        if step == 0 and not (options.full_logits or options.skip_comparison):
            apart = distance(engine.module, alone, tokens, labels)
            assert apart < 1e-5, f"relative distance {apart:.1e} to full logits"
            if rank == 0:
                print(f"relative distance of the gradients to full logits: {apart:.1e}")
        engine.step()
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
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    train(parser.parse_args())
    # A model that is still there keeps gloo's threads, which need Python after Python has ended.
    gc.collect()
    dist.destroy_process_group()
