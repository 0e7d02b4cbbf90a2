"""What a killed run leaves behind: nothing that stays, nothing that the next one waits for.

    python -P tests/helpers/orphans.py MODULE-OR-FILE ARGUMENTS

runs a module or a file so; the suite does it by `conftest.py`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "XENTLIB_RUN"  # in the environment of all that a run starts: a value of the run's own
ENDS_WITH = "XENTLIB_ENDS_WITH"  # process id of the `make` that a run is of
_guards: list[subprocess.Popen[bytes]] = []


def guard() -> None:
    """Have everything that this process starts killed when it ends, or the `make` that it is of.

    Ranks end with their parents by themselves, but ninja and the compilers do not, torchrun puts
    ranks into sessions of their own, and `kill -9` of `make` reaches nobody but `make`. So another
    process, in a session that nobody else is in, waits for the end and then goes by the mark.
    """
    pids = [str(os.getpid()), *filter(None, [os.environ.pop(ENDS_WITH, None)])]
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    os.environ[MARK] = uuid.uuid4().hex
    # -P: this file's folder has a `ranks`, and what else psutil may be looking for.
    command = [sys.executable, "-P", __file__, "--guard", os.environ[MARK], *pids]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        command, env=unmarked, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing
    )
    _guards.append(process)  # a Popen that is collected before its process ends is a warning


def clear_up(mark: str, *pids: int) -> None:
    """Wait for the end of one of these processes, then end the first and all that are marked."""
    with suppress(psutil.NoSuchProcess):
        watched = [psutil.Process(pid) for pid in pids]
        while all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in watched):
            time.sleep(0.2)
        watched[0].kill()
    for _ in range(50):  # a process may be starting another one just now
        left = [process for process in psutil.process_iter() if mark_of(process) == mark]
        if not left:
            break
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=1)


def mark_of(process: psutil.Process) -> str | None:
    try:
        return process.environ().get(MARK)
    except (psutil.Error, OSError):  # another user's, or gone
        return None


def remove_locks(folder: str | None = None) -> list[Path]:
    """Remove the locks in torch's folder of compiled extensions that no living process holds.

    `torch.utils.file_baton` makes a file and has it open for as long as it compiles; whoever finds
    one waits until it is gone, and a process that was killed never removes its own.
    """
    folder = folder or os.environ.get("TORCH_EXTENSIONS_DIR")
    found = Path(folder).resolve().glob("*/lock") if folder else ()
    made = {}
    for lock in found:
        with suppress(FileNotFoundError):
            made[lock] = lock.stat().st_mtime_ns
    if not made:
        return []
    held = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            held |= {Path(file.path) for file in process.open_files()}
    removed = []
    for lock, when in made.items():
        with suppress(FileNotFoundError):
            # Another one since then may have been taken by a process that was already asked.
            if lock not in held and lock.stat().st_mtime_ns == when:
                lock.unlink()
                removed.append(lock)
    return removed


def main(what: str, *arguments: str) -> None:
    if what == "--guard":
        mark, *pids = arguments
        clear_up(mark, *map(int, pids))
        return
    guard()
    remove_locks()
    sys.argv = [what, *arguments]
    if what.endswith(".py"):
        runpy.run_path(what, run_name="__main__")
    else:
        runpy.run_module(what, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
