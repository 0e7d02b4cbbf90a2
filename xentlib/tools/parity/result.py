"""What a parity run finds, as data: the table, `parity.json` and `parity.html` are views of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from xentlib.contract import Measurement


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distances in ULP of one quantity: counts[i] entries in [edges[i], edges[i + 1])."""

    row: str
    backend: str
    quantity: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """Loss of every optimizer step of one backend, in nats a token, with the window's tokens."""

    backend: str
    losses: tuple[float, ...]
    tokens: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Section:
    """What one section of a run found, or why it could not be run."""

    name: str
    measurements: tuple[Measurement, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    curves: tuple[TrainingCurve, ...] = ()
    seconds: float = 0.0
    error: str = ""  # one line that says it, then what a developer wants to see

    @property
    def reason(self) -> str:
        return self.error.partition("\n")[0]

    def of_rows(self, rows: Collection[str]) -> Section:
        """What it has of these rows of the contract, and its curves."""
        return replace(
            self,
            measurements=tuple(m for m in self.measurements if m.row in rows),
            histograms=tuple(h for h in self.histograms if h.row in rows),
        )


@dataclass(slots=True)
class ParityResult:
    """A run, as far as it has come. `passed` decides the exit status."""

    sections: list[Section] = field(default_factory=list)
    planned: list[str] = field(default_factory=list)  # names of all sections, in their order
    environment: dict[str, str] = field(default_factory=dict)  # versions, device, seed, only

    def add(self, section: Section) -> None:
        """In the place that is planned for it, whenever it was run and however often."""
        by_name = {other.name: other for other in (*self.sections, section)}
        order = dict.fromkeys([*self.planned, *by_name])
        self.sections = [by_name[name] for name in order if name in by_name]

    @property
    def measurements(self) -> list[Measurement]:
        return [m for section in self.sections for m in section.measurements]

    @property
    def histograms(self) -> list[Histogram]:
        """One of each quantity, whatever sections have counted it."""
        merged: dict[tuple[str, str, str, tuple[float, ...]], Histogram] = {}
        for h in (h for section in self.sections for h in section.histograms):
            key = (h.row, h.backend, h.quantity, h.edges)
            before = merged[key].counts if key in merged else (0,) * len(h.counts)
            merged[key] = replace(h, counts=tuple(a + b for a, b in zip(before, h.counts)))
        return list(merged.values())

    @property
    def seconds(self) -> float:
        return sum(section.seconds for section in self.sections)

    @property
    def failed(self) -> list[Section]:
        """The sections that could not be run."""
        return [section for section in self.sections if section.error]

    @property
    def missing(self) -> list[str]:
        """The sections that have not been run yet."""
        there = {section.name for section in self.sections}
        return [name for name in self.planned if name not in there]

    @property
    def only(self) -> list[str]:
        """The rows that were asked for, where not all are."""
        return self.environment.get("only", "").split()

    @property
    def unmeasured(self) -> list[str]:
        """Rows that were asked for and of which nothing was measured."""
        measured = {m.row for m in self.measurements}
        return [row for row in self.only if row not in measured]

    @property
    def passed(self) -> bool:
        measured = self.measurements
        whole = not self.failed and not self.missing and not self.unmeasured
        return whole and bool(measured) and all(m.passed for m in measured)
