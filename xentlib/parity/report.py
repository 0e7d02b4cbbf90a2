"""A parity run on paper: the table on the terminal, `parity.json`, and the page beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from xentlib.parity.page import render_page
from xentlib.parity.result import Histogram, Measurement, ParityResult, TrainingCurve
from xentlib.parity.summary import (
    RowSummary,
    bound_text,
    duration,
    number,
    row_statements,
    summarise,
    value_text,
    verdict,
)

__all__ = ["SCHEMA", "from_json", "print_table", "to_json", "write_report"]

SCHEMA = "xentlib.parity/1"

# --- parity.json: everything, in a fixed order, strict JSON --------------------------------------


def to_json(result: ParityResult, statements: Mapping[str, str] | None = None) -> str:
    """The run as strict JSON; NaN and infinities, which it lacks, are strings."""
    rows = summarise(result, row_statements() if statements is None else statements)
    document = {
        "schema": SCHEMA,
        "passed": result.passed,
        "verdict": verdict(result, rows),
        "seconds": round(result.seconds, 3),
        "environment": result.environment,
        "rows": [
            {"id": row.id, "statement": row.statement, "passed": row.passed, "entries": row.entries}
            | {"worst": [asdict(m) for _, m in row.worst]}
            for row in rows
        ],
        "measurements": [asdict(m) for m in result.measurements],
        "histograms": [asdict(h) for h in result.histograms],
        "training": [asdict(c) for c in result.curves],
    }
    return json.dumps(_finite(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> ParityResult:
    """The run that `to_json` wrote; the summary of the rows is made anew where it is wanted."""
    document = json.loads(text)
    if document.get("schema") != SCHEMA:
        raise ValueError(
            f"`text` must be a parity run of schema {SCHEMA!r}; got {document.get('schema')!r}. "
            f"Write it again with `xentlib parity`."
        )
    return ParityResult(
        measurements=[
            Measurement(**{**m, "value": float(m["value"]), "bound": float(m["bound"])})
            for m in document["measurements"]
        ],
        histograms=[
            Histogram(**{**h, "edges": _floats(h["edges"]), "counts": tuple(h["counts"])})
            for h in document["histograms"]
        ],
        curves=[
            TrainingCurve(**{**c, "losses": _floats(c["losses"]), "tokens": tuple(c["tokens"])})
            for c in document["training"]
        ],
        environment=document["environment"],
        seconds=document["seconds"],
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _floats(values: list[float | str]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


# --- the terminal --------------------------------------------------------------------------------

_COLUMNS = ("row", "what", "backend", "metric", "worst", "bound", "entries", "result")
LOG_WIDTH = 128  # columns of a table that goes to a file or a pipe


def print_table(
    result: ParityResult, stream: TextIO, statements: Mapping[str, str] | None = None
) -> None:
    """One line a row of the contract, one line a metric within it, and the verdict below."""
    rows = summarise(result, row_statements() if statements is None else statements)
    try:
        _rich_table(rows, stream)
    except ModuleNotFoundError:
        _plain_table(rows, stream)
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
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths))
        print(text.rstrip(), file=stream)


# --- the files -----------------------------------------------------------------------------------


def write_report(
    result: ParityResult, out: Path, statements: Mapping[str, str] | None = None
) -> tuple[Path, Path]:
    """Write `parity.json` and `parity.html` into the folder `out`; returns their paths."""
    if statements is None:
        statements = row_statements()
    out.mkdir(parents=True, exist_ok=True)
    data, page = out / "parity.json", out / "parity.html"
    data.write_text(to_json(result, statements), encoding="utf-8")
    page.write_text(render_page(result, statements), encoding="utf-8")
    return data, page
