"""A benchmark's numbers as a picture: time over the floor, and peak memory beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xentlib.bench.contestant import BARE, FLOOR, OURS, Kind
from xentlib.bench.report import environment_line, mebibytes, milliseconds
from xentlib.bench.result import ContestantResult, Report, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "save"]

OURS_COLOUR, OTHER_COLOUR = "#0b7a75", "#9aa5b1"
INK, FAINT = "#1f2933", "#d9dee4"
KIND_ORDER: tuple[Kind, ...] = ("loss + gradient", "loss")
BAR = 0.36
FARTHEST = 4.0  # times the floor
ROW_INCHES, HEAD_INCHES = 0.46, 0.85


def save(report: Report, folder: Path) -> list[Path]:
    figure = draw(report)
    paths = [folder / "bench.png", folder / "bench.svg"]
    for path in paths:
        # Without a date an unchanged run gives an unchanged file.
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=160, facecolor="white", metadata=metadata)
    return paths


def draw(report: Report) -> Figure:
    """A row of two panels for each run: ratio to the floor, peak MiB."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    runs = [run for run in report.runs if shown(run)]
    heights = [HEAD_INCHES + ROW_INCHES * len(shown(run)) for run in runs]
    with mpl.rc_context({"font.size": 9, "font.family": "sans-serif", "svg.hashsalt": "xentlib"}):
        layout = ConstrainedLayoutEngine(h_pad=0.08, w_pad=0.08, rect=(0, 0.022, 1, 0.978))
        figure = Figure(figsize=(10.5, sum(heights) + 0.75), layout=layout)
        panels = figure.subplots(
            len(runs), 2, squeeze=False, gridspec_kw={"height_ratios": heights, "wspace": 0.03}
        )
        for run, (left, right) in zip(runs, panels):
            draw_times(left, run)
            draw_memory(right, run)
        figure.text(0.01, 0.004, environment_line(report), color="#7b8794", fontsize=7.5)
        figure.draw_without_rendering()
    return figure


def shown(run: Run) -> list[str]:
    """Contestants with numbers, ours first, then by the time of loss + gradient."""

    def key(name: str) -> tuple[bool, float]:
        spread = run.row(name, "loss + gradient").ratio
        return name != OURS, spread.median if spread is not None else float("inf")

    names = {row.contestant for row in run.rows if row.seconds and row.contestant not in BARE}
    return sorted(names, key=key)


def rows_of(run: Run, kind: Kind) -> list[ContestantResult]:
    return [run.row(name, kind) for name in shown(run)]


def draw_times(axes: Axes, run: Run) -> None:
    ratios = {
        kind: [row.ratio.median if row.ratio else None for row in rows_of(run, kind)]
        for kind in KIND_ORDER
    }
    draw_bars(axes, run, ratios, lambda value: f"{value:.2f}", FARTHEST)
    axes.axvline(1, color=INK, linewidth=1, zorder=3)
    floor = run.row(FLOOR, "loss + gradient").time
    note = "" if floor is None else f" ({milliseconds(floor.median)} ms for loss + gradient)"
    axes.set_xlabel("time / bare GEMMs" + note)
    axes.set_title(run.title, loc="left", fontsize=10, fontweight="bold", color=INK)


def draw_memory(axes: Axes, run: Run) -> None:
    sizes = {kind: [row.peak_bytes for row in rows_of(run, kind)] for kind in KIND_ORDER}
    draw_bars(axes, run, sizes, lambda value: f"{mebibytes(int(value))} MiB")
    axes.set_yticklabels([])
    axes.set_xticks([])
    axes.set_xlabel("extra memory at the peak of one call")


def draw_bars(
    axes: Axes,
    run: Run,
    values: Mapping[Kind, Sequence[float | None]],
    text: Callable[[float], str],
    farthest: float = float("inf"),
) -> None:
    """Two bars for each contestant: loss + gradient solid, loss alone pale.

    A bar that would go beyond `farthest` is cut there: one hopeless contestant must not make the
    others look alike.
    """
    names = shown(run)
    known = [value for found in values.values() for value in found if value is not None]
    limit = min(max(known, default=1.0), farthest)
    for offset, (kind, found) in zip((-BAR / 2, BAR / 2), values.items()):
        for place, (name, value) in enumerate(zip(names, found)):
            if value is None:
                continue
            solid = kind == "loss + gradient"
            axes.barh(
                place + offset,
                min(value, limit),
                height=BAR * 0.92,
                color=OURS_COLOUR if name == OURS else OTHER_COLOUR,
                alpha=1.0 if solid else 0.42,
                linewidth=0,
                zorder=2,
            )
            note = "  loss only" if place == 0 and not solid else ""
            axes.annotate(
                ("» " if value > limit else "") + text(value) + note,
                (min(value, limit), place + offset),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=INK,
                fontweight="bold" if solid and name == OURS else "normal",
                bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "linewidth": 0},
                zorder=4,
            )
    axes.set_xlim(0, limit * 1.22)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_yticks(range(len(names)), names)
    for label, name in zip(axes.get_yticklabels(), names):
        label.set_fontweight("bold" if name == OURS else "normal")
        label.set_color(OURS_COLOUR if name == OURS else INK)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors="#616e7c", labelsize=8)
    axes.grid(axis="x", color=FAINT, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
