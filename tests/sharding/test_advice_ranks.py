"""A call that a message prints of a head that ranks or devices share is made as it is printed, on
four ranks of PyTorch and two devices of JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

from helpers.advised_dtensors import CASES, on_rank  # noqa: E402
from helpers.advised_mesh import CASES as OF_MESH  # noqa: E402
from helpers.advised_mesh import Mesh  # noqa: E402
from helpers.advised_ranks import WORLD  # noqa: E402
from helpers.held import hold_in_norm  # noqa: E402
from helpers.ranks import launch  # noqa: E402


@pytest.fixture(scope="module")
def of_ranks() -> Any:
    return launch(WORLD, on_rank)


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_what_is_printed_is_right(of_ranks: Any, name: str) -> None:
    for found in of_ranks:
        assert not isinstance(found[name], str), found[name]
        got, want = found[name]
        assert all(np.any(x) for x in want)
        hold_in_norm(got, want)


@pytest.mark.jax
@pytest.mark.parametrize("name", OF_MESH)
def test_what_is_printed_of_a_mesh_is_right(name: str) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("flax")
    got, want = OF_MESH[name](Mesh())
    hold_in_norm([np.asarray(x) for x in got], [np.asarray(x) for x in want])
