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
from xentlib.tools.parity.training.loop import (
    DISTILLATION,
    AdamW,
    HeadStep,
    HeadWindow,
    Record,
    Teacher,
)
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

    def arrays(self) -> Weights:
        """As they were given."""
        return {name: value.detach().numpy() for name, value in self.named_parameters()}


# One thread, for a run whose time does not hang on its neighbours. On two idle cores a second one
# gains nothing at these sizes (10.5 s against 11.2 s). Beside another busy process OpenMP's threads
# wait for each other: 91 s to 148 s. The losses have the same bits either way.
@torch_threads(1)
def train(
    windows: Sequence[TextWindow],
    weights: Weights,
    sizes: ModelSizes,
    teacher: Teacher | None,
    adamw: AdamW,
    record: Record,
) -> Weights:
    model = LanguageModel(sizes, weights)
    above = LanguageModel(*teacher).requires_grad_(False) if teacher else None
    norm = xt.TokenNormalizer(model)
    optimizer = torch.optim.AdamW(model.parameters(), **adamw._asdict())
    for text in windows:
        batches = []
        for arrays in zip(text.tokens, text.segments, text.labels, strict=True):
            tokens, segments, labels = map(torch.from_numpy, arrays)
            labels = xt.next_token_labels(labels, segment_ids=segments)
            taught = (above(tokens, segments), above.head) if above else ()
            batches.append((labels, taught, tokens, segments))
        optimizer.zero_grad()
        stats, taken = _window(norm, model, model.head, batches)
        loss, count, gradient = stats.loss.item(), int(stats.num_tokens), model.head.grad
        record(loss, count, taken, model.head.detach(), gradient)
        optimizer.step()
    return model.arrays()


def _window(norm: Any, model: nn.Module, head: nn.Parameter, batches: list[Any]) -> Any:
    """Statistics of a window, and what went into the head; labels come first in a batch, then the
    hidden states and the head of the teacher, if there is one."""
    taken = []
    with norm.window(labels=[labels for labels, *_ in batches]) as window:
        for labels, taught, *inputs in window.micro_batches(batches):
            hidden = model(*inputs)
            window.backward(_loss_sum(hidden, head, labels, *taught))
            taken.append(tuple(x.detach().numpy() for x in (hidden, labels, *taught[:1])))
    return window.stats, taken


def _loss_sum(hidden: Tensor, head: Tensor, labels: Tensor, *taught: Any) -> Any:
    if not taught:
        return xt.chunked_nll(hidden, head, labels, reduction="sum")
    how: dict[str, Any] = {"labels": labels, "reduction": "sum", **DISTILLATION}
    return xt.chunked_divergence(hidden, head, xt.TeacherHead(*taught), **how)


def head_window(at: HeadStep) -> HeadWindow:
    head = nn.Parameter(torch.tensor(at.head))
    batches = []
    for hidden, labels, *taught in zip(at.hidden, at.labels, *at.taught[:1]):
        above = [torch.tensor(x) for x in (*taught, *at.taught[1:])]
        batches.append((torch.tensor(labels), above, torch.tensor(hidden)))
    norm = xt.TokenNormalizer(nn.ParameterList([head]))
    stats, _ = _window(norm, nn.Identity(), head, batches)
    return HeadWindow(float(stats.loss), int(stats.num_tokens), numpy_of(head.grad))
