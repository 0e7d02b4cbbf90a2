"""Time and memory of the routes against tokens a rank, as a picture; the crossover is marked."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xentlib.plan import Route, head_routes
from xentlib.plan.routes import RouteOptions
from xentlib.tools.harness import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from xentlib.tools.cli.plan import Sizes


TOKENS = tuple(1 << k for k in range(8, 18))
LOOKS = {
    "full logits": (plot.COLOURS[4], "--"),
    "head": (plot.COLOURS[0], "-"),
    "hidden": (plot.OURS_COLOUR, "-"),
    "stream": (plot.COLOURS[1], "-"),
    "hybrid": (plot.COLOURS[2], "-."),
}


def save(sizes: Sizes, ranks: int, more: RouteOptions, crossover: int, path: Path) -> None:
    plot.save_figure(draw(sizes, ranks, more, crossover), path)


def draw(sizes: Sizes, ranks: int, more: RouteOptions, crossover: int) -> Figure:
    """Two panels: milliseconds, and GiB at the peak."""
    planned = [head_routes(n, sizes.vocab, sizes.hidden, ranks, **more) for n in TOKENS]
    with plot.letters():
        figure = plot.new_figure(plot.WIDTH, 2.7)
        time, memory = figure.subplots(1, 2)
        _panel(time, planned, "ms", lambda route: 1e3 * route.seconds)
        _panel(memory, planned, "GiB at the peak", lambda route: route.peak_bytes / 2**30)
        if TOKENS[0] <= crossover <= TOKENS[-1]:
            for axes in (time, memory):
                axes.axvline(crossover, color=plot.INK, linewidth=0.8, linestyle=":")
            where, up = (crossover, 0.02), ("data", "axes fraction")
            time.annotate(f" {crossover:,}", where, xycoords=up, fontsize=7, color=plot.INK)
        handles, labels = time.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=7
        )
    return figure


def _panel(axes: Axes, planned: list[dict[str, Route]], title: str, value: Any) -> None:
    for name in planned[0]:
        colour, line = LOOKS[name]
        values = [value(routes[name]) for routes in planned]
        axes.plot(TOKENS, values, color=colour, linestyle=line, linewidth=1.4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(TOKENS[::3], [f"{n:,}" for n in TOKENS[::3]])
    axes.set_xlabel("tokens a rank and call")
    plot.panel(axes, title)
