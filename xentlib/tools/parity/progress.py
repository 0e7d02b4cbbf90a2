"""The sections of a run, how far it has come, and how long the others will take on this machine: a
bar on a terminal, one line a stage elsewhere."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TextIO

from xentlib.tools.errors import reader_gone
from xentlib.tools.parity.result import Section

if TYPE_CHECKING:
    from rich.progress import Progress as RichBars
    from rich.progress import Task, TaskID


class Progress:
    """What a part of the run may say about itself; this one is silent."""

    def stage(self, name: str, total: int) -> None:
        """Begin `name`, made of `total` steps (0: not known); the stage before it is over."""

    def advance(self, note: str = "") -> None:
        """One step of the stage is done; `note` says what it was."""


class Planned(NamedTuple):
    """A section that is to be run: `run(progress, slowness)`, the second as `Pace` has it.

    `step_seconds` are those of a step, of all backends, on two idle cores: 0.64 of those in
    a quick run of 404 s. The sections that are done put right what is wrong of all.
    """

    name: str
    steps: int
    run: Callable[[Progress, float], Section]
    step_seconds: float = 0.5
    rows: tuple[str, ...] = ()  # of the contract, those it measures
    ahead: Callable[[], Callable[[], None]] | None = None  # of ranks, `OnRanks.ahead`

    def section(self, progress: Progress, slowness: float = 1.0) -> Section:
        """What it finds. What stops it is an error of it alone: the others are run."""
        start = time.perf_counter()
        try:
            section = self.run(progress, slowness)
        except Exception as error:  # hours of other sections do not hang on it
            if isinstance(error, BrokenPipeError) and reader_gone():
                raise
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            section = Section(self.name, error=f"{message}\n{traceback.format_exc()}")
        return replace(section, seconds=time.perf_counter() - start)


class Pace:
    """How slow this machine is, from the sections that are done, and how long the others take."""

    def __init__(self, plan: Sequence[Planned]) -> None:
        self._left = {part.name: part.steps * part.step_seconds for part in plan}
        self._expected = self._taken = 0.0
        self._running, self._began = "", 0.0

    @property
    def slowness(self) -> float:
        """Seconds taken for each one expected: 1 on two idle cores, and before anything is done."""
        return self._taken / self._expected if self._expected else 1.0

    def begin(self, name: str) -> None:
        self._running, self._began = name, time.monotonic()

    def done(self, name: str, seconds: float | None) -> None:
        """A section has taken so long; None where that says nothing, as it failed."""
        expected = self._left.pop(name, 0.0)
        if seconds is not None:
            self._expected += expected
            self._taken += seconds

    def left(self) -> float:
        """Seconds until everything is done."""
        running = self._left.get(self._running, 0.0) * self.slowness
        rest = sum(self._left.values()) * self.slowness
        return rest - min(time.monotonic() - self._began, running)

    def text(self) -> str:
        """`left` for people: "under 1 min left", "about 12 min left"."""
        minutes = round(self.left() / 60)
        return f"about {minutes} min left" if minutes else "under 1 min left"


class PlainProgress(Progress):
    """One line when a stage begins, with the seconds since the start and those that are left: for
    logs and pipes."""

    def __init__(self, stream: TextIO, pace: Pace | None = None) -> None:
        self._stream, self._pace = stream, pace
        self._start = time.monotonic()

    def stage(self, name: str, total: int) -> None:
        steps = f" ({total} steps)" if total else ""
        elapsed = time.monotonic() - self._start
        left = f", {self._pace.text()}" if self._pace else ""
        print(f"[{elapsed:6.1f} s] {name}{steps}{left}", file=self._stream, flush=True)


class _BarProgress(Progress):
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
        from rich import progress as rich_progress
        from rich.console import Console
        from rich.text import Text
    except ModuleNotFoundError:
        console = None
    else:
        console = Console(file=stream)
    if console is None or not console.is_terminal:
        yield PlainProgress(stream, pace)
        return

    class LeftColumn(rich_progress.ProgressColumn):
        """Of the whole run, beside the stage that is running."""

        def render(self, task: Task) -> Text:
            return Text(pace.text() if pace and not task.finished else "")

    columns = (
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        LeftColumn(),
        rich_progress.TextColumn("{task.fields[note]}", style="dim", markup=False),
    )
    with rich_progress.Progress(*columns, console=console) as bars:
        progress = _BarProgress(bars)
        yield progress
        progress.finish()
