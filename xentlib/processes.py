"""Processes that end with the one that started them, however that one ends; and ranks, which are
several of them that do one thing together."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

KILL = 9  # signal.SIGKILL, a name that Windows lacks
PR_SET_PDEATHSIG = 1  # linux/prctl.h
POLL_SECONDS = 0.5
AFTER_FAILURE = 10.0  # seconds without progress in which other ranks say what they make of it
# A rank makes progress while it and all that it has started use more than this share of a core.
# Waiting for ever in gloo uses 0.002; in a store that is a file, read every 10 ms, 0.009. A rank
# that computes has 0.1 of two cores at load 20, and this much at load 100.
PROGRESS = 0.02
# A page that has to be read from disk counts as so much processor time: where memory is short,
# ranks that compute do little else (four used less than PROGRESS for 240 s at 23 of 23 GiB).
PAGE_SECONDS = 0.005
TICKS = 2  # of the processor time in /proc, commonly 10 ms: one may belong to what was before
# Processor time that ranks may use, each, as a multiple of `seconds`: one may spin for ever.
SPINNING = 10


def end_with_parent(parent: int) -> None:
    """Have this process killed as soon as the process that started it is gone.

    A rank whose starter was killed would otherwise wait for the others, or for a lock, for ever. On
    Linux the kernel does it, whatever this process is busy with; elsewhere a thread looks twice a
    second.

    Args:
        parent: process id of the starter. Linux goes by the starting thread: start from one that
            lives as long as this process should, which the main thread does.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, KILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # gone before it could be told
        os.kill(os.getpid(), KILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os.kill(os.getpid(), KILL)


# --- folders --------------------------------------------------------------------------------------

FOLDER = "xentlib-"  # then the id of the process that made it
LOCK = "lock"  # in the folder, held for as long as that process lives


@contextmanager
def own_folder() -> Iterator[str]:
    """A temporary folder; those that a killed process has left behind are removed first."""
    _remove_left_behind()
    folders = tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-")
    with folders as folder, Path(folder, LOCK).open("wb") as lock:
        _lock(lock)
        yield folder


def _remove_left_behind() -> None:
    """Of this user, whose process is gone: there is none of its number here, and none has the lock,
    in another container that shares the folder for example."""
    if sys.platform == "win32":
        return
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}[0-9]*-*"):
        with suppress(OSError, ValueError):
            pid = int(folder.name.removeprefix(FOLDER).partition("-")[0])
            if folder.is_symlink() or folder.stat().st_uid != os.getuid() or _lives(pid):
                continue
            with (folder / LOCK).open("ab") as lock:
                if _lock(lock):
                    shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _lock(file: IO[bytes]) -> bool:
    """Whether nobody else has it."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# --- ranks ---------------------------------------------------------------------------------------


class RanksError(RuntimeError):
    """Ranks that have not come back: what each has said, and how many ranks there are in all."""

    def __init__(self, outputs: list[str], world: int) -> None:
        super().__init__("\n".join(outputs))
        self.outputs = outputs
        self.world = world


class RanksFailed(RanksError):
    """They have ended without a result."""


class RanksLate(RanksError):
    """They made no progress, or used too much processor time; `why` completes "2 ranks"."""

    def __init__(self, outputs: list[str], world: int, why: str) -> None:
        super().__init__(outputs, world)
        self.why = why


def launch(
    work: Callable[..., Any],
    world: int,
    *arguments: Any,
    seconds: float,
    preload: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """`work(rank, world, folder, *arguments)` on ranks, each a process; what each returned.

    Args:
        work: a function that can be imported. The main module is not run again in the ranks.
        seconds: that all of them may go without progress, which is processor time, of a rank or of
            a process that it has started, or a rank that is done. A busy machine makes no rank
            late; one that waits for ever uses next to nothing. One that spins for ever ends when
            ranks have used `SPINNING` times as much processor time. Without Linux's /proc, only a
            rank that is done counts as progress.
        preload: modules that take long to import. Ranks are then forked from a process that has
            imported them and done nothing else; the first call in a process decides which. Without
            any, or where there is no fork, each rank is a new interpreter.
        environment: variables of the ranks beside those of this process as they are now.

    The folder is there for as long as the ranks are. They can meet in a file of it: a port that is
    free now may be taken before they listen on it.

    Raises:
        RanksFailed: ranks ended without a result; the others were given `AFTER_FAILURE` seconds.
        RanksLate: they made no progress for `seconds`, or used too much processor time.
    """
    with own_folder() as folder:
        Path(folder, "work").write_bytes(pickle.dumps((work, arguments)))
        variables = {**os.environ, **(environment or {})}
        context = _context(preload)
        ranks = [_rank(context, rank, world, folder, variables) for rank in range(world)]
        try:
            with _no_main():
                for rank in ranks:
                    rank.process.start()
            states = _wait(ranks, seconds)
        finally:
            for rank in ranks:
                _end(rank.process)
        outputs = [rank.stderr.read_text(errors="replace") for rank in ranks]
        # The one that failed first says the least of lost connections.
        for ending in ("failed", "waiting", "spinning"):
            of_them = [text for state, text in zip(states, outputs, strict=True) if state == ending]
            if of_them and ending == "failed":
                raise RanksFailed(of_them, world)
            if of_them:
                why = {
                    "waiting": f"made no progress for {seconds:g} s",
                    "spinning": f"were not done in {SPINNING * seconds:g} s of processor time each",
                }
                raise RanksLate(of_them, world, why[ending])
        # Written a moment ago by the processes above.
        return [pickle.loads(rank.result.read_bytes()) for rank in ranks]


class _Rank(NamedTuple):
    process: Any
    stderr: Path  # all that it has written to standard error
    result: Path  # what it has returned; there as a whole, or not at all


def _context(preload: Sequence[str]) -> Any:
    if not preload or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


def _rank(context: Any, rank: int, world: int, folder: str, variables: dict[str, str]) -> _Rank:
    stderr, result = Path(folder, f"stderr{rank}"), Path(folder, f"result{rank}")
    stderr.touch()
    process = context.Process(
        target=_enter, args=(rank, world, folder, stderr, result, variables), name=f"rank {rank}"
    )
    return _Rank(process, stderr, result)


@contextmanager
def _no_main() -> Iterator[None]:
    """multiprocessing would import the main module in each rank: seconds, or, where it is a script
    whose last lines have no guard, the whole program once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _wait(ranks: list[_Rank], seconds: float) -> list[str]:
    """What became of each: "done", "failed", or why it is late, "waiting" or "spinning"."""
    progress = _Progress([rank.process.pid for rank in ranks])
    before: list[str] = []
    while True:
        # In this order: a rank may end between the two.
        ended = [rank.process.exitcode is not None for rank in ranks]
        done = [rank.result.exists() for rank in ranks]
        states = [
            "done" if there else "failed" if gone else ""
            for gone, there in zip(ended, done, strict=True)
        ]
        if all(states):
            return states
        if states != before:
            if "failed" in states and "failed" not in before:
                seconds = min(seconds, AFTER_FAILURE)
                progress.processor_seconds = 0.0
            progress.restart()
            before = states
        still = progress.look(min(POLL_SECONDS, seconds))
        if still > seconds:
            return [state or "waiting" for state in states]
        if progress.processor_seconds > SPINNING * seconds * len(ranks):
            return [state or "spinning" for state in states]
        time.sleep(0.05)


class _Progress:
    """Since when ranks make no progress, and the processor time that they have used."""

    def __init__(self, pids: list[int]) -> None:
        self.processor_seconds = 0.0
        self._pids = pids
        self._used = [0.0] * len(pids)
        self.restart()

    def restart(self) -> None:
        self._looked = self._since = time.monotonic()
        self._used_then = self._used

    def look(self, every: float) -> float:
        """Seconds without progress, as of the last look; one takes some milliseconds."""
        now = time.monotonic()
        if now - self._looked >= every:
            self._looked = now
            before, self._used = self._used, _processor_seconds(self._pids)
            pairs = zip(self._used, before, strict=True)
            self.processor_seconds += sum(max(new - old, 0.0) for new, old in pairs)
            # Less than before: a process is gone whose time nobody has been told.
            self._used_then = list(map(min, self._used, self._used_then))
            enough = TICKS * _tick() + PROGRESS * (now - self._since)
            pairs = zip(self._used, self._used_then, strict=True)
            if any(new - old > enough for new, old in pairs):
                self.restart()
        return self._looked - self._since


def _processor_seconds(pids: list[int]) -> list[float]:
    """Of each process and all that it has started, with `PAGE_SECONDS`; 0 where there is no Linux's
    /proc."""
    used = dict.fromkeys(pids, 0.0)
    parents, seconds = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat") if sys.platform == "linux" else ():
        with suppress(OSError):  # gone meanwhile
            # proc(5), from the third field on: the second, a name in brackets, may hold anything.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            pid = int(stat.parent.name)
            pages, ticks = (sum(map(int, fields[k : k + n])) for k, n in ((9, 2), (11, 4)))
            parents[pid], seconds[pid] = int(fields[1]), pages * PAGE_SECONDS + ticks * _tick()
    for process in parents:
        above = process
        while above not in used and above in parents:
            above = parents[above]
        if above in used:
            used[above] += seconds[process]
    return [used[pid] for pid in pids]


def _tick() -> float:
    return 1 / os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 0.0


def _end(process: Any) -> None:
    if process.pid is not None:  # started
        process.kill()
        process.join()


def _enter(
    rank: int, world: int, folder: str, stderr: Path, result: Path, variables: dict[str, str]
) -> None:
    """Be a rank. What it raises is written to standard error by multiprocessing, which ends it."""
    _end_with_launcher()
    os.environ.clear()
    os.environ.update(variables)
    # A file: a rank that fills a pipe which is not read yet would make the others wait. DeepSpeed
    # says much; the launcher's standard output is where the JSON of a parity run goes.
    with stderr.open("wb") as errors, Path(os.devnull).open("wb") as nothing:
        os.dup2(errors.fileno(), 2)
        os.dup2(nothing.fileno(), 1)
    # Written by the process that started this one.
    work, arguments = pickle.loads(Path(folder, "work").read_bytes())
    part = result.with_suffix(".part")
    part.write_bytes(pickle.dumps(work(rank, world, folder, *arguments)))
    part.replace(result)


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    if os.getppid() == launcher.pid:
        end_with_parent(os.getppid())
    else:  # the parent is the process that ranks are forked from, which waits for them
        threading.Thread(target=_kill_after, args=(launcher,), daemon=True).start()


def _kill_after(launcher: Any) -> None:
    launcher.join()
    os.kill(os.getpid(), KILL)
