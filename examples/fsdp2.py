"""FSDP2 with a head that is read directly: `chunked_nll(hidden, model.head.weight, labels)`.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Two CPU ranks train a small transformer on the Python standard library's own sources. The loss is
taken outside the model's forward, where the head is a sharded DTensor. The first step's gradients
are compared with those of one process that has the whole batch, and the collectives of the head are
counted. Half a minute on two cores; needs `pip install 'xentlib[torch,cli]'`.
"""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from library_text import library_tokens
from small_transformer import LanguageModel, uneven_batches
from xentlib.torch import chunked_nll, count_collectives

VOCAB, HIDDEN, LENGTH, BATCH, STEPS = 4096, 128, 128, 8, 20
CHUNK = 4 << 20  # bytes of logits that exist at once: 256 tokens, two chunks of a rank's batch


def train() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    text = library_tokens(VOCAB, 2_000_000)
    torch.manual_seed(0)
    model, alone = LanguageModel(VOCAB, HIDDEN), LanguageModel(VOCAB, HIDDEN)
    alone.load_state_dict(model.state_dict())
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model.head)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for step, (tokens, labels) in zip(range(STEPS), uneven_batches(text, BATCH, LENGTH)):
        # FSDP2 takes the mean over ranks: with the valid tokens of all ranks over their number as
        # the denominator, the gradient is that of the mean over all tokens.
        denominator = int((labels != -100).sum()) / world
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        hidden = model(tokens[mine])
        with count_collectives() as forward:
            loss = chunked_nll(
                hidden,
                model.head.weight,
                labels[mine],
                denominator=denominator,
                max_chunk_bytes=CHUNK,
            ).loss
        loss.backward()
        if step == 0:
            chunked_nll(alone(tokens), alone.head.weight, labels).loss.backward()
            for (name, p), q in zip(model.named_parameters(), alone.parameters()):
                got = p.grad.full_tensor()
                apart = float((got - q.grad).norm() / q.grad.norm())
                assert apart < 1e-5, f"{name}: relative distance {apart:.1e} to one process"
                if rank == 0 and name == "head.weight":
                    print(f"the head's forward sends: {forward}")
                    print(f"its gradient's relative distance to one process: {apart:.1e}")
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3}   loss {loss / world:.3f}", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    train()
    # A model that is still there keeps gloo's threads, which need Python after Python has ended.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
