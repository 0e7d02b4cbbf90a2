"""Windows of micro-batches in JAX: a small net, its data, and the gradients of one batch that has
all tokens.

Shapes: M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from helpers.held import hold_in_norm
from xentlib.jax import chunked_nll

M, N, V, H = 4, 16, 31, 8


def data(seed: int = 0, valid: tuple[int, ...] = (16, 5, 0, 1)) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, V, (M, N)).astype(np.int32)
    for k, n in enumerate(valid):
        labels[k, n:] = -100
    return {"x": rng.standard_normal((M, N, H), np.float32), "y": labels}


def params() -> dict[str, Any]:
    rng = np.random.default_rng(9)
    return {
        "trunk": rng.standard_normal((H, H), np.float32),
        "head": rng.standard_normal((V, H), np.float32),
    }


def sum_and_count(p: Any, batch: Any) -> tuple[Any, Any]:
    out = chunked_nll(batch["x"] @ p["trunk"], p["head"], batch["y"], reduction="sum")
    return out.loss, out.num_tokens


@jax.jit  # once for all windows of a file
def mean_and_gradients(p: Any, batch: Any, count: Any) -> tuple[Any, Any]:
    return jax.value_and_grad(lambda p: sum_and_count(p, batch)[0] / count)(p)


def of_one_batch(batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    flat = {"x": batch["x"].reshape(-1, H), "y": batch["y"].reshape(-1)}
    return mean_and_gradients(params(), flat, np.float32(max((flat["y"] >= 0).sum(), 1)))


def hold_tree(got: Any, want: Any) -> None:
    """A12, by name; and nothing of it is 0."""
    assert all(np.abs(np.asarray(got[name])).max() > 0 for name in want)
    for name in want:
        hold_in_norm([got[name]], [want[name]], name)
