"""The contract on the page: a line for each row, and behind it every measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from xentlib.contract import Measurement
from xentlib.tools.parity.report.numbers import allowance_used, bound_text, number, value_text
from xentlib.tools.parity.report.summary import RowSummary, backend_name
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
