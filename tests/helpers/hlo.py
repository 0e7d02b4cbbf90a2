"""Reading a compiled program: its collectives, inside and outside loops, and its arrays."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from xentlib.jax.collectives import operations

SHAPE = re.compile(r"\b(?:f64|f32|f16|bf16|s64|s32|u32|u8|pred)\[([\d,]*)\]")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Collective(NamedTuple):
    kind: str  # of an all-reduce what reduces, "add" or "maximum"
    types: str  # of its results, without layouts
    looped: bool


def entries(text: str) -> list[int]:
    """Number of entries of every array type in a text."""
    return [math.prod(int(n) for n in dims.split(",") if n) for dims in SHAPE.findall(text)]


def collectives(text: str) -> list[Collective]:
    """Those of an optimised program."""
    found = operations(text)
    return sorted(
        Collective(x.reduces if x.opcode == "all-reduce" else x.opcode, x.types, x.looped)
        for x in found
    )


def products(text: str) -> int:
    """Of an optimised program, under both names that XLA has for one on a CPU."""
    return len(re.findall(r" dot\(|__onednn\$matmul", text))


def trip_counts(text: str) -> list[int]:
    """Of the loops whose number of trips no value decides."""
    return [int(n) for n in TRIPS.findall(text)]
