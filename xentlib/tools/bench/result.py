"""What a benchmark finds, as data: table, `bench.json`, `bench.md` and plot are views of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles

from xentlib.tools.bench.cases import HeadSizes
from xentlib.tools.bench.contestant import FLOOR, Kind


@dataclass(frozen=True, slots=True)
class Spread:
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
class ContestantResult:
    """One contestant, one kind."""

    contestant: str
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
    """All contestants of one framework on one case and dtype: the numbers that may be compared."""

    backend: str
    case: HeadSizes
    dtype: str
    device: str
    threads: int | None
    rounds: int
    rows: list[ContestantResult]

    @property
    def title(self) -> str:
        case = self.case
        sizes = f"N={case.num_tokens} H={case.hidden_size} V={case.vocab_size}"
        return f"{self.backend}, {self.dtype}, {case.name} ({sizes}), {self.device}"

    def row(self, contestant: str, kind: Kind) -> ContestantResult:
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
