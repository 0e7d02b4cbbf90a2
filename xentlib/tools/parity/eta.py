"""The sections that are to be run, and how long they will take on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xentlib.tools.parity.progress import Progress
from xentlib.tools.parity.result import Section

# Seconds of a step of each section, both backends, on two idle cores (where a quick run took 201 s;
# the shares are of one on a busy machine). A section that is not here counts as `STEP_SECONDS` a
# step; the sections that are done put right what is wrong of all.
STEP_SECONDS = 0.5
SECONDS_OF_STEP = {
    "audit mode, bit for bit": 0.4,
    "chunk sizes": 2.2,
    "run to run": 1.0,
    "windows of micro-batches": 1.5,
    "mutants": 2.5,
    "per-token outputs, fp32": 0.7,
    "per-token outputs, bf16": 0.7,
    "per-token outputs, fp16": 0.7,
    "per-token outputs, chunk sizes": 1.8,
    "per-token outputs, run to run": 1.0,
    "per-token outputs, mutants": 1.2,
    "vocabularies over ranks": 50.0,
    "collectives": 18.0,
    "per-token outputs in audit mode": 0.7,
    "windows in audit mode": 2.5,
    "training": 0.65,
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A section that is to be run: `run(progress, slowness)`, the second as `Pace` has it."""

    name: str
    steps: int
    run: Callable[[Progress, float], Section]


class Pace:
    """How slow this machine is, from the sections that are done, and how long the others take."""

    def __init__(self, plan: Sequence[Planned]) -> None:
        self._left = {
            part.name: part.steps * SECONDS_OF_STEP.get(part.name, STEP_SECONDS) for part in plan
        }
        self._expected = self._taken = 0.0
        self._began: tuple[str, float] | None = None

    @property
    def slowness(self) -> float:
        """Seconds taken for each one expected: 1 on two idle cores, and before anything is done."""
        return self._taken / self._expected if self._expected else 1.0

    def begin(self, name: str) -> None:
        self._began = (name, time.monotonic())

    def done(self, name: str, seconds: float | None) -> None:
        """A section has taken so long; None where that says nothing, as it failed."""
        expected = self._left.pop(name, 0.0)
        self._began = None
        if seconds is not None:
            self._expected += expected
            self._taken += seconds

    def left(self) -> float:
        """Seconds until everything is done."""
        rest = sum(self._left.values()) * self.slowness
        if self._began is None:
            return rest
        name, start = self._began
        expected = self._left.get(name, 0.0) * self.slowness
        return rest - min(time.monotonic() - start, expected)

    def text(self) -> str:
        """`left` for people: "under 1 min left", "about 12 min left"."""
        minutes = round(self.left() / 60)
        return f"about {minutes} min left" if minutes else "under 1 min left"
