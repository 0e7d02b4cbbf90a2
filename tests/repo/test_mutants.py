"""The tool that changes one node at a time: a change is one, and is the same one again."""

from __future__ import annotations

import ast
import functools
import random
from pathlib import Path

import pytest

from helpers.scripts import load

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / ".ci" / "mutants.py").is_file() or not (ROOT / "torch_impl").is_dir():
    pytest.skip("the sources are not there", allow_module_level=True)
TOOL = load(ROOT / ".ci" / "mutants.py", "mutants")
MUTANTS_OF = functools.cache(TOOL.mutants_of)


@pytest.fixture(autouse=True)
def few_files(monkeypatch):
    """Of the whole package it takes ten seconds; what a file has is worked out once."""
    files = [path for path in TOOL.files() if path.parent.name == "core"]
    assert len(files) > 10
    monkeypatch.setattr(TOOL, "files", lambda: files)
    monkeypatch.setattr(TOOL, "mutants_of", MUTANTS_OF)


def test_every_change_changes_its_file():
    """Catches: a span counted in characters where a line has others than ASCII's, brackets that are
    needed, a change that is none."""
    everything = [m for path in TOOL.files() for m in TOOL.mutants_of(path)]
    assert len(everything) > 1000
    assert len({mutant.key for mutant in everything}) == len(everything)
    for mutant in random.Random(3).sample(everything, 300):
        source = (ROOT / mutant.file).read_bytes()
        new = TOOL.changed(source, mutant)
        assert ast.dump(ast.parse(new)) != ast.dump(ast.parse(source)), mutant


def test_a_table_s_rows_are_drawn_again():
    mutants = TOOL.drawn(1, 5, {})
    assert TOOL.drawn(1, 5, {}) == mutants != TOOL.drawn(2, 5, {})
    assert TOOL.drawn(9, 40, {mutant.key: {} for mutant in mutants}) == mutants


def test_what_counts_as_rejected():
    assert TOOL.rejected("tests/numerics/test_nll.py::test_any_problem[torch]")
    for verdict in (None, "survives 12 tests", "survives: no test reaches it", "ended: 'Killed'"):
        assert not TOOL.rejected(verdict)


def test_a_probe_stands_before_its_statement():
    tree = ast.parse("def f(x):\n    if x:\n        y = x\n    else:\n        y = 2\n    return y")
    probed = ast.unparse(TOOL.Probes({5: [7], 6: [8, 9]}).visit(tree)).splitlines()
    at = {n: f"__import__('reached').at({n})" for n in (7, 8, 9)}
    lines = [line.strip() for line in probed]
    assert lines[lines.index("else:") + 1 :] == [at[7], "y = 2", at[8], at[9], "return y"]
