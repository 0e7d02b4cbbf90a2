"""A call of `next_token_labels`: labels before their shift, and what says where documents end."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from xentlib.checks.call import check_ignore_index
from xentlib.checks.validators import ArraySpec, Refusals, check_choice, check_integers, holds
from xentlib.labels import PIECES

LABELS = Refusals(
    ValueError,
    no_tokens="`labels` must have shape (..., tokens); got (). Pass at least one dimension of "
    "tokens.",
    shift="`shift` must be at least 1; got {shift}. Labels that are aligned already, with the "
    "tokens that predict them, need no call: pass them to the loss as they are.",
    one_packing="`segment_ids`, `cu_seqlens` and `position_ids` say the same thing; got "
    "{packings}. Pass one of them.",
    shape="`{name}` must have the shape of `labels` {expected}; got {shape}. Broadcast it "
    "first.{axes}",
    cu_seqlens="`cu_seqlens` must have shape (documents + 1,); got {shape}. Pass the offsets 0, "
    "len_0, len_0 + len_1, ...",
    one_row="`labels` must be one packed row, (tokens,) or (1, tokens), with `cu_seqlens`; got "
    "{shape}. Pass `segment_ids` or `position_ids` for a batch of rows.",
    # What cannot be the offsets of documents, lengths above all, by the first number.
    offsets="`cu_seqlens` must be the offsets of documents, of which the first is 0; got {first} "
    "first. Pass the sums of the lengths, 0, len_0, len_0 + len_1, ...",
    layout="`layout` must be left out without `sequence_parallel`, the ranks that have the pieces; "
    "got {layout!r}. Pass the ranks, or leave it out and shift the whole row before slicing.",
    pieces="`labels` must be two pieces of equal length, the same on every rank, with "
    "`layout='zigzag'`; got {length} tokens. Pad the row to a multiple of twice the ranks before "
    "slicing.",
    one_layout="`layout` must be the same on every rank of `sequence_parallel`; got ranks that "
    "differ. Pass the one in which the row was sliced.",
    one_offsets="`cu_seqlens` must be the offsets of the whole row, the same on every rank of "
    "`sequence_parallel`; got others on another rank. Pass those from before slicing.",
)


def check_next_token_labels(
    shift: Any,
    ignore_index: int,
    layout: str,
    parallel: Any,
    labels: ArraySpec,
    segment_ids: ArraySpec | None,
    cu_seqlens: ArraySpec | None,
    position_ids: ArraySpec | None,
    where: ArraySpec | None,
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
    LABELS.require("no_tokens", labels.shape)
    if isinstance(shift, bool) or not isinstance(shift, Integral):
        raise TypeError(
            f"`shift` must be an integer; got {shift!r}. Pass how many tokens ahead the target is."
        )
    LABELS.require("shift", not shift < 1, shift=shift)
    check_choice("layout", layout, tuple(PIECES))
    whole = layout == "contiguous" or parallel is not None
    LABELS.require("layout", whole, layout=layout)
    packing = {
        "segment_ids": (segment_ids, "Number the packed documents."),
        "cu_seqlens": (cu_seqlens, "Pass token offsets."),
        "position_ids": (position_ids, "Pass each token's place in its document."),
    }
    names = [name for name, (operand, _) in packing.items() if operand is not None]
    packings = " and ".join(f"`{name}`" for name in names)
    LABELS.require("one_packing", len(names) <= 1, packings=packings)
    for name, (operand, way_out) in packing.items():
        if operand is not None:
            check_integers(name, operand, way_out)
    if where is not None and where.dtype != "bool":
        check_integers("where", where, "Pass a mask, 1 or True for each token that counts.")
    shaped = {"segment_ids": segment_ids, "position_ids": position_ids, "where": where}
    for name, operand in shaped.items():
        if operand is not None and operand.shape != labels.shape:
            shapes = {"expected": labels.shape, "shape": operand.shape}
            axes = " Where tokens have places on several axes, pass `segment_ids` instead."
            LABELS.refuse("shape", name=name, axes=axes if name == "position_ids" else "", **shapes)
    if cu_seqlens is not None:
        offsets = cu_seqlens.shape
        LABELS.require("cu_seqlens", len(offsets) == 1 and offsets[0] >= 1, shape=offsets)
        LABELS.require("one_row", math.prod(labels.shape[:-1]) == 1, shape=labels.shape)
    return int(shift)
