"""Reading a compiled program: its collectives, inside and outside loops, and its arrays."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

COLLECTIVE = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\("
)
SHAPE = re.compile(r"\b(?:f64|f32|f16|bf16|s64|s32|u32|u8|pred)\[([\d,]*)\]")
BLOCK = re.compile(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
LAYOUT = re.compile(r"\{[\d,]*\}")
NAME = r"%([\w.\-]+)"


class Collective(NamedTuple):
    kind: str  # of a reduction what reduces, "add" or "maximum"
    types: str  # of its results, without layouts
    looped: bool


def entries(text: str) -> list[int]:
    """Number of entries of every array type in a text."""
    return [math.prod(int(n) for n in dims.split(",") if n) for dims in SHAPE.findall(text)]


def collectives(text: str) -> list[Collective]:
    """Those of an optimised program. A computation is in a loop if a loop's body reaches it."""
    blocks = dict(BLOCK.findall(text))
    looped: set[str] = set()
    todo = re.findall("body=" + NAME, text)
    while todo:
        name = todo.pop()
        if name in blocks and name not in looped:
            looped.add(name)
            todo += re.findall(NAME, blocks[name])
    found = []
    for name, block in blocks.items():
        for line in block.splitlines():
            if op := COLLECTIVE.search(line):
                kind = op[2]
                if reduction := re.search("to_apply=" + NAME, line):
                    kind = re.search(r"ROOT .* (\w+)\(", blocks[reduction[1]])[1]
                found.append(Collective(kind, LAYOUT.sub("", op[1]), name in looped))
    return sorted(found)


def trip_counts(text: str) -> list[int]:
    """Of the loops whose number of trips no value decides."""
    return [int(n) for n in TRIPS.findall(text)]
