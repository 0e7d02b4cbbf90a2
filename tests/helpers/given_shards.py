"""Given logits in shards: columns of every rank or device with padding between them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from helpers.given_logits import FLOAT32_MIN, Call, hold_given, same_bits
from helpers.vocab_shards import V

# In padded columns, in turn: one that takes part in anything shows.
PADDING = (np.nan, np.inf, 1e3)
Layout = tuple[tuple[int, int], ...]  # classes and padding of each rank
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "options": {"shape": (3, 4, 5), "temperature": True, "where": True},
    "bf16": {"dtype": "bfloat16", "temperature": True},
    "float64": {"dtype": "float64", "temperature": True},
    "nothing valid": {"ignored": 1.0, "shape": (9,)},
    "classes at -inf": {"dead": 70, "ignored": 0.0},
    "smoothed": {"smoothing": 0.2, "temperature": True},
    "all classes but two masked": {"dead": V - 2, "mask": FLOAT32_MIN, "ignored": 0.0},
}


WHOLE = (
    r"`vocab_parallel` must come with this rank's part of 10 classes; got all of them on each of 2"
)


def laid_out(logits: Any, layout: Layout) -> tuple[Any, Any]:
    """Columns of all ranks side by side, with padding, and which of them are classes."""
    bounds = pairwise(accumulate((size for size, _ in layout), initial=0))
    parts, classes = [], []
    for (start, stop), (size, padding) in zip(bounds, layout):
        columns = np.resize(np.array(PADDING, logits.dtype), padding)
        fill = np.broadcast_to(columns, (*logits.shape[:-1], padding))
        parts += [logits[..., start:stop], fill]
        classes += [np.ones(size, bool), np.zeros(padding, bool)]
    return np.concatenate(parts, axis=-1), np.concatenate(classes)


def without_padding(found: dict[str, Any], classes: Any) -> dict[str, Any]:
    """Gradients of the classes; those of padding are 0."""
    assert not found["d_logits"][..., ~classes].any()
    return found | {"d_logits": found["d_logits"][..., classes]}


def of_dense(call: Call, got: dict[str, Any], run: Callable[[Call], dict[str, Any]]) -> None:
    """A13: within the contract of the oracle; from float64, the dense answer's float32 bits."""
    hold_given(call, got)
    if call.logits.dtype == np.float64:
        same_bits(
            *({k: x.astype(np.float32) for k, x in y.items()} for y in (got, run(call))), "A13"
        )
