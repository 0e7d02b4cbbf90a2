"""How far a run has come, for people: a bar on a terminal, one line a stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from xentlib.tools.parity.eta import Pace
from xentlib.tools.parity.progress import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import Task, TaskID


class PlainProgress:
    """One line when a stage begins, with the seconds since the start and those that are left: for
    logs and pipes."""

    def __init__(self, stream: TextIO, pace: Pace | None = None) -> None:
        self._stream = stream
        self._pace = pace
        self._start = time.monotonic()

    def stage(self, name: str, total: int) -> None:
        steps = f" ({total} steps)" if total else ""
        elapsed = time.monotonic() - self._start
        left = f", {self._pace.text()}" if self._pace else ""
        print(f"[{elapsed:6.1f} s] {name}{steps}{left}", file=self._stream, flush=True)

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
def progress_on(stream: TextIO, pace: Pace | None = None) -> Iterator[Progress]:
    """Bars where `stream` is a terminal and `rich` is installed, else one line a stage; with the
    time that is left where `pace` is given."""
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bars
        from rich.text import Text
    except ModuleNotFoundError:
        yield PlainProgress(stream, pace)
        return
    console = Console(file=stream)
    if not console.is_terminal:
        yield PlainProgress(stream, pace)
        return

    class LeftColumn(ProgressColumn):
        """Of the whole run, beside the stage that is running."""

        def render(self, task: Task) -> Text:
            return Text(pace.text() if pace and not task.finished else "")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        LeftColumn(),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    with Bars(*columns, console=console) as bars:
        progress = _BarProgress(bars)
        yield progress
        progress.finish()
