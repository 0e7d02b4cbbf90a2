"""A window of the head alone: the same hidden states, head and labels, through either backend."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from xentlib.tools.parity.training.steps import Float32, HeadStep


class HeadWindow(NamedTuple):
    """A window of the head alone, by one backend."""

    loss: float
    num_tokens: int
    gradient: Float32  # [V, H]


def head_window(backend: str, at: HeadStep) -> HeadWindow:
    """The window of `at` through `backend`'s `chunked_nll` and its accumulation."""
    if backend == "torch":
        import torch

        from xentlib import torch as xt

        head = torch.nn.Parameter(torch.tensor(at.head))
        module = torch.nn.ParameterList([head])
        batches = [
            (torch.tensor(hidden), torch.tensor(labels))
            for hidden, labels in zip(at.hidden, at.labels, strict=True)
        ]
        with xt.TokenNormalizer(module).window(labels=[y for _, y in batches]) as window:
            for x, y in window.micro_batches(batches):
                window.backward(xt.chunked_nll(x, head, y, reduction="sum"))
        assert head.grad is not None
        stats, gradient = window.stats, head.grad.numpy()
    elif backend == "jax":
        import jax

        with jax.default_matmul_precision("highest"):
            stats, gradient = _head_scan()(at.head, (at.hidden, at.labels))
    else:
        raise ValueError(f"`backend` must be 'torch' or 'jax'; got {backend!r}.")
    return HeadWindow(float(stats.loss), int(stats.num_tokens), np.asarray(gradient))


@cache
def _head_scan() -> Any:
    """Compiled once for each number of micro-batches."""
    import jax

    from xentlib import jax as xj

    def sum_and_count(head: Any, batch: Any) -> Any:
        output = xj.chunked_nll(batch[0], head, batch[1], reduction="sum")
        return output.loss, output.num_tokens

    return jax.jit(lambda head, batches: xj.accumulate_grads(sum_and_count, head, batches))
