"""What a parity run finds, as data: the table, `parity.json` and `parity.html` are views of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from xentlib.contract import Measurement

__all__ = ["Histogram", "Measurement", "ParityResult", "TrainingCurve"]


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


@dataclass(slots=True)
class ParityResult:
    """A whole run. `passed` decides the exit status."""

    measurements: list[Measurement] = field(default_factory=list)
    histograms: list[Histogram] = field(default_factory=list)
    curves: list[TrainingCurve] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)  # versions, device, seed, suite
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.measurements) and all(m.passed for m in self.measurements)
