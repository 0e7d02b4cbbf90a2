"""What a caller tells of a micro-batch: its loss, and the weight of its tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xentlib.checks.operand import plain
from xentlib.checks.window import check_integer_count, check_loss_sum, check_token_count
from xentlib.jax.describe import concrete_on_cpu, describe
from xentlib.nll import NLLOutput

__all__ = ["count_told", "known", "told"]

SUM = "Pass reduction='sum' to it."


def told(loss: Any, num_tokens: Any = None) -> tuple[Any, Any]:
    """A sum and the weight of its tokens: an `NLLOutput`'s, or as they were given."""
    denominator = None
    if isinstance(loss, NLLOutput):
        num_tokens = loss.weight_sum if num_tokens is None else num_tokens
        loss, denominator = loss.loss, loss.denominator
    if isinstance(plain(loss), (int, float)):
        loss = np.asarray(loss, np.float64)
    if num_tokens is not None and not isinstance(num_tokens, jax.Array):
        num_tokens = np.asarray(num_tokens)
    check_loss_sum(describe(loss), denominator is not None, SUM)
    value, count = known(loss), None if num_tokens is None else known(num_tokens)
    check_token_count("num_tokens", describe(num_tokens), count, True, value)
    return loss, num_tokens


def count_told(given: Any, weighted: bool) -> Any:
    """The number or the weight of an `NLLOutput`'s tokens; any other count as it is.

    Where weights are not counted and the loss has some, the number is no denominator: refused, or
    -1 where that is traced.
    """
    if not isinstance(given, NLLOutput):
        if given is None:
            check_token_count("token_count", None, None, weighted)
        return given
    check_loss_sum(describe(given.loss), given.denominator is not None, SUM)
    number, weight = jnp.asarray(given.num_tokens), jnp.asarray(given.weight_sum)
    if weighted:
        return weight
    alike = weight == number.astype(weight.dtype)
    if known(alike) is False:
        check_integer_count("token_count", describe(weight))
    return jnp.where(alike, number, -1)


def known(x: Any) -> Any:
    """A number that can be read without waiting, or None."""
    return np.asarray(x).item() if concrete_on_cpu(x) and not np.ndim(x) else None
