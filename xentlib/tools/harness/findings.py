"""What the sections of a parity run find: each comparison is a measurement of a contract row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import Measurement, check, failures
from xentlib.tools.harness.backends import run as public
from xentlib.tools.harness.outcomes import Outcome
from xentlib.tools.parity.result import Histogram
from xentlib.ulp import ulp_distance

Array = npt.NDArray[Any]
BOTH = "torch/jax"
GRADIENT_ROWS = {"d_hidden": "A5", "d_weight": "A6", "d_bias": "A6"}
# Metrics of row A9. Bits alone would let one dropped row of 509 pass; its error would not.
BETWEEN = {
    "float32": ("rho / u", "error ratio"),
    "bfloat16": ("bf16 bit-equal", "error ratio"),
    "float16": ("error ratio",),
}
# Distances of ULP in powers of two: from exact to 2^24, where no digit is right.
EDGES = (0.0, 0.5, *(2.0**k for k in range(25)), np.inf)


class Findings:
    """What has been measured so far.

    `slowness` is this machine's beside two idle cores, which time limits follow; `run` is what is
    held, by default `chunked_nll` of a backend.
    """

    def __init__(
        self,
        backends: tuple[str, ...],
        slowness: float = 1.0,
        run: Callable[..., Outcome] = public,
    ) -> None:
        self.backends, self.run = backends, run
        self.slowness = slowness
        self.measurements: list[Measurement] = []
        self._counts: dict[tuple[str, str, str], npt.NDArray[np.int64]] = {}

    def check(self, row: str, got: Any, oracle: Any, bound: Any = None, **details: Any) -> None:
        self.measurements += check(row, got, oracle, bound, **details)

    def reject(
        self,
        row: str,
        wrong: dict[str, Array],
        oracle: Any,
        bound: Any = None,
        *,
        backend: str,
        quantity: str,
        named: bool = True,
        **details: Any,
    ) -> None:
        """One A14 measurement: how many of the mutants, by name, pass the row's check.

        The case says so, and names the row if `named`.
        """
        passed = [
            name
            for name, got in wrong.items()
            if not failures(check(row, got, oracle, bound, **details))
        ]
        case = f"{len(wrong)} mutants" + "".join(f"; passed: {name}" for name in passed)
        self.measurements.append(
            Measurement(
                row="A14",
                backend=backend,
                case=f"{row}, {case}" if named else case,
                quantity=f"{row} {quantity}",
                metric="mutants passed",
                value=float(len(passed)),
                bound=0.0,
                passed=not passed,
                entries=len(wrong),
            )
        )

    def count_ulps(self, row: str, backend: str, quantity: str, got: Any, oracle: Any) -> None:
        distances = ulp_distance(got, oracle, np.asarray(got).dtype.name)
        counts = np.histogram(np.minimum(distances, 2.0**24), EDGES)[0]
        key = (row, backend, quantity)
        self._counts[key] = self._counts.get(key, np.zeros_like(counts)) + counts

    @property
    def histograms(self) -> list[Histogram]:
        return [
            Histogram(*key, EDGES, tuple(int(n) for n in counts))
            for key, counts in self._counts.items()
        ]


def part_of(reference: Any, gradient: str, part: str = "d") -> Array:
    """A gradient of an oracle by name, or its "bound" or "magnitude"."""
    found: Array = getattr(reference, gradient.replace("d_", f"{part}_", 1))
    return found


def label(name: str) -> str:
    """A field as a reader says it: "d hidden"."""
    return name.replace("_", " ")
