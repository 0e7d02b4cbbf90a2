"""The views of a parity run: its numbers, the table and parity.json say what was measured."""

import builtins
import io
import json
import math
from pathlib import Path

import pytest

from helpers.parity_runs import FAILURES, STATEMENTS, a_run, failed, measured, unfinished
from xentlib.tools.parity.report.document import from_json, to_json, write_report
from xentlib.tools.parity.report.page import render_page
from xentlib.tools.parity.report.summary import (
    allowance_used,
    bound_text,
    number,
    print_table,
    row_statements,
    summarise,
    value_text,
    verdict,
    worst_first,
)
from xentlib.tools.parity.result import Histogram, ParityResult, Section

# --- parity.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda run: run, failed, unfinished])
def test_json_round_trip(change):
    run = change(a_run(FAILURES["infinite"]))
    again = from_json(to_json(run, STATEMENTS))
    assert again == run
    assert (again.missing, again.failed) == (run.missing, run.failed)


def test_json_of_a_run_before_there_were_sections():
    """Which documentation has."""
    document = json.loads(to_json(a_run(), STATEMENTS))
    del document["sections"]
    for kind in ("measurements", "histograms", "training"):
        for entry in document[kind]:
            del entry["section"]
    run = from_json(json.dumps(document))
    for name in ("measurements", "histograms", "environment", "seconds", "passed"):
        assert getattr(run, name) == getattr(a_run(), name)
    ours, theirs = ([c for part in x.sections for c in part.curves] for x in (run, a_run()))
    assert ours == theirs


def test_json_is_strict_with_nan_and_infinity():
    run = a_run(FAILURES["NaN"], FAILURES["infinite"])
    text = to_json(run, STATEMENTS)

    def refuse(name):
        pytest.fail(f"{name} is not JSON")

    json.loads(text, parse_constant=refuse)
    again = from_json(text)
    assert math.isnan(again.measurements[-2].value)
    assert again.measurements[-1].value == math.inf
    assert again.histograms[0].edges[-1] == math.inf


def test_json_has_a_fixed_order_and_says_what_it_is():
    text = to_json(a_run(), STATEMENTS)
    assert text == to_json(a_run(), STATEMENTS)
    document = json.loads(text)
    assert list(document) == [
        "schema",
        "passed",
        "verdict",
        "seconds",
        "environment",
        "sections",
        "rows",
        "measurements",
        "histograms",
        "training",
    ]
    assert document["schema"] == "xentlib.parity/1"
    assert document["environment"]["torch"] == "2.13.0+cpu"
    assert [row["id"] for row in document["rows"]] == ["A1", "A5", "A7", "A9", "A13", "curve"]
    assert document["rows"][4]["passed"] is None


def test_json_says_what_became_of_each_section():
    document = json.loads(to_json(unfinished(failed(a_run())), STATEMENTS))
    assert document["passed"] is False
    assert document["seconds"] == 69.125
    assert [tuple(section.values()) for section in document["sections"]] == [
        ("operators", "failed", 9.0, "RuntimeError: 2 ranks were late\nTraceback of <it>"),
        ("training", "done", 60.125, ""),
        ("more", "not run", 0.0, ""),
        ("most", "not run", 0.0, ""),
    ]
    assert {m["section"] for m in document["measurements"]} == {"training"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_a_section_has_its_place_whenever_it_was_run(order):
    """Also one that was run again; what several have counted of one quantity is added up."""
    edges = (0.0, 0.5, 1.0)

    def found(k):
        counted = (Histogram("A5", "torch", "d hidden", edges, (10**k, k)),)
        return Section("abc"[k], (measured(f"A{k}", 1.0, 4.0),), counted)

    run = ParityResult(planned=["a", "b", "c"])
    run.add(Section("b", error="late"))
    for k in order:
        run.add(found(k))
    assert run == ParityResult([found(0), found(1), found(2)], ["a", "b", "c"])
    assert [m.row for m in run.measurements] == ["A0", "A1", "A2"]
    assert run.histograms == [Histogram("A5", "torch", "d hidden", edges, (111, 3))]
    assert run.passed


def test_json_of_another_schema_is_refused():
    text = to_json(a_run(), STATEMENTS).replace("xentlib.parity/1", "xentlib.parity/0")
    with pytest.raises(ValueError, match=r"must be a parity run of schema 'xentlib.parity/1'; got"):
        from_json(text)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (24733308.0, "24,733,308"),
        (3.0987654321987654, "3.10"),
        (34.54, "34.5"),
        (9.996, "10.0"),
        (999.6, "1,000"),
        (0.00123456, "0.00123"),
        (2.6e-7, "2.60e-7"),
        (1.5e20, "1.50e20"),
        (math.nan, "NaN"),
        (math.inf, "∞"),
        (-2.5, "-2.50"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("m", "value", "bound"),
    [
        (measured("A5", 3.0987654, 4.0), "3.10", "≤ 4"),
        (measured("A5", 4.0004, 4.0), "4.0004", "≤ 4"),  # 4.00 would look like a pass
        (measured("A1", 0.0, 0.0), "0", "= 0"),
        (measured("A4", 2.6e-7, 5e-7), "2.60e-7", "≤ 5e-7"),
        (measured("A7", 0.9973, 0.995, at_least=True), "99.73 %", "≥ 99.5 %"),
        (measured("A7", 0.994999, 0.995, at_least=True), "99.4999 %", "≥ 99.5 %"),
        (measured("A7", 0.9999999, 0.995, at_least=True), "99.99999 %", "≥ 99.5 %"),
        (measured("A7", 1.0, 0.995, at_least=True), "100 %", "≥ 99.5 %"),
        (measured("A14", 9, 9, at_least=True), "9", "≥ 9"),
    ],
)
def test_value_beside_its_bound(m, value, bound):
    assert (value_text(m), bound_text(m)) == (value, bound)


def test_the_worst_is_a_failure_then_the_closest_to_its_bound():
    good = [measured("A5", 1.0, 4.0), measured("A5", 3.0, 4.0), measured("A5", 2.0, 4.0)]
    assert [m.value for m in worst_first(good)] == [3.0, 2.0, 1.0]
    for failure in (FAILURES["above"], FAILURES["NaN"], FAILURES["infinite"]):
        assert worst_first([*good, failure])[0] is failure
        assert allowance_used(failure) > 1.0
    shares = [measured("A7", v, 0.995, at_least=True) for v in (1.0, 0.996, 0.999)]
    assert [m.value for m in worst_first(shares)] == [0.996, 0.999, 1.0]


def test_summary_counts_an_entry_once_and_keeps_the_worst_of_each_metric():
    row = {row.id: row for row in summarise(a_run(), STATEMENTS)}["A5"]
    assert row.entries == 2 * 2112  # two backends; tau and rho of torch are of the same entries
    assert [(label, m.value) for label, m in row.worst] == [
        ("tau", 3.0987654321987654),
        ("rho / u", 34.5),
    ]


def test_rows_come_in_the_order_of_the_contract():
    rows = ("curve", "A10", "A2", "A0")
    run = ParityResult([Section("one", tuple(measured(row, 1.0, 4.0) for row in rows))])
    assert [row.id for row in summarise(run, {"A2": "", "A10": ""})] == ["A2", "A10", "A0", "curve"]


def test_every_row_of_the_contract_has_a_statement():
    from xentlib.contract import ROWS

    statements = row_statements()
    assert list(statements) == list(ROWS)
    assert all(row.quantity in statements[row.id] for row in ROWS.values())


def test_verdict():
    def of(run):
        return verdict(run, summarise(run, STATEMENTS))

    short = FAILURES["above"], FAILURES["below"]
    assert of(a_run(*short)) == "A5 and A7 fall short"
    assert of(failed(a_run())) == "operators could not be run; what was measured holds"
    said = "2 of 4 sections have been run; what was measured holds"
    assert of(unfinished(a_run())) == said
    assert of(failed(unfinished(a_run(*short)))) == (
        "A5 and A7 fall short; operators could not be run; 2 of 4 sections have been run"
    )
    nothing = failed(failed(ParityResult(planned=["operators", "training"])), "training")
    assert of(nothing) == "Nothing was measured; operators and training could not be run"


# --- the table -----------------------------------------------------------------------------------


@pytest.fixture(params=["rich", "plain"])
def table(request, monkeypatch):
    """Prints a run's table, with `rich` and without it."""
    if request.param == "rich":
        pytest.importorskip("rich")
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        real = builtins.__import__

        def without_rich(name, *args, **kwargs):
            if name.split(".")[0] == "rich":
                raise ModuleNotFoundError("No module named 'rich'", name="rich")
            return real(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", without_rich)

    def printed(run):
        stream = io.StringIO()
        print_table(run, stream, STATEMENTS)
        return stream.getvalue()

    return printed


def test_table_has_a_line_for_every_row(table):
    lines = table(a_run()).splitlines()
    by_row = {line.split()[0]: " ".join(line.split()) for line in lines if line.split()}
    assert by_row["A1"].endswith("torch/jax unequal entries 0 = 0 24,733,308 pass")
    assert by_row["A5"].endswith("d hidden · fp32 torch, jax tau 3.10 ≤ 4 4,224 pass")
    assert by_row["A13"].endswith("not run")
    assert any(" ".join(line.split()) == "rho / u 34.5 ≤ 64" for line in lines)
    assert lines[-1] == (
        "PyTorch and JAX hold all 5 rows of the contract that were measured. "
        "9 measurements in 3 min 20 s."
    )


@pytest.mark.parametrize("failure", FAILURES)
def test_table_shows_a_failure(table, failure):
    m = FAILURES[failure]
    lines = table(a_run(m)).splitlines()
    (line,) = [line for line in lines if "FAIL" in line]
    assert line.split()[0] == m.row
    assert value_text(m) in line
    assert lines[-1].startswith(f"{m.row} falls short.")


def test_table_shows_what_could_not_be_run(table):
    lines = table(failed(a_run())).splitlines()
    assert "operators could not be run: RuntimeError: 2 ranks were late" in lines
    assert lines[-1].startswith("operators could not be run; what was measured holds.")
    assert not [line for line in lines if "Traceback" in line]


@pytest.mark.parametrize("width", [72, 80, 99])
def test_table_keeps_its_numbers_on_a_narrow_terminal(monkeypatch, width):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    print_table(a_run(FAILURES["below"]), stream, STATEMENTS)
    text = stream.getvalue()
    assert max(map(len, text.splitlines()[:-2])) <= width
    assert all(word in text for word in ("24,733,308", "99.4999 %", "≥ 99.5 %", "FAIL"))
    assert "…" not in text


def test_markup_in_a_metric_is_text():
    pytest.importorskip("rich")
    stream = io.StringIO()
    print_table(a_run(measured("A5", 1.0, 4.0, metric="[bold]x[/bold]")), stream, STATEMENTS)
    assert "[bold]x[/bold]" in stream.getvalue()


def test_write_report(tmp_path):
    out = tmp_path / "a" / "b"
    data, page = write_report(a_run(), out, STATEMENTS)
    assert sorted(path.name for path in out.iterdir()) == ["parity.html", "parity.json"]
    assert data.read_text(encoding="utf-8") == to_json(a_run(), STATEMENTS)
    assert page.read_text(encoding="utf-8") == render_page(a_run(), STATEMENTS)


@pytest.mark.parametrize("file", ["parity.json", "parity.html"])
def test_a_file_is_whole_at_every_moment(tmp_path, monkeypatch, file):
    """Writing ends halfway: what was there before is there still."""
    write_report(a_run(), tmp_path, STATEMENTS)
    before = (tmp_path / file).read_bytes()

    def half(self, text, encoding):
        halved = text[: len(text) // 2] if file in self.name else text
        self.write_bytes(halved.encode(encoding))
        if halved is not text:
            raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="no space left"):
        write_report(failed(a_run()), tmp_path, STATEMENTS)
    assert (tmp_path / file).read_bytes() == before
