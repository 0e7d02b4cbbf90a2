"""A language model trained in plain PyTorch with `chunked_nll`, and what that saves.

    python examples/train_torch.py

A two-layer transformer learns the Python standard library's own sources, tokenized with a
vocabulary of 16,384 that is trained first. Afterwards the loss head alone is run on one batch of
4096 tokens in two ways, chunked and with full logits, and compared in memory, time and gradients.
Under a minute on two CPU cores; needs `pip install 'xentlib[torch,cli]'`.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says when it starts and stops

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from library_text import library_tokens
from xentlib.torch import chunked_nll, next_token_labels

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH = 16_384, 128, 4, 2, 128
STEPS, BATCH = 40, 8  # 1024 tokens a step
COMPARED = 32  # sequences, 4096 tokens, for the comparison
CHUNK = 32 << 20  # bytes of logits that exist at once: 512 tokens
MIB = 1 << 20


class LanguageModel(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        layer = nn.TransformerEncoderLayer(
            HIDDEN,
            HEADS,
            4 * HIDDEN,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Parameter(torch.randn(vocab, HIDDEN) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states, not logits: the head is `chunked_nll`'s business."""
        length = tokens.shape[1]
        x = self.embedding(tokens) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden: Tensor = self.norm(self.blocks(x, mask=mask, is_causal=True))
        return hidden


def batches(tokens: np.ndarray, size: int, seed: int) -> Iterator[Tensor]:
    """[size, LENGTH] excerpts of the text, at random offsets, without end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, tokens.size - LENGTH, size)
        yield torch.from_numpy(np.stack([tokens[i : i + LENGTH] for i in starts])).long()


def train(model: LanguageModel, tokens: np.ndarray) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step, batch in zip(range(1, STEPS + 1), batches(tokens, BATCH, seed=0)):
        labels = next_token_labels(batch)
        loss = chunked_nll(model(batch), model.head, labels, max_chunk_bytes=CHUNK).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % 5 == 0:
            print(f"  step {step:3}   loss {statistics.mean(losses[-5:]):.3f}", flush=True)


# --- chunked against full logits -----------------------------------------------------------------

Gradients = tuple[Tensor, Tensor]


def chunked(hidden: Tensor, head: Tensor, labels: Tensor) -> Gradients:
    loss = chunked_nll(hidden, head, labels, max_chunk_bytes=CHUNK).loss
    d_hidden, d_head = torch.autograd.grad(loss, (hidden, head))
    return d_hidden, d_head


def eager(hidden: Tensor, head: Tensor, labels: Tensor) -> Gradients:
    logits = hidden @ head.T
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    d_hidden, d_head = torch.autograd.grad(loss, (hidden, head))
    return d_hidden, d_head


def in_float64(hidden: Tensor, head: Tensor, labels: Tensor) -> Gradients:
    """Full logits of a few sequences at a time, everything in float64."""
    count = int((labels != -100).sum())
    wide = head.detach().double().requires_grad_()
    parts = []
    for rows, y in zip(hidden.detach().split(4), labels.split(4)):
        x = rows.double().requires_grad_()
        logits = (x @ wide.T).flatten(0, 1)
        (F.cross_entropy(logits, y.flatten(), reduction="sum") / count).backward()
        assert x.grad is not None
        parts.append(x.grad)
    assert wide.grad is not None
    return torch.cat(parts), wide.grad


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that PyTorch's allocator held at once on top of what was there, by its profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    return int(np.cumsum([size for _, size in changes]).max())


def seconds(runs: list[Callable[[], object]], repeats: int = 3) -> list[float]:
    """Median of each, taken in turns so that a slow moment of the machine meets them all."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, taken):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def distance(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error."""
    return float((got.double() - want).norm() / want.norm())


def main() -> None:
    torch.manual_seed(0)
    tokens = library_tokens(VOCAB)
    print(f"{tokens.size:,} tokens of the standard library's sources, vocabulary {VOCAB:,}")
    model = LanguageModel(VOCAB)
    train(model, tokens)

    batch = next(batches(tokens, COMPARED, seed=1))
    labels = next_token_labels(batch)
    hidden = model(batch).detach().requires_grad_()
    inputs = (hidden, model.head, labels)
    ours, theirs, truth = chunked(*inputs), eager(*inputs), in_float64(*inputs)
    ways: list[Callable[[], object]] = [lambda: chunked(*inputs), lambda: eager(*inputs)]
    bytes_ours, bytes_theirs = map(peak_bytes, ways)
    time_ours, time_theirs = seconds(ways)
    print(f"\nloss head alone, {labels.numel()} tokens, loss and gradients   chunked   full logits")
    row = "peak memory on top of the inputs, MiB"
    print(f"  {row:43}{bytes_ours / MIB:13.0f} {bytes_theirs / MIB:13.0f}")
    print(f"  {'time, s':43}{time_ours:13.2f} {time_theirs:13.2f}")
    for i, name in enumerate(("d hidden", "d weight")):
        row = f"{name}, relative distance to float64"
        print(
            f"  {row:43}{distance(ours[i], truth[i]):13.1e} {distance(theirs[i], truth[i]):13.1e}"
        )
    apart = ", ".join(
        f"{name} {distance(a, b.double()):.1e}"
        for name, a, b in zip(("d hidden", "d weight"), ours, theirs)
    )
    print(f"  chunked from full logits: {apart}")
    print(
        f"saved: {1 - bytes_ours / bytes_theirs:.0%} of the memory, at "
        f"{time_ours / time_theirs:.2f} times the time"
    )


if __name__ == "__main__":
    main()
