"""Precomputed logits over shards of no round size, in several blocks a rank: values and gradients
of the whole call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from xentlib.tools.harness.ranks import run_ranks

torch = pytest.importorskip("torch")

from helpers.logits_in_blocks import FUNCTIONS, SIZES, N, V, computed, of_rank  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(scope="module")
def found(request: Any) -> list[dict[str, list[Any]]]:
    names = collected(request, FUNCTIONS)
    of_ranks = run_ranks("torch", of_rank, names, len(SIZES))
    return [dict(zip(names, results, strict=True)) for results in of_ranks]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_many_blocks_of_a_shard(found: Any, name: str) -> None:
    """A13: from float64 the float32 bits. Catches: the blocks of a rank, which share a buffer, in
    one unit."""
    of_ranks = [rank[name] for rank in found]
    want = computed(name, slice(0, V))
    got = [*of_ranks[0][:-1], np.concatenate([x[-1] for x in of_ranks], 1)]
    assert got[-1].shape == (N, V)
    for values, right in zip(got, want, strict=True):
        assert np.array_equal(*(x.astype(np.float32) for x in (values, right))), name
