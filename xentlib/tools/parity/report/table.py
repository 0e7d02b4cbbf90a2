"""The table on the terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TextIO

from xentlib.tools.harness.table import aligned
from xentlib.tools.parity.report.summary import (
    RowSummary,
    bound_text,
    duration,
    number,
    row_statements,
    summarise,
    value_text,
    verdict,
)
from xentlib.tools.parity.result import ParityResult

_COLUMNS = ("row", "what", "backend", "metric", "worst", "bound", "entries", "result")
LOG_WIDTH = 128  # columns of a table that goes to a file or a pipe


def print_table(
    result: ParityResult, stream: TextIO, statements: Mapping[str, str] | None = None
) -> None:
    """One line a row of the contract, one line a metric within it; below them what could not be
    run, and the verdict."""
    rows = summarise(result, row_statements() if statements is None else statements)
    try:
        _rich_table(rows, stream)
    except ModuleNotFoundError:
        _plain_table(rows, stream)
    for section in result.failed:
        print(f"\n{section.name} could not be run: {section.reason}", file=stream)
    taken = f"{len(result.measurements):,} measurements in {duration(result.seconds)}"
    print(f"\n{verdict(result, rows)}. {taken}.", file=stream)


def _lines(row: RowSummary) -> list[list[str]]:
    """A row of the contract as lines of the table: one a metric, the first with what they share."""
    shared = [row.id, row.statement, ", ".join(row.backends) or "–"]
    entries = number(row.entries) if row.entries else ""
    metrics = [[label, value_text(m), bound_text(m)] for label, m in row.worst]
    first, *others = metrics or [["", "", ""]]
    return [
        [*shared, *first, entries, row.status],
        *([*[""] * 3, *metric, "", ""] for metric in others),
    ]


def _rich_table(rows: list[RowSummary], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=stream, width=LOG_WIDTH)
    narrow = console.width < 100
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        if name == "backend" and narrow:
            continue
        # Numbers are never cut; where there is little room the words wrap.
        table.add_column(
            name,
            justify="right" if name in ("worst", "bound", "entries") else "left",
            overflow="fold",
            no_wrap=name not in ("what", "metric"),
            ratio={"what": 3, "metric": 2}.get(name) if narrow else None,
        )
    for row in rows:
        for i, line in enumerate(_lines(row)):
            cells = [Text(cell) for cell in line]
            if narrow:
                what, backends = cells[1], cells.pop(2)
                what.append(f" · {backends}" if row.backends and i == 0 else "")
            if row.worst and not row.worst[i][1].passed:
                cells[-4].stylize("bold red")
            cells[-1].stylize({None: "", True: "green", False: "bold red"}[row.passed])
            table.add_row(*cells, style="dim" if row.passed is None else "")
    console.print(table)


def _plain_table(rows: list[RowSummary], stream: TextIO) -> None:
    lines = [list(_COLUMNS), *(line for row in rows for line in _lines(row))]
    print("\n".join(aligned(lines)), file=stream)
