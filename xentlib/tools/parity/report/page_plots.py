"""The plots on the page: how far from the oracle, in ULP, a panel for each quantity and backend;
and the training: its losses, how far they are apart, and the head's gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from xentlib.contract import Measurement
from xentlib.tools.parity.report.plots import (
    Series,
    histogram_bins,
    histogram_plot,
    histogram_reach,
    line_plot,
    style_of,
)
from xentlib.tools.parity.report.summary import (
    RowSummary,
    allowance_used,
    backend_name,
    bound_text,
    duration,
    number,
    value_text,
)
from xentlib.tools.parity.result import Histogram, ParityResult, TrainingCurve


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
    row_of = {row.id: row for row in rows}
    ranked = sorted(result.histograms, key=lambda h: order.get(h.row, len(order)))
    for name, group in groupby(ranked, key=lambda h: h.row):
        panels = list(group)
        most = max((count for h in panels for count in h.counts), default=1)
        row = row_of.get(name)
        statement = "" if row is None else row.statement
        held = [bounds_of(h, () if row is None else row.measurements) for h in panels]
        lines = [next((m.bound for m in of if "ULP" in m.metric), None) for of in held]
        bins = histogram_bins(panels, max(line or 0.0 for line in lines))
        yield f'<h3>{escape(name)} · {escape(statement)}</h3><div class="panels">'
        for h, of, line in zip(panels, held, lines, strict=True):
            held_to = "".join(
                f"<span>{escape(m.metric)} {whole(value_text(m))} ({whole(bound_text(m))})</span>"
                for m in of
            )
            yield (
                f"<figure><figcaption><b>{escape(h.quantity)}</b>, "
                f"{escape(backend_name(h.backend))}"
                f"<span>{sum(h.counts):,} entries, {histogram_reach(h)}</span>"
                f"{held_to}</figcaption>"
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
    worst: dict[str, Measurement] = {}
    for m in measurements:
        quantity = m.quantity.partition(",")[0]
        if (m.backend, quantity) == (histogram.backend, histogram.quantity):
            worst.setdefault(m.metric, m)
    return [worst[metric] for metric in sorted(worst)]


# How a training measurement says which step it is of: "training, step 3".
_STEP = re.compile(r"(?:^|, )step (\d+)\b")


def training(result: ParityResult, rows: list[RowSummary]) -> Iterator[str]:
    curves = [c for c in result.curves if c.losses]
    if not curves:
        return
    yield "<h2>Training on real text</h2>"
    yield '<ul class="legend">'
    yield from map(_curve_key, curves)
    yield "</ul>"
    series = [Series(backend_name(c.backend), style_of(c.backend), c.losses) for c in curves]
    yield _figure(
        "Loss",
        "nats a token, each optimizer step",
        line_plot(series, label="Loss of each optimizer step", kind="tall"),
    )
    if len(curves) == 2:
        yield _difference(result, *curves)
    yield from _head_gradients(result)
    yield '<p class="axis">optimizer step</p>'


def _curve_key(curve: TrainingCurve) -> str:
    tokens = f"{sum(curve.tokens):,} tokens, " if curve.tokens else ""
    return (
        f'<li><i class="key {style_of(curve.backend)}"></i>{escape(backend_name(curve.backend))} '
        f"<span>{number(curve.losses[0], 4)} → {number(curve.losses[-1], 4)} in "
        f"{len(curve.losses)} steps, {tokens}{duration(curve.seconds)}</span></li>"
    )


def _figure(title: str, detail: str, plot: str) -> str:
    return (
        f'<figure class="wide"><figcaption><b>{escape(title)}</b> '
        f"<span>{detail}</span></figcaption>{plot}</figure>"
    )


def _difference(result: ParityResult, one: TrainingCurve, other: TrainingCurve) -> str:
    """|a - b| / |b| of each step, on a logarithmic axis."""
    apart = [
        math.nan if math.isnan(a - b) else abs(a - b) / (abs(b) or 1.0)
        for a, b in zip(one.losses, other.losses)
    ]
    bound = next(
        (m for m in result.measurements if "loss" in m.quantity and "relative" in m.metric), None
    )
    worst = math.nan if any(map(math.isnan, apart)) else max(apart)
    detail = f"of the two losses; at most {number(worst)}"
    if bound is not None:
        detail += f', <i class="key bound"></i>bound {escape(bound_text(bound))}'
    if 0.0 in apart:
        detail += f"; equal in {apart.count(0.0)} of {len(apart)} steps, marked on the floor"
    return _figure(
        "Relative difference",
        detail,
        line_plot(
            [Series("relative difference", "both", apart)],
            label=f"Relative difference of the two losses at each step, at most {number(worst)}",
            kind="low",
            bound=bound.bound if bound else None,
            log=True,
        ),
    )


def _head_gradients(result: ParityResult) -> Iterator[str]:
    """Row A9 at each step, one plot a quantity and metric."""
    steps_of: dict[tuple[str, str], list[tuple[int, Measurement]]] = {}
    for m in result.measurements:
        step = _STEP.search(m.case)
        if m.row == "A9" and step:
            steps_of.setdefault((m.quantity, m.metric), []).append((int(step[1]), m))
    for (quantity, metric), steps in steps_of.items():
        steps.sort(key=lambda pair: pair[0])
        measured: Sequence[Measurement] = [m for _, m in steps]
        worst = min(measured, key=lambda m: (m.passed, -allowance_used(m)))
        log = not worst.at_least and worst.value > 30 * worst.bound > 0
        yield _figure(
            f"A9, {quantity}: {metric}",
            f'PyTorch against JAX; worst {value_text(worst)}, <i class="key bound"></i>'
            f"bound {bound_text(worst)}",
            line_plot(
                [Series(f"{quantity}, {metric}", "both", [m.value for m in measured])],
                label=f"Row A9, {quantity}, {metric} at each step, worst {value_text(worst)}",
                kind="low",
                bound=worst.bound,
                log=log,
                from_zero=not log and not worst.at_least,
                first_step=steps[0][0],
            ),
        )
