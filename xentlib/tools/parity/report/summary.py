"""A run seen row by row: what table, page and `parity.json` have in common."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from xentlib.contract import Measurement
from xentlib.tools.parity.report.numbers import allowance_used
from xentlib.tools.parity.result import ParityResult

_NAMES = {"torch": "PyTorch", "jax": "JAX", "torch/jax": "PyTorch and JAX"}


@dataclass(frozen=True, slots=True)
class RowSummary:
    """One row of the contract: what it states and the worst that was found."""

    id: str
    statement: str
    backends: tuple[str, ...]
    worst: tuple[tuple[str, Measurement], ...]  # label and worst measurement of each metric
    entries: int  # numbers compared, each once however many metrics were taken of it
    passed: bool | None  # None: nothing was measured
    measurements: tuple[Measurement, ...]  # worst first

    @property
    def status(self) -> str:
        return "not run" if self.passed is None else "pass" if self.passed else "FAIL"


def row_statements() -> dict[str, str]:
    """The contract's rows, id -> one line."""
    from xentlib.contract import ROWS

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


def summarise(result: ParityResult, statements: Mapping[str, str]) -> list[RowSummary]:
    """Every row of the contract in its order, then rows the contract does not name."""
    rows: dict[str, list[Measurement]] = {name: [] for name in statements}
    for m in result.measurements:
        rows.setdefault(m.row, []).append(m)
    return [
        _summary(name, statements.get(name, ""), rows[name])
        for name in sorted(rows, key=lambda name: (name not in statements, _natural(name)))
    ]


def _summary(name: str, statement: str, measurements: list[Measurement]) -> RowSummary:
    ranked = worst_first(measurements)
    worst: dict[tuple[str, float, bool], Measurement] = {}
    for m in measurements:  # the metrics keep the order in which they were measured
        worst.setdefault((m.metric, m.bound, m.at_least), m)
    for m in reversed(ranked):
        worst[m.metric, m.bound, m.at_least] = m
    metrics = [metric for metric, _, _ in worst]
    entries: dict[tuple[str, str, str], int] = {}
    for m in measurements:
        key = (m.backend, m.case, m.quantity)
        entries[key] = max(entries.get(key, 0), m.entries)
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
    short = [row.id for row in rows if row.passed is False]
    failed = [section.name for section in result.failed]
    said = []
    if short:
        said.append(f"{_listed(short)} {'falls' if len(short) == 1 else 'fall'} short")
    if failed:
        said.append(f"{_listed(failed)} could not be run")
    if result.missing:
        run = len(result.planned) - len(result.missing)
        said.append(f"{run} of {len(result.planned)} sections have been run")
    if not result.measurements:
        return "; ".join(["Nothing was measured", *said])
    if said:
        return "; ".join(said if short else [*said, "what was measured holds"])
    found = {name for m in result.measurements for name in m.backend.split("/")}
    who = [_NAMES[name] for name in ("torch", "jax") if name in found]
    held = sum(row.passed is True for row in rows)
    verb = "holds" if len(who) == 1 else "hold"
    every = "the one row" if held == 1 else f"all {held} rows"
    return f"{_listed(who) or 'It'} {verb} {every} of the contract that were measured".replace(
        "row of the contract that were", "row of the contract that was"
    )


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
