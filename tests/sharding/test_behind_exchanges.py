"""Over padded shards, as Megatron pads a vocabulary: class probabilities and a teacher's logits,
whose columns are padded as the rows are; and refusals behind an exchange, on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers import behind_exchanges as behind  # noqa: E402


@pytest.fixture(scope="module")
def on_three() -> list[Any]:
    return launch(3, behind.values)


@pytest.mark.parametrize("name", behind.PADDED)
def test_columns_of_padding(on_three: Any, name: str) -> None:
    """A9: they take no part. Catches: a rank with padding that is refused alone, after an exchange
    in which the others wait."""
    value, gradient = behind.exact(name)
    axis = int("log" in name)
    parts = [np.asarray(of_rank[name][1]) for of_rank in on_three]
    got = np.concatenate(parts, axis)
    places = slice(behind.V), slice(behind.V, None)
    of_classes, of_padding = (got[:, x] if axis else got[x] for x in places)
    assert not of_padding.any()
    pairs = [(of_rank[name][0], value.numpy()) for of_rank in on_three]
    for one, exact in [*pairs, (of_classes, gradient.numpy())]:
        measured = check("A9", np.asarray(one), exact, metrics=("rho / u",), case=name)
        assert not failures(measured)


def test_every_rank_refuses() -> None:
    """M3: in one sentence. Catches: a rank that raises alone behind an exchange, and a teacher that
    is whole and is told to pass what is refused there."""
    said = launch(3, behind.refused)
    for texts in zip(*said, strict=True):
        assert len(set(texts)) == 1, texts
        assert not texts[0].endswith(": nothing"), texts
        assert "intersect" not in texts[0], texts
    assert len(said[0]) > 30
