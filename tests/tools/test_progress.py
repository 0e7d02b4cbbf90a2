"""How far a run has come, and how long the rest will take."""

import io
from types import SimpleNamespace

import pytest

from xentlib.tools.parity import progress as parity_pace
from xentlib.tools.parity.progress import Pace, PlainProgress, Planned, Progress, progress_on
from xentlib.tools.parity.result import Section


class Terminal(io.StringIO):
    def isatty(self):
        return True


def a_stage(progress):
    progress.stage("operators [a5]", 2)
    progress.advance("N=33 [/bold]")
    progress.advance()
    progress.stage("training", 0)
    progress.advance()


def test_progress_off_a_terminal_is_one_line_a_stage():
    stream = io.StringIO()
    with progress_on(stream) as progress:
        assert isinstance(progress, PlainProgress)
        a_stage(progress)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("s] operators [a5] (2 steps)")
    assert second.endswith("s] training")


def test_progress_on_a_terminal_is_a_bar(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with progress_on(stream) as progress:
        assert not isinstance(progress, PlainProgress)
        a_stage(progress)
    shown = stream.getvalue()
    assert "operators [a5]" in shown  # brackets are text
    assert "2/2" in shown
    assert "1/1" in shown  # a stage of unknown length ends full


def a_plan(**steps):
    """Of so many steps, and the seconds of a step."""
    return [
        Planned(name, count, lambda *_: Section(""), seconds)
        for name, (count, seconds) in steps.items()
    ]


def test_time_left_follows_what_this_machine_has_taken(monkeypatch):
    """Of sections that are expected to take 60, 120 and 600 s."""
    now = [1000.0]
    monkeypatch.setattr(parity_pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    pace = Pace(a_plan(one=(1, 60.0), two=(2, 60.0), three=(6, 100.0)))
    assert (pace.slowness, pace.left(), pace.text()) == (1.0, 780.0, "about 13 min left")
    pace.begin("one")
    now[0] += 30
    assert pace.left() == 750.0
    now[0] += 150  # longer than expected: nothing of it is left
    assert pace.left() == 720.0
    pace.done("one", 180.0)
    assert (pace.slowness, pace.left()) == (3.0, 2160.0)
    pace.done("two", None)  # failed, and says nothing of the speed
    assert (pace.slowness, pace.left()) == (3.0, 1800.0)
    pace.begin("three")
    now[0] += 1780
    assert pace.text() == "under 1 min left"
    pace.done("three", 1780.0)
    assert pace.left() == 0.0


def test_time_left_is_in_the_plain_lines_and_beside_the_bar(monkeypatch):
    stream, pace = io.StringIO(), Pace(a_plan(one=(2, 0.5)))
    monkeypatch.setattr(Pace, "left", lambda self: 500.0)
    with progress_on(stream, pace) as told:
        a_stage(told)
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("] operators [a5] (2 steps), about 8 min left")
    assert lines[1].endswith("] training, about 8 min left")
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = Terminal()
    with progress_on(stream, pace) as told:
        told.stage("operators", 2)
        told.advance("N=33")
    assert "about 8 min left" in stream.getvalue()


def test_silent_progress():
    a_stage(Progress())
