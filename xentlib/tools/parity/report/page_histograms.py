"""How far from the oracle, in ULP: a panel for each quantity and backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from xentlib.contract import Measurement
from xentlib.tools.parity.report.numbers import bound_text, value_text
from xentlib.tools.parity.report.plots import (
    histogram_bins,
    histogram_plot,
    histogram_reach,
    style_of,
)
from xentlib.tools.parity.report.summary import RowSummary, backend_name
from xentlib.tools.parity.result import Histogram, ParityResult


def histograms(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    if not result.histograms:
        return
    yield "<h2>How far, in ULP</h2>"
    yield (
        '<p class="lead">Entries by their distance, on a logarithmic count axis. Panels of one row '
        "share both axes. A dashed line is the row's bound, where it has one in ULP; entries whose "
        "terms cancel may be beyond it. Above each panel, the worst of what the row bounds.</p>"
    )
    order = {row.id: i for i, row in enumerate(rows)}
    found = {row.id: row for row in rows}
    ranked = sorted(result.histograms, key=lambda h: order.get(h.row, len(order)))
    for name, group in groupby(ranked, key=lambda h: h.row):
        panels = list(group)
        most = max((count for h in panels for count in h.counts), default=1)
        row = found.get(name)
        statement = "" if row is None else row.statement
        held = [bounds_of(h, () if row is None else row.measurements) for h in panels]
        lines = [next((m.bound for m in of if "ULP" in m.metric), None) for of in held]
        bins = histogram_bins(panels, max(line or 0.0 for line in lines))
        yield f'<h3>{escape(name)} · {escape(statement)}</h3><div class="panels">'
        for h, of, line in zip(panels, held, lines, strict=True):
            said = "".join(
                f"<span>{escape(m.metric)} {whole(value_text(m))} ({whole(bound_text(m))})</span>"
                for m in of
            )
            yield (
                f"<figure><figcaption><b>{escape(h.quantity)}</b>, "
                f"{escape(backend_name(h.backend))}"
                f"<span>{sum(h.counts):,} entries, {histogram_reach(h)}</span>"
                f"{said}</figcaption>"
                f"{histogram_plot(h, style_of(h.backend), most, bins, line)}</figure>"
            )
        yield "</div>"


def whole(text: str) -> str:
    """With spaces at which no line ends."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def bounds_of(histogram: Histogram, measurements: Sequence[Measurement]) -> list[Measurement]:
    """The worst measurement of each metric of what a histogram counts, by the metrics' names;
    `measurements` are worst first.

    A measurement may say more of its quantity behind a comma: "lse, ULP of max(|m|, log S)".
    """
    found: dict[str, Measurement] = {}
    for m in measurements:
        quantity = m.quantity.partition(",")[0]
        if (m.backend, quantity) == (histogram.backend, histogram.quantity):
            found.setdefault(m.metric, m)
    return [found[metric] for metric in sorted(found)]
