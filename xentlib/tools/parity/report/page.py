"""`parity.html`: one file to read and to pass on; no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files

from xentlib.contract import Measurement
from xentlib.tools.parity.report.page_plots import histograms, training
from xentlib.tools.parity.report.summary import (
    RowSummary,
    allowance_used,
    backend_name,
    bound_text,
    duration,
    number,
    summarise,
    value_text,
    verdict,
)
from xentlib.tools.parity.result import ParityResult


def contract(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    yield "<h2>The contract, row by row</h2>"
    yield (
        '<p class="lead">The worst value of each metric beside its bound. '
        "Open a row for every measurement behind it.</p>"
    )
    yield '<section class="contract">'
    yield (
        '<div class="head"><span>Row</span><span>What is held</span>'
        "<span>Worst value, its bound, and how much of it was used</span>"
        "<span>Entries</span><span></span></div>"
    )
    for row in rows:
        yield from _row(row)
    yield "</section>"


def _row(row: RowSummary) -> Iterator[str]:
    backends = ", ".join(map(backend_name, row.backends))
    what = (
        f'<span class="id">{escape(row.id)}</span><span class="what">{escape(row.statement)}'
        f"<small>{escape(backends.replace('PyTorch, JAX, PyTorch and JAX', 'each and together'))}"
        f"</small></span>"
    )
    if row.passed is None:
        yield (
            f'<div class="row empty" id="{escape(row.id)}">{what}<span class="worst"></span>'
            '<span class="entries"></span><span class="badge none">not run</span></div>'
        )
        return
    badge = (
        '<span class="badge holds">✓ holds</span>'
        if row.passed
        else '<span class="badge short">✗ fails</span>'
    )
    worst = "".join(_worst(label, m) for label, m in row.worst)
    yield (
        f'<details class="row{"" if row.passed else " fails"}" id="{escape(row.id)}"'
        f"{'' if row.passed else ' open'}><summary>{what}"
        f'<span class="worst" role="list">{worst}</span>'
        f'<span class="entries">{number(row.entries)}</span>{badge}</summary>'
    )
    yield from table(row.measurements)
    yield "</details>"


def _worst(label: str, m: Measurement) -> str:
    over = "" if m.passed else " over"
    used = min(allowance_used(m), 1.0)
    return (
        f'<span role="listitem"><span class="metric">{escape(label)}</span>'
        f'<span class="value{over}">{value_text(m)}</span>'
        f'<span class="bound">{bound_text(m)}</span>'
        f'<span class="meter{over}" title="{100 * used:.0f} % of the allowance">'
        f'<i style="width:{100 * used:.1f}%"></i></span></span>'
    )


def table(measurements: Sequence[Measurement], with_row: bool = False) -> Iterator[str]:
    yield (
        '<div class="every" tabindex="0"><table><thead><tr><th>Case</th><th>Backend</th>'
        '<th>Quantity, metric</th><th class="n">Value</th><th>Bound</th>'
        '<th class="n">Entries</th></tr></thead><tbody>'
    )
    for m in measurements:
        row = f'<a href="#{escape(m.row)}">{escape(m.row)}</a> · ' if with_row else ""
        yield (
            f'<tr{"" if m.passed else " class=over"}><td class="case">{row}{escape(m.case)}</td>'
            f'<td class="b">{escape(backend_name(m.backend))}</td>'
            f'<td class="q">{escape(m.quantity)}, {escape(m.metric)}</td>'
            f'<td class="n value">{"" if m.passed else "✗ "}{value_text(m)}</td>'
            f'<td class="b to">{bound_text(m)}</td>'
            f'<td class="n size">{number(m.entries)}</td></tr>'
        )
    yield "</tbody></table></div>"


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
        named = [k for k in _ESSENTIALS if k in result.environment]
        essentials = " · ".join(f"{k} {result.environment[k]}" for k in named)
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
