"""Processor seconds of each test module, its ranks included, and how long it took: a plugin of
pytest that writes build/seconds.tsv, of which .ci/seconds.tsv is a copy from an idle machine."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

BUILD = Path(__file__).parents[2] / "build"
KEPT = Path(__file__).parents[2] / ".ci" / "seconds.tsv"
OF_RANKS = "XENTLIB_SECONDS_OF_RANKS"  # a file of this process, to which its ranks append theirs


def kept() -> dict[str, float]:
    """How long each file of tests takes, by its name. One that waits, as for ranks that hang on
    purpose, has few seconds of a processor, and must not begin last for that."""
    rows = KEPT.read_text().splitlines()[1:] if KEPT.is_file() else []
    return {name: float(took) for _, took, name in (row.split("\t") for row in rows)}


SECONDS = kept()


def used() -> float:
    """Of this process, those that it has waited for, and ranks, which another process forks."""
    own, children = (
        resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    ranks = sum(map(float, Path(os.environ[OF_RANKS]).read_text().split()))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime + ranks


def rank_ends() -> None:
    """Called by a rank as it ends."""
    if OF_RANKS in os.environ:
        with Path(os.environ[OF_RANKS]).open("a") as file:
            file.write(f"{time.process_time():.2f}\n")


class Seconds:
    def __init__(self, config: Any) -> None:
        self.config = config
        self.of: Counter[str] = Counter()
        self.took: Counter[str] = Counter()
        handle, os.environ[OF_RANKS] = tempfile.mkstemp()
        os.close(handle)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        before, began = used(), time.monotonic()
        try:
            return (yield)
        finally:
            self.of[item.path.stem] += used() - before
            self.took[item.path.stem] += time.monotonic() - began

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        of, took = getattr(node, "workeroutput", {}).get("seconds", ({}, {}))
        self.of.update(of)
        self.took.update(took)

    def pytest_sessionfinish(self) -> None:
        Path(os.environ[OF_RANKS]).unlink(missing_ok=True)
        if hasattr(self.config, "workerinput"):
            self.config.workeroutput["seconds"] = dict(self.of), dict(self.took)
            return
        BUILD.mkdir(exist_ok=True)
        rows = [
            f"{self.of[name]:.1f}\t{took:.1f}\t{name}" for name, took in self.took.most_common()
        ]
        rows = [
            "processor\ttook\tfile",
            f"{self.of.total():.1f}\t{self.took.total():.1f}\tall",
            *rows,
        ]
        (BUILD / "seconds.tsv").write_text("\n".join(rows) + "\n")
