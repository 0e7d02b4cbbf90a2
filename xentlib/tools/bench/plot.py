"""A benchmark's numbers as a picture: time over the floor against extra memory.

Made for a page of text, 6.8 inches wide: two panels beside each other, each as wide as a column, or
three of a run with several cases, in letters of 8 points without serifs. On what it was measured is
for the caption: `bench.md` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xentlib.tools.bench.implementation import BARE, OURS, TRAINING
from xentlib.tools.bench.report import Report, Run, alike
from xentlib.tools.harness import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MARKERS = "sDv^<>phXP*d8H"
FARTHEST = 4.0  # times the floor: one hopeless contestant must not make the others look alike
TALL = {1: 2.5, 2: 2.5, 3: 2.0}  # inches of a panel, by how many are beside each other
MIB = 1 << 20


def save(
    report: Report, folder: Path, name: str = "bench", kinds: Sequence[str] = ("png", "svg", "pdf")
) -> list[Path]:
    figure = draw(report)
    paths = [folder / f"{name}.{kind}" for kind in kinds]
    for path in paths:
        plot.save_figure(figure, path)
    return paths


def draw(report: Report) -> Figure:
    """A panel for each run: loss + gradient. Below and left is better."""
    rows = grid(report)
    runs = [run for row in rows for run in row]
    names = list(dict.fromkeys(name for run in runs for name in points(run)))
    one_case = len({run.case.name for run in runs}) == 1
    across = max(map(len, rows), default=1)
    in_legend = 2 if across == 1 else 3
    with plot.letters():
        height = TALL[across] * len(rows) + 0.17 * -(-len(names) // in_legend) + 0.1
        width = plot.WIDTH if across > 1 else plot.WIDTH / 2
        figure = plot.new_figure(width, height)
        panels = figure.subplots(len(rows), across, squeeze=False)
        for row, beside in zip(rows, panels):
            for run, axes in zip_longest(row, beside):
                draw_run(axes, run, names, one_case)
            beside[0].set_ylabel("time / bare GEMMs")
        for axes in panels[-1]:
            axes.set_xlabel("extra memory, MiB")
        handles = {
            text: handle
            for axes in figure.axes
            for handle, text in zip(*axes.get_legend_handles_labels())
        }
        figure.legend(
            [handles[name] for name in names],
            names,
            loc="outside lower center",
            ncols=in_legend,
            frameon=False,
            fontsize=7,
            columnspacing=1.2,
            handletextpad=0.2,
        )
    return figure


def grid(report: Report) -> list[list[Run]]:
    """Rows of panels: cases beside each other, three at most; of one case two runs."""
    columns = alike(report)
    if all(len(runs) == 1 for runs in columns):
        runs = [run for (run,) in columns]
        return [runs[k : k + 2] for k in range(0, len(runs), 2)]
    return [runs[k : k + 3] for runs in columns for k in range(0, len(runs), 3)]


def points(run: Run) -> dict[str, tuple[float, float]]:
    """Of everyone with numbers: extra MiB and time over the floor."""
    points_of = {}
    for row in run.rows:
        if row.kind == TRAINING and row.ratio and row.peak_bytes and row.contestant not in BARE:
            points_of[row.contestant] = (row.peak_bytes / MIB, row.ratio.median)
    return points_of


def draw_run(axes: Axes, run: Run | None, names: list[str], one_case: bool) -> None:
    if run is None:
        axes.set_axis_off()
        return
    drawn = points(run)
    widest = 1.15 * max((memory for memory, _ in drawn.values()), default=1)
    labelled: list[float] = []
    for name, (memory, ratio) in drawn.items():
        place = names.index(name)
        marker, colour = MARKERS[place % len(MARKERS)], plot.COLOURS[place % len(plot.COLOURS)]
        look: dict[str, Any] = {"marker": marker, "markersize": 5.5, "color": colour, "zorder": 2}
        if name == OURS:
            look = {"marker": "o", "markersize": 8, "color": plot.OURS_COLOUR, "zorder": 3}
        axes.plot(memory, min(ratio, FARTHEST), linestyle="none", label=name, **look)
        if ratio > FARTHEST:
            above = sum(abs(memory - other) < 0.2 * widest for other in labelled)
            down = (5, -3 - 9 * above)
            axes.annotate(f"{ratio:.1f}", (memory, FARTHEST), down, textcoords="offset points")
            labelled.append(memory)
    axes.axhline(1, color=plot.INK, linewidth=0.8, zorder=1)
    axes.set_xlim(0, widest)
    axes.set_ylim(0, 1.1 * min(max((ratio for _, ratio in drawn.values()), default=1), FARTHEST))
    case = "" if one_case else f", {run.case.name}"
    plot.panel(axes, f"{run.backend}, {run.dtype}{case}")
