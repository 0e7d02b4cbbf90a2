"""A call of `next_token_labels`: labels before their shift, and what says where documents end."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from xentlib.checks.call import check_ignore_index
from xentlib.checks.validators import ArraySpec, check_integers
from xentlib.dtypes import holds


def check_next_token_labels(
    labels: ArraySpec,
    segment_ids: ArraySpec | None,
    cu_seqlens: ArraySpec | None,
    position_ids: ArraySpec | None,
    where: ArraySpec | None,
    shift: Any,
    ignore_index: int,
) -> int:
    """Validate one call of `next_token_labels`; return its shift as Python's integer."""
    check_integers("labels", labels, "Pass token ids.")
    check_ignore_index(ignore_index)
    if not holds(labels.dtype, ignore_index):
        wide = "int32 or int64" if holds("int32", ignore_index) else "int64"
        raise TypeError(
            f"`labels` must have a dtype that can hold `ignore_index` ({ignore_index}); "
            f"got {labels.dtype}. Cast it to {wide}."
        )
    if len(labels.shape) < 1:
        raise ValueError(
            "`labels` must have shape (..., tokens); got (). Pass at least one dimension of tokens."
        )
    if isinstance(shift, bool) or not isinstance(shift, Integral):
        raise TypeError(
            f"`shift` must be an integer; got {shift!r}. Pass how many tokens ahead the target is."
        )
    if shift < 1:
        raise ValueError(
            f"`shift` must be at least 1; got {shift}. Labels that are aligned already, with the "
            f"tokens that predict them, need no call: pass them to the loss as they are."
        )
    packing = {
        "segment_ids": (segment_ids, "Number the packed documents."),
        "cu_seqlens": (cu_seqlens, "Pass token offsets."),
        "position_ids": (position_ids, "Pass each token's place in its document."),
    }
    given = [name for name, (operand, _) in packing.items() if operand is not None]
    if len(given) > 1:
        raise ValueError(
            f"`segment_ids`, `cu_seqlens` and `position_ids` say the same thing; got "
            f"{' and '.join(f'`{name}`' for name in given)}. Pass one of them."
        )
    for name in given:
        check_integers(name, *packing[name])
    if where is not None and where.dtype != "bool":
        check_integers("where", where, "Pass a mask, 1 or True for each token that counts.")
    shaped = {"segment_ids": segment_ids, "position_ids": position_ids, "where": where}
    for name, operand in shaped.items():
        if operand is not None and operand.shape != labels.shape:
            axes = " Where tokens have places on several axes, pass `segment_ids` instead."
            raise ValueError(
                f"`{name}` must have the shape of `labels` {labels.shape}; got {operand.shape}. "
                f"Broadcast it first.{axes if name == 'position_ids' else ''}"
            )
    if cu_seqlens is not None:
        if len(cu_seqlens.shape) != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                f"`cu_seqlens` must have shape (documents + 1,); got {cu_seqlens.shape}. Pass the "
                f"offsets 0, len_0, len_0 + len_1, ..."
            )
        if math.prod(labels.shape[:-1]) != 1:
            raise ValueError(
                f"`labels` must be one packed row, (tokens,) or (1, tokens), with `cu_seqlens`; "
                f"got {labels.shape}. Pass `segment_ids` or `position_ids` for a batch of rows."
            )
    return int(shift)


def check_offsets(first: int) -> None:
    """Refuse what cannot be the offsets of documents, lengths above all, by the first number."""
    if first != 0:
        raise ValueError(
            f"`cu_seqlens` must be the offsets of documents, of which the first is 0; got {first} "
            f"first. Pass the sums of the lengths, 0, len_0, len_0 + len_1, ..."
        )
