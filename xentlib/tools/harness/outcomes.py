"""What a call of each function gives, as NumPy arrays; None where it was not asked for."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

Array = npt.NDArray[Any]
GRADIENTS = ("d_hidden", "d_weight", "d_bias")


def _gradients(outcome: Outcome | PerToken) -> dict[str, Array]:
    """By name, those that were asked for. A NamedTuple takes no method from a base class."""
    pairs = ((name, getattr(outcome, name)) for name in GRADIENTS)
    return {name: value for name, value in pairs if value is not None}


class Outcome(NamedTuple):
    """Everything a call of `chunked_nll` gives."""

    loss: Array
    num_tokens: Array | None
    weight_sum: Array | None
    z_loss: Array | None
    logprobs: Array | None
    entropy: Array | None
    lse: Array | None
    correct: Array | None
    predicted: Array | None
    d_hidden: Array | None = None
    d_weight: Array | None = None
    d_bias: Array | None = None

    def gradients(self) -> dict[str, Array]:
        return _gradients(self)


class PerToken(NamedTuple):
    """Everything a call of `chunked_logprobs` gives."""

    logprobs: Array
    entropy: Array | None
    lse: Array
    correct: Array
    d_hidden: Array | None = None
    d_weight: Array | None = None
    d_bias: Array | None = None

    def gradients(self) -> dict[str, Array]:
        return _gradients(self)


class GivenLogits(NamedTuple):
    """Everything a call of `vocab_parallel_logprobs` gives."""

    logprobs: Array
    entropy: Array | None
    lse: Array
    correct: Array
    d_logits: Array
