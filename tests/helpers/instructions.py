"""What is read in the text of a program that XLA has compiled: its loops, the products in them, and
the bytes that everything else moves."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

ITEMSIZE = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "u16": 2,
    "s8": 1,
    "pred": 1,
}

BLOCK = re.compile(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^ +(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$", re.MULTILINE)
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
NOISE = re.compile(r"/\*.*?\*/|\{[\d,]*(?::[^}]*)?\}(?=[,)\s])")  # tuple positions, layouts
# What only passes an array on.
ALIASES = ("bitcast", "get-tuple-element", "parameter", "tuple", "constant")
# What reads some rows or entries of an array.
PICKS = ("gather", "dynamic-slice", "slice")
# What writes some rows of one.
UPDATES = ("scatter", "dynamic-update-slice")


class Array(NamedTuple):
    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return ITEMSIZE[self.dtype] * math.prod(self.dims)


class Instruction(NamedTuple):
    name: str
    results: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str  # attributes

    @property
    def result(self) -> Array:
        return self.results[0]

    @property
    def called(self) -> str | None:
        found = re.search(r"calls=%([\w.\-]+)", self.rest)
        return found and found[1]

    @property
    def product(self) -> bool:
        return "__cublas" in self.rest


class Program:
    """The text of a compiled program."""

    def __init__(self, text: str) -> None:
        text = re.sub(r", (metadata|backend_config)=.*", "", NOISE.sub("", text))
        self.blocks = {name: parsed(block) for name, block in BLOCK.findall(text)}
        everything = [x for block in self.blocks.values() for x in block]
        names = [re.search(r"body=%([\w.\-]+)", x.rest) for x in everything if x.opcode == "while"]
        self.loops = [self.blocks[name[1]] for name in names if name]

    def inner(self, block: list[Instruction]) -> list[Instruction]:
        """Instructions of a block, with those of its fusions."""
        called = [self.blocks[x.called] for x in block if x.called]
        return [*block, *(x for one in called for x in one)]

    def moved(self, block: list[Instruction], dims: set[tuple[int, ...]]) -> int:
        """Bytes of arrays of these shapes that a block's instructions read whole or write, beside
        its products."""
        known = {x.name: x for x in block}
        total = 0
        for one in block:
            if one.opcode in ALIASES or one.product:
                continue
            if not self.updates(one):
                total += sum(x.bytes for x in one.results if x.dims in dims)
            for position, name in enumerate(one.operands):
                array = known[name].result
                if array.dims in dims and not self.picks(one, position):
                    total += array.bytes
        return total

    def updates(self, one: Instruction) -> bool:
        """Whether an instruction writes some rows of its first operand, in place."""
        return (self.blocks[one.called][-1] if one.called else one).opcode in UPDATES

    def picks(self, one: Instruction, position: int) -> bool:
        """Whether an instruction takes single entries of an operand."""
        if one.called is None:
            return one.opcode in PICKS
        block = self.blocks[one.called]
        (name,) = (x.name for x in block if x.opcode == "parameter" and x.rest == str(position))
        return picked(name, block)


def picked(name: str, block: list[Instruction]) -> bool:
    """Whether a fusion has only single entries of a value, or of what it makes of each entry."""
    dims = known_dims(name, block)
    for one in (x for x in block if name in x.operands):
        if one.opcode in PICKS + UPDATES:
            most = one.opcode == "slice" and 2 * math.prod(one.result.dims) > math.prod(dims)
            if most or one.operands[0] != name:
                return False
        elif one is block[-1] or one.result.dims != dims or not picked(one.name, block):
            return False
    return True


def known_dims(name: str, block: list[Instruction]) -> tuple[int, ...]:
    return next(x.result.dims for x in block if x.name == name)


def parsed(block: str) -> list[Instruction]:
    found = []
    for name, types, opcode, operands, rest in LINE.findall(block):
        arrays = tuple(
            Array(dtype, tuple(int(n) for n in dims.split(",") if n))
            for dtype, dims in ARRAY.findall(types)
        )
        if opcode == "parameter":  # its number stands where others have operands
            found.append(Instruction(name, arrays, opcode, (), operands))
        else:
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            found.append(Instruction(name, arrays, opcode, names, rest))
    return found
