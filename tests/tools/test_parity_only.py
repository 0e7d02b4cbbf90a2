"""`xentlib parity --only`: some rows of the contract, by the sections that measure them."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from helpers.played import complaint, measured, parity, sections, staged, written
from xentlib.contract import ROWS
from xentlib.tools import cli
from xentlib.tools.parity.result import Histogram, Section
from xentlib.tools.parity.suite import few_sections, operator_sections
from xentlib.tools.parity.training.comparison import training_sections

RUN = Path(__file__).parents[2] / "docs" / "data" / "parity.json"
BOTH = ("torch", "jax")


@pytest.fixture
def stage(monkeypatch):
    return staged(monkeypatch)


def every_section(backends, device="cpu"):
    return [
        *operator_sections(backends, "quick", 0, device),
        *training_sections(backends, text=None, seed=0, few=True),
    ]


def test_a_section_measures_the_rows_that_it_says():
    """Of the whole run that the documentation shows: these, each of them, and no other."""
    found = defaultdict(set)
    for m in json.loads(RUN.read_text(encoding="utf-8"))["measurements"]:
        found[m["section"]].add(m["row"])
    said = {part.name: set(part.rows) for part in every_section(BOTH)}
    assert said == found
    assert set().union(*said.values()) == {*ROWS, "curve"}


@pytest.mark.parametrize("backend", BOTH)
def test_one_backend_is_not_held_against_the_other(backend):
    both = {part.name: part.rows for part in every_section(BOTH)}
    for part in every_section((backend,)):
        assert set(part.rows) == set(both[part.name]) - {"A9"}


@pytest.mark.torch
def test_what_doctor_measures_are_the_rows_that_it_says():
    """Two sections run: what they find, and no section without rows."""
    pytest.importorskip("torch")
    from xentlib.tools.parity.progress import Progress

    parts = few_sections(("torch",))
    assert all(part.rows for part in parts)
    for part in parts[1:3]:
        section = part.section(Progress())
        assert not section.error
        assert {m.row for m in section.measurements} == set(part.rows)


def test_only_the_sections_of_a_row_run_and_only_it_is_judged(stage, tmp_path, capsys):
    stage.parts["one"] = Section(
        "one",
        (measured(), measured(4.5, row="A0")),
        (Histogram("A0", "torch", "x", (0.0, 1.0), (3,)), *stage.parts["one"].histograms),
    )
    assert parity(tmp_path, "--only", "A7", "A5") == 0  # A0 falls short
    assert stage.ran == ["one", "two"]
    found, said = written(tmp_path), capsys.readouterr()
    assert [m["row"] for m in found["measurements"]] == ["A5", "A7"]
    assert [h["row"] for h in found["histograms"]] == ["A5"]
    assert [row["id"] for row in found["rows"]] == ["A5", "A7"]
    assert found["environment"]["only"] == "A5 A7"
    assert found["passed"] is True
    first = [line.split()[0] for line in said.out.splitlines() if line.split()]
    assert [word for word in first if word in ROWS] == ["A5", "A7"]
    assert "not run" not in said.out
    assert "all 2 rows of the contract that were measured" in said.out
    # Also a row that falls short, and by options that are given twice.
    assert parity(tmp_path, "--only", "A5", "--only", "A0") == 1
    assert "A0 falls short" in capsys.readouterr().out
    assert [row["id"] for row in written(tmp_path)["rows"]] == ["A0", "A5"]


def test_a_row_of_which_nothing_comes_is_no_success(stage, tmp_path, capsys):
    assert parity(tmp_path, "--only", "A5", "A0") == 1
    assert "nothing was measured of A0; what was measured holds" in capsys.readouterr().out
    assert written(tmp_path)["passed"] is False


def test_only_training(stage, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    assert parity(tmp_path, "--only", "A6", "--text", str(text)) == 0
    assert stage.ran == ["training"]
    assert len(written(tmp_path)["training"]) == 1


def test_only_is_gone_on_from_with_the_same_rows(stage, tmp_path, capsys):
    found, stage.parts["two"] = stage.parts["two"], KeyboardInterrupt()
    assert parity(tmp_path, "--only", "A5", "A7") == 130
    assert "--only A5 A7 --resume`" in capsys.readouterr().err
    stage.parts["two"] = found
    stage.ran.clear()
    assert parity(tmp_path, "--only", "A7", "A5", "A7", "--resume") == 0
    assert stage.ran == ["two"]
    assert sections(tmp_path) == {"one": "done", "two": "done"}
    capsys.readouterr()
    assert parity(tmp_path, "--only", "A5", "--resume") == 2
    assert "only 'A5 A7' and not 'A5'" in complaint(capsys)
    assert parity(tmp_path, "--resume") == 2
    assert "only 'A5 A7' and not 'none'" in complaint(capsys)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["A99"], "got 'A99'."),
        (["A5,A7"], "got 'A5,A7'."),
        (["a5"], "got 'a5'."),
        ([""], "got ''."),
        (["A5", "A18"], "got 'A18', which a run of both backends on the CPU measures."),
    ],
)
def test_rows_that_no_section_measures_are_refused(stage, tmp_path, capsys, asked, said):
    assert parity(tmp_path, "--only", *asked) == 2
    line = complaint(capsys)
    assert line.endswith(said)
    assert "must name rows that a section of this run measures, with spaces between (A0, A5" in line
    assert stage.ran == []
    assert not (tmp_path / "out" / "parity.json").exists()


def test_a_text_without_training_is_refused(stage, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("some text\n")
    assert parity(tmp_path, "--only", "A5", "--text", str(text)) == 2
    assert "`--text` is for the training part, which `--only A5` leaves out" in complaint(capsys)
    assert stage.ran == []


def test_no_row_after_only(tmp_path, capsys):
    assert parity(tmp_path, "--only") == 2
    assert "argument --only: expected at least one argument" in complaint(capsys)


@pytest.mark.slow
@pytest.mark.torch
def test_a_row_of_real_sections(tmp_path, monkeypatch, capsys):
    """A row that is on a GPU as well, measured by one section of many."""
    pytest.importorskip("torch")
    out = tmp_path / "out"
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    assert cli.main(["parity", "--backend", "torch", "--only", "A21", "--out", str(out)]) == 0
    assert list(sections(tmp_path)) == ["divergences of given logits"]
    assert {m["row"] for m in written(tmp_path)["measurements"]} == {"A21"}
    assert "PyTorch holds the one row of the contract that was measured" in capsys.readouterr().out
