"""Class probabilities as labels, and what they do not go with."""

from __future__ import annotations

from typing import Any

from xentlib.arguments import Arguments, Scalars
from xentlib.checks.classes import check_classes
from xentlib.checks.validators import ArraySpec, Refusals, check_device, check_floating
from xentlib.labels import SoftLabels
from xentlib.options import RULES

LARGEST = ("correct", "predicted")  # of `outputs`, what a class that is right is needed for
SOFT = Refusals(
    ValueError,
    # Of an array of all classes, or of the columns of a shard.
    shape="`labels` must have shape {leading} + (V,) where they are class probabilities, one for "
    "each of the {size} classes; got {shape}. Pass `SoftLabels(ids, probs)` where only a few have "
    "any.",
    columns="`labels` must have the {size} classes that this rank has of the head; got {other}. "
    "Pass the columns of the same classes.",
    probs="`probs` must have shape {shape}, as the `ids` of the same `SoftLabels`; got {came}. "
    "Pass one probability for each class.",
    negative="`labels` must be probabilities, none of them negative or NaN; got one that is. Pass "
    "`softmax` values, neither logits nor their logarithms.",
    none="`ids` must hold a class of each valid token; got {count} tokens of -1 alone. Mask "
    "them with `where`: without a class there is no distribution.",
    ignore_index="`ignore_index` must be left out where `labels` are class probabilities; got "
    "{value}. Take tokens out with `where`.",
    outputs="`outputs` must not have {name!r} where `labels` are class probabilities, none of "
    "which is the right one; got it. Leave it out.",
    stay="`labels` must be `SoftLabels` where hidden states travel ({route}); got probabilities of "
    "all classes, which stay on the rank whose tokens they are of. Pass `SoftLabels(ids, probs)`, "
    "or `gather='head'`.",
    stream="`gather` must be 'head' or 'hidden' where `labels` are class probabilities; got "
    "'stream'. Pass 'hidden' with `SoftLabels`, or multiply `ids_logprobs` of `chunked_logprobs`.",
    recompute="`recompute` must be False where `labels` are class probabilities, whose gradients "
    "are computed in the forward; got True. Leave it out.",
    option="`{name}` must be left out where `labels` are class probabilities, whose loss does not "
    "have it; got {value!r}. Call without it.",
    kept="`labels` must be classes with `kept`, `ids` or `top_k`; got class probabilities. "
    "Multiply `ids_logprobs` by them.",
)


def check_soft_options(call: Arguments) -> None:
    """Refuse options of `chunked_nll` that do not go with class probabilities."""
    for name in LARGEST:
        SOFT.require("outputs", name not in call.outputs, name=name)
    SOFT.require("stream", call.gather != "stream")
    SOFT.require("recompute", not call.recompute)


def check_read(call: Any) -> None:
    """Refuse a number of a call that the loss of class probabilities does not read, as one that was
    written for class indices alone: it would have no effect."""
    for name, default in Scalars._field_defaults.items():
        value = getattr(call, name, default)
        unset = value is default or (isinstance(value, (int, float)) and value == default)
        SOFT.require("option", RULES[name].probabilities or unset, name=name, value=value)


def check_soft(
    labels: Any, source: ArraySpec, name: str, columns: int | None, ignore_index: int
) -> None:
    """Validate them, their arrays given as `ArraySpec`, beside the argument `name` of a call;
    `columns` on this rank, if they are to be compared here."""
    leading = source.shape[:-1]
    SOFT.require("ignore_index", ignore_index == -100, value=ignore_index)
    if isinstance(labels, SoftLabels):
        check_classes(None, labels.ids, source, source=name)
        check_floating("probs", labels.probs)
        same = labels.probs.shape == labels.ids.shape
        SOFT.require("probs", same, shape=labels.ids.shape, came=labels.probs.shape)
        check_device("probs", labels.probs, source, name)
        return
    size = "V" if columns is None else columns
    right = labels.shape[:-1] == leading and columns in (None, labels.shape[-1])
    SOFT.require("shape", right, leading=leading, size=size, shape=labels.shape)
    check_device("labels", labels, source, name)


def check_none(count: int) -> None:
    """The number of valid tokens without any class."""
    SOFT.require("none", not count, count=count)


def check_columns(size: int, other: int) -> None:
    """Of a shard, once all ranks know what the others have."""
    SOFT.require("columns", size == other, size=size, other=other)
