"""A call of `segment_sum` or `segment_mean`: what belongs to which sequence."""

from __future__ import annotations

import math
from typing import Any

from xentlib.checks.validators import (
    ArraySpec,
    Refusals,
    check_device,
    check_floating,
    check_integers,
    plain,
)
from xentlib.segments import MOST_TOKENS

SEGMENTS = Refusals(
    ValueError,
    shape="`{name}` must have the shape of `values` {expected}; got {shape}. {way_out}",
    count="`num_segments` must be at least 0; got {count}. Pass the number of sequences of the "
    "batch, `1 + largest id` or more.",
    tokens="`values` must have at most {most} tokens, of which the sum is exact; got {tokens}. Sum "
    "parts of them: their sums add up.",
    ids="`segment_ids` must be below `num_segments` ({count}); got {offender}. Ids count from 0 "
    "through all rows, and a negative one is padding: number the sequences of the whole call, or "
    "pass a larger `num_segments`.",
)
SEGMENT_TYPES = Refusals(
    TypeError,
    count="`num_segments` must be a Python integer; got {came}. It is the size of the result: pass "
    "`int(...)` of what the host knows, and in `jax.jit` name it in `static_argnames`.",
    sharded="`{name}` must be a plain tensor; got a DTensor. Pass `{name}.to_local()`: the sums of "
    "ranks over their own tokens add up.",
    where="`where` must be boolean; got {dtype}. Compare the mask with 0; to weigh tokens multiply "
    "`values`.",
)
NUMBERED = (
    "Pass the number of each token's sequence, from 0 on, and a negative one for padding; a mask "
    "is `where`."
)


def check_segments(
    values: ArraySpec, segment_ids: ArraySpec, num_segments: Any, where: ArraySpec | None
) -> int:
    """Validate one call; return the number of segments as Python's integer."""
    check_floating("values", values)
    tokens = math.prod(values.shape)
    known = isinstance(tokens, int)  # JAX exports sizes that are none
    SEGMENTS.require("tokens", not known or tokens <= MOST_TOKENS, most=MOST_TOKENS, tokens=tokens)
    check_integers("segment_ids", segment_ids, NUMBERED)
    count = plain(num_segments)
    integer = isinstance(count, int) and not isinstance(count, bool)
    SEGMENT_TYPES.require("count", integer, came=type(count).__name__)
    SEGMENTS.require("count", count >= 0, count=count)
    if where is not None:
        SEGMENT_TYPES.require("where", where.dtype == "bool", dtype=where.dtype)
    for name, operand in (("segment_ids", segment_ids), ("where", where)):
        if operand is None:
            continue
        if operand.shape != values.shape:
            way_out = "Broadcast it first."
            if operand.shape[:-1] == values.shape:
                way_out = (
                    "Pass one number for each token; of one-hot rows it is their `argmax(-1)`."
                )
            shapes = {"expected": values.shape, "shape": operand.shape}
            SEGMENTS.refuse("shape", name=name, way_out=way_out, **shapes)
        check_device(name, operand, values, "values")
    return int(count)
