"""How results are held to the contract where no measurement of the parity run does it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from xentlib.contract import check, failures
from xentlib.tools.harness.findings import check_gradient

ROWS = {"hidden": "A5", "weight": "A6", "bias": "A6"}


def hold_in_norm(got: Iterable[Any], want: Iterable[Any], said: str = "") -> None:
    """A12: of a whole network, whose arrays have no oracle with bounds of their own, in norm."""
    for g, w in zip(got, want, strict=True):
        assert not failures(check("A9", np.asarray(g), np.asarray(w), metrics=("rho / u",))), said


def hold_parameters(got: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """A12: of a whole network by name, each in norm; none is left out, and none is 0."""
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert np.abs(got[name]).max() > 0
        measured = check("A9", got[name], np.asarray(x), metrics=("rho / u",), quantity=name)
        assert not failures(measured)


def hold_gradients(
    oracle: Any,
    got: Mapping[str, Any],
    row: str | None = None,
    metrics: tuple[str, ...] | None = None,
) -> None:
    """A5 and A6, or the row that is given, for gradients of an operator by name; with A7 and A16,
    and not some of their metrics, A19."""
    found = []
    for name, x in got.items():
        of = {"metrics": metrics, "quantity": name}
        found += check_gradient(row or ROWS[name], f"d_{name}", np.asarray(x), oracle, **of)
    assert found
    assert failures(found) == []
