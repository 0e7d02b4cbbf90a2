"""The plot of `xentlib plan`: time and memory of each route against tokens."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xentlib.plan import Route, head_routes
from xentlib.plan.routes import RouteOptions
from xentlib.tools.errors import UsageError
from xentlib.tools.harness import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PLOTS = (".svg", ".png", ".pdf")
GB = 1e9
# Of the plot: tokens a rank, and how each route is drawn.
TOKENS = tuple(1 << k for k in range(8, 18))
LOOKS = {
    "full logits": (plot.COLOURS[4], "--"),
    "head": (plot.COLOURS[0], "-"),
    "hidden": (plot.OURS_COLOUR, "-"),
    "stream": (plot.COLOURS[1], "-"),
    "hybrid": (plot.COLOURS[2], "-."),
}


def check_plot(path: Path) -> None:
    if path.suffix not in PLOTS:
        raise UsageError(
            f"`--plot` must end with {', '.join(PLOTS[:-1])} or {PLOTS[-1]}; got '{path}'."
        )
    if find_spec("matplotlib") is None:
        raise UsageError(
            "`--plot` needs matplotlib, which is not installed; install it with "
            "`pip install 'xentlib[plot]'`."
        )


def draw(head: tuple[int, int, int], more: RouteOptions, crossover: int) -> Figure:
    """Of V, H and R: milliseconds as far as links overlap, and GB at the peak, against tokens a
    rank; the crossover is marked."""
    planned = [head_routes(n, *head, **more) for n in TOKENS]
    with plot.letters():
        figure = plot.new_figure(plot.WIDTH, 2.7)
        time, memory = figure.subplots(1, 2)
        _panel(time, planned, "ms", lambda route: 1e3 * route.overlapped_seconds)
        _panel(memory, planned, "GB at the peak", lambda route: route.peak_bytes / GB)
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
