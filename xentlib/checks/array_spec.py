"""What a check may know of an argument, and numbers that NumPy has wrapped."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class ArraySpec(NamedTuple):
    """What a check may know of an array: shape, dtype name, and device (None: not one device)."""

    shape: tuple[int, ...]
    dtype: str
    device: str | None = None


Scalar = float | int | ArraySpec | None


def plain(value: Any) -> Any:
    """Python's number for one of NumPy's; anything else as it is."""
    alone = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if alone else value
