"""Sizes that hide nothing: in tests of shards, routes, chunks and blocks no size of a module is a
multiple of 8. V = 512 over four ranks has shards of whole blocks of 128, and hid a wrong loss."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
if not (TESTS / "helpers").is_dir():
    pytest.skip("the tests are not there", allow_module_level=True)

# Of files about these.
ABOUT = (
    *(
        "shard",
        "rank",
        "fsdp",
        "zero",
        "node",
        "route",
        "parallel",
        "chunk",
        "mesh",
        "given_logits",
    ),
    *("titan", "blocks", "advi"),
)
SIZES = {"V", "VOCAB", "CLASSES", "ROWS", "N", "TOKENS", "H", "HIDDEN", "WIDTH"}


def constants(tree: ast.Module) -> Iterator[tuple[int, str, int]]:
    """The line, the name and the value of each number that a module names."""
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = value.elts if isinstance(value, ast.Tuple) else [value]
        for name, of in zip(names, values):
            try:
                number = eval(compile(ast.Expression(of), "", "eval"), {})
            except (NameError, SyntaxError, TypeError, AttributeError):  # no number by itself
                continue
            if isinstance(name, ast.Name) and type(number) is int:
                yield node.lineno, name.id, number


def hiding(text: str) -> list[str]:
    """Sizes that are multiples of 8, on lines whose end does not say why."""
    lines = text.splitlines()
    return [
        f"{line}: {name} = {number}"
        for line, name, number in constants(ast.parse(text))
        if name in SIZES and number and number % 8 == 0 and "#" not in lines[line - 1]
    ]


def test_sizes_are_no_multiples_of_8() -> None:
    files = [x for x in TESTS.glob("*/*.py") if any(word in x.stem for word in ABOUT)]
    assert len(files) > 90
    found = {file.name: wrong for file in files if (wrong := hiding(file.read_text()))}
    assert not found, "choose another size, or say at the end of the line why it is this one"


def test_what_hides_something_is_found() -> None:
    assert hiding("N, V = 9, 512\n") == ["1: V = 512"]
    assert hiding("ROWS = 4 * 128\nV = 2**16\n") == ["1: ROWS = 512", "2: V = 65536"]
    assert hiding("N, V = 9, 512  # whole blocks\nH = 7\nK = 8\nW = 2 * H\n") == []
