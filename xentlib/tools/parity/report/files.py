"""The files of a run: `parity.json`, and the page beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from xentlib.tools.parity.report.document import to_json
from xentlib.tools.parity.report.page import render_page
from xentlib.tools.parity.report.summary import row_statements
from xentlib.tools.parity.result import ParityResult

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
