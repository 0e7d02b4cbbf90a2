"""How far from the oracle, in ULP: a panel for each quantity and backend."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import groupby

from xentlib.parity.report.plots import histogram_plot, histogram_reach, style_of
from xentlib.parity.report.summary import RowSummary, backend_name
from xentlib.parity.result import ParityResult

__all__ = ["histograms"]


def histograms(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    if not result.histograms:
        return
    yield "<h2>How far, in ULP</h2>"
    yield (
        '<p class="lead">Entries by their distance, on a logarithmic count axis. '
        "Panels of one row share it.</p>"
    )
    order = {row.id: i for i, row in enumerate(rows)}
    statements = {row.id: row.statement for row in rows}
    ranked = sorted(result.histograms, key=lambda h: order.get(h.row, len(order)))
    for name, group in groupby(ranked, key=lambda h: h.row):
        panels = list(group)
        most = max((count for h in panels for count in h.counts), default=1)
        yield f'<h3>{escape(name)} · {escape(statements.get(name, ""))}</h3><div class="panels">'
        for h in panels:
            yield (
                f"<figure><figcaption><b>{escape(h.quantity)}</b>, "
                f"{escape(backend_name(h.backend))}"
                f"<span>{sum(h.counts):,} entries, {histogram_reach(h)}</span></figcaption>"
                f"{histogram_plot(h, style_of(h.backend), most)}</figure>"
            )
        yield "</div>"
