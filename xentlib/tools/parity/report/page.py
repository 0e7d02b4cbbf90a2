"""`parity.html`: one file to read and to pass on; no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files

from xentlib.tools.parity.report.numbers import duration, number
from xentlib.tools.parity.report.page_contract import contract, table
from xentlib.tools.parity.report.page_histograms import histograms
from xentlib.tools.parity.report.page_training import training
from xentlib.tools.parity.report.summary import RowSummary, summarise, verdict
from xentlib.tools.parity.result import ParityResult

_ESSENTIALS = ("suite", "seed", "torch", "jax", "python", "system")  # read without opening

_MOST_FAILURES = 12

_GLOSSARY = (
    ("oracle", "every value and gradient in closed form, in float64, without either framework"),
    ("u", "2⁻²⁴ = 5.96e-8, half the spacing of float32 numbers just above 1"),
    ("ULP", "distance in units of the spacing of the result's own floating-point format"),
    (
        "tau",
        "the largest error of an entry over u times its error bound; a few, whatever the sizes",
    ),
    ("rho", "the error's norm over the oracle's norm, in units of u"),
    ("error ratio", "the larger of the two backends' errors over the smaller one"),
    (
        "meter",
        "how much of what the bound allows was used: empty is exact, full is the bound or more",
    ),
)


def render_page(result: ParityResult, statements: Mapping[str, str]) -> str:
    """The whole page; `statements` gives each contract row its line."""
    rows = summarise(result, statements)
    style = files("xentlib.tools.parity.report").joinpath("page.css").read_text(encoding="utf-8")
    body = "\n".join(
        part
        for section in (_header, _not_run, _failures, contract, histograms, training, _closing)
        for part in section(result, rows)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_mark(result)[0]} xentlib parity</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _mark(result: ParityResult) -> tuple[str, str]:
    """A sign and a class of the sheet: holds, does not, or is not known yet."""
    if result.failed or not all(m.passed for m in result.measurements):
        return "✗", " fail"
    return ("✓", "") if result.passed else ("…", " open") if result.missing else ("✗", " fail")


def _header(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    mark, kind = _mark(result)
    failed = sum(not m.passed for m in result.measurements)
    total = len(result.measurements)
    counted = f"{failed:,} of {total:,} measurements" if failed else f"All {total:,} measurements"
    yield '<p class="kicker">xentlib parity</p>'
    yield (
        f'<header class="verdict{kind}">'
        f'<h1><span class="mark" aria-hidden="true">{mark}</span>'
        f"{escape(verdict(result, rows))}</h1>"
        f"<p>{counted} {'are outside' if failed else 'are within'} their bounds.</p></header>"
        if total
        else f'<header class="verdict{kind}"><h1>{escape(verdict(result, rows))}</h1></header>'
    )
    held, measured = (sum(row.passed is p for row in rows) for p in (True, False))
    audit = next((row for row in rows if row.id == "A1" and row.measurements), None)
    figures = [
        ("Contract rows that hold", f"{held} of {held + measured}"),
        ("Entries compared", number(sum(row.entries for row in rows))),
        ("Time taken", duration(result.seconds)),
    ]
    if audit:
        unequal = sum(m.value for m in audit.measurements)
        figures.insert(
            2, ("Unequal in audit mode", f"{number(unequal)} of {number(audit.entries)}")
        )
    yield '<dl class="figures">'
    yield from (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures)
    yield "</dl>"
    for name in sorted(k for k, v in result.environment.items() if v.startswith("left out")):
        yield f'<p class="note"><b>{escape(name)}</b> {escape(result.environment[name])}</p>'
    if result.environment:
        seen = [k for k in _ESSENTIALS if k in result.environment]
        essentials = " · ".join(f"{k} {result.environment[k]}" for k in seen)
        yield (
            f'<details class="environment"><summary><b>Environment</b>{escape(essentials)}'
            "</summary><dl>"
        )
        for key, value in result.environment.items():
            wide = ' class="long"' if len(value) > 26 else ""
            yield f"<div{wide}><dt>{escape(key)}</dt><dd>{escape(value)}</dd></div>"
        yield "</dl></details>"
    if result.planned:
        took = {section.name: section for section in result.sections}
        yield (
            '<details class="environment"><summary><b>Sections</b>'
            f"{len(took)} of {len(result.planned)} have been run</summary><dl>"
        )
        for name in result.planned:
            section = took.get(name)
            state = "not run" if section is None else duration(section.seconds)
            what = f"{name}, could not be run" if section and section.error else name
            yield f'<div class="long"><dt>{escape(state)}</dt><dd>{escape(what)}</dd></div>'
        yield "</dl></details>"


def _not_run(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    """The sections that could not be run, each with all that it said."""
    if not result.failed:
        return
    yield '<section class="failures"><h2>What could not be run</h2>'
    for section in result.failed:
        yield (
            f"<details><summary><b>{escape(section.name)}</b> {escape(section.reason)}</summary>"
            f"<pre>{escape(section.error)}</pre></details>"
        )
    yield "</section>"


def _failures(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    """What fell short, before anything else."""
    failed = [m for row in rows for m in row.measurements if not m.passed]
    if not failed:
        return
    yield '<section class="failures"><h2>What fell short</h2>'
    yield from table(failed[:_MOST_FAILURES], with_row=True)
    if len(failed) > _MOST_FAILURES:
        yield f"<p>and {len(failed) - _MOST_FAILURES:,} more, in the rows below</p>"
    yield "</section>"


def _closing(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    yield '<h2>The words</h2><dl class="glossary">'
    yield from (f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in _GLOSSARY)
    yield "</dl>"
    yield "<footer>The numbers behind this page are in <code>parity.json</code> beside it.</footer>"
