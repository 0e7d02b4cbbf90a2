"""A small net, its micro-batches and windows over them, and the gradients of one batch that has all
tokens.

Shapes: M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from xentlib.torch import TokenNormalizer, chunked_nll

M, N, V, H = 3, 10, 31, 8


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(H, H), torch.nn.Linear(H, V))


def token_losses(logits: Any, y: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none")


def normalizer(**options: Any) -> tuple[Any, Any]:
    model = net()
    return model, TokenNormalizer(model, **options)


def batch_of(seed: int, valid: int = N) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(V, (N,), generator=generator)
    y[valid:] = -100
    return torch.randn(N, H, generator=generator), y


def spoilt(batch: Any) -> Any:
    """NaN and inf in its inputs: 0 times its graph would be NaN."""
    x, y = batch[0].clone(), batch[1]
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    return x, y


def run_window(norm: Any, model: Any, batches: list[Any], **options: Any) -> Any:
    return attempt(norm, model, batches, one, **options)


def attempt(
    norm: Any, model: Any, batches: list[Any], body: Callable[..., Any], **options: Any
) -> Any:
    """A window with `body` for each micro-batch, until it returns something."""
    declared = {"labels": [y for _, y in batches]} if norm.mode == "precount" else {}
    with norm.window(**(declared | options)) as window:
        for x, y in window.micro_batches(batches):
            if body(window, model, x, y):
                break
    return window


def one(window: Any, model: Any, x: Any, y: Any) -> None:
    window.backward(token_losses(model(x), y).sum(), (y != -100).sum())


def raising(window: Any, model: Any, x: Any, y: Any) -> None:
    one(window, model, x, y)
    raise RuntimeError("in the middle")


def mean_of(model: Any, x: Any, y: Any, **how: Any) -> Any:
    return chunked_nll(model[0](x), model[1].weight, y, bias=model[1].bias, **how)


def changed(out: Any) -> Any:
    return out._replace(loss=out.loss + 0.0)


def gradients(model: Any) -> list[Any]:
    return [p.grad.clone() for p in model.parameters()]


def of_one_batch(batches: list[Any]) -> list[Any]:
    """Gradients in float64 of one process that has all tokens."""
    model = net().double()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    (token_losses(model(x.double()), y).sum() / (y != -100).sum()).backward()
    return [p.grad.numpy() for p in model.parameters()]
