"""Plots of a parity run as SVG in HTML: the drawing stretches, the words around it do not.

A drawing has a 1000 x 1000 view box without a fixed aspect, so it fills any width; strokes keep
their pixels, and tick labels are HTML placed in percent, legible on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from xentlib.tools.parity.report.summary import number
from xentlib.tools.parity.result import Histogram

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

_STYLES = {"torch": "torch", "jax": "jax"}  # a backend's colour; every comparison has a third

MOST_TICKS = 6  # of a histogram, which has 200 pixels where it is narrowest
FEWEST_BINS = 4

Tick = tuple[float, str]  # position in [0, 1] from the left or the bottom; label


@dataclass(frozen=True, slots=True)
class Series:
    """One line: a value for each x, the CSS class that colours it, its name for tooltips."""

    name: str
    style: str
    values: Sequence[float]


def style_of(backend: str) -> str:
    """The CSS class of what is drawn of a backend, or of a comparison."""
    return _STYLES.get(backend, "both")


def _frame(
    drawing: str, *, x_ticks: Sequence[Tick], y_ticks: Sequence[Tick], label: str, kind: str
) -> str:
    """The drawing with its grid and tick labels."""
    grid = "".join(f'<path class="grid" d="M0 {1000 - 1000 * at:.1f}H1000"/>' for at, _ in y_ticks)
    ys = "".join(
        f'<span style="bottom:{100 * at:.2f}%">{escape(text)}</span>' for at, text in y_ticks
    )
    xs = "".join(
        f'<span style="left:{100 * at:.2f}%">{escape(text)}</span>' for at, text in x_ticks
    )
    return (
        f'<div class="plot {kind}"><div class="ys" aria-hidden="true">{ys}</div>'
        f'<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{grid}{drawing}</svg>'
        f'<div class="xs" aria-hidden="true">{xs}</div></div>'
    )


# --- histograms ----------------------------------------------------------------------------------


def histogram_reach(histogram: Histogram) -> str:
    """How far the distances go, in words."""
    last = max((i for i, count in enumerate(histogram.counts) if count), default=-1)
    if last < 0:
        return "empty"
    low, high = histogram.edges[last], histogram.edges[last + 1]
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
    histogram: Histogram,
    style: str,
    most: int,
    bins: int | None = None,
    bound: float | None = None,
) -> str:
    """Bars of equal width, one a bin, on a logarithmic count axis that reaches `most`.

    `bins` of them are shown, all if None; `bound` in ULP is a dashed line.
    """
    # The axis begins at half an entry, so that a single one can be seen.
    floor, top = math.log10(0.5), math.log10(max(most, 9)) + 0.08

    def height(count: float) -> float:
        return (math.log10(count) - floor) / (top - floor)

    edges = histogram.edges
    bins = len(histogram.counts) if bins is None else bins
    width = 1000 / max(bins, 1)
    parts = []
    for i, count in enumerate(histogram.counts[:bins]):
        if count:
            tall = 1000 * height(count)
            span = f"{_tick(edges[i])} to {_tick(edges[i + 1])} ULP"
            parts.append(
                f'<rect class="{style}" x="{i * width + 0.07 * width:.1f}" y="{1000 - tall:.1f}" '
                f'width="{0.86 * width:.1f}" height="{tall:.1f}">'
                f"<title>{span}: {count:,}</title></rect>"
            )
    if bound is not None:
        at = _bins_below(edges, bound) * width
        parts.append(f'<path class="bound" d="M{at:.1f} 0V1000"/>')
    stride = max(1, math.ceil(bins / MOST_TICKS))
    x_ticks = [(i / bins, _short(edges[i])) for i in range(0, bins + 1, stride)]
    decades = range(0, math.floor(top) + 1, max(1, math.ceil(math.floor(top) / 3)))
    y_ticks = [(height(10.0**k), _power(k)) for k in decades]
    label = (
        f"{histogram.quantity}, {histogram.backend}: {sum(histogram.counts):,} entries, "
        f"{histogram_reach(histogram)}"
    )
    if bound is not None:
        label += f", bound {_tick(bound)} ULP"
    return _frame("".join(parts), x_ticks=x_ticks, y_ticks=y_ticks, label=label, kind="small")


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


def line_plot(
    series: Sequence[Series],
    *,
    label: str,
    kind: str,
    bound: float | None = None,
    log: bool = False,
    from_zero: bool = False,
    first_step: int = 1,
) -> str:
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

    parts = []
    if bound is not None:
        parts.append(f'<path class="bound" d="M0 {at_y(bound):.1f}H1000"/>')
    for line in series:
        points = [(at_x(i), at_y(v)) for i, v in enumerate(line.values)]
        path, pen = [], "M"
        for (x, y), value in zip(points, line.values):
            if not math.isfinite(value) or (log and value <= 0):
                pen = "M"  # a mark of its own says what is there: no line leads to it
                continue
            path.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
        parts.append(f'<path class="line {line.style}" d="{"".join(path) or "M0 0"}"/>')
        for step, ((x, y), value) in enumerate(zip(points, line.values), first_step):
            mark = "zero" if log and value == 0 else "lost" if not math.isfinite(value) else "dot"
            parts.append(
                f'<path class="{mark} {line.style}" d="M{x:.1f} {y:.1f}h0">'
                f"<title>step {step}, {escape(line.name)}: {number(value, 4)}</title></path>"
            )
    stride = max(1, math.ceil(steps / 8 / 5) * 5) if steps > 8 else 1
    x_ticks = [
        (at_x(i) / 1000, str(first_step + i))
        for i in range(steps)
        if (first_step + i) % stride == 0 or i == 0
    ]
    y_ticks = [((t - low) / (high - low), text) for t, text in ticks]
    return _frame("".join(parts), x_ticks=x_ticks, y_ticks=y_ticks, label=label, kind=kind)


def _linear_axis(values: Sequence[float]) -> tuple[float, float, list[Tick]]:
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


def _log_axis(values: Sequence[float]) -> tuple[float, float, list[Tick]]:
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    stride = max(1, math.ceil((high - low) / 4))
    ticks = [(float(k), _power(k)) for k in range(high, low - 1, -stride)]
    return low - 0.35, high + 0.15, ticks
