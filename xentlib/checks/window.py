"""Windows of accumulation, and evaluations: what is counted, and what is added up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xentlib.accumulate import CountOverflowError
from xentlib.checks.validators import ArraySpec, Refusals
from xentlib.options import INT32, INTEGERS

WINDOWS = Refusals(
    ValueError,
    labels="`labels` must be the labels of all micro-batches, after the shift; got None. Pass "
    "`norm.window(labels=[...])`, or use mode='postscale'.",
    uncounted="`{name}` cannot be passed with mode='postscale', which counts tokens in "
    "`window.backward`. Pass `num_tokens` there, or use mode='precount'.",
    even="`uneven` must be False with mode='postscale'; got True. Use mode='precount', whose "
    "collective says how many micro-batches each rank has.",
    number="`{name}` must have one entry for each of the {number} micro-batches; got {entries}. "
    "Pass a list like `labels`.",
    # Losses that are dropped from a window that is counted as it runs.
    precount="`mode` must be 'precount' with nonfinite='drop', whose collective says that all "
    "ranks have as many micro-batches to decide on; got {mode!r}. Use mode='precount'.",
    # Ranks that would wait for each other.
    rounds="`uneven` must be True with nonfinite='drop', which all ranks decide together in each "
    "micro-batch, where they have different numbers; got {least} to {most}. Pass "
    "`norm.window(..., uneven=True)`.",
    # Nothing is broadcast.
    shape="`{name}` must have the shape of its labels, {expected}; got {shape}. Pass "
    "`{name}.expand_as(labels)`, if that is what you mean.",
    one_number="`loss` must be one number, the sum over this rank's valid tokens; got {came}. "
    "Pass `loss.sum()`, or an NLLOutput of reduction='sum'.",
    sum="`loss` must be a sum over tokens; got one that `chunked_nll` has divided. {instead}",
    # A sum of `chunked_nll` that its caller has divided.
    undivided="`loss` must be the sum as `chunked_nll` returns it; got one that was divided by "
    "its number of tokens since. Pass the `NLLOutput`, or its loss as it is.",
    # An output whose loss is no longer that of its tokens.
    as_made="`loss` must be an `NLLOutput` as `chunked_nll` returns it; got one whose loss was "
    "written to since, as `torch.distributed.all_reduce` does. Log a copy, "
    "`out.loss.detach().clone()`.",
    # A loss that was divided by something else than it is said to be.
    denominator="`loss` must have been divided by `window.denominator` with normalized=True; got "
    "one that was not. Pass `denominator=window.denominator` to `chunked_nll`, or its sum without "
    "`normalized`.",
    count="`{name}` must be given with a loss that is no `NLLOutput`; got None. Pass the "
    "`NLLOutput` itself, which has its count and says whether it is a sum, or the weight of the "
    "valid tokens.",
    one_count="`{name}` must be one number, the weight of the valid tokens; got {came}. Add it up.",
    no_pair="`token_count` must be an `NLLOutput` or one number; got a {kind}. Pass the output "
    "whose loss was differentiated, which has its count.",
    finite="`{name}` must be finite; got {value}. Look for NaN in what it is the sum of.",
    not_negative="`{name}` must be the number of valid tokens, 0 or more; got {value}. Count the "
    "labels that the loss sees.",
    some="`{name}` must be the number of tokens that the loss is the sum of; got 0 and a loss of "
    "{loss:g}. Count the labels that the loss sees.",
    # A count that is not that of the loss it is given with.
    own_count="`num_tokens` must be the number of tokens that `chunked_nll` has counted for this "
    "loss, {number:.15g}; got {value:.15g}. Pass the `NLLOutput` alone, which has its count, or "
    "count the labels after the shift that are not ignored.",
    # One number of which nobody knows whether it is a sum.
    named="`loss` must be an `NLLOutput`, which says whether it is a sum; got one number, which "
    "may be a mean. Pass the output itself, or `loss_sum=` or `loss_mean=` with `num_tokens`.",
    # A loss as a mean that `chunked_nll` has not divided by its own count.
    mean="`loss_mean` must be a mean over its tokens; got a loss that `chunked_nll` has not "
    "divided by their number. Pass `loss_sum=` for a sum, and reduction='sum' to `chunked_nll` in "
    "place of a `denominator`.",
    # The count of one device of a `shard_map`, by the mesh axes over which it varies.
    count_of_all="`token_count` must be the count of all devices; got one that varies over "
    "{over!r}, each device's own. Pass `jax.lax.psum(out.num_tokens, {over!r})` of the sum's "
    "output.",
    # The count of a loss that `chunked_nll` has divided, beside gradients of it.
    count_of_sum="`token_count` must be the count of a sum, whose gradients come with it; got the "
    "count of a loss that `chunked_nll` has divided. Pass reduction='sum' to it, and "
    "`token_count=out`.",
)
WINDOW_TYPES = Refusals(
    TypeError,
    integers="`labels` must be integers; got {dtype}. Pass the labels, not a mask of them.",
    tensors="`{name}` must be a tensor for each micro-batch; got {kind}. Pass "
    "`[torch.as_tensor(x) for x in {name}]`.",
    wide_loss="`loss` must be float32 or float64; got {dtype}, in which a sum is rounded, and its "
    "factor too. Add up the losses in float32.",
    wide_count="`{name}` must be a number, an integer or float32; got {dtype}. Add up the mask as "
    "integers, or weights in float32.",
    # A sum of weights where tokens are counted in int32.
    integer="`token_count` must be an integer; got {dtype}. Pass the number of valid tokens, or "
    "token_normalized(..., weighted=True) for a sum of weights.",
    # An optimizer that accumulates by itself inside of one that does.
    multi_steps="`token_normalized` must be in place of `optax.MultiSteps`; got an optimizer with "
    "one inside of it, which would hold back the step and take the mean of windows' means. Pass "
    "the optimizer that `optax.MultiSteps` wraps, and `is_last` where a window ends.",
    # Likewise.
    apply_every="`token_normalized` must be in place of `optax.apply_every`; got an optimizer "
    "with one inside of it, which would hold back the step and add up windows' means. Leave it "
    "out of the chain, and pass `is_last` where a window ends.",
    # An optimizer that has `token_normalized` inside of it: it would be told no count.
    outermost="`token_normalized` must be around the whole optimizer; got one inside of another "
    "transformation, which hands on no `token_count`. Pass `token_normalized(optax.chain(...))`, "
    "with options of `token_normalized` there.",
    # An optimizer that would take no notice of a count.
    token_normalized="`tx` must be token-normalised; got another optimizer, which takes no notice "
    "of a `token_count` and would step on the sum. Make the state with `TrainState.create`, or "
    "pass `tx=token_normalized(tx)`.",
)


def check_windows(mode: str, labels: Any, where: Any, token_weights: Any, uneven: object) -> None:
    """Validate what a window of `TokenNormalizer` counts."""
    WINDOWS.require("labels", mode != "precount" or labels is not None)
    per_token = {"where": where, "token_weights": token_weights}
    if mode == "postscale":
        for name, value in {"labels": labels, **per_token}.items():
            WINDOWS.require("uncounted", value is None, name=name)
        if uneven:
            WINDOWS.refuse("even")
        return
    number = len(labels)
    for name, value in per_token.items():
        entries = number if value is None else len(value)
        WINDOWS.require("number", entries == number, name=name, number=number, entries=entries)


def check_counted(labels: ArraySpec, where: ArraySpec | None, weights: ArraySpec | None) -> None:
    """Validate what is counted of one micro-batch: nothing is broadcast."""
    if isinstance(labels, ArraySpec):
        WINDOW_TYPES.require("integers", labels.dtype in INTEGERS, dtype=labels.dtype)
    for name, spec in (("labels", labels), ("where", where), ("token_weights", weights)):
        if spec is not None:
            described, kind = isinstance(spec, ArraySpec), type(spec).__name__
            WINDOW_TYPES.require("tensors", described, name=name, kind=kind)
            shape, expected = spec.shape, labels.shape
            WINDOWS.require("shape", shape == expected, name=name, shape=shape, expected=expected)


def check_loss_sum(loss: object, divided: bool, instead: str) -> None:
    """Validate a loss that a window adds up; `instead` is the way out for one that is no sum."""
    if not isinstance(loss, ArraySpec) or loss.shape != ():
        WINDOWS.refuse("one_number", came=shape_or_kind(loss))
    WINDOW_TYPES.require("wide_loss", loss.dtype in ("float32", "float64"), dtype=loss.dtype)
    WINDOWS.require("sum", not divided, instead=instead)


def shape_or_kind(x: object) -> str:
    return f"shape {x.shape}" if isinstance(x, ArraySpec) else type(x).__name__


def check_token_count(
    name: str, count: object, value: object, weighted: bool, loss: object = None
) -> None:
    """Validate the tokens of one micro-batch, integers unless they may be `weighted`.

    `value` and `loss` are None where reading them costs something.
    """
    WINDOWS.require("count", count is not None, name=name)
    if not isinstance(count, ArraySpec) or count.shape != ():
        WINDOWS.refuse("one_count", name=name, came=shape_or_kind(count))
    dtype, integer = count.dtype, count.dtype in (*INTEGERS, "uint64")
    wide = integer or dtype in ("float32", "float64")
    WINDOW_TYPES.require("wide_count", wide, name=name, dtype=dtype)
    if not isinstance(value, (int, float)):
        return
    WINDOWS.require("finite", -math.inf < value < math.inf, name=name, value=value)
    if weighted and not integer:
        return
    WINDOWS.require("not_negative", value >= 0, name=name, value=value)
    if value == 0 and isinstance(loss, float) and loss != 0 and math.isfinite(loss):
        WINDOWS.refuse("some", name=name, loss=loss)


def check_returned_sum(loss: object, returned: object, *counts: object) -> None:
    """Refuse an output's loss that is the one it was made with over its count, as `_replace` puts
    it there; numbers, or None where they are not read."""
    if not isinstance(loss, (int, float)) or not isinstance(returned, (int, float)):
        return
    times_n = (loss * n for n in counts if isinstance(n, (int, float)) and n > 1)
    mean = returned != 0 and any(abs(x - returned) <= 1e-5 * abs(returned) for x in times_n)
    WINDOWS.require("undivided", not mean)


def check_own_count(value: object, number: object, weight: object) -> None:
    """Refuse a count that is not that of the loss it is given with; None where it is not read.

    Tokens with weights may be divided by anything, and 0 leaves a batch out.
    """
    if not isinstance(value, (int, float)) or not isinstance(number, (int, float)):
        return
    plausible = number != weight or value in (0, number)
    WINDOWS.require("own_count", plausible, number=number, value=value)


def check_one_loss(names: Sequence[str]) -> str:
    """By what name a batch of an evaluation has its loss: one, no more."""
    if len(names) != 1:
        came = " and ".join(f"`{name}`" for name in names) or "none"
        raise TypeError(
            f"`Evaluation.add` must have one of `loss`, `loss_sum` and `loss_mean`; got {came}. "
            f"Pass the `NLLOutput` alone."
        )
    return names[0]


def check_integer_count(count: ArraySpec) -> None:
    """Refuse a sum of weights where tokens are counted in int32."""
    WINDOW_TYPES.require("integer", count.dtype in (*INTEGERS, "uint64"), dtype=count.dtype)


def check_window_count(so_far: object, more: object) -> None:
    """Refuse a count that int32 does not hold, where it can be read."""
    before = so_far if isinstance(so_far, int) else 0
    if isinstance(more, int) and before + more > INT32:
        raise CountOverflowError(
            f"`token_count` must leave the window's count below 2^31; got {before} and {more} "
            f"more. End the window earlier, or count weights in float32."
        )
