"""The arrays of the head: their shapes against the hidden states and each other."""

from __future__ import annotations

from xentlib.checks.array_spec import ArraySpec
from xentlib.checks.validators import check_choice
from xentlib.options import LAYOUTS


def check_weight(
    weight: ArraySpec, hidden: ArraySpec, layout: str, *, sharded: bool = False
) -> int:
    """Validate the head against `hidden`; return V."""
    check_choice("weight_layout", layout, LAYOUTS)
    width = hidden.shape[-1]
    axis = 1 if layout == "VH" else 0
    expected = f"(vocab, {width})" if layout == "VH" else f"({width}, vocab)"
    if len(weight.shape) != 2 or weight.shape[axis] != width:
        other = "HV" if layout == "VH" else "VH"
        turned = len(weight.shape) == 2 and weight.shape[1 - axis] == width
        way_out = (
            f"Pass `weight_layout='{other}'` or `weight.T`."
            if turned
            else "Pass the head that belongs to these hidden states."
        )
        raise ValueError(
            f"`weight` must have shape {expected} to match `hidden` {hidden.shape}; "
            f"got {weight.shape}. {way_out}"
        )
    vocab_size = weight.shape[1 - axis]
    if vocab_size < 1 and not sharded:
        raise ValueError(
            f"`weight` must have at least one vocabulary row; got shape {weight.shape}. "
            f"Gather a partitioned head before the call."
        )
    return vocab_size


def check_class_weights(length: int, vocab_size: int | None) -> None:
    """Refuse class weights, of one dimension or -1, that are not those of the whole vocabulary."""
    if length < 0 or vocab_size not in (None, length):
        came = "another number of dimensions" if length < 0 else f"({length},)"
        raise ValueError(
            f"`class_weights` must have shape ({vocab_size or 'vocab'},), one entry for each class "
            f"of the whole vocabulary, on every rank; got {came}. Pass all of them."
        )
