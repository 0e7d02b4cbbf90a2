"""The house of CONTRIBUTING.md: files that are read at one sitting, and no circle of imports."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from helpers.modules import MODULES, PACKAGES, ROOT

if not all((ROOT / folder).is_dir() for folder in PACKAGES):
    pytest.skip("the sources are not there", allow_module_level=True)

SOURCE_LINES = 400
TEST_LINES = 400

GENERATED = ("xentlib.arguments", "xentlib.torch.api", "xentlib.jax.api")
TESTS = sorted((ROOT / "tests").glob("*/test_*.py"))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a module is imported: no function's body, nothing for type checkers alone."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
            continue
        for inner in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, inner, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def imported(text: str, modules: Collection[str]) -> set[str]:
    """Which of `modules` a module's text imports as it is imported.

    `from package import module` is of that module alone: the package around it is being imported
    already, and need not be done.
    """
    found: set[str] = set()
    for node in statements(ast.parse(text).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in modules else str(node.module))
    return found & set(modules)


def circle(texts: dict[str, str]) -> list[str]:
    """Modules of which each imports the next, the last one being the first; none if there are no
    such modules."""
    arrows = {name: imported(text, texts) for name, text in texts.items()}
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for following in sorted(arrows[name]):
            found = walk(following, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    for name in sorted(arrows):
        found = walk(name, [])
        if found:
            return found
    return []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_read_at_one_sitting(name):
    """But for what is generated, which is as long as what it is made of."""
    assert lines_of(MODULES[name]) <= SOURCE_LINES or name in GENERATED


def test_what_is_generated_says_so():
    for name in GENERATED:
        assert "Written by `make public`" in MODULES[name].read_text(encoding="utf-8")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_a_test_file_is_read_at_one_sitting(path):
    assert lines_of(path) <= TEST_LINES


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_a_test_file_imports_no_other(path):
    """What several of them use is in tests/helpers, or a change of one test moves another."""
    names = {other.stem for other in TESTS}
    taken: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            taken.add(str(node.module))
        elif isinstance(node, ast.Import):
            taken |= {alias.name for alias in node.names}
    assert not taken & names


def test_no_circle_of_imports():
    texts = {name: path.read_text(encoding="utf-8") for name, path in MODULES.items()}
    assert circle(texts) == []


def test_a_circle_is_found():
    """Through a package, a conditional import, or `from package import module`."""
    texts = {
        "p": "from p.a import f",
        "p.a": "import json\nfrom p import b",
        "p.b": "if __debug__:\n    from p.c import g",
        "p.c": "def g():\n    from p.a import f",
    }
    assert circle(texts) == []
    assert circle(texts | {"p.c": "from p.a import f"}) == ["p.a", "p.b", "p.c", "p.a"]
    assert circle(texts | {"p.c": "try:\n    import p.a\nfinally:\n    pass"})
    assert circle(texts | {"p.c": "from p import f"}) == ["p", "p.a", "p.b", "p.c", "p"]
    unchecked = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import f"
    assert circle(texts | {"p.c": unchecked}) == []
