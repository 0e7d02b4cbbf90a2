"""A call of `chunked_nll` that is refused, and its sentence: the same from both backends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from xentlib.interop import to_jax, to_torch

N, V, H = 6, 11, 4


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@dataclasses.dataclass(frozen=True)
class Bad:
    """Arguments that differ from a good call, and what is raised."""

    id: str
    error: type[Exception]
    changes: dict[str, Any]
    message: str


def call(backend: str, changes: dict[str, Any]) -> Any:
    """One call; 64-bit types are on in JAX, so that no dtype is narrowed on the way in."""
    arguments = {
        "hidden": zeros(N, H),
        "weight": zeros(V, H),
        "labels": np.arange(N, dtype=np.int32),
    }
    arguments |= changes

    def crossed(cross) -> dict[str, Any]:
        return {k: cross(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}

    if backend == "torch":
        from xentlib.torch import chunked_nll

        return chunked_nll(**crossed(lambda x: to_torch(x, copy=True)))
    import jax

    from xentlib.jax import chunked_nll

    with jax.enable_x64(True):
        return chunked_nll(**crossed(lambda x: to_jax(x, copy=True)))


def refusal(backend: str, bad: Bad) -> str:
    with pytest.raises(bad.error) as caught:
        call(backend, bad.changes)
    assert caught.type is bad.error
    return str(caught.value)


def check_refusal(backend: str, bad: Bad) -> None:
    """D12, M11: argument, expectation, what came, way out; nothing is guessed."""
    text = refusal(backend, bad)
    if bad.message.endswith(" be "):
        assert text.startswith(bad.message)
    else:
        assert text == bad.message
    assert "; got " in text
    assert text.endswith(".")


def check_both(bad: Bad) -> None:
    """D2, M27: validation that is pasted per backend drifts; this one is asked once."""
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    assert refusal("torch", bad) == refusal("jax", bad)
