"""Lightning's `Trainer` with automatic optimisation: a loss without logits, gradients of one batch.

    torchrun --nproc-per-node 2 examples/lightning_module.py

Two CPU ranks train a small recurrent model under DDP on rows of uneven lengths, in steps of three
micro-batches. `training_step` returns the sum of the losses and the callback `TokenMean` makes each
step's gradient that of the mean over all its tokens. The first step's gradient is compared with
that of one process that has all logits of the whole batch. Ten seconds on two cores; needs
`pip install 'xentlib[torch]' lightning`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` trains with all logits and Lightning's mean of means.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import warnings

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from xentlib.torch import chunked_nll  # xentlib
from xentlib.torch.integrations.lightning import TokenMean  # xentlib

WORLD, BATCH, ACCUMULATE, RATE = 2, 2, 3, 0.5


class Model(lightning.LightningModule):
    def __init__(self, vocab: int, full_logits: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 64)
        self.body = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, vocab, bias=False)
        self.full_logits = full_logits
        self.stepped_on: list[Tensor] = []  # gradients of each step

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens))[0]

    def training_step(self, batch: tuple[Tensor, Tensor], index: int):
        tokens, labels = batch
        if self.full_logits:
            return F.cross_entropy(self.head(self(tokens)).flatten(0, 1), labels.flatten())
        return chunked_nll(self(tokens), self.head, labels, reduction="sum")  # xentlib

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.stepped_on.append(torch.cat([p.grad.flatten() for p in self.parameters()]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), RATE)


def micro_batches(options: argparse.Namespace, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens that go up by 3 and the next ones as labels, -100 after the first few of each row."""
    generator = torch.Generator().manual_seed(rank)
    shape, place = (BATCH, 1), torch.arange(options.length)
    found = []
    for _ in range(options.steps * ACCUMULATE):
        tokens = torch.randint(options.vocab, shape, generator=generator) + 3 * place
        lengths = 2 + (options.length - 2) * torch.rand(shape, generator=generator) ** 3
        found.append(
            (tokens % options.vocab, ((tokens + 3) % options.vocab).where(place < lengths, -100))
        )
    return found


def gradient(model: Model, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of one process, of the mean over all tokens of these batches, with all logits."""
    tokens, labels = (torch.cat(part) for part in zip(*batches))
    model.zero_grad()
    F.cross_entropy(model.head(model(tokens)).flatten(0, 1), labels.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    assert os.environ.get("WORLD_SIZE") == str(WORLD), "run it under torchrun, on two ranks"
    rank = int(os.environ["RANK"])
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")

    torch.manual_seed(0)
    model = Model(options.vocab, options.full_logits)
    alone = copy.deepcopy(model)
    mean = [] if options.full_logits else [TokenMean()]  # xentlib
    trainer = lightning.Trainer(
        callbacks=mean,  # xentlib
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        accumulate_grad_batches=ACCUMULATE,
        max_epochs=1,
        use_distributed_sampler=False,  # each rank has its own list
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(micro_batches(options, rank), batch_size=None))
    assert len(model.stepped_on) == options.steps

    if rank == 0 and not (options.full_logits or options.skip_comparison):
        window = [x for r in range(WORLD) for x in micro_batches(options, r)[:ACCUMULATE]]
        want = gradient(alone, window)
        naive = sum(gradient(alone, [x]) for x in window) / len(window)
        apart, means = (
            float((x - want).norm() / want.norm()) for x in (model.stepped_on[0], naive)
        )
        assert apart < 1e-5, f"relative distance {apart:.1e} to one process"
        print(f"relative distance to one process {apart:.1e}, mean of means {means:.1e}")


if __name__ == "__main__":
    main()
