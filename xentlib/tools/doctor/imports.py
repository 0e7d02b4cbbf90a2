"""Packages imported in processes of their own: what raises, ends its process, prints what it likes
or never comes back is a line of the report.

Nothing here needs NumPy, which may be what is broken.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import NamedTuple

from xentlib.processes import end_with_parent, own_folder

LIMIT = 120.0  # seconds of a step; the longest need 14 of one core
LONGEST = 200  # characters of an error
START = "import sys, json; given = json.loads(sys.argv[1]); sys.path[:] = given.pop('path'); "
START += "from xentlib.tools.doctor.imports import be_child; be_child(**given)"
PLUGINS = "jax._src.xla_bridge"  # whose log has what plugins of JAX raise: nothing else has
PLUGIN_FAILED = "Jax plugin configuration error"


class Tried(NamedTuple):
    """What became of a package; `wrong` is empty where nothing is."""

    wrong: str = ""  # "`import torch` raises ..."
    plugins: tuple[str, ...] = ()  # of JAX, that could not be initialized


def try_imports(chains: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, Tried]:
    """By package, what comes of its steps, one after the other: "torch", "torch.cuda:is_available".

    A chain is packages that load each other: one process imports them in their order, and another
    one the rest where it fails. All is as in this process, with its path of modules and its
    variables. What a function raises is for who asks for its answer.
    """
    results: dict[str, Tried] = {}
    with own_folder() as folder, ExitStack() as ending:
        running = [_Chain(chain, Path(folder, f"{k}-"), ending) for k, chain in enumerate(chains)]
        while running:
            for chain in [*running]:
                if chain.ended():
                    results |= chain.results()
                    if not chain.go_on():
                        running.remove(chain)
            time.sleep(0.02)
    return results


class _Chain:
    """One after the other the processes that import the packages of a chain."""

    def __init__(self, steps_of: Mapping[str, Sequence[str]], at: Path, ending: ExitStack) -> None:
        self._left, self._at, self._ending = dict(steps_of), at, ending
        self._process: Popen[bytes] | None = None
        self.go_on()

    def go_on(self) -> bool:
        """Start a process for what is left, if anything is."""
        if not self._left:
            return False
        self._answer = self._at.with_name(f"{self._at.name}{len(self._left)}")
        self._answer.touch()
        self._size, self._since, self.late = 0, time.monotonic(), False
        given = {"path": sys.path, "parent": os.getpid(), "answer": str(self._answer)}
        command = [sys.executable, "-c", START, json.dumps({**given, "steps_of": self._left})]
        with self._answer.with_suffix(".stderr").open("wb") as errors:
            # Of a session of its own, so that what a package starts ends with it.
            self._process = Popen(
                command, stdin=DEVNULL, stdout=DEVNULL, stderr=errors, start_new_session=True
            )
        self._ending.callback(_end, self._process)
        return True

    def ended(self) -> bool:
        """Whether the process has, or was made to: a step may take `LIMIT`."""
        if self._process is None or self._process.poll() is not None:
            return True
        size, now = self._answer.stat().st_size, time.monotonic()
        if size != self._size:
            self._size, self._since = size, now
        self.late = now - self._since > LIMIT
        if self.late:
            _end(self._process)
        return self.late

    def results(self) -> dict[str, Tried]:
        """What the process says of packages, and what is to be said of the one it ended with."""
        if self._process is None:
            return {}
        tried: dict[str, Tried] = {}
        name, step = next(iter(self._left)), ""
        for line in map(json.loads, self._answer.read_text(encoding="utf-8").splitlines()):
            name, step = line["package"], line.get("step", step)
            if "done" in line:
                wrong = line["done"] and f"{_said(step)} raises {line['done']}"
                tried[name] = Tried(wrong, tuple(line["plugins"]))
        whole = all(other in tried for other in self._left)
        if not whole and not any(one.wrong for one in tried.values()):
            name = name if name not in tried else next(x for x in self._left if x not in tried)
            tried[name] = Tried(f"{_said(step)} {self._how()}")
        self._left = {x: steps for x, steps in self._left.items() if x not in tried}
        return tried

    def _how(self) -> str:
        """What else than an error became of a step."""
        if self.late:
            return f"is not done after {LIMIT:g} s"
        status = self._process.returncode if self._process else 0
        how = f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
        errors = self._answer.with_suffix(".stderr").read_text(encoding="utf-8", errors="replace")
        last = first_line("\n".join(reversed(errors.splitlines())))
        return f"ends the process {how}{f', with {last}' if last else ''}"


def _said(step: str) -> str:
    module, _, function = step.partition(":")
    return f"`{module}.{function}()`" if function else f"`import {module}`" if module else "Python"


def _end(process: Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.wait()


def first_line(text: str) -> str:
    """The first one with something in it, not too long."""
    line = next((x.strip() for x in text.splitlines() if x.strip()), "")
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def error_line(error: BaseException) -> str:
    """An error in one line, with the one that it comes from in the end."""
    text, cause = _one(error), error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return text if cause is error else f"{text} (from {_one(cause)})"


def _one(error: BaseException) -> str:
    line = first_line(f"{error}")
    return type(error).__name__ + (f": {line}" if line else "")


# --- in the child ---------------------------------------------------------------------------------


class _Plugins(logging.Handler):
    """Keeps what JAX says of plugins that it cannot use, and goes on without."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith(PLUGIN_FAILED):
            error = record.exc_info[1] if record.exc_info else None
            # One of its messages has a place for the name, and gets none.
            name = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
            text = error_line(error) if error is not None else "cannot be found"
            self.failed.append(f"{name}: {text}" if name else text)


def be_child(parent: int, answer: str, steps_of: Mapping[str, Sequence[str]]) -> None:
    """Make the steps of each package, and write down each before it is made; after an error no
    other package, which would find half of a module."""
    end_with_parent(parent)
    plugins = _Plugins()
    logging.getLogger(PLUGINS).addHandler(plugins)
    with Path(answer).open("w", encoding="utf-8") as file:
        for package, steps in steps_of.items():
            done = ""
            for step in steps:
                print(json.dumps({"package": package, "step": step}), file=file, flush=True)
                done = _make(step)
                if done:
                    break
            report = {"package": package, "plugins": plugins.failed, "done": done}
            print(json.dumps(report), file=file, flush=True)
            plugins.failed = []
            if done:
                break
    os._exit(0)  # what it has loaded need not come to an end as well


def _make(step: str) -> str:
    """What an import raises."""
    module, _, function = step.partition(":")
    try:
        loaded = import_module(module)
        if function:
            getattr(loaded, function)()
    except BaseException as error:  # noqa: BLE001 - SystemExit, too
        return "" if function else error_line(error)
    return ""
