"""Shapes of loss heads, as data, and the arrays that every implementation is handed.

Shapes: N tokens, H hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

DTYPES = ("float32", "bfloat16")

# Real heads spread their logits by about this much; a wider spread only makes the softmax cheaper
# to get right, never to compute.
LOGIT_STD = 2.0


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """One head, with the options of its model, and one number of tokens."""

    name: str
    num_tokens: int
    hidden_size: int
    vocab_size: int
    about: str
    softcap: float | None = None

    @property
    def sizes(self) -> str:
        return f"N={self.num_tokens} H={self.hidden_size} V={self.vocab_size}"


# Real heads. What the models' weights have: padded vocabularies, where they are padded.
REAL = (
    HeadSizes("gpt2", 4096, 768, 50_257, "GPT-2; a vocabulary that is a multiple of nothing"),
    HeadSizes("qwen3-0.6b", 8192, 1024, 151_936, "Qwen3 0.6B"),
    HeadSizes("qwen3-8b", 8192, 4096, 151_936, "Qwen3 8B"),
    HeadSizes("llama3-8b", 32_768, 4096, 128_256, "Llama 3 8B, the table of tokamax"),
    HeadSizes("gemma2-2b", 8192, 2304, 256_000, "Gemma 2 2B, the table of CCE; softcap", 30.0),
    HeadSizes("gemma3-27b", 8192, 5376, 262_208, "Gemma 3 27B"),
    HeadSizes("gpt-oss", 8192, 2880, 201_088, "GPT-OSS 20B and 120B"),
)


def scaled_down(head: HeadSizes) -> HeadSizes:
    """An eighth of the width and of the vocabulary, and tokens for more than one chunk of logits.

    That keeps the shape of the head, and makes the softmax weigh eight times as much beside the
    matrix products as it does in the real one.
    """
    sizes = 768, head.hidden_size // 8, head.vocab_size // 8
    about = f"an eighth of {head.name} in width and vocabulary, for CPUs"
    return HeadSizes(f"{head.name}/8", *sizes, about, head.softcap)


SMALL = tuple(scaled_down(head) for head in REAL if head.name != "gpt2")
CASES = {
    case.name: case
    for case in (
        HeadSizes("tiny", 96, 64, 1000, "seconds for everything; says nothing about speed"),
        HeadSizes("cpu", 2048, 512, 32_000, "what two CPU cores do in half a second"),
        *SMALL,
        *REAL,
    )
}


class Suite(NamedTuple):
    """What `--suite` runs."""

    cases: tuple[str, ...]
    every_kind: tuple[str, ...]  # cases that compute all there is; the others loss + gradient
    dtypes: tuple[str, ...]
    rounds: int
    about: str


ALL_REAL = tuple(head.name for head in REAL)
SUITES = {
    # Three of six, in eight minutes: a narrow head, a wide one, and one with a softcap.
    "cpu": Suite(
        ("qwen3-0.6b/8", "llama3-8b/8", "gemma2-2b/8"),
        ("llama3-8b/8",),
        DTYPES,
        3,
        "an eighth of three heads, for two cores",
    ),
    "gpu": Suite(ALL_REAL, ALL_REAL, ("bfloat16",), 10, "the heads themselves"),
}


class Arrays(NamedTuple):
    """Inputs, in float32, every value one that `dtype` can hold: casts to it are exact."""

    hidden_NH: Any
    weight_VH: Any
    labels_N: Any
    upstream_N: Any  # of each token's log-probability
    dtype: str
    softcap: float | None


class OnHost:
    """Numbers by chance in NumPy: the same for every implementation of either framework."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int) -> Any:
        return self.rng.standard_normal(shape, np.float32)

    def integers(self, below: int, count: int) -> Any:
        return self.rng.integers(0, below, count)

    def rounded(self, x: Any) -> Any:
        """To bfloat16 and back."""
        import ml_dtypes

        return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def make_arrays(case: HeadSizes, dtype: str, draws: OnHost | None = None) -> Arrays:
    """Every label counts."""
    if dtype not in DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(DTYPES)}; got {dtype!r}.")
    draws = OnHost(0) if draws is None else draws
    hidden_NH = draws.normal(case.num_tokens, case.hidden_size)
    weight_VH = draws.normal(case.vocab_size, case.hidden_size)
    weight_VH *= np.float32(LOGIT_STD / case.hidden_size**0.5).item()
    labels_N = draws.integers(case.vocab_size, case.num_tokens)
    upstream_N = draws.normal(case.num_tokens)
    if dtype == "bfloat16":
        hidden_NH, weight_VH = draws.rounded(hidden_NH), draws.rounded(weight_VH)
    return Arrays(hidden_NH, weight_VH, labels_N, upstream_N, dtype, case.softcap)
