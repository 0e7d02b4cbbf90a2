"""Shapes of loss heads, as data, and the arrays that every contestant is handed.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CASES", "DTYPES", "Arrays", "HeadSizes", "make_arrays"]

DTYPES = ("float32", "bfloat16")

# Real heads spread their logits by about this much; a wider spread only makes the softmax cheaper
# to get right, never to compute.
LOGIT_STD = 2.0


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """One head and one number of tokens."""

    name: str
    num_tokens: int
    hidden_size: int
    vocab_size: int
    about: str


CASES = {
    case.name: case
    for case in (
        HeadSizes("tiny", 96, 64, 1000, "seconds for everything; says nothing about speed"),
        HeadSizes("cpu", 2048, 512, 32_000, "what two CPU cores do in half a second"),
        HeadSizes("gpt2", 4096, 768, 50_257, "GPT-2; a vocabulary that is a multiple of nothing"),
        HeadSizes("gemma2-2b", 8192, 2304, 256_000, "Gemma 2 2B, the table of Cut Cross-Entropy"),
        HeadSizes("qwen2.5-7b", 16_384, 3584, 152_064, "Qwen2.5 7B"),
        HeadSizes("llama3-8b", 32_768, 4096, 128_256, "Llama 3 8B, the table of tokamax"),
    )
}


@dataclass(frozen=True, slots=True)
class Arrays:
    """Inputs, float32 in memory, every value one that `dtype` can hold: casts to it are exact."""

    hidden_NH: np.ndarray[Any, np.dtype[np.float32]]
    weight_VH: np.ndarray[Any, np.dtype[np.float32]]
    labels_N: np.ndarray[Any, np.dtype[np.int64]]
    dtype: str


def make_arrays(case: HeadSizes, dtype: str, seed: int = 0) -> Arrays:
    """The same numbers for every contestant of either framework; every label counts."""
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    rng = np.random.default_rng(seed)
    hidden_NH = rng.standard_normal((case.num_tokens, case.hidden_size), np.float32)
    weight_VH = rng.standard_normal((case.vocab_size, case.hidden_size), np.float32)
    weight_VH *= np.float32(LOGIT_STD / case.hidden_size**0.5)
    labels_N = rng.integers(0, case.vocab_size, case.num_tokens)
    if dtype == "bfloat16":
        import ml_dtypes

        hidden_NH = hidden_NH.astype(ml_dtypes.bfloat16).astype(np.float32)
        weight_VH = weight_VH.astype(ml_dtypes.bfloat16).astype(np.float32)
    return Arrays(hidden_NH, weight_VH, labels_N, dtype)
