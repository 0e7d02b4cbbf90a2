"""A loop with Accelerate under DDP, its gradients those of one batch: `TokenNormalizer`.

    torchrun --nproc-per-node 2 examples/accelerate_ddp.py

Two CPU ranks train a small model in windows whose token counts differ between ranks and
micro-batches. One micro-batch has no valid token. In two windows of three the ranks have different
numbers of micro-batches: one and four, or none and four. Each window's gradient is compared with
that of one process on the concatenated batch, and the replicas with each other, bit for bit. So is
the loss of an evaluation, of no batch on one rank and four on the other. Ten seconds on two cores;
needs `pip install 'xentlib[hf]'`. Lines marked `# xentlib` are those to add or to change;
`--full-logits` trains on means of means with all logits, and as many micro-batches on each rank.
"""

from __future__ import annotations

import argparse
import copy

import accelerate
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xentlib.torch import Evaluation, TokenNormalizer, chunked_nll, next_token_labels  # xentlib

HIDDEN, BATCH = 64, 4
ACCUMULATE = 3  # micro-batches of a window, where both ranks have as many


class LanguageModel(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, HIDDEN)
        self.body = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states: the loss, and not the model, has the head."""
        hidden: Tensor = self.body(self.embedding(tokens))[0]
        return hidden


def window_of(options: argparse.Namespace, step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of a rank: tokens and labels [BATCH, LENGTH], rows of uneven lengths."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    number = (ACCUMULATE, 1 + 3 * rank, 4 * rank)[0 if options.full_logits else step % 3]
    made = []
    for k in range(number):
        start = torch.randint(options.vocab, (BATCH, 1), generator=generator)
        tokens = (start + 3 * torch.arange(options.length)) % options.vocab
        longest = options.length if rank else 8  # rank 0 has the short ones
        lengths = torch.randint(2, longest + 1, (BATCH, 1), generator=generator)
        if rank == 1 and k == 2 and not options.full_logits:
            lengths = torch.zeros_like(lengths)
        y = next_token_labels(tokens).masked_fill(torch.arange(options.length) >= lengths, -100)
        made.append((tokens, y))
    return made


def gradient(alone: LanguageModel, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of one process that has these batches as one, and all logits."""
    tokens, labels = (torch.cat(column) for column in zip(*batches))
    alone.zero_grad()
    F.cross_entropy(alone.head(alone(tokens)).flatten(0, 1), labels.flatten()).backward()
    return torch.cat([p.grad.flatten() for p in alone.parameters()])


def train(accelerator: accelerate.Accelerator, options: argparse.Namespace) -> None:
    rank, world = accelerator.process_index, accelerator.num_processes
    assert world == 2, "run it under torchrun, on two ranks"
    torch.manual_seed(0)
    model = LanguageModel(options.vocab)
    alone = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    # Used outside of the forward: DDP must not look for unused parameters, and by default does not.
    head = accelerator.unwrap_model(model).head
    norm = TokenNormalizer(model, accelerator=accelerator)  # xentlib
    # For a rank that has nothing else: its loss counts nothing.
    filler = window_of(options, 0, rank)[0]  # xentlib
    compared = not (options.full_logits or options.skip_comparison)

    for step in range(options.steps):
        batches = window_of(options, step, rank)
        labels = [y for _, y in batches]
        if options.full_logits:
            for tokens, y in batches:
                logits = head(model(tokens)).flatten(0, 1)
                accelerator.backward(F.cross_entropy(logits, y.flatten()))
            optimizer.step()
            optimizer.zero_grad()
            continue
        with norm.window(labels=labels, uneven=True, filler=filler) as window:  # xentlib
            for tokens, y in window.micro_batches(batches):  # xentlib
                out = chunked_nll(model(tokens), head.weight, y, reduction="sum")  # xentlib
                window.backward(out)  # xentlib

        apart = 0.0
        if compared:
            alone.load_state_dict(accelerator.unwrap_model(model).state_dict())
            want = gradient(alone, [x for r in range(world) for x in window_of(options, step, r)])
            got = torch.cat([p.grad.flatten() for p in model.parameters()])
            apart = float((got - want).norm() / want.norm())
            assert apart < 1e-5, f"step {step}: relative distance {apart:.1e} to one process"

        optimizer.step()
        optimizer.zero_grad()
        loss = window.mean_loss()
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        replicas = accelerator.gather(mine[None])
        assert all(torch.equal(replica, mine) for replica in replicas), f"step {step}: they differ"
        if rank == 0 and (step < 3 or step % 10 == 9):
            micro = " + ".join(str(len(window_of(options, step, r))) for r in range(world))
            print(
                f"step {step:2}   {micro} micro-batches, {int(window.stats.num_tokens):3} tokens   "
                f"loss {loss:.3f}   relative distance to one process {apart:.1e}",
                flush=True,
            )

    if not compared:
        return
    replica, evaluation = accelerator.unwrap_model(model), Evaluation()  # xentlib
    last = 3 * options.steps + 2  # no batch on rank 0
    with torch.no_grad():
        for tokens, y in window_of(options, last, rank):
            out = chunked_nll(replica(tokens), head.weight, y, reduction="sum")  # xentlib
            evaluation.add(out)  # xentlib
        tokens, labels = (torch.cat(column) for column in zip(*window_of(options, last, 1)))
        logits = replica.head(replica(tokens))
    loss = evaluation.mean_loss()  # xentlib
    apart = abs(float(loss / F.cross_entropy(logits.flatten(0, 1), labels.flatten())) - 1)
    assert apart < 1e-6, f"evaluation: relative distance {apart:.1e} to one process"
    if rank == 0:
        print(f"evaluation: loss {loss:.3f}, perplexity {loss.exp():.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    # Its backward divides by these steps, whatever a window has. The normalizer makes up for it.
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    train(accelerator, parser.parse_args())
    # DDP keeps the process group, whose threads still need Python: let it go before Python ends.
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
