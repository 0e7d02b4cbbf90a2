"""Sizes and budgets of chunks."""

from __future__ import annotations

from xentlib.checks.words import check_choice, check_number
from xentlib.dtypes import FLOATS
from xentlib.options import COMPUTE

__all__ = [
    "check_chunk_bytes",
    "check_plan_arguments",
]


def check_plan_arguments(
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    dtype: str,
    compute_dtype: str | None,
    max_chunk_bytes: int | None,
) -> None:
    """Refuse sizes and budgets that no chunk can have."""
    for name, value, least in (
        ("num_tokens", num_tokens, 0),
        ("vocab_size", vocab_size, 1),
        ("hidden_size", hidden_size, 1),
    ):
        check_number(
            name, value, f"an integer >= {least}", ok=isinstance(value, int) and value >= least
        )
    check_choice("dtype", dtype, FLOATS)
    if compute_dtype is not None:
        check_choice("compute_dtype", compute_dtype, COMPUTE)
    check_chunk_bytes(max_chunk_bytes)


def check_chunk_bytes(max_chunk_bytes: object) -> None:
    if max_chunk_bytes is None:
        return
    if (
        isinstance(max_chunk_bytes, bool)
        or not isinstance(max_chunk_bytes, int)
        or max_chunk_bytes < 1
    ):
        raise ValueError(
            f"`max_chunk_bytes` must be a positive integer, the bytes of one chunk of logits; "
            f"got {max_chunk_bytes!r}. Pass None for the default."
        )
