"""The model and its training loop in PyTorch; `in_jax.py` is its twin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xentlib import torch as xt
from xentlib.tools.harness.device import numpy_of, torch_threads
from xentlib.tools.parity.training.loop import AdamW, HeadStep, HeadWindow, Record
from xentlib.tools.parity.training.model import (
    EPSILON,
    ModelSizes,
    Operators,
    Weights,
    hidden_states,
)
from xentlib.tools.parity.training.text import TextWindow


def _norm(x: Tensor, factors: Tensor) -> Tensor:
    return F.rms_norm(x, factors.shape, factors, EPSILON)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    # PyTorch wants the heads before the positions.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


gelu, split = partial(F.gelu, approximate="tanh"), torch.Tensor.chunk
OPERATORS = Operators(torch, F.embedding, F.linear, _norm, gelu, _attention, split)


class LanguageModel(nn.Module):
    """With copies of `weights`."""

    head: nn.Parameter

    def __init__(self, sizes: ModelSizes, weights: Weights) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value)))
        self.sizes = sizes

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        weights = dict(self.named_parameters())
        hidden: Tensor = hidden_states(OPERATORS, weights, self.sizes, tokens, segments)
        return hidden


# One thread, for a run whose time does not hang on its neighbours. On two idle cores a second one
# gains nothing at these sizes (10.5 s against 11.2 s). Beside another busy process OpenMP's threads
# wait for each other: 91 s to 148 s. The losses have the same bits either way.
@torch_threads(1)
def train(
    windows: Sequence[TextWindow], weights: Weights, sizes: ModelSizes, adamw: AdamW, record: Record
) -> None:
    model = LanguageModel(sizes, weights)
    norm = xt.TokenNormalizer(model)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw._asdict())
    for text in windows:
        batches = []
        for arrays in zip(text.tokens, text.segments, text.labels, strict=True):
            tokens, segments, labels = map(torch.from_numpy, arrays)
            batches.append((tokens, segments, xt.next_token_labels(labels, segment_ids=segments)))
        optimizer.zero_grad()
        stats, taken = _window(norm, model, model.head, batches)
        loss, count, gradient = stats.loss.item(), int(stats.num_tokens), model.head.grad
        record(loss, count, taken, model.head.detach(), gradient)
        optimizer.step()


def _window(norm: Any, model: nn.Module, head: nn.Parameter, batches: list[Any]) -> Any:
    """Statistics of a window, and what went into the head; labels come last in a batch."""
    taken = []
    with norm.window(labels=[labels for *_, labels in batches]) as window:
        for *inputs, labels in window.micro_batches(batches):
            hidden = model(*inputs)
            window.backward(xt.chunked_nll(hidden, head, labels, reduction="sum"))
            taken.append((hidden.detach().numpy(), labels.numpy()))
    return window.stats, taken


def head_window(at: HeadStep) -> HeadWindow:
    head = nn.Parameter(torch.tensor(at.head))
    batches = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(at.hidden, at.labels)]
    norm = xt.TokenNormalizer(nn.ParameterList([head]))
    stats, _ = _window(norm, nn.Identity(), head, batches)
    return HeadWindow(float(stats.loss), int(stats.num_tokens), numpy_of(head.grad))
