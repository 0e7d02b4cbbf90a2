"""`parity.json`: everything that a run has found, in a fixed order, strict JSON; and back. It is
written with the page beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xentlib.contract import Measurement
from xentlib.tools.parity.report.page import render_page
from xentlib.tools.parity.report.summary import row_statements, summarise, verdict
from xentlib.tools.parity.result import (
    Histogram,
    ParityResult,
    Section,
    TrainingCurve,
)

SCHEMA = "xentlib.parity/1"


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
    return json.dumps(finite(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def from_json(text: str) -> ParityResult:
    """The run that `to_json` wrote; the summary of the rows is made anew where it is wanted."""
    document = json.loads(text)
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        schema = document.get("schema") if isinstance(document, dict) else document
        raise ValueError(
            f"`text` must be a parity run of schema {SCHEMA!r}; got {schema!r}. "
            f"Write it again with `xentlib parity`."
        )

    def entries(kind: str, section: str) -> Iterator[dict[str, Any]]:
        for entry in document[kind]:
            if entry.get("section", "") == section:
                yield {name: value for name, value in entry.items() if name != "section"}

    def section(entry: dict[str, Any]) -> Section:
        name = entry["name"]
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
            seconds=entry["seconds"],
            error=entry["error"],
        )

    # Runs were one whole before they had sections.
    whole = [{"name": "", "state": "done", "seconds": document["seconds"], "error": ""}]
    sections = document.get("sections", whole)
    return ParityResult(
        sections=[section(entry) for entry in sections if entry["state"] != "not run"],
        planned=[entry["name"] for entry in sections],
        environment=document["environment"],
    )


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _floats(values: list[float | str]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


DATA = "parity.json"


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
