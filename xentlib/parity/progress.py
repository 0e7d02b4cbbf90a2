"""How far a run has come: a bar on a terminal, one line a stage elsewhere, nothing in tests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import TaskID

__all__ = ["PlainProgress", "Progress", "SilentProgress", "progress_on"]


class Progress(Protocol):
    """What a part of the run may say about itself."""

    def stage(self, name: str, total: int) -> None:
        """Begin `name`, made of `total` steps (0: not known); the stage before it is over."""

    def advance(self, note: str = "") -> None:
        """One step of the stage is done; `note` says what it was."""


class SilentProgress:
    """Says nothing."""

    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, note: str = "") -> None:
        pass


class PlainProgress:
    """One line when a stage begins, with the seconds since the start: for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.monotonic()

    def stage(self, name: str, total: int) -> None:
        steps = f" ({total} steps)" if total else ""
        elapsed = time.monotonic() - self._start
        print(f"[{elapsed:6.1f} s] {name}{steps}", file=self._stream, flush=True)

    def advance(self, note: str = "") -> None:
        pass


class _BarProgress:
    """A bar for every stage, the notes beside the running one."""

    def __init__(self, bars: RichBars) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def stage(self, name: str, total: int) -> None:
        self.finish()
        self._task = self._bars.add_task(name, total=total or None, note="")

    def advance(self, note: str = "") -> None:
        if self._task is not None:
            self._bars.update(self._task, advance=1, note=note)

    def finish(self) -> None:
        if self._task is None:
            return
        # A stage of unknown length, or one that stopped early, would keep its bar moving.
        done = max(int(self._bars.tasks[self._task].completed), 1)
        self._bars.update(self._task, total=done, completed=done, note="")
        self._task = None


@contextmanager
def progress_on(stream: TextIO) -> Iterator[Progress]:
    """Bars where `stream` is a terminal and `rich` is installed, else one line a stage."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
    except ModuleNotFoundError:
        yield PlainProgress(stream)
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield PlainProgress(stream)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    with Bars(*columns, console=console) as bars:
        progress = _BarProgress(bars)
        yield progress
        progress.finish()
