"""What the sections of a parity run find: each comparison is a measurement of a contract row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.contract import ROW_OF, ROWS, SHARES, Measurement, check, failures
from xentlib.tools.harness.backends import Outcome
from xentlib.tools.harness.backends import run as public
from xentlib.tools.harness.problems import Problem
from xentlib.tools.parity.result import Histogram
from xentlib.ulp import ulp_distance

Array = npt.NDArray[Any]
BOTH = "torch/jax"
GRADIENT_ROWS = {"d_hidden": "A5", "d_weight": "A6", "d_bias": "A6"}
# Rows and metrics of one backend's gradients against the other's.
BETWEEN: dict[str, dict[str, tuple[str, ...]]] = {
    "float32": {"A9": ("rho / u", "error ratio")},
    "bfloat16": {"A9": ("error ratio",), "A19": ("bf16 bit-equal",)},
    "float16": {"A9": ("error ratio",)},
}
SHARE_OF = {row: SHARES[dtype] for dtype, row in ROW_OF.items()}
# Distances of ULP in powers of two: from exact to 2^24, where no digit is right.
EDGES = (0.0, 0.5, *(2.0**k for k in range(25)), np.inf)


def part_of(reference: Any, gradient: str, part: str = "d") -> Array:
    """A gradient of an oracle by name, or its "bound" or "magnitude"."""
    array: Array = getattr(reference, gradient.replace("d_", f"{part}_", 1))
    return array


def label(name: str) -> str:
    """A field as a reader says it: "d hidden"."""
    return name.replace("_", " ")


def check_gradient(
    row: str, name: str, got: Any, reference: Any, **details: Any
) -> list[Measurement]:
    """A gradient by its name against an oracle's, with its error bound and the sum of its absolute
    terms; by A7 or A16, and not some of their metrics, beside them A19."""
    oracle, bound, terms = (part_of(reference, name, part) for part in ("d", "bound", "magnitude"))
    measured = check(row, got, oracle, bound, magnitude=terms, **details)
    if row in SHARE_OF and details.get("metrics") is None:
        measured += check("A19", got, oracle, **{**details, "metrics": (SHARE_OF[row],)})
    return measured


def claimed(row: str, problem: Problem) -> dict[str, Any]:
    """Which metrics of a row are claimed of a problem, where not all are."""
    if not problem.unclaimed:
        return {}
    return {"metrics": [b.metric for b in ROWS[row].bounds if b.metric not in problem.unclaimed]}


class Findings:
    """What has been measured so far.

    `slowness` is this machine's beside two idle cores, which time limits follow; `run` is what is
    held, by default `chunked_nll` of a backend.
    """

    def __init__(
        self, backends: tuple[str, ...], slowness: float = 1.0, run: Callable[..., Outcome] = public
    ) -> None:
        self.backends, self.slowness, self.run = backends, slowness, run
        self.measurements: list[Measurement] = []
        self._counts: dict[tuple[str, str, str], npt.NDArray[np.int64]] = {}

    def check(self, row: str, got: Any, oracle: Any, bound: Any = None, **details: Any) -> None:
        self.measurements += check(row, got, oracle, bound, **details)

    def gradients(
        self,
        outcomes: Mapping[str, Any],
        reference: Any,
        problem: Problem,
        named: Callable[[str], str] = label,
        *,
        count: bool = False,
    ) -> None:
        """Gradients of one problem by each backend: A5 and A6 of float32, A7 or A16 and A19 of 16
        bits, and A9 where there are two; `count` puts the distances into the histograms."""
        dtype = problem.hidden.dtype.name
        for backend, outcome in outcomes.items():
            for name, got in outcome.gradients().items():
                row = ROW_OF.get(dtype) or GRADIENT_ROWS[name]
                details: dict[str, Any] = {"backend": backend, "case": problem.text}
                details |= {"quantity": named(name)} | claimed(row, problem)
                self.measurements += check_gradient(row, name, got, reference, **details)
                if count:
                    self.count_ulps(row, backend, named(name), got, part_of(reference, name))
        if len(outcomes) < 2:
            return
        for name, got in outcomes["torch"].gradients().items():
            for row, metrics in BETWEEN[dtype].items():
                self.check(
                    row,
                    got,
                    part_of(reference, name),
                    other=getattr(outcomes["jax"], name),
                    metrics=[x for x in metrics if x not in problem.unclaimed],
                    backend=BOTH,
                    case=problem.text,
                    quantity=named(name),
                )

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
        (limit,) = ROWS["A14"].bounds
        case, quantity = f"{row}, {case}" if named else case, f"{row} {quantity}"
        of = {"backend": backend, "case": case, "quantity": quantity}
        self.measurements.append(limit.measured("A14", float(len(passed)), len(wrong), **of))

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
