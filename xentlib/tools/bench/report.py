"""What a benchmark finds, as data, and its views: a table on the terminal, Markdown for the
documentation, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from xentlib.tools.bench.cases import HeadSizes
from xentlib.tools.bench.implementation import BARE, FLOOR, KINDS, OURS, Kind
from xentlib.tools.harness.table import aligned
from xentlib.tools.harness.writing import write_whole

MIB = 1 << 20
COLUMNS = ("contestant", "computes", "ms", "best ms", "x floor", "quartiles", "loss off by")
LEFT = ("contestant", "computes", "quartiles")
# Columns of memory, where there is something in them: "peak" is by the allocator or compiler.
MEMORY = {"peak MiB": "peak_bytes", "resident MiB": "resident_bytes", "plan MiB": "plan_bytes"}
WIDE = 190  # columns, where no terminal says


class Spread(NamedTuple):
    """Median, quartiles and smallest of some measurements."""

    median: float
    low: float
    high: float
    best: float


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    low, high = values[0], values[0]
    if len(values) > 1:
        low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(median(values), low, high, min(values))


@dataclass(slots=True)
class Result:
    """One implementation, one kind."""

    contestant: str  # the implementation, by the name that `bench.json` has for it
    kind: Kind
    seconds: list[float] = field(default_factory=list)  # one for each round it ran in
    ratios: list[float] = field(default_factory=list)  # to the floor of the same round
    loss: float | None = None
    # Extra bytes at the peak of one call, results included, inputs not.
    peak_bytes: int | None = None  # torch: the allocator's; JAX: the compiler's
    resident_bytes: int | None = None  # growth of the process, on Linux
    plan_bytes: int | None = None  # what the plan's formula says
    failed: str | None = None  # why there are no numbers

    @property
    def time(self) -> Spread | None:
        return spread(self.seconds)

    @property
    def ratio(self) -> Spread | None:
        return spread(self.ratios)


@dataclass(slots=True)
class Run:
    """One framework on one case and dtype: the numbers that may be compared."""

    backend: str
    case: HeadSizes
    dtype: str
    device: str
    threads: int | None
    rounds: int
    rows: list[Result]

    @property
    def title(self) -> str:
        case = self.case
        return f"{self.backend}, {self.dtype}, {case.name} ({case.sizes}), {self.device}"

    def row(self, contestant: str, kind: Kind) -> Result:
        return next(row for row in self.rows if (row.contestant, row.kind) == (contestant, kind))

    def pair_with_floor(self) -> None:
        """Fill in the ratios; the floor runs in every round."""
        for row in self.rows:
            floor = self.row(FLOOR, row.kind).seconds
            row.ratios = [ours / bare for ours, bare in zip(row.seconds, floor)]


@dataclass(slots=True)
class Report:
    """A whole call of `xentlib bench`."""

    environment: dict[str, str]
    runs: list[Run] = field(default_factory=list)


# --- table ------------------------------------------------------------------------------------


def milliseconds(seconds: float) -> str:
    ms = 1e3 * seconds
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}"


def mebibytes(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / MIB:,.0f}" if count >= 10 * MIB else f"{count / MIB:.2f}"


def cells(row: Result, run: Run) -> dict[str, str]:
    texts = {"contestant": row.contestant, "computes": row.kind}
    if row.failed is not None:
        return texts | {"ms": "–", "quartiles": row.failed}
    if row.time is not None:
        texts |= {"ms": milliseconds(row.time.median), "best ms": milliseconds(row.time.best)}
    if row.ratio is not None:
        ratio = row.ratio
        texts["x floor"] = f"{ratio.median:.2f}"
        if row.contestant != FLOOR:
            texts["quartiles"] = f"{ratio.low:.2f}–{ratio.high:.2f}"
    off = loss_off(row, run)
    if off is not None:
        texts["loss off by"] = f"{off:.0e}"
    return texts | {x: mebibytes(getattr(row, name)) for x, name in MEMORY.items()}


def loss_off(row: Result, run: Run) -> float | None:
    """Speed bought with rounded logits shows here; ours is right to float32 (row A8)."""
    ours = run.row(OURS, row.kind).loss
    if row.contestant == OURS or row.loss is None or not ours:
        return None
    return abs(row.loss - ours) / abs(ours)


def as_table(run: Run) -> tuple[list[str], list[list[str]]]:
    """Head and body; loss + gradient first, that being what training pays for."""
    memory = [x for x in MEMORY if any(getattr(row, MEMORY[x]) is not None for row in run.rows)]
    names = [*COLUMNS, *memory]
    rows = sorted(run.rows, key=lambda row: KINDS.index(row.kind))
    return names, [[cells(row, run).get(name, "") for name in names] for row in rows]


# --- terminal -----------------------------------------------------------------------------------


def print_run(run: Run) -> None:
    names, rows = as_table(run)
    if find_spec("rich") is None:
        print("\n".join([run.title, *aligned([names, *rows])]), end="\n\n")
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title=run.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in names:
        table.add_column(name, justify="left" if name in LEFT else "right", no_wrap=True)
    for before, row in zip([rows[0], *rows], rows):
        if before[1] != row[1]:
            table.add_section()
        table.add_row(*row, style={OURS: "bold green", **dict.fromkeys(BARE, "dim")}.get(row[0]))
    console = Console()
    if not console.is_terminal:
        console.width = WIDE
    console.print(table)


def environment_line(report: Report) -> str:
    facts = report.environment
    versions = [f"{key} {facts[key]}" for key in ("xentlib", "torch", "jax") if key in facts]
    parts = [f"{facts['cpu']}, {facts['cores']} cores", *versions, f"Python {facts['python']}"]
    return "; ".join([*parts, facts["date"]])


# --- files --------------------------------------------------------------------------------------

LEGEND = (
    "Every contestant ran once in each round. A cell: time, as the median of the ratios to the "
    "bare GEMMs of the same round, with its quartiles; then extra memory at the peak of one call, "
    "results included, as the allocator (torch) or the compiler (JAX) counts it, for xentlib "
    "beside what `xentlib.plan` predicts. The bare GEMMs, whose cell has their time, have float32 "
    "results for both dtypes, new ones in every call as everybody's gradients are; with old "
    "buffers they skip the first touch of that memory. Loss off by: the largest relative distance "
    "from xentlib's loss."
)


def as_markdown(report: Report, plot: str | None = None) -> str:
    lines = [environment_line(report) + ".", "", LEGEND, ""]
    if plot is not None:
        lines += [f"![Time over the floor and extra memory]({plot})", ""]
    for runs in alike(report):
        for kind in KINDS:
            lines += pivot(runs, kind)
    return "\n".join(lines)


def alike(report: Report) -> list[list[Run]]:
    """Runs that differ in the case alone, side by side in one table."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in report.runs:
        groups.setdefault((run.backend, run.dtype, run.device), []).append(run)
    return list(groups.values())


def pivot(runs: Sequence[Run], kind: Kind) -> list[str]:
    """One kind: a row for each contestant, a column for each case."""
    runs = [run for run in runs if any(row.kind == kind for row in run.rows)]
    if not runs:
        return []
    one = runs[0]
    names = ["contestant", *map(title_of_column, runs), "loss off by"]
    lines = [f"**{one.backend}, {one.dtype}, {kind}, {one.device}**", ""]
    lines += [markdown_row(names), markdown_row(["---", *["---:"] * len(runs), "---:"])]
    for name in dict.fromkeys(row.contestant for row in one.rows):
        rows = [run.row(name, kind) for run in runs]
        off = [loss_off(row, run) for row, run in zip(rows, runs)]
        known = [value for value in off if value is not None]
        shown = [name, *map(cell, rows), f"{max(known):.0e}" if known else ""]
        if name == OURS:
            shown = [text and f"**{text}**" for text in shown]
        lines.append(markdown_row(shown))
    return [*lines, ""]


def title_of_column(run: Run) -> str:
    softcap = "" if run.case.softcap is None else f", softcap {run.case.softcap:g}"
    return f"{run.case.name}<br>{run.case.sizes}{softcap}"


def cell(row: Result) -> str:
    if row.failed is not None:
        return row.failed
    if row.time is None or row.ratio is None:
        return ""
    if row.contestant == FLOOR:
        return f"{milliseconds(row.time.median)} ms"
    ratio = row.ratio
    text = f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
    if row.peak_bytes is not None:
        text += f"<br>{mebibytes(row.peak_bytes)} MiB"
    if row.plan_bytes is not None:
        text += f" of {mebibytes(row.plan_bytes)}"
    return text


def markdown_row(row: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in row) + " |"


def as_json(report: Report) -> dict[str, Any]:
    document = asdict(report)
    document["schema"] = 2
    for run, entry in zip(report.runs, document["runs"]):
        for row, row_entry in zip(run.rows, entry["rows"]):
            floor = run.row(FLOOR, row.kind).time
            row_entry |= {
                "ms_median": None if row.time is None else 1e3 * row.time.median,
                "ms_iqr": None if row.time is None else 1e3 * (row.time.high - row.time.low),
                "floor_ms": None if floor is None else 1e3 * floor.median,
                "ratio": None if row.ratio is None else row.ratio._asdict(),
            }
    return document


def from_json(document: dict[str, Any]) -> Report:
    """The report of `as_json`; what follows from its measurements is made anew."""
    names = {field.name for field in fields(Result)}
    report = Report(document["environment"])
    for run in document["runs"]:
        rows = [Result(**{name: row[name] for name in names & row.keys()}) for row in run["rows"]]
        report.runs.append(Run(**{**run, "case": HeadSizes(**run["case"]), "rows": rows}))
    return report


def write_json(report: Report, path: Path) -> None:
    """A line for each contestant."""
    text = json.dumps(as_json(report))
    write_whole(path, text.replace('{"contestant"', '\n{"contestant"') + "\n")
