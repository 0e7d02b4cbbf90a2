"""Processor seconds of each test, its ranks included, how long it took, and what it showed: a
plugin of pytest that writes build/seconds.tsv. `.ci/cases.py` makes .ci/seconds.tsv of it, by which
files that take longest begin first, and `make test` runs some cases of each function."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from xentlib import contract
from xentlib.checks.validators import Refusals

BUILD = Path(__file__).parents[2] / "build"
TABLE = Path(__file__).parents[2] / ".ci" / "seconds.tsv"
OUTCOMES = ("failed", "error", "passed", "skipped")
HEADER = "processor\ttook\tcases\tkept\tfunction\n"
OF_RANKS = "XENTLIB_SHOWN_BY_RANKS"  # a file of this process, to which its ranks append theirs
# Processor seconds of each process that forks ranks, and of the ranks that it has waited for.
FORKED: dict[int, float] = {}


class Row(NamedTuple):
    """A function's cases in one backend: their seconds, and how many `make test` runs."""

    processor: float
    took: float
    cases: int
    kept: int


def table() -> dict[str, Row]:
    rows = TABLE.read_text().splitlines()[1:] if TABLE.is_file() else []
    return {
        name: Row(float(processor), float(took), int(cases), int(kept))
        for processor, took, cases, kept, name in (row.split("\t") for row in rows)
    }


def function_of(item: Any) -> str:
    """The function of a case, in its backend if it has one."""
    backend = getattr(item, "callspec", None) and item.callspec.params.get("backend")
    return f"{item.path.stem}::{item.originalname}" + (f"[{backend}]" if backend else "")


def spread(count: int, kept: int) -> list[int]:
    """Which of so many cases: the first, and others at equal distances."""
    return list(range(count)) if kept >= count else [i * count // kept for i in range(kept)]


def chosen(items: Iterable[Any]) -> set[int]:
    """Those of `make test`, by `id`: all of a function that the table does not have, and each
    that is named for the README."""
    functions, rows, found = defaultdict(list), table(), set()
    for item in items:
        functions[function_of(item)].append(item)
        if "README" in item.name:
            found.add(id(item))
    for name, cases in functions.items():
        kept = rows[name].kept if name in rows else len(cases)
        found |= {id(cases[i]) for i in spread(len(cases), kept)}
    return found


def file_seconds(cases: str) -> Counter[str]:
    """How long each file takes, by its name. One that waits, as for ranks that hang on purpose, has
    few seconds of a processor, and must not begin last for that."""
    files: Counter[str] = Counter()
    for name, row in table().items():
        few = row.kept / row.cases
        share = {"all": 1.0, "few": few, "rest": 1 - few}[cases]
        files[name.partition("::")[0]] += row.took * share
    return files


# What a test has shown: rows of the contract that it has measured, and refusals that it has met.
SHOWN: set[str] = set()
check, refuse, require = contract.check, Refusals.refuse, Refusals.require


def checked(row: str, *args: Any, **more: Any) -> Any:
    SHOWN.add(row)
    return check(row, *args, **more)


def refused(self: Refusals, message: str, /, **values: object) -> Any:
    SHOWN.add(opening(self.messages[message]))
    return refuse(self, message, **values)


def required(self: Refusals, message: str, holds: object, /, **values: object) -> None:
    if not holds:
        SHOWN.add(opening(self.messages[message]))
    require(self, message, holds, **values)


def opening(message: str) -> str:
    return " ".join(message.partition(";")[0].split())


contract.check, Refusals.refuse, Refusals.require = checked, refused, required


def used() -> float:
    """Of this process, those that it has waited for, and ranks, which another process forks."""
    own, children = (
        resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    pid = forkserver._forkserver._forkserver_pid
    if pid is not None and Path(f"/proc/{pid}/stat").is_file():
        # proc(5): utime, stime, and those of children that it has waited for, in ticks.
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        FORKED[pid] = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    of_both = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return of_both + sum(FORKED.values())


def of_ranks() -> list[str]:
    return Path(os.environ[OF_RANKS]).read_text().splitlines()


def rank_ends() -> None:
    """Called by a rank as it ends."""
    if OF_RANKS in os.environ:
        with Path(os.environ[OF_RANKS]).open("a") as file:
            file.write("\t".join(sorted(SHOWN)) + "\n")


class Test(NamedTuple):
    processor: float
    took: float
    function: str
    shown: list[str]


class Seconds:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.tests: dict[str, Test] = {}
        self.whole = 0.0
        handle, os.environ[OF_RANKS] = tempfile.mkstemp()
        os.close(handle)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        SHOWN.clear()
        before, began, ranks = used(), time.monotonic(), len(of_ranks())
        try:
            return (yield)
        finally:
            of = (used() - before, time.monotonic() - began, function_of(item))
            shown = {x for line in of_ranks()[ranks:] for x in line.split("\t") if x} | SHOWN
            self.tests[item.nodeid] = Test(*of, sorted(shown))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        tests, whole = getattr(node, "workeroutput", {}).get("seconds", ({}, 0.0))
        self.tests |= {name: Test(*test) for name, test in tests.items()}
        self.whole += whole

    def pytest_sessionfinish(self) -> None:
        # Workers are this process's children, and have told theirs.
        self.whole = self.whole or used()
        Path(os.environ[OF_RANKS]).unlink(missing_ok=True)
        if hasattr(self.config, "workerinput"):
            tests = {name: tuple(test) for name, test in self.tests.items()}
            self.config.workeroutput["seconds"] = tests, self.whole
            return
        BUILD.mkdir(exist_ok=True)
        rows = [
            "\t".join([f"{x.processor:.3f}", f"{x.took:.3f}", x.function, name, *x.shown])
            for name, x in self.tests.items()
        ]
        (BUILD / "seconds.tsv").write_text("\n".join(rows) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        of_tests = sum(test.processor for test in self.tests.values())
        terminalreporter.write_line(
            f"{self.whole:.0f} processor seconds, {of_tests:.0f} of them in tests"
        )
        counts = {name: len(terminalreporter.stats.get(name, ())) for name in OUTCOMES}
        counts["processor seconds"] = round(self.whole)
        lines = "".join(f"{count}\t{name}\n" for name, count in counts.items())
        (BUILD / f"outcomes-{self.config.getoption('--cases')}.tsv").write_text(lines)
