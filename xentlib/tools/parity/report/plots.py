"""The plots on the page as SVG in HTML: how far from the oracle, in ULP, a panel for each quantity
and backend; and the trainings: their losses, how far they are apart, and the head's gradients.

A drawing has a 1000 x 1000 view box without a fixed aspect, so it fills any width; strokes keep
their pixels, and tick labels are HTML placed in percent, legible on a phone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from xentlib.contract import Measurement
from xentlib.tools.parity.report.markup import Markup, element, lines
from xentlib.tools.parity.report.summary import (
    RowSummary,
    backend_name,
    bound_text,
    duration,
    number,
    value_text,
    worst_first,
)
from xentlib.tools.parity.result import Histogram, ParityResult, Section, TrainingCurve

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

MOST_TICKS = 6  # of a histogram, which has 200 pixels where it is narrowest
FEWEST_BINS = 4

Ticks = list[tuple[float, str]]  # position in [0, 1] from the left or the bottom; label


class Series(NamedTuple):
    """One line: a value for each x, the CSS class that colours it, its name for tooltips."""

    name: str
    style: str
    values: Sequence[float]


def style_of(backend: str) -> str:
    """The CSS class of what is drawn of a backend, or of a comparison."""
    return backend if backend in ("torch", "jax") else "both"


def _frame(kind: str, label: str, drawing: list[Markup], x_ticks: Ticks, y_ticks: Ticks) -> Markup:
    """The drawing with its grid and tick labels."""
    grid = (element("path.grid", d=f"M0 {1000 - 1000 * at:.1f}H1000") for at, _ in y_ticks)
    below = (element("span", text, style=f"left:{100 * at:.2f}%") for at, text in x_ticks)
    beside = (element("span", text, style=f"bottom:{100 * at:.2f}%") for at, text in y_ticks)
    box = {"viewBox": "0 0 1000 1000", "preserveAspectRatio": "none"}
    return element(
        f"div.plot.{kind}",
        element("div.ys", *beside, aria_hidden="true"),
        element("svg", *grid, *drawing, **box, role="img", aria_label=label),
        element("div.xs", *below, aria_hidden="true"),
    )


# --- histograms ----------------------------------------------------------------------------------


def histograms(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    counted = result.histograms
    if not counted:
        return
    yield element("h2", "How far, in ULP")
    yield Markup(
        '<p class="lead">Entries by their distance, on a logarithmic count axis. Panels of one row '
        "share both axes. A dashed line is the row's bound, where it has one in ULP; entries whose "
        "terms cancel may be beyond it. Above each panel, the worst of what the row bounds.</p>"
    )
    row_of = {row.id: row for row in rows}
    for name in dict.fromkeys([*row_of, *(h.row for h in counted)]):
        panels = [h for h in counted if h.row == name]
        if panels:
            yield _panels(name, panels, row_of.get(name))


def _panels(name: str, panels: list[Histogram], row: RowSummary | None) -> Markup:
    """The histograms of one row, on the same axes."""
    statement, measurements = ("", ()) if row is None else (row.statement, row.measurements)
    most = max((count for h in panels for count in h.counts), default=1)
    bounds = [bounds_of(h, measurements) for h in panels]
    marks = [next((m.bound for m in held if "ULP" in m.metric), None) for held in bounds]
    bins = histogram_bins(panels, max(mark or 0.0 for mark in marks))
    figures = []
    for h, held, mark in zip(panels, bounds, marks, strict=True):
        said = [f"{sum(h.counts):,} entries, {histogram_reach(h)}"]
        said += [f"{m.metric} {whole(value_text(m))} ({whole(bound_text(m))})" for m in held]
        spans = (element("span", text) for text in said)
        quantity = (element("b", h.quantity), f", {backend_name(h.backend)}")
        caption = element("figcaption", *quantity, *spans)
        figures.append(element("figure", caption, histogram_plot(h, most, bins, mark)))
    return Markup(element("h3", f"{name} · {statement}") + element("div.panels", lines(figures)))


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


def histogram_reach(histogram: Histogram) -> str:
    """How far the distances go, in words."""
    last = max((i for i, count in enumerate(histogram.counts) if count), default=-1)
    if last < 0:
        return "empty"
    low, high = histogram.edges[last : last + 2]
    if math.isinf(high):
        return f"some at {_short(low)} ULP or more"
    return f"all below {_short(high)} ULP"


def histogram_bins(histograms: Sequence[Histogram], bound: float = 0.0) -> int:
    """How many bins panels of one axis show: up to the last that holds something, and to a bound in
    ULP, four at least."""
    last = (i + 1 for h in histograms for i, count in enumerate(h.counts) if count)
    line = (math.ceil(_bins_below(h.edges, bound)) for h in histograms)
    most = max((len(h.counts) for h in histograms), default=0)
    return min(max(*last, *line, FEWEST_BINS), most)


def histogram_plot(
    histogram: Histogram, most: int, bins: int | None = None, bound: float | None = None
) -> Markup:
    """Bars of equal width, one a bin, on a logarithmic count axis that reaches `most`.

    `bins` of them are shown, all if None; `bound` in ULP is a dashed line.
    """
    # The axis begins at half an entry, so that a single one can be seen.
    floor, top = math.log10(0.5), math.log10(max(most, 9)) + 0.08

    def height(count: float) -> float:
        return (math.log10(count) - floor) / (top - floor)

    edges, counts, style = histogram.edges, histogram.counts, style_of(histogram.backend)
    bins = len(counts) if bins is None else bins
    width = 1000 / max(bins, 1)
    drawing = []
    for i, count in enumerate(counts[:bins]):
        if count:
            tall = 1000 * height(count)
            title = f"{_tick(edges[i])} to {_tick(edges[i + 1])} ULP: {count:,}"
            place = {"x": f"{i * width + 0.07 * width:.1f}", "y": f"{1000 - tall:.1f}"}
            size = {"width": f"{0.86 * width:.1f}", "height": f"{tall:.1f}"}
            drawing.append(element(f"rect.{style}", element("title", title), **place, **size))
    label = (
        f"{histogram.quantity}, {histogram.backend}: {sum(counts):,} entries, "
        f"{histogram_reach(histogram)}"
    )
    if bound is not None:
        drawing.append(element("path.bound", d=f"M{_bins_below(edges, bound) * width:.1f} 0V1000"))
        label += f", bound {_tick(bound)} ULP"
    stride = max(1, math.ceil(bins / MOST_TICKS))
    x_ticks = [(i / bins, _short(edges[i])) for i in range(0, bins + 1, stride)]
    decades = range(0, math.floor(top) + 1, max(1, math.ceil(math.floor(top) / 3)))
    y_ticks = [(height(10.0**k), _power(k)) for k in decades]
    return _frame("small", label, drawing, x_ticks, y_ticks)


def _bins_below(edges: Sequence[float], distance: float) -> float:
    """Where a distance is on an axis of bins of equal width."""
    for i, (low, high) in enumerate(pairwise(edges)):
        if distance < high:
            return i + (0.0 if math.isinf(high) else (distance - low) / (high - low))
    return float(len(edges) - 1)


def _tick(edge: float) -> str:
    text = number(edge, 3)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def _short(edge: float) -> str:
    """A tick that has 30 pixels: powers of two from 1024 on as such."""
    if math.isfinite(edge) and edge >= 1024 and math.log2(edge).is_integer():
        return "2" + str(int(math.log2(edge))).translate(_SUPERSCRIPTS)
    return _tick(edge)


def _power(exponent: int) -> str:
    if exponent in (0, 1):
        return str(10**exponent)
    return "10" + str(exponent).translate(_SUPERSCRIPTS)


# --- lines over the steps of training ------------------------------------------------------------

# How a training measurement says which step it is of: "training, step 3".
_STEP = re.compile(r"(?:^|, )step (\d+)\b")


def training(result: ParityResult, rows: list[RowSummary]) -> Iterator[Markup]:
    for section in result.sections:
        yield from _of_training(section)


def _of_training(section: Section) -> Iterator[Markup]:
    curves = [c for c in section.curves if c.losses]
    if not curves:
        return
    yield element("h2", f"{section.name.capitalize()} on real text")
    yield element("ul.legend", lines(map(_curve_key, curves)))
    series = [Series(backend_name(c.backend), style_of(c.backend), c.losses) for c in curves]
    plot = line_plot(series, label="Loss of each optimizer step", kind="tall")
    yield _figure("Loss", "nats a token, each optimizer step", plot)
    if len(curves) == 2:
        yield _difference(section, *curves)
    yield from _head_gradients(section)
    yield element("p.axis", "optimizer step")


def _curve_key(curve: TrainingCurve) -> Markup:
    tokens = f"{sum(curve.tokens):,} tokens, " if curve.tokens else ""
    steps = f"{len(curve.losses)} steps, {tokens}{duration(curve.seconds)}"
    text = f"{number(curve.losses[0], 4)} → {number(curve.losses[-1], 4)} in {steps}"
    key = element(f"i.key.{style_of(curve.backend)}")
    return element("li", key, f"{backend_name(curve.backend)} ", element("span", text))


def _figure(
    title: str, detail: str, plot: Markup, bound: Measurement | None = None, more: str = ""
) -> Markup:
    """A plot below its title, what it shows, and the bound that is drawn in it."""
    key = [] if bound is None else [", ", element("i.key.bound"), f"bound {bound_text(bound)}"]
    shown = element("span", detail, *key, more)
    return element("figure.wide", element("figcaption", element("b", title), " ", shown), plot)


def _difference(section: Section, one: TrainingCurve, other: TrainingCurve) -> Markup:
    """|a - b| / |b| of each step, on a logarithmic axis."""
    apart = [abs(a - b) / (abs(b) or 1.0) for a, b in zip(one.losses, other.losses)]
    bounds = (m for m in section.measurements if "loss" in m.quantity and "relative" in m.metric)
    bound = next(bounds, None)
    worst = number(math.nan if any(map(math.isnan, apart)) else max(apart))
    plot = line_plot(
        [Series("relative difference", "both", apart)],
        label=f"Relative difference of the two losses at each step, at most {worst}",
        kind="low",
        bound=bound.bound if bound else None,
        log=True,
    )
    equal = f"; equal in {apart.count(0.0)} of {len(apart)} steps, marked on the floor"
    detail = f"of the two losses; at most {worst}"
    return _figure("Relative difference", detail, plot, bound, equal if 0.0 in apart else "")


def _head_gradients(section: Section) -> Iterator[Markup]:
    """Row A9 at each step, one plot a quantity and metric."""
    steps_of: dict[tuple[str, str], list[tuple[int, Measurement]]] = {}
    for m in section.measurements:
        step = _STEP.search(m.case)
        if m.row == "A9" and step:
            steps_of.setdefault((m.quantity, m.metric), []).append((int(step[1]), m))
    for (quantity, metric), steps in steps_of.items():
        steps.sort(key=lambda pair: pair[0])
        worst = worst_first(m for _, m in steps)[0]
        log = not worst.at_least and worst.value > 30 * worst.bound > 0
        plot = line_plot(
            [Series(f"{quantity}, {metric}", "both", [m.value for _, m in steps])],
            label=f"Row A9, {quantity}, {metric} at each step, worst {value_text(worst)}",
            kind="low",
            bound=worst.bound,
            log=log,
            from_zero=not log and not worst.at_least,
            first_step=steps[0][0],
        )
        detail = f"PyTorch against JAX; worst {value_text(worst)}"
        yield _figure(f"A9, {quantity}: {metric}", detail, plot, worst)


def line_plot(
    series: Sequence[Series],
    *,
    label: str,
    kind: str,
    bound: float | None = None,
    log: bool = False,
    from_zero: bool = False,
    first_step: int = 1,
) -> Markup:
    """Lines over optimizer steps. On a logarithmic axis a zero is a mark on the floor."""
    steps = max(len(line.values) for line in series)
    shown = [v for line in series for v in line.values if math.isfinite(v) and (v > 0 or not log)]
    if bound is not None:
        shown.append(bound)
    if from_zero:
        shown.append(0.0)
    low, high, ticks = (_log_axis if log else _linear_axis)(shown or [1.0])

    def at_x(i: int) -> float:
        return 1000 * (i + 0.5) / steps

    def at_y(value: float) -> float:
        if math.isnan(value):
            return 0.0
        if log:
            value = -math.inf if value <= 0 else math.log10(value)
        return 1000 - 1000 * min(max((value - low) / (high - low), 0.0), 1.0)

    drawing = []
    if bound is not None:
        drawing.append(element("path.bound", d=f"M0 {at_y(bound):.1f}H1000"))
    for line in series:
        path, pen, marks = "", "M", []
        for i, value in enumerate(line.values):
            place = f"{at_x(i):.1f} {at_y(value):.1f}"
            if math.isfinite(value) and (value > 0 or not log):
                path += f"{pen}{place}"
                pen = "L"
            else:
                pen = "M"  # a mark of its own says what is there: no line leads to it
            mark = "zero" if log and value == 0 else "dot" if math.isfinite(value) else "lost"
            title = f"step {first_step + i}, {line.name}: {number(value, 4)}"
            shape = f"path.{mark}.{line.style}"
            marks.append(element(shape, element("title", title), d=f"M{place}h0"))
        drawing += [element(f"path.line.{line.style}", d=path or "M0 0"), *marks]
    stride = max(1, math.ceil(steps / 8 / 5) * 5) if steps > 8 else 1
    labelled = (i for i in range(steps) if (first_step + i) % stride == 0 or i == 0)
    x_ticks = [(at_x(i) / 1000, str(first_step + i)) for i in labelled]
    y_ticks = [((t - low) / (high - low), text) for t, text in ticks]
    return _frame(kind, label, drawing, x_ticks, y_ticks)


def _linear_axis(values: Sequence[float]) -> tuple[float, float, Ticks]:
    """Ends and round ticks of an axis that holds `values` with a little air."""
    low, high = min(values), max(values)
    span = (high - low) or abs(high) or 1.0
    raw = span / 3
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * k for k in (1, 2, 2.5, 5, 10) if unit * k >= raw * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    stop = max(stop, start + 1)
    decimals = max(0, 2 - math.floor(math.log10(step))) if step < 100 else 0
    ticks = [(k * step, _tick(round(k * step, decimals + 2))) for k in range(start, stop + 1)]
    return start * step, stop * step + 0.06 * (stop - start) * step, ticks


def _log_axis(values: Sequence[float]) -> tuple[float, float, Ticks]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    stride = max(1, math.ceil((high - low) / 4))
    ticks = [(float(k), _power(k)) for k in range(high, low - 1, -stride)]
    return low - 0.35, high + 0.15, ticks
