"""A benchmark's numbers as a picture: time over the floor against extra memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xentlib.bench.contestant import BARE, OURS, TRAINING
from xentlib.bench.report import alike, environment_line
from xentlib.bench.result import Report, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw", "save"]

OURS_COLOUR = "#0b7a75"
INK, FAINT = "#1f2933", "#d9dee4"
MARKERS = "sDv^<>phXP*d8H"
COLOURS = ("#c0392b", "#2c6fbb", "#8e5ea2", "#d98200", "#6b7280", "#a0522d", "#4d7c0f")
FARTHEST = 4.0  # times the floor: one hopeless contestant must not make the others look alike
WIDE, HIGH = 3.1, 2.7  # inches of a panel
MIB = 1 << 20


def save(report: Report, folder: Path) -> list[Path]:
    figure = draw(report)
    paths = [folder / "bench.png", folder / "bench.svg"]
    for path in paths:
        # Without a date an unchanged run gives an unchanged file.
        metadata: dict[str, Any] = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=120, facecolor="white", metadata=metadata)
    return paths


def draw(report: Report) -> Figure:
    """A panel for each run: rows are cases, columns backends and dtypes; loss + gradient."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = alike(report)
    cases = list(dict.fromkeys(run.case.name for run in report.runs))
    names = list(dict.fromkeys(name for run in report.runs for name in points(run)))
    with mpl.rc_context({"font.size": 8, "font.family": "sans-serif", "svg.hashsalt": "xentlib"}):
        legend_rows = -(-len(names) // max(1, len(columns)))
        height = HIGH * len(cases) + 0.22 * legend_rows + 0.6
        figure = Figure((max(WIDE * len(columns), 7.5), height), layout=ConstrainedLayoutEngine())
        panels = figure.subplots(len(cases), len(columns), squeeze=False)
        for column, runs in enumerate(columns):
            found = {run.case.name: run for run in runs}
            for row, case in enumerate(cases):
                draw_run(panels[row][column], found.get(case), names)
        handles = {
            text: handle
            for panel in figure.axes
            for handle, text in zip(*panel.get_legend_handles_labels())
        }
        figure.legend(
            [handles[name] for name in names],
            names,
            loc="outside lower center",
            ncols=max(2, len(columns)),
            frameon=False,
        )
        figure.suptitle(
            f"{TRAINING}: time / bare GEMMs against extra MiB; below and left is better\n"
            + environment_line(report),
            fontsize=8,
            color=INK,
        )
    return figure


def points(run: Run) -> dict[str, tuple[float, float]]:
    """Of everyone with numbers: extra MiB and time over the floor."""
    found = {}
    for row in run.rows:
        if row.kind == TRAINING and row.ratio and row.peak_bytes and row.contestant not in BARE:
            found[row.contestant] = (row.peak_bytes / MIB, row.ratio.median)
    return found


def draw_run(axes: Axes, run: Run | None, names: list[str]) -> None:
    if run is None:
        axes.set_axis_off()
        return
    found = points(run)
    widest = 1.15 * max((memory for memory, _ in found.values()), default=1)
    labelled: list[float] = []
    for name, (memory, ratio) in found.items():
        place = names.index(name)
        axes.plot(
            memory,
            min(ratio, FARTHEST),
            linestyle="none",
            marker="o" if name == OURS else MARKERS[place % len(MARKERS)],
            markersize=8 if name == OURS else 5.5,
            color=OURS_COLOUR if name == OURS else COLOURS[place % len(COLOURS)],
            label=name,
            zorder=3 if name == OURS else 2,
        )
        if ratio > FARTHEST:
            above = sum(abs(memory - other) < 0.2 * widest for other in labelled)
            down = (5, -3 - 9 * above)
            axes.annotate(f"{ratio:.1f}", (memory, FARTHEST), down, textcoords="offset points")
            labelled.append(memory)
    axes.axhline(1, color=INK, linewidth=0.8, zorder=1)
    axes.set_xlim(0, widest)
    axes.set_ylim(0, 1.1 * min(max((ratio for _, ratio in found.values()), default=1), FARTHEST))
    axes.set_title(f"{run.backend}, {run.dtype}: {run.case.name}", fontsize=8, loc="left")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
