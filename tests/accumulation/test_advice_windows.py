"""A call that a message of windows or of token counts prints is made as it is printed."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.advised_windows import CASES
from helpers.held import hold_in_norm


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, of)) for name, (of, _) in CASES.items()]
)
def test_what_is_printed_is_right(name: str) -> None:
    backend, function = CASES[name]
    pytest.importorskip(backend)
    if backend == "jax":
        pytest.importorskip("flax")
        pytest.importorskip("optax")
    got, want = function()
    assert np.any(want)
    hold_in_norm([got], [want])
