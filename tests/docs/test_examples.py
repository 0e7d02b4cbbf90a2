"""Files of examples/ are what a reader copies; docs/recipes.md lists each of them."""

from __future__ import annotations

import ast
import json
import logging
import re
from pathlib import Path

import pytest

from helpers.scripts import load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
if not (DOCS / "measured.py").is_file():
    pytest.skip("the documentation is not beside the tests", allow_module_level=True)

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES = 40


measured = load(DOCS / "measured.py")


def cells_of(text):
    """What a browser shows of the tables of a page: rows of cells, the head first."""
    markdown = pytest.importorskip("markdown")
    html = markdown.markdown(text, extensions=["tables"])
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.DOTALL)
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in rows]
    return [[re.sub(r"<[^>]+>", "", cell).strip() for cell in row] for row in cells], html


def test_the_table_of_recipes_has_a_row_for_each_file_and_no_empty_cell():
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert "<!-- recipes -->" in page
    rows, html = cells_of(page.replace("<!-- recipes -->", measured.recipes_part()))
    head, *body = rows
    assert html.count("<table>") == 1
    assert "|" not in html, "a row that is none"
    assert sorted(row[1] for row in body) == [path.name for path in EXAMPLES]
    for row in rows:
        assert len(row) == len(head) == 6, row
        assert all(row), row
    for row in body:
        assert len(row[0]) < 100, f"{row[1]}: {row[0]}"


def test_a_docstring_without_the_trainers_name_is_no_row(tmp_path, monkeypatch, caplog):
    """Three of them had put their whole text into a cell, and broken the table."""
    name = EXAMPLES[0].stem
    (tmp_path / f"{name}.py").write_text('"""A loop.\n\nWith words: many."""\n', encoding="utf-8")
    only = {"vocab": 5, "length": 5, "recipes": {name: {}}}
    only["recipes"][name] = json.loads(measured.RECIPES.read_text("utf-8"))["recipes"][name]
    (tmp_path / "recipes.json").write_text(json.dumps(only), encoding="utf-8")
    monkeypatch.setattr(measured, "EXAMPLES", tmp_path)
    monkeypatch.setattr(measured, "RECIPES", tmp_path / "recipes.json")
    with caplog.at_level(logging.WARNING, logger=measured.log.name):
        assert "not there yet" in measured.recipes_part()
    assert f"the trainer's name in `examples/{name}.py` is missing" in caplog.text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_it_is_run(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    doc = ast.get_docstring(tree) or ""
    commands = [line.strip() for line in doc.splitlines() if line.startswith("    ")]
    assert commands[0] == f"python examples/{path.name}"
    assert all(line.endswith(commands[0].removeprefix("python ")) for line in commands)
    assert "`# xentlib`" in doc
    assert measured.marked(path.stem)
    rest = [line.strip() for line in text.splitlines()[tree.body[0].end_lineno :]]
    code = [line for line in rest if line and not line.startswith("#")]
    assert len(code) <= LINES
    assert any("print(" in line or "logging_steps=1" in line for line in code)
