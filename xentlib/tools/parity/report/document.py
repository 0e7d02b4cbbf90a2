"""`parity.json`: everything that a run has found, in a fixed order, strict JSON; and back. It is
written with the page beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from xentlib.contract import Measurement
from xentlib.tools.harness.writing import write_whole
from xentlib.tools.parity.report.page import render_page
from xentlib.tools.parity.report.summary import summarise, verdict
from xentlib.tools.parity.result import Histogram, ParityResult, Section, TrainingCurve

SCHEMA = "xentlib.parity/1"
DATA = "parity.json"

# What sections find, by its name in the document: its name in a `Section`, and its type.
FINDINGS: dict[str, tuple[str, Any]] = {
    "measurements": ("measurements", Measurement),
    "histograms": ("histograms", Histogram),
    "training": ("curves", TrainingCurve),
}


def to_json(result: ParityResult, statements: Mapping[str, str] | None = None) -> str:
    """The run as strict JSON; NaN and infinities, which it lacks, are strings."""
    rows = summarise(result, statements)
    states = dict.fromkeys(result.planned, ("not run", 0.0, "")) | {
        section.name: ("failed" if section.error else "done", section.seconds, section.error)
        for section in result.sections
    }
    document = {
        "schema": SCHEMA,
        "passed": result.passed,
        "verdict": verdict(result, rows),
        "seconds": round(result.seconds, 3),
        "environment": result.environment,
        "sections": [
            {"name": name, "state": state, "seconds": seconds, "error": error}
            for name, (state, seconds, error) in states.items()
        ],
        "rows": [
            {"id": row.id, "statement": row.statement, "passed": row.passed, "entries": row.entries}
            | {"worst": [asdict(m) for _, m in row.worst]}
            for row in rows
        ],
    }
    for kind, (field, _) in FINDINGS.items():
        document[kind] = [
            {"section": section.name, **asdict(entry)}
            for section in result.sections
            for entry in getattr(section, field)
        ]
    return json.dumps(finite(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def finite(value: Any) -> Any:
    """NaN and infinities as strings, wherever they are in it."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def from_json(text: str) -> ParityResult:
    """The run that `to_json` wrote; the summary of the rows is made anew where it is wanted."""
    document = json.loads(text)
    schema = document.get("schema") if isinstance(document, dict) else document
    if not isinstance(document, dict) or schema != SCHEMA:
        raise ValueError(
            f"`text` must be a parity run of schema {SCHEMA!r}; got {schema!r}. "
            f"Write it again with `xentlib parity`."
        )

    def section(name: str, seconds: float, error: str) -> Section:
        findings: dict[str, Any] = {
            field: tuple(
                entry_type(**{k: _read(k, v) for k, v in entry.items() if k != "section"})
                for entry in document[kind]
                if entry.get("section", "") == name
            )
            for kind, (field, entry_type) in FINDINGS.items()
        }
        return Section(name, **findings, seconds=seconds, error=error)

    # Runs were one whole before they had sections.
    whole = [{"name": "", "state": "done", "seconds": document["seconds"], "error": ""}]
    sections = document.get("sections", whole)
    return ParityResult(
        [section(x["name"], x["seconds"], x["error"]) for x in sections if x["state"] != "not run"],
        [entry["name"] for entry in sections],
        document["environment"],
    )


def _read(field: str, value: Any) -> Any:
    """What a field of a finding was before it was JSON."""
    if field in ("value", "bound"):
        return float(value)
    if field in ("edges", "losses"):
        return tuple(map(float, value))
    return tuple(value) if isinstance(value, list) else value


def write_report(
    result: ParityResult, out: Path, statements: Mapping[str, str] | None = None
) -> tuple[Path, Path]:
    """Write `parity.json` and `parity.html` into the folder `out`; returns their paths.

    Each is there as a whole at every moment: the one before, or this one.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts = {DATA: to_json(result, statements), "parity.html": render_page(result, statements)}
    for name, text in texts.items():
        write_whole(out / name, text)
    data, page = (out / name for name in texts)
    return data, page
