"""What `CrossCheck` is asked for."""

from __future__ import annotations

from importlib.util import find_spec
from operator import index
from typing import Any

from xentlib.checks.validators import Refusals, is_count
from xentlib.options import INTEGERS

# Tokens, and rows of d weight, that are compared entry by entry.
SAMPLE = 8
SCHEDULES = Refusals(
    ValueError,
    every="`every` must be a positive number of steps; got {every!r}. 1 checks each step.",
    against="`against` must be 'oracle' or 'other', the backend that the step does not use; got "
    "{against!r}.",
    exceeded="`exceeded` must be 'warn' or 'raise'; got {exceeded!r}.",
    tokens="`tokens` must be the number of tokens to compare, or None for all; got {tokens!r}.",
    rows="`rows` must be the number of rows of d weight to compare, or None for all; got {rows!r}.",
    seed="`seed` must be an integer, 0 or more; got {seed!r}.",
    whole="`{name}` must be None with `against='other'`, which compares everything; got {number}. "
    "Leave it out, or compare with the oracle.",
)


def check_schedule(
    every: object,
    against: object,
    tokens: object,
    rows: object,
    exceeded: object,
    seed: object,
    counterpart: str,
) -> None:
    """`counterpart` is the backend that the run does not use."""
    SCHEDULES.require("every", is_count(every), every=every)
    SCHEDULES.require("against", against in ("oracle", "other"), against=against)
    SCHEDULES.require("exceeded", exceeded in ("warn", "raise"), exceeded=exceeded)
    SCHEDULES.require("tokens", tokens is None or is_count(tokens), tokens=tokens)
    SCHEDULES.require("rows", rows is None or is_count(rows), rows=rows)
    SCHEDULES.require("seed", is_count(seed, 0), seed=seed)
    for name, number in (("tokens", tokens), ("rows", rows)):
        same = against != "other" or number in (None, SAMPLE)
        SCHEDULES.require("whole", same, name=name, number=number)
    if against == "other" and find_spec(counterpart) is None:
        raise ImportError(
            f"`against='other'` must find {counterpart}, which is not installed. Run: pip "
            f"install 'xentlib[{counterpart}]', or use `against='oracle'`."
        )


def check_step_number(number: Any) -> int:
    """The number of a step, as Python's integer."""
    try:
        return index(number)
    except TypeError:
        raise TypeError(
            f"`number` must be an integer, that of the step; got {number!r}. Leave it out, and the "
            f"blocks are counted."
        ) from None


def check_traced_step(step: object, dtype: object, shape: tuple[int, ...]) -> None:
    """Of JAX: an integer, or an array of one, perhaps traced. `dtype`: None of what has none."""
    number = isinstance(step, int) if dtype is None else str(dtype) in INTEGERS and not shape
    if not number:
        came = repr(step) if dtype is None else f"{dtype} of shape {shape}"
        raise TypeError(
            f"`step` must be an integer of shape (), the number of the step; got {came}. Pass what "
            f"the run counts, `state.step` say, before the arguments of `chunked_nll`."
        )
