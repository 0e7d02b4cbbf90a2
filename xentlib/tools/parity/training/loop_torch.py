"""The training loop in PyTorch; `loop_jax.py` is its twin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from xentlib import torch as xt
from xentlib.tools.parity.training.loop import AdamW, Record, head_step
from xentlib.tools.parity.training.model import ModelSizes, Weights
from xentlib.tools.parity.training.model_torch import build
from xentlib.tools.parity.training.text import TextWindow


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """One thread, for a run whose time does not hang on its neighbours.

    On two idle cores a second thread gains nothing at these sizes (10.5 s against 11.2 s). Beside
    another busy process OpenMP's threads wait for each other: 91 s to 148 s. The losses have the
    same bits either way.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def train(
    windows: Sequence[TextWindow], weights: Weights, sizes: ModelSizes, adamw: AdamW, record: Record
) -> None:
    model = build(sizes, weights)
    norm = xt.TokenNormalizer(model)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adamw.lr,
        betas=adamw.betas,
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
    )

    def step_of(step: int, text: TextWindow) -> None:
        batches = []
        for arrays in zip(text.tokens, text.segments, text.labels, strict=True):
            tokens, segments, labels = map(torch.from_numpy, arrays)
            batches.append((tokens, segments, xt.next_token_labels(labels, segment_ids=segments)))
        optimizer.zero_grad()
        taken = []
        with norm.window(labels=[labels for *_, labels in batches]) as window:
            for tokens, segments, labels in window.micro_batches(batches):
                hidden = model(tokens, segments)
                window.backward(xt.chunked_nll(hidden, model.head, labels, reduction="sum"))
                taken.append((hidden.detach().numpy(), labels.numpy()))
        loss, count = window.stats.loss.item(), int(window.stats.num_tokens)
        assert model.head.grad is not None
        record(loss, count, head_step(step, taken, model.head.detach(), loss, model.head.grad))
        optimizer.step()

    with _one_torch_thread():
        for step, text in enumerate(windows):
            step_of(step, text)
