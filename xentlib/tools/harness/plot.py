"""What plots of matplotlib have in common: letters, colours, panels and files."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS_COLOUR = "#0b7a75"
INK, FAINT = "#1f2933", "#d9dee4"
COLOURS = ("#c0392b", "#2c6fbb", "#8e5ea2", "#d98200", "#6b7280", "#a0522d", "#4d7c0f")
WIDTH = 6.8  # inches of a page's text


def letters() -> AbstractContextManager[None]:
    """Without serifs; TrueType in a PDF, as many publishers refuse Type 3, the default."""
    import matplotlib as mpl

    settings: Any = {"font.family": "sans-serif", "font.size": 8}
    settings |= {"pdf.fonttype": 42, "svg.hashsalt": "xentlib"}
    return mpl.rc_context(settings)


def new_figure(width: float, height: float) -> Figure:
    """Of so many inches, whose panels and legend make room for each other."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure((width, height), layout=ConstrainedLayoutEngine())


def panel(axes: Axes, title: str) -> None:
    """A title, a grid behind what is drawn, and no frame above and at the right."""
    axes.set_title(title, fontsize=8, loc="left")
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def save_figure(figure: Figure, path: Path) -> None:
    """Without a date, so that an unchanged run gives an unchanged file."""
    dates: dict[str, Any] = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with letters():
        figure.savefig(path, dpi=200, facecolor="white", metadata=dates.get(path.suffix, {}))
