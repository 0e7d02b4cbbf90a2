"""What a caller tells of a micro-batch: its loss, and the weight of its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.checks.operand import plain
from xentlib.nll import NLLOutput
from xentlib.torch.core.device import traits

__all__ = ["Told", "known", "told"]


class Told(NamedTuple):
    """A micro-batch's loss, as it was given."""

    loss: Any
    weight: Any  # of its valid tokens
    denominator: Tensor | None = None  # of a loss that `chunked_nll` has divided


def told(loss: Any, num_tokens: Any) -> Told:
    num_tokens = plain(num_tokens)
    if isinstance(num_tokens, (int, float)):  # exactly
        kind = torch.float64 if isinstance(num_tokens, float) else torch.int64
        num_tokens = torch.tensor(num_tokens, dtype=kind)
    elif num_tokens is not None:
        num_tokens = torch.as_tensor(num_tokens)
    if not isinstance(loss, NLLOutput):
        return Told(loss, num_tokens)
    if num_tokens is None:
        # The number itself where tokens have no weights: their sum is rounded beyond 2^24.
        number, weight = loss.num_tokens, loss.weight_sum
        whole = weight == number.to(weight.dtype)
        num_tokens = torch.where(whole, number.double(), weight.double())
    return Told(loss.loss, num_tokens, loss.denominator)


def known(x: Any) -> Any:
    """A number, where reading it costs nothing, or None."""
    there = type(x) is Tensor and traits(x).free_to_read and x.numel() == 1
    return x.detach().item() if there else None
