"""What a check may know of an argument: its dtype, shape, device or value, and what these must be.

Each message names the argument, what was expected, what came, and the way out where the expectation
does not tell it. Wrong dtypes raise `TypeError`, wrong shapes and values `ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from xentlib.options import COMPUTE, FLOATS, INTEGERS, Rule

Args = TypeVar("Args", bound=Any)  # the arguments of a call, a NamedTuple


class ArraySpec(NamedTuple):
    """What a check may know of an array: shape, dtype name, and device (None: not one device)."""

    shape: tuple[int, ...]
    dtype: str
    device: str | None = None

    def __repr__(self) -> str:
        """As a message has it."""
        return f"an array of {self.dtype} and shape {self.shape}"


Scalar = float | int | ArraySpec | None
# Of `head_routes`.
ROUTE_SIZES = (
    *("tokens_per_rank", "vocab_size", "hidden_size", "ranks", "nodes", "replicas"),
    *("tensor_parallel", "micro_batches", "chunk_tokens", "block_rows"),
)
# Of these the first must be 1 where there is the second.
NOT_TOGETHER = (
    ("tensor_parallel", "zero3"),
    ("tensor_parallel", "low_rank"),
    ("replicas", "zero3"),
)


class Refusals:
    """Messages by name, all of one kind of error; who refuses fills in what is in braces."""

    def __init__(self, error: type[Exception], **messages: str) -> None:
        self.error, self.messages = error, messages

    def require(self, message: str, holds: object, /, **values: object) -> None:
        """Refuse by the message of that name unless something holds."""
        text = self.messages[message]
        if not holds:
            raise self.error(text.format(**values))

    def refuse(self, message: str, /, **values: object) -> NoReturn:
        raise self.error(self.messages[message].format(**values))


PLANS = Refusals(
    ValueError,
    chunk_bytes="`max_chunk_bytes` must be a positive integer, the bytes of one chunk of logits; "
    "got {max_chunk_bytes!r}. Pass None for the default.",
    options="`options` must be a tuple of names; got the string {options!r}. Write ({options!r},).",
    nodes="`ranks` must be spread over `nodes` evenly; got {ranks} ranks on {nodes} nodes. Pass "
    "the ranks that share the head, and their nodes.",
    alone="`{name}` must be 1 with `{other}`, as both together are not planned; got {value}.",
    # Shards that cannot be those of the vocabulary they claim to be.
    too_few_rows="`vocab_parallel` must spread {vocab_size} classes over its ranks; got shards of "
    "{sizes}, {rows} in all. Pass the number of classes that they hold.",
)


def plain(value: Any) -> Any:
    """Python's number for one of NumPy's; anything else as it is."""
    alone = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if alone else value


def plain_args(args: Args) -> Args:
    """The same of all arguments of a call."""
    numpy = (np.generic, np.ndarray)
    converted: Args = args._make([plain(x) if isinstance(x, numpy) else x for x in args])
    return converted


def is_count(value: object, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def quoted(items: Sequence[str]) -> str:
    return repr([*items])[1:-1]


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        dtype = getattr(value, "__name__", str(value)).rpartition(".")[2]
        way_out = f" Pass its name, {dtype!r}." if dtype in choices else ""
        raise ValueError(f"`{name}` must be one of {quoted(choices)}; got {value!r}.{way_out}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False; got {value!r}.")


def check_number(name: str, value: object, rule: str, *, ok: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not ok:
        raise ValueError(f"`{name}` must be {rule}; got {value!r}.")


def check_rule(name: str, value: Scalar, rule: Rule, leading: tuple[int, ...] = ()) -> None:
    """Of a number, or of an array of one or of one for each token."""
    if isinstance(value, ArraySpec) and rule.array:
        if value.shape not in ((), leading):
            raise ValueError(
                f"`{name}` must be {rule.expected}; got shape {value.shape}. Reduce or reshape it "
                f"to {leading or '()'}."
            )
        if value.dtype not in FLOATS + INTEGERS:
            raise TypeError(
                f"`{name}` must be {rule.expected}; got dtype {value.dtype}. Cast it to float32."
            )
        return
    # No math.isfinite: the compiler traces numbers that it keeps symbolic through this.
    ok = isinstance(value, (int, float)) and rule.low <= value <= rule.high
    ok = ok and isinstance(value, (int, float)) and -math.inf < value < math.inf
    ends = (rule.open_low and value == rule.low) or (rule.open_high and value == rule.high)
    check_number(name, value, rule.expected, ok=ok and not ends)


def holds(dtype: str, value: int) -> bool:
    """Whether an integer dtype has this value."""
    signed = dtype[0] != "u"
    top = 1 << int(dtype.lstrip("uint")) - signed
    return (-top if signed else 0) <= value < top


def check_floating(name: str, operand: ArraySpec) -> None:
    if operand.dtype not in FLOATS:
        # Integers of a quantised head, cast to floats, are a head without its scales.
        quantised = (
            "A quantised head is its integers times scales: pass what its own method dequantises "
            "it to, or leave the head out of the quantisation."
        )
        raise TypeError(
            f"`{name}` must be floating point ({', '.join(FLOATS)}); got {operand.dtype}. "
            f"{quantised if name == 'weight' else 'Cast it before the call.'}"
        )


def check_integers(name: str, operand: ArraySpec, way_out: str) -> None:
    rule = "integers"
    if operand.dtype == "uint64":
        rule, way_out = "integers of any dtype but uint64", "Cast it to int64."
    if operand.dtype not in INTEGERS:
        raise TypeError(f"`{name}` must be {rule}; got {operand.dtype}. {way_out}")


def check_per_token(
    name: str, operand: ArraySpec, leading: tuple[int, ...], source: str = "hidden"
) -> None:
    if operand.shape != leading:
        check_off_by_one(name, operand.shape, leading, source)
        raise ValueError(
            f"`{name}` must have shape {leading}, one entry per token of `{source}`; "
            f"got {operand.shape}. Reshape it, or flatten `{source}` to match."
        )


def check_off_by_one(
    name: str, shape: tuple[int, ...], leading: tuple[int, ...], source: str
) -> None:
    """Refuse a shift that one side of a call has made by slicing, and the other has not."""
    if not shape or shape[:-1] != leading[:-1] or abs(shape[-1] - leading[-1]) != 1:
        return
    before = ":, " * (len(leading) - 1)
    sliced, short = f"`{name}[{before}1:]`", f"`{source}[{before}:-1]`"
    fewer = shape[-1] < leading[-1]
    if name == "labels":
        way_out = (
            f"Slice {short if fewer else sliced} too, or pass the whole of `{source}` with "
            f"`next_token_labels` of the whole labels."
        )
    elif fewer:
        way_out = "Add a last column, for the token that predicts nothing."
    else:
        way_out = f"Slice {sliced} too, as the labels are."
    raise ValueError(
        f"`{name}` must have shape {leading}, one entry per token of `{source}`; got {shape}, one "
        f"column {'fewer' if fewer else 'more'}, as after {sliced if fewer else short}. {way_out}"
    )


def check_device(name: str, operand: ArraySpec, other: ArraySpec, source: str = "hidden") -> None:
    if None not in (operand.device, other.device) and operand.device != other.device:
        raise ValueError(
            f"`{name}` must be on the device of `{source}` ({other.device}); got "
            f"{operand.device}. Move one of them before the call."
        )


def check_plan_arguments(
    sizes: Mapping[str, int], dtype: str, compute_dtype: str | None, max_chunk_bytes: int | None
) -> None:
    """Refuse sizes and budgets that no chunk can have."""
    for name, value in sizes.items():
        least = 0 if name in ("num_tokens", "teacher_size") else 1
        check_number(name, value, f"an integer >= {least}", ok=is_count(value, least))
    check_choice("dtype", dtype, FLOATS)
    if compute_dtype is not None:
        check_choice("compute_dtype", compute_dtype, COMPUTE)
    check_chunk_bytes(max_chunk_bytes)


def check_chunk_bytes(max_chunk_bytes: Any) -> None:
    right = max_chunk_bytes is None or is_count(max_chunk_bytes)
    PLANS.require("chunk_bytes", right, max_chunk_bytes=max_chunk_bytes)


def check_shards(sizes: Sequence[int], vocab_size: int) -> None:
    """Refuse shards that cannot be those of the vocabulary they claim to be."""
    rule = "an integer >= 1, the classes of all shards"
    check_number("vocab_size", vocab_size, rule, ok=is_count(vocab_size))
    rows = sum(sizes)
    shards = {"sizes": tuple(sizes), "rows": rows}
    PLANS.require("too_few_rows", rows >= vocab_size, vocab_size=vocab_size, **shards)


def check_routes(arguments: Mapping[str, Any], known: Sequence[str]) -> frozenset[str]:
    """The options by name, of the arguments of `head_routes`; refuse what no sharded head can
    be."""
    for name in ROUTE_SIZES:
        value = arguments[name]
        if value is not None or name not in ("nodes", "chunk_tokens", "block_rows"):
            check_number(name, value, "an integer >= 1", ok=is_count(value))
    for name in ("dtype", "head_dtype", "reduce_dtype", "param_dtype"):
        check_choice(name, arguments[name], FLOATS)
    low_rank = arguments["low_rank"]
    check_number("low_rank", low_rank, "an integer >= 0", ok=is_count(low_rank, 0))
    for name in ("recompute", "module", "kept", "kernels", "zero3", "bias"):
        check_flag(name, arguments[name])
    for name, other in NOT_TOGETHER:
        alone = arguments[name] == 1 or not arguments[other]
        PLANS.require("alone", alone, name=name, other=other, value=arguments[name])
    check_choice("platform", arguments["platform"], ("gpu", "cpu"))
    check_chunk_bytes(arguments["max_chunk_bytes"])
    options, ranks, nodes = (arguments[name] for name in ("options", "ranks", "nodes"))
    PLANS.require("options", not isinstance(options, str), options=options)
    for option in options:
        check_choice("options", option, known)
    PLANS.require("nodes", ranks % (nodes or 1) == 0, ranks=ranks, nodes=nodes)
    rates = arguments["rates"]
    for name, rate in (rates._asdict() if rates else {}).items():
        least = 0 if name in ("latency", "step") else 1
        ok = isinstance(rate, (int, float)) and least <= rate < float("inf")
        check_number(f"rates.{name}", rate, f"a finite number >= {least}", ok=ok)
    return frozenset(options)


LEARNED = {  # of constants that a model may have as parameters
    "logit_scale": "; to learn it, multiply `hidden` and `bias` by it instead",
    "temperature": "; to learn it, divide `hidden` and `bias`, or `logits`, by it instead, where "
    "there is no `softcap`",
}


def to_learn(name: str) -> str:
    """How a constant's gradient comes about, for the end of a sentence."""
    return LEARNED.get(name, "")
