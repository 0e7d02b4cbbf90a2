"""A parity run on paper: the table on the terminal, `parity.json`, and the page beside it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from xentlib.parity.page import render_page
from xentlib.parity.result import (
    Histogram,
    Measurement,
    ParityResult,
    Section,
    TrainingCurve,
)
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

__all__ = ["DATA", "SCHEMA", "from_json", "print_table", "to_json", "write_report"]

SCHEMA = "xentlib.parity/1"
DATA = "parity.json"

# --- parity.json: everything, in a fixed order, strict JSON --------------------------------------


def to_json(result: ParityResult, statements: Mapping[str, str] | None = None) -> str:
    """The run as strict JSON; NaN and infinities, which it lacks, are strings."""
    rows = summarise(result, row_statements() if statements is None else statements)
    there = {section.name: section for section in result.sections}

    def entries(kind: str) -> list[dict[str, Any]]:
        return [
            {"section": section.name, **asdict(entry)}
            for section in result.sections
            for entry in getattr(section, kind)
        ]

    document = {
        "schema": SCHEMA,
        "passed": result.passed,
        "verdict": verdict(result, rows),
        "seconds": round(result.seconds, 3),
        "environment": result.environment,
        "sections": [
            {"name": name, "state": "not run", "seconds": 0.0, "error": ""}
            if name not in there
            else {"name": name, "state": "failed" if there[name].error else "done"}
            | {"seconds": there[name].seconds, "error": there[name].error}
            for name in dict.fromkeys([*result.planned, *there])
        ],
        "rows": [
            {"id": row.id, "statement": row.statement, "passed": row.passed, "entries": row.entries}
            | {"worst": [asdict(m) for _, m in row.worst]}
            for row in rows
        ],
        "measurements": entries("measurements"),
        "histograms": entries("histograms"),
        "training": entries("curves"),
    }
    return json.dumps(_finite(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> ParityResult:
    """The run that `to_json` wrote; the summary of the rows is made anew where it is wanted."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else document
        raise ValueError(
            f"`text` must be a parity run of schema {SCHEMA!r}; got {found!r}. "
            f"Write it again with `xentlib parity`."
        )

    def entries(kind: str, section: str) -> Iterator[dict[str, Any]]:
        for entry in document[kind]:
            if entry.get("section", "") == section:
                yield {name: value for name, value in entry.items() if name != "section"}

    def section(said: dict[str, Any]) -> Section:
        name = said["name"]
        return Section(
            name,
            measurements=tuple(
                Measurement(**{**m, "value": float(m["value"]), "bound": float(m["bound"])})
                for m in entries("measurements", name)
            ),
            histograms=tuple(
                Histogram(**{**h, "edges": _floats(h["edges"]), "counts": tuple(h["counts"])})
                for h in entries("histograms", name)
            ),
            curves=tuple(
                TrainingCurve(**{**c, "losses": _floats(c["losses"]), "tokens": tuple(c["tokens"])})
                for c in entries("training", name)
            ),
            seconds=said["seconds"],
            error=said["error"],
        )

    # Runs were one whole before they had sections.
    whole = [{"name": "", "state": "done", "seconds": document["seconds"], "error": ""}]
    sections = document.get("sections", whole)
    return ParityResult(
        sections=[section(said) for said in sections if said["state"] != "not run"],
        planned=[said["name"] for said in sections],
        environment=document["environment"],
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
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths))
        print(text.rstrip(), file=stream)


# --- the files -----------------------------------------------------------------------------------


def write_report(
    result: ParityResult, out: Path, statements: Mapping[str, str] | None = None
) -> tuple[Path, Path]:
    """Write `parity.json` and `parity.html` into the folder `out`; returns their paths.

    Each is there as a whole at every moment: the one before, or this one.
    """
    if statements is None:
        statements = row_statements()
    out.mkdir(parents=True, exist_ok=True)
    texts = {DATA: to_json(result, statements), "parity.html": render_page(result, statements)}
    for name, text in texts.items():
        part = out / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(out / name)
    data, page = (out / name for name in texts)
    return data, page
