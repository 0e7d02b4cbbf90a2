"""A run row by row, and its numbers as people read them: what the page and `parity.json` have in
common, and the table on the terminal."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, NoReturn, TextIO

from xentlib.contract import ROWS, Measurement
from xentlib.tools.harness.table import aligned
from xentlib.tools.parity.result import ParityResult


def allowance_used(m: Measurement) -> float:
    """The share of what the bound allows that was used up: 0 exact, 1 at the bound, NaN is inf."""
    if math.isnan(m.value):
        return math.inf
    if not m.at_least:
        value = abs(m.value)
        return value / m.bound if m.bound > 0 else math.inf if value > 0 else 0.0
    if _is_share(m):
        return (1 - m.value) / (1 - m.bound)
    return 0.0 if m.value >= m.bound else math.inf


def number(value: float, digits: int = 3) -> str:
    """`value` to `digits` significant digits: 34.5, 24,733,308, 2.60e-7. Counts are exact."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    scientific = f"{value:.{digits - 1}e}"  # rounds first: 9.996 is 10.0, not 10.00
    mantissa, exponent = scientific.split("e")
    if -4 < int(exponent) < 6:
        return f"{value:,.{max(digits - 1 - int(exponent), 0)}f}"
    return f"{mantissa}e{int(exponent)}"


def bound_text(m: Measurement) -> str:
    """The bound with its direction: "≤ 4", "≥ 99.5 %", "= 0"."""
    sign = "≥" if m.at_least else "≤" if m.bound else "="
    return f"{sign} {_bound(m)}{' %' if _is_share(m) else ''}"


def value_text(m: Measurement) -> str:
    """The value, with as many digits as it takes to be on its own side of the bound."""
    scale, unit, digits = (100.0, " %", 4) if _is_share(m) else (1.0, "", 3)
    value, bound = m.value * scale, float(_bound(m).replace(",", ""))
    text = number(value, digits)
    while digits < 17 and math.isfinite(value):
        shown = float(text.replace(",", ""))
        crossed = shown >= bound > value if m.at_least else shown <= bound < value
        if not crossed and not (unit and shown == 100.0 != value):
            break
        digits += 1
        text = number(value, digits)
    return text + unit


def _bound(m: Measurement) -> str:
    text = number(m.bound * (100.0 if _is_share(m) else 1.0), 6)
    mantissa, e, exponent = text.partition("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return mantissa + e + exponent


def _is_share(m: Measurement) -> bool:
    """A floor below one is a share of the entries, and is read as a percentage."""
    return m.at_least and 0 < m.bound < 1


def duration(seconds: float) -> str:
    """8.4 s, or 3 min 20 s."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


_NAMES = {"torch": "PyTorch", "jax": "JAX", "torch/jax": "PyTorch and JAX"}


class RowSummary(NamedTuple):
    """One row of the contract: what it states and the worst that was found."""

    id: str
    statement: str
    backends: tuple[str, ...]
    worst: tuple[tuple[str, Measurement], ...]  # label and worst measurement of each metric
    entries: int  # numbers compared, each once however many metrics were taken of it
    passed: bool | None  # None: nothing was measured
    measurements: tuple[Measurement, ...]  # worst first
    judged: bool = True  # whether it counts in the verdict

    @property
    def status(self) -> str:
        if self.passed is False and not self.judged:
            return "differs"
        return "not run" if self.passed is None else "pass" if self.passed else "FAIL"


def row_statements() -> dict[str, str]:
    """The contract's rows, id -> one line."""
    return {
        name: row.quantity if row.inputs == "any" else f"{row.quantity} · {row.inputs}"
        for name, row in ROWS.items()
    }


def backend_name(backend: str) -> str:
    """The backend as a reader says it."""
    return _NAMES.get(backend, backend)


def worst_first(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Failures first, then by the share of the bound that was used."""
    return sorted(measurements, key=lambda m: (m.passed, -allowance_used(m)))


def summarise(
    result: ParityResult, statements: Mapping[str, str] | None = None
) -> list[RowSummary]:
    """Every row of the contract in its order, or those that were asked for, then rows the contract
    does not name; `statements` are by default the contract's own."""
    statements = row_statements() if statements is None else statements
    if result.only:
        statements = {name: text for name, text in statements.items() if name in result.only}
    rows: dict[str, list[Measurement]] = {name: [] for name in statements}
    for m in result.measurements:
        rows.setdefault(m.row, []).append(m)
    return [
        _summary(name, statements.get(name, ""), rows[name])
        for name in sorted(rows, key=lambda name: (name not in statements, _natural(name)))
    ]


def _summary(name: str, statement: str, measurements: list[Measurement]) -> RowSummary:
    ranked = worst_first(measurements)
    # The metrics keep the order in which they were measured, and each the worst of its values.
    worst = {(m.metric, m.bound, m.at_least): m for m in (*measurements, *reversed(ranked))}
    metrics = [metric for metric, _, _ in worst]
    fewest_first = sorted(measurements, key=lambda m: m.entries)
    entries = {(m.backend, m.case, m.quantity): m.entries for m in fewest_first}
    return RowSummary(
        id=name,
        statement=statement or ", ".join(dict.fromkeys(m.quantity for m in measurements)),
        backends=tuple(dict.fromkeys(m.backend for m in measurements)),
        worst=tuple(
            # One metric under two bounds: the quantity tells them apart.
            (f"{m.quantity}, {m.metric}" if metrics.count(m.metric) > 1 else m.metric, m)
            for m in worst.values()
        ),
        entries=sum(entries.values()),
        passed=all(m.passed for m in measurements) if measurements else None,
        measurements=tuple(ranked),
    )


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """A2 before A10."""
    return tuple((int(n or 0), text) for text, n in re.findall(r"(\D*)(\d*)", name))


def verdict(result: ParityResult, rows: list[RowSummary]) -> str:
    """One sentence: does every row hold, and if not, which do not; and was everything run."""
    rows = [row for row in rows if row.judged]
    short = [row.id for row in rows if row.passed is False]
    failed = [section.name for section in result.failed]
    parts = []
    if short:
        parts.append(f"{_listed(short)} {'falls' if len(short) == 1 else 'fall'} short")
    if failed:
        parts.append(f"{_listed(failed)} could not be run")
    if result.missing:
        run = len(result.planned) - len(result.missing)
        parts.append(f"{run} of {len(result.planned)} sections have been run")
    elif result.unmeasured and not failed:
        parts.append(f"nothing was measured of {_listed(result.unmeasured)}")
    if not result.measurements:
        return "; ".join(["Nothing was measured", *parts])
    if parts:
        return "; ".join(parts if short else [*parts, "what was measured holds"])
    measured = {name for m in result.measurements for name in m.backend.split("/")}
    who = [_NAMES[name] for name in ("torch", "jax") if name in measured]
    held = sum(row.passed is True for row in rows)
    holds = "holds" if len(who) == 1 else "hold"
    which, were = ("the one row", "was") if held == 1 else (f"all {held} rows", "were")
    return f"{_listed(who) or 'It'} {holds} {which} of the contract that {were} measured"


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# --- the table on the terminal -------------------------------------------------------------------

_COLUMNS = ("row", "what", "backend", "metric", "worst", "bound", "entries", "result")
LOG_WIDTH = 128  # columns of a table that goes to a file or a pipe


def print_table(
    result: ParityResult,
    stream: TextIO,
    statements: Mapping[str, str] | None = None,
    reported: Collection[str] = (),
) -> None:
    """One line a row of the contract, one line a metric within it; below them what could not be
    run, and the verdict, in which `reported` rows do not count."""
    rows = [row._replace(judged=row.id not in reported) for row in summarise(result, statements)]
    try:
        _rich_table(rows, stream)
    except ModuleNotFoundError:
        lines = (line for row in rows for line in _lines(row))
        print("\n".join(aligned([_COLUMNS, *lines])), file=stream)
    for section in result.failed:
        print(f"\n{section.name} could not be run: {section.reason}", file=stream)
    taken = f"{len(result.measurements):,} measurements in {duration(result.seconds)}"
    print(f"\n{verdict(result, rows)}. {taken}.", file=stream)


def _lines(row: RowSummary) -> list[list[str]]:
    """A row of the contract as lines of the table: one a metric, the first with what they share."""
    shared = [row.id, row.statement, ", ".join(row.backends) or "–"]
    result = [number(row.entries) if row.entries else "", row.status]
    metrics = [[label, value_text(m), bound_text(m)] for label, m in row.worst]
    first, *others = metrics or [["", "", ""]]
    return [[*shared, *first, *result], *(["", "", "", *metric, "", ""] for metric in others)]


def _raise() -> NoReturn:
    raise BrokenPipeError


def _rich_table(rows: list[RowSummary], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=stream, width=LOG_WIDTH)
    setattr(console, "on_broken_pipe", _raise)  # noqa: B010 - it would leave with status 1
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
            bad = "bold red" if row.judged else ""
            if row.worst and not row.worst[i][1].passed:
                cells[-4].stylize(bad)
            cells[-1].stylize({None: "", True: "green", False: bad}[row.passed])
            table.add_row(*cells, style="dim" if row.passed is None else "")
    console.print(table)
