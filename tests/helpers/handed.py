"""What `CrossCheck` hands to its reference, beside what a call of `chunked_nll` was given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from xentlib.nll import chunked_nll
from xentlib.options import RULES

H, V, N = 5, 7, 4
# Of how a call is computed, or of vocabulary shards, which are refused.
NO_NUMBERS = {"outputs", "vocab_parallel", "tokens_parallel", "gather", "tokens_per_rank"}
NO_NUMBERS |= {"reduce_hidden_grad", "recompute", "max_chunk_bytes"}
ARRAYS: dict[str, Any] = {
    "hidden": np.linspace(-1, 1, N * H, dtype=np.float32).reshape(N, H),
    "weight": np.linspace(1, -1, H * V, dtype=np.float32).reshape(H, V),
    "labels": np.arange(N),
    "bias": np.linspace(0, 1, V, dtype=np.float32),
    "where": np.arange(N) != 2,
    "token_weights": np.linspace(0.5, 1, N, dtype=np.float32),
    "class_weights": np.linspace(1, 2, V, dtype=np.float32),
}
OPTIONS: dict[str, Any] = {
    name: 0.5 for name in RULES if name in inspect.signature(chunked_nll).parameters
}
OPTIONS |= {"ignore_index": -7, "softcap": 3.0, "reduction": "sum", "weight_layout": "HV"}


def options_missed(
    check: Any, call: Callable[..., Any], array: Callable[[Any], Any], compute_dtype: str
) -> list[str]:
    """Options of the definition that a checked `call` did not hand over as they were; each has a
    value here that is not its default."""
    handed: list[Any] = []
    right = check.taken_of

    def taken_of(kit: Any, problem: Any, *given: Any, **parts: Any) -> Any:
        handed.append(problem)
        return right(kit, problem, *given, **parts)

    check.taken_of = taken_of
    options = {**OPTIONS, "compute_dtype": compute_dtype}
    call(**{name: array(x) for name, x in ARRAYS.items()}, **options)
    (problem,) = handed
    got = {name: getattr(problem, name) for name in ARRAYS} | problem.options
    want = ARRAYS | options
    names = [x for x in inspect.signature(chunked_nll).parameters if x not in NO_NUMBERS]
    return [
        name
        for name in names
        if name not in got or name not in want or not np.array_equal(got[name], want[name])
    ]
