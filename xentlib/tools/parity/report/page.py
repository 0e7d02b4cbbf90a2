"""`parity.html`: one file to read and to pass on; no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from importlib.resources import files

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

_GLOSSARY = {
    "oracle": "every value and gradient in closed form, in float64, without either framework",
    "u": "2⁻²⁴ = 5.96e-8, half the spacing of float32 numbers just above 1",
    "ULP": "distance in units of the spacing of the result's own floating-point format",
    "tau": "the largest error of an entry over u times its error bound; a few, whatever the sizes",
    "rho": "the error's norm over the oracle's norm, in units of u",
    "error ratio": "the larger of the two backends' errors over the smaller one",
    "meter": (
        "how much of what the bound allows was used: empty is exact, full is the bound or more"
    ),
}


def render_page(result: ParityResult, statements: Mapping[str, str] | None = None) -> str:
    """The whole page; `statements` gives each contract row its line."""
    rows = summarise(result, statements)
    style = files("xentlib.tools.parity.report").joinpath("page.css").read_text(encoding="utf-8")
    sections = (_header, _not_run, _failures, _contract, histograms, training, _closing)
    body = "\n".join(part for section in sections for part in section(result, rows))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_mark(result)[0]} xentlib parity</title>\n"
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _mark(result: ParityResult) -> tuple[str, str]:
    """A sign and a class of the sheet: holds, does not, or is not known yet."""
    if result.failed or not all(m.passed for m in result.measurements):
        return "✗", ".fail"
    return ("✓", "") if result.passed else ("…", ".open") if result.missing else ("✗", ".fail")


def _header(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    mark, kind = _mark(result)
    title, total = [verdict(result, rows)], len(result.measurements)
    counted = []
    if total:
        failed = sum(not m.passed for m in result.measurements)
        which = f"{failed:,} of {total:,}" if failed else f"All {total:,}"
        where = "outside" if failed else "within"
        title.insert(0, element("span.mark", mark, aria_hidden="true"))
        counted.append(element("p", f"{which} measurements are {where} their bounds."))
    yield element("p.kicker", "xentlib parity")
    yield element(f"header.verdict{kind}", element("h1", *title), *counted)
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
        facts = (_fact(*fact, long=len(fact[1]) > 26) for fact in environment.items())
        yield _environment("Environment", essentials, facts)
    if result.planned:
        took = {section.name: duration(section.seconds) for section in result.sections}
        ends = {section.name: ", could not be run" for section in result.failed}
        facts = (
            _fact(took.get(name, "not run"), name + ends.get(name, ""), long=True)
            for name in result.planned
        )
        count = f"{len(took)} of {len(result.planned)} have been run"
        yield _environment("Sections", count, facts)


def _environment(title: str, text: str, facts: Iterable[Markup]) -> Markup:
    """Facts that are there to be opened."""
    summary = element("summary", element("b", title), text)
    return element("details.environment", summary, element("dl", lines(facts)))


def _fact(name: str, value: str, long: bool = False) -> Markup:
    return element("div.long" if long else "div", element("dt", name), element("dd", value))


def _not_run(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    """The sections that could not be run, each with all that it said."""
    parts = [
        element(
            "details",
            element("summary", element("b", section.name), f" {section.reason}"),
            element("pre", section.error),
        )
        for section in result.failed
    ]
    if parts:
        title = element("h2", "What could not be run")
        yield element("section.failures", title, lines(parts))


def _failures(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    """What fell short, before anything else."""
    failed = [m for row in rows for m in row.measurements if not m.passed]
    if failed:
        parts = [_table(failed[:_MOST_FAILURES], with_row=True)]
        if len(failed) > _MOST_FAILURES:
            more = f"and {len(failed) - _MOST_FAILURES:,} more, in the rows below"
            parts.append(element("p", more))
        yield element("section.failures", element("h2", "What fell short"), lines(parts))


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
    held = element("span.what", row.statement, element("small", backends))
    what = (element("span.id", row.id), held)
    if row.passed is None:
        nothing = (element("span.worst"), element("span.entries"))
        badge = element("span.badge.none", "not run")
        return element("div.row.empty", *what, *nothing, badge, id=row.id)
    sign = ("holds", "✓ holds") if row.passed else ("short", "✗ fails")
    summary = element(
        "summary",
        *what,
        element("span.worst", *(_worst(label, m) for label, m in row.worst), role="list"),
        element("span.entries", number(row.entries)),
        element(f"span.badge.{sign[0]}", sign[1]),
    )
    kind = "details.row" if row.passed else "details.row.fails"
    return element(kind, summary, lines([_table(row.measurements)]), id=row.id, open=not row.passed)


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
    body = (
        element(
            "tr" if m.passed else "tr.over",
            element("td.case", *(_link(m) if with_row else ()), m.case),
            element("td.b", backend_name(m.backend)),
            element("td.q", f"{m.quantity}, {m.metric}"),
            element("td.n.value", f"{'' if m.passed else '✗ '}{value_text(m)}"),
            element("td.b.to", bound_text(m)),
            element("td.n.size", number(m.entries)),
        )
        for m in measurements
    )
    table = element("table", element("thead", element("tr", *head)), element("tbody", lines(body)))
    return element("div.every", table, tabindex="0")


def _link(m: Measurement) -> tuple[str, str]:
    return element("a", m.row, href=f"#{m.row}"), " · "


def _closing(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    words = (
        Markup(element("dt", word) + element("dd", meaning)) for word, meaning in _GLOSSARY.items()
    )
    yield Markup(element("h2", "The words") + element("dl.glossary", lines(words)))
    data = element("code", "parity.json")
    yield element("footer", "The numbers behind this page are in ", data, " beside it.")
