"""What tests of vocabularies in shards share: cases, and how a result is held to the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from xentlib.contract import ROW_OF, check, failures
from xentlib.tools.harness.cases import EXTRAS, OPTIONS
from xentlib.tools.harness.findings import check_gradient
from xentlib.tools.harness.problems import Case
from xentlib.ulp import bits_unequal

V = 157
PLAIN = Case("plain", 61, 24, V, confident=0.3)
CASES = (
    PLAIN,
    Case("options", 61, 24, V, std=3.0, options=OPTIONS, **EXTRAS),
    Case("kernel", 37, 24, V, layout="HV", options={"z_loss": 1e-3}),
    Case("bf16", 61, 24, V, dtype="bfloat16"),
    Case("nothing", 16, 24, V, ignored=1.0),
    replace(PLAIN, id="class-weights", class_weights=True, options={"label_smoothing": 0.1}),
)
COUNTS = ("num_tokens", "correct", "predicted", "weight_sum")
VALUES = ("loss", "z_loss", "logprobs", "entropy", "lse")


def vocab_axis(options: dict[str, Any]) -> int:
    return 1 if options.get("weight_layout") == "HV" else 0


def same_on_all_ranks(values: Sequence[Any]) -> Any:
    for other in values[1:]:
        assert bits_unequal(np.asarray(other), np.asarray(values[0])) == 0
    return values[0]


def held(
    name: str,
    got: Any,
    dense: Any,
    reference: Any,
    *,
    low: bool,
    world: int,
    dtype: str = "bfloat16",
) -> None:
    """One value or gradient against the oracle; its bits against the dense ones where it must have
    them. `low`: gradients of 16 bits, of this dtype."""
    if dense is None:
        assert got is None
        return
    if name in COUNTS or (world == 1 and name in VALUES):
        assert not failures(check("A0", np.asarray(got), np.asarray(dense), quantity=name))
    elif name in VALUES:
        exact = np.asarray(getattr(reference, name))
        scale = np.maximum(np.abs(exact), np.maximum(np.abs(reference.lse).max(), 1.0))
        assert not failures(check("A2", got, exact, magnitude=scale, quantity=name))
    else:
        row = ROW_OF[dtype] if low else {"d_hidden": "A5"}.get(name, "A6")
        measured = check_gradient(row, name, got, reference, quantity=name)
        assert measured
        assert not failures(measured)
