"""The smallest error that each row of the contract rejects, for docs/data/conformance.json.

Of a quantity as a whole, which is multiplied by 1 + error, and of the exponentials of a softmax,
each of which is off by that much, up or down. The cases are the base case in each dtype, and that
of row A26 with the exponentials.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from xentlib.contract import ROW_OF, check, failures
from xentlib.tools.harness.cases import BASE, GRID, low_precision, named
from xentlib.tools.harness.findings import GRADIENT_ROWS, part_of
from xentlib.tools.harness.problems import build
from xentlib.tools.parity.rows.head import beside, nll
from xentlib.tools.parity.rows.softmaxes import FEW_BITS, of_defect
from xentlib.ulp import dtype_named, round_to

Wrong = Callable[[float], Any]
HIDDEN, WEIGHT = "d_hidden", "d_weight"


def smallest_rejected() -> dict[str, dict[str, float]]:
    """By row; of two gradients of one row the larger."""
    rejected: dict[str, dict[str, float]] = {}

    def put(row: str, what: str, value: float) -> None:
        rejected.setdefault(row, {})[what] = max(value, rejected.get(row, {}).get(what, 0.0))

    for dtype in ("float32", *ROW_OF):
        case = BASE if dtype == "float32" else low_precision((BASE,), dtype)[0]
        reference = nll.oracle(build(case, 0))
        put(*whole("A8" if dtype in ROW_OF else "A2", "float32", *of_loss(reference)))
        for name in (HIDDEN, WEIGHT):
            row = ROW_OF.get(dtype) or GRADIENT_ROWS[name]
            put(*whole(row, dtype, *of_gradient(reference, name)))
    problem = build(*named(GRID, "given-logits"), 0)
    reference = problem.reference()

    def others(d_weight: Any) -> tuple[Any, ...]:
        return beside(problem, d_weight, reference)

    _, exact, bound = others(reference.d_weight)
    put(*whole("A26", "float32", exact, bound))
    for row, arrays, part in (
        ("A2", of_loss(reference), lambda x: x.loss),
        ("A5", of_gradient(reference, HIDDEN), lambda x: x.d_hidden),
        ("A6", of_gradient(reference, WEIGHT), lambda x: x.d_weight),
        ("A26", (exact, bound), lambda x: others(x.d_weight)[0]),
    ):

        def wrong(error: float, part: Any = part) -> Any:
            return part(of_defect(problem, FEW_BITS, -np.log2(error)))

        put(row, "exponentials", smallest(row, wrong, *arrays))
    return rejected


def of_loss(reference: Any) -> tuple[Any, ...]:
    return reference.loss, None, reference.loss_magnitude


def of_gradient(reference: Any, name: str) -> tuple[Any, ...]:
    return tuple(part_of(reference, name, part) for part in ("d", "bound", "magnitude"))


def whole(row: str, dtype: str, exact: Any, *others: Any) -> tuple[str, str, float]:
    def wrong(error: float) -> Any:
        return round_to(np.asarray(exact) * (1 + error), dtype).astype(dtype_named(dtype))

    return row, "the whole", smallest(row, wrong, exact, *others)


def smallest(row: str, wrong: Wrong, exact: Any, bound: Any = None, magnitude: Any = None) -> float:
    """By bisection, to 2 %."""
    least, most = 2.0**-24, 1.0
    while most > 1.02 * least:
        middle = (least * most) ** 0.5
        if failures(check(row, wrong(middle), exact, bound, magnitude=magnitude)):
            most = middle
        else:
            least = middle
    return most
