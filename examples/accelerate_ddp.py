"""A loop with Accelerate under DDP, its gradients those of one batch: `TokenNormalizer`.

    torchrun --nproc-per-node 2 examples/accelerate_ddp.py

Two CPU ranks train a small transformer in windows whose token counts differ between ranks and
micro-batches. One micro-batch has no valid token. In two windows of three the ranks have different
numbers of micro-batches: one and four, or none and four. Each window's gradient is compared with
that of one process on the concatenated batch, and the replicas with each other, bit for bit. So is
the loss of an evaluation, of no batch on one rank and four on the other. Ten seconds on two cores;
needs `pip install 'xentlib[hf]'`.
"""

from __future__ import annotations

import copy

import accelerate
import torch
import torch.nn.functional as F
from torch import Tensor

from small_transformer import LanguageModel
from xentlib.torch import Evaluation, TokenNormalizer, chunked_nll, next_token_labels

VOCAB, HIDDEN, LENGTH, BATCH, STEPS = 256, 64, 32, 4, 30
ACCUMULATE = 3  # micro-batches of a window, where both ranks have as many


def window_of(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Micro-batches of a rank: tokens and labels [BATCH, LENGTH], rows of uneven lengths."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    number = (ACCUMULATE, 1 + 3 * rank, 4 * rank)[step % 3]
    made = []
    for k in range(number):
        start = torch.randint(VOCAB, (BATCH, 1), generator=generator)
        tokens = (start + 3 * torch.arange(LENGTH)) % VOCAB
        longest = LENGTH if rank else 8  # rank 0 has the short ones
        lengths = torch.randint(2, longest + 1, (BATCH, 1), generator=generator)
        if rank == 1 and k == 2:
            lengths = torch.zeros_like(lengths)
        y = next_token_labels(tokens).masked_fill(torch.arange(LENGTH) >= lengths, -100)
        made.append((tokens, y))
    return made


def train(accelerator: accelerate.Accelerator) -> None:
    rank, world = accelerator.process_index, accelerator.num_processes
    assert world == 2, "run it under torchrun, on two ranks"
    torch.manual_seed(0)
    model = LanguageModel(VOCAB, HIDDEN)
    alone = copy.deepcopy(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    # Used outside of the forward: DDP must not look for unused parameters, and by default does not.
    head = accelerator.unwrap_model(model).head
    norm = TokenNormalizer(model, accelerator=accelerator)
    filler = window_of(0, rank)[0]  # for a rank that has nothing else: its loss counts nothing

    for step in range(STEPS):
        batches = window_of(step, rank)
        labels = [y for _, y in batches]
        with norm.window(labels=labels, uneven=True, filler=filler) as window:
            for tokens, y in window.micro_batches(batches):
                window.backward(chunked_nll(model(tokens), head.weight, y, reduction="sum"))

        alone.load_state_dict(accelerator.unwrap_model(model).state_dict())
        everything = [batch for r in range(world) for batch in window_of(step, r)]
        tokens, labels = (torch.cat(column) for column in zip(*everything))
        logits = alone.head(alone(tokens))
        alone.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        got, want = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (model, alone))
        apart = float((got - want).norm() / want.norm())
        assert apart < 1e-5, f"step {step}: relative distance {apart:.1e} to one process"

        optimizer.step()
        optimizer.zero_grad()
        loss = window.mean_loss()
        mine = torch.cat([p.detach().flatten() for p in model.parameters()])
        replicas = accelerator.gather(mine[None])
        assert all(torch.equal(replica, mine) for replica in replicas), f"step {step}: they differ"
        if rank == 0 and (step < 3 or step % 10 == 9):
            micro = " + ".join(str(len(window_of(step, r))) for r in range(world))
            print(
                f"step {step:2}   {micro} micro-batches, {int(window.stats.num_tokens):3} tokens   "
                f"loss {loss:.3f}   relative distance to one process {apart:.1e}",
                flush=True,
            )

    replica, evaluation = accelerator.unwrap_model(model), Evaluation()
    with torch.no_grad():
        for tokens, y in window_of(STEPS + 2, rank):
            evaluation.add(chunked_nll(replica(tokens), head.weight, y, reduction="sum"))
        tokens, labels = (torch.cat(column) for column in zip(*window_of(STEPS + 2, 1)))
        logits = replica.head(replica(tokens))
    loss = evaluation.mean_loss()  # on both ranks
    apart = abs(float(loss / F.cross_entropy(logits.flatten(0, 1), labels.flatten())) - 1)
    assert apart < 1e-6, f"evaluation: relative distance {apart:.1e} to one process"
    if rank == 0:
        print(f"evaluation: loss {loss:.3f}, perplexity {loss.exp():.2f}", flush=True)


def main() -> None:
    # Its backward divides by these steps, whatever a window has. The normalizer makes up for it.
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    train(accelerator)
    # DDP keeps the process group, whose threads still need Python: let it go before Python ends.
    accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
