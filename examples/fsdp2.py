"""FSDP2 with a head that is read directly: `chunked_nll(hidden, model.head.weight, labels)`.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Two CPU ranks train a small transformer on the Python standard library's own sources. The loss is
taken outside the model's forward, where the head is a sharded DTensor. The first step's gradients
are compared with those of one process that has the whole batch, and the collectives of the head are
counted. Half a minute on two cores; needs `pip install 'xentlib[torch,cli]'`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from xentlib.parity.text import encode_documents, read_documents, train_tokenizer
from xentlib.torch import chunked_nll, count_collectives, next_token_labels

VOCAB, HIDDEN, LENGTH, BATCH, STEPS = 4096, 128, 128, 8, 20
CHUNK = 4 << 20  # bytes of logits that exist at once: 256 tokens, two chunks of a rank's batch


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, 4, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden: Tensor = self.norm(self.blocks(self.embedding(tokens), mask=mask, is_causal=True))
        return hidden


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels [BATCH, LENGTH] of all ranks, rows of uneven lengths."""
    documents = read_documents(max_bytes=2_000_000)
    tokenizer = train_tokenizer(documents, VOCAB)
    text = np.concatenate(encode_documents(tokenizer, documents))
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(0, text.size - LENGTH, BATCH)
        tokens = torch.from_numpy(np.stack([text[i : i + LENGTH] for i in starts])).long()
        labels = next_token_labels(tokens)
        for row, length in enumerate(rng.integers(LENGTH // 4, LENGTH, BATCH)):
            labels[row, length:] = -100
        yield tokens, labels


def train() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model, alone = LanguageModel(), LanguageModel()
    alone.load_state_dict(model.state_dict())
    for block in model.blocks.layers:
        fully_shard(block)
    fully_shard(model.head)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    for step, (tokens, labels) in zip(range(STEPS), batches()):
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
