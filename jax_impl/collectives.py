"""What a step sends between devices, counted in the programs that XLA made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from xentlib.collectives import Collective, CollectiveCount

KIND_OF = {
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
    "collective-permute": "permute",
}

NAME = r"%([\w.\-]+)"
BLOCK = re.compile(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
DEFINED = re.compile(rf"^ +(?:ROOT )?{NAME} = (.*?) [\w\-]+\(", re.MULTILINE)
# The second half of an asynchronous one ("-done") sends nothing.
SENDS = re.compile(rf"= (.*?) ({'|'.join(KIND_OF)})(-start)?\((.*?)\)")
NOT_SHAPE = re.compile(r"\{[^{}\n]*\}|/\*.*?\*/")  # layouts; the numbers of a long tuple's elements
SHAPE = re.compile(r"\b(?:pred|[a-z]+?(\d+)\w*)\[([\d,]*)\]")


class Operation(NamedTuple):
    """A collective of a compiled program.

    Attributes:
        opcode: XLA's name, "all-reduce".
        reduces: what reduces, "add" or "maximum"; "" where nothing does.
        types: of the whole tensors, "f32[64,32]"; several in parentheses.
        looped: a loop's body reaches it.
    """

    opcode: str
    reduces: str
    types: str
    looped: bool

    @property
    def bytes(self) -> int:
        return sum(
            -(-int(bits or 8) * math.prod(int(n) for n in dims.split(",") if n) // 8)
            for bits, dims in SHAPE.findall(self.types)
        )


def operations(text: str) -> list[Operation]:
    """The collectives of an optimised program, in its order."""
    text = NOT_SHAPE.sub("", text)
    blocks = dict(BLOCK.findall(text))
    looped: set[str] = set()
    todo = re.findall("body=" + NAME, text)
    while todo:
        name = todo.pop()
        if name in blocks and name not in looped:
            looped.add(name)
            todo += re.findall(NAME, blocks[name])
    listed = []
    for name, block in blocks.items():
        types = dict(DEFINED.findall(block))
        for line in block.splitlines():
            if not (op := SENDS.search(line)):
                continue
            result, opcode, starts, operands = op.groups()
            if opcode == "reduce-scatter":
                whole = [types[operand] for operand in re.findall(NAME, operands)]
                result = whole[0] if len(whole) == 1 else f"({', '.join(whole)})"
            elif starts and opcode != "all-reduce":
                result = elements(result)[1]  # (operands, results, ...)
            reduction = re.search("to_apply=" + NAME, line)
            root = reduction and re.search(r"ROOT .* (\w+)\(", blocks[reduction[1]])
            listed.append(Operation(opcode, root[1] if root else "", result, name in looped))
    return listed


def elements(types: str) -> list[str]:
    """Of a tuple's type; they may be tuples."""
    parts, depth = [""], 0
    for letter in types[1:-1]:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [one.strip() for one in parts]


@contextmanager
def count_collectives() -> Iterator[CollectiveCount]:
    """Count the collectives of a step: `with count_collectives() as c: step()`.

    A head should cost what contract row A15 says, however many chunks and valid tokens there are,
    on every rank: a count that differs between ranks is a step that hangs.

    In PyTorch every collective that this thread and its backward dispatch is counted, those of a
    wrapper's hooks included, each time. A collective that another library calls inside an operator
    of its own is not seen.

    In JAX the programs that are compiled and first run within the block are read: each program's
    collectives count once, however often it runs, and one in a loop says so. The block begins with
    `jax.clear_caches()`, so that programs compiled before are compiled again.

    Yields:
        A `CollectiveCount`. In PyTorch it grows as the block runs, in JAX it is filled at its end.

    Numerics: nothing is changed.
    """
    jax.clear_caches()
    client = jax.devices()[0].client
    before = set(client.live_executables())
    programs: dict[Any, None] = {}

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        # At the end of each compilation, which is such an event: a program goes with the function
        # it was made for, and one called under a name of its own is gone before the block ends.
        programs.update(dict.fromkeys(x for x in client.live_executables() if x not in before))

    count = CollectiveCount()
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
        count.found += [
            Collective(KIND_OF[x.opcode], x.bytes, x.looped)
            for program in programs
            for module in program.hlo_modules()
            for x in operations(module.to_string())
        ]
