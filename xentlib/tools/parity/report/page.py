"""`parity.html`: one file to read and to pass on; no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files
from string import Template

from xentlib.contract import Measurement
from xentlib.tools.parity.report.markup import Markup, element, lines
from xentlib.tools.parity.report.plots import histograms, training
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

_ESSENTIALS = ("suite", "seed", "torch", "jax", "python", "system")  # read without opening

_MOST_FAILURES = 12

# Of a row that was not run, holds or does not: the class of the sheet, and the words.
_BADGES = {None: ("none", "not run"), True: ("holds", "✓ holds"), False: ("short", "✗ fails")}


def render_page(result: ParityResult, statements: Mapping[str, str] | None = None) -> str:
    """The whole page; `statements` gives each contract row its line."""
    rows = summarise(result, statements)
    sections = (_header, _failures, _contract, histograms, training)
    body = "\n".join(part for section in sections for part in section(result, rows))
    folder = files("xentlib.tools.parity.report")
    page, style = (folder.joinpath(f"page.{x}").read_text("utf-8") for x in ("html", "css"))
    return Template(page).substitute(mark=_mark(result)[0], style=style, body=body)


def _mark(result: ParityResult) -> tuple[str, str]:
    """A sign and a class of the sheet: holds, does not, or is not known yet."""
    if result.failed or not all(m.passed for m in result.measurements):
        return "✗", ".fail"
    return ("✓", "") if result.passed else ("…", ".open") if result.missing else ("✗", ".fail")


def _header(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    mark, kind = _mark(result)
    total, failed = len(result.measurements), sum(not m.passed for m in result.measurements)
    within = f"All {total:,} measurements are within their bounds."
    outside = f"{failed:,} of {total:,} measurements are outside their bounds."
    counted = [element("p", outside if failed else within)] if total else []
    sign = [element("span.mark", mark, aria_hidden="true")] if total else []
    yield element("p.kicker", "xentlib parity")
    yield element(f"header.verdict{kind}", element("h1", *sign, verdict(result, rows)), *counted)
    held, short = (sum(row.passed is passed for row in rows) for passed in (True, False))
    figures = {
        "Contract rows that hold": f"{held} of {held + short}",
        "Entries compared": number(sum(row.entries for row in rows)),
    }
    for row in rows:
        if row.id == "A1" and row.measurements:
            unequal = number(sum(m.value for m in row.measurements))
            figures["Unequal in audit mode"] = f"{unequal} of {number(row.entries)}"
    figures["Time taken"] = duration(result.seconds)
    yield element("dl.figures", lines(_fact(*figure) for figure in figures.items()))
    environment = result.environment
    for name in sorted(key for key, value in environment.items() if value.startswith("left out")):
        yield element("p.note", element("b", name), f" {environment[name]}")
    if environment:
        essentials = " · ".join(f"{k} {environment[k]}" for k in _ESSENTIALS if k in environment)
        facts = (_fact(k, v, ".long" if len(v) > 26 else "") for k, v in environment.items())
        listed = element("dl", lines(facts))
        yield _folded("details.environment", "Environment", essentials, listed)
    if result.planned:
        took = {section.name: duration(section.seconds) for section in result.sections}
        ends = {section.name: f"{section.name}, could not be run" for section in result.failed}
        facts = (_fact(took.get(x, "not run"), ends.get(x, x), ".long") for x in result.planned)
        count = f"{len(took)} of {len(result.planned)} have been run"
        yield _folded("details.environment", "Sections", count, element("dl", lines(facts)))


def _fact(name: str, value: str, kind: str = "") -> Markup:
    return element(f"div{kind}", element("dt", name), element("dd", value))


def _folded(kind: str, title: str, text: str, content: Markup) -> Markup:
    """Content that is there to be opened."""
    return element(kind, element("summary", element("b", title), text), content)


def _failures(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    """What could not be run, with all that it said, and what fell short, before anything else."""
    errors = [
        _folded("details", section.name, f" {section.reason}", element("pre", section.error))
        for section in result.failed
    ]
    failed = [m for row in rows for m in row.measurements if not m.passed]
    short = [_table(failed[:_MOST_FAILURES], with_row=True)] if failed else []
    if len(failed) > _MOST_FAILURES:
        short.append(element("p", f"and {len(failed) - _MOST_FAILURES:,} more, in the rows below"))
    for title, parts in (("What could not be run", errors), ("What fell short", short)):
        if parts:
            yield element("section.failures", element("h2", title), lines(parts))


def _contract(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    yield element("h2", "The contract, row by row")
    yield element(
        "p.lead",
        "The worst value of each metric beside its bound. "
        "Open a row for every measurement behind it.",
    )
    worst = "Worst value, its bound, and how much of it was used"
    titles = ("Row", "What is held", worst, "Entries", "")
    head = element("div.head", *(element("span", title) for title in titles))
    yield element("section.contract", lines([head, *map(_row, rows)]))


def _row(row: RowSummary) -> Markup:
    backends = ", ".join(map(backend_name, row.backends))
    backends = backends.replace("PyTorch, JAX, PyTorch and JAX", "each and together")
    badge, words = _BADGES[row.passed]
    cells = (
        element("span.id", row.id),
        element("span.what", row.statement, element("small", backends)),
        element(
            "span.worst", *(_worst(*x) for x in row.worst), role="list" if row.worst else False
        ),
        element("span.entries", number(row.entries) if row.measurements else ""),
        element(f"span.badge.{badge}", words),
    )
    if row.passed is None:
        return element("div.row.empty", *cells, id=row.id)
    table = lines([_table(row.measurements)])
    kind = "details.row" if row.passed else "details.row.fails"
    return element(kind, element("summary", *cells), table, id=row.id, open=not row.passed)


def _worst(label: str, m: Measurement) -> Markup:
    over = "" if m.passed else ".over"
    used = 100 * min(allowance_used(m), 1.0)
    bar = element("i", style=f"width:{used:.1f}%")
    return element(
        "span",
        element("span.metric", label),
        element(f"span.value{over}", value_text(m)),
        element("span.bound", bound_text(m)),
        element(f"span.meter{over}", bar, title=f"{used:.0f} % of the allowance"),
        role="listitem",
    )


def _table(measurements: Iterable[Measurement], with_row: bool = False) -> Markup:
    titles = ("Case", "Backend", "Quantity, metric", "Value", "Bound", "Entries")
    of_numbers = ("Value", "Entries")
    head = (element("th.n" if title in of_numbers else "th", title) for title in titles)
    body = []
    for m in measurements:
        link = (element("a", m.row, href=f"#{m.row}"), " · ") if with_row else ()
        cells = (
            element("td.case", *link, m.case),
            element("td.b", backend_name(m.backend)),
            element("td.q", f"{m.quantity}, {m.metric}"),
            element("td.n.value", f"{'' if m.passed else '✗ '}{value_text(m)}"),
            element("td.b.to", bound_text(m)),
            element("td.n.size", number(m.entries)),
        )
        body.append(element("tr" if m.passed else "tr.over", *cells))
    table = element("table", element("thead", element("tr", *head)), element("tbody", lines(body)))
    return element("div.every", table, tabindex="0")
