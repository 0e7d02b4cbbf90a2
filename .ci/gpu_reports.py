"""A plugin of pytest: a line of JSON for each phase of each test, as it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--lines", type=Path, help="file of the lines")


def pytest_configure(config: Any) -> None:
    if not hasattr(config, "workerinput"):  # workers of pytest-xdist report to the first process
        config.pluginmanager.register(Lines(config.getoption("--lines")))


class Lines:
    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        line = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
        }
        if report.failed:
            line["said"] = said(report)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def said(report: Any) -> str:
    """The first line of the exception."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    return text.partition("\n")[0][:300]
