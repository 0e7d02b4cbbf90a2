"""Distances between floating-point numbers: units in the last place, exact rounding, bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Float64 = NDArray[np.float64]

# Explicit mantissa bits and smallest normal exponent.
FORMATS = {
    "float64": (52, -1022),
    "float32": (23, -126),
    "bfloat16": (7, -126),
    "float16": (10, -14),
    "tfloat32": (10, -126),
}


def spacing(x: Array | float, dtype: str = "float32") -> Float64:
    """Distance between neighbours of `dtype` at |x|: 2^(exponent - mantissa bits), never below the
    smallest subnormal."""
    mantissa, least = FORMATS[dtype]
    _, exponent = np.frexp(np.abs(np.asarray(x, np.float64)))
    unit: Float64 = np.ldexp(1.0, np.maximum(exponent - 1, least) - mantissa)
    return unit


def round_to(x: Array, dtype: str) -> Float64:
    """`x` rounded once to `dtype`, ties to even, as float64.

    A cast through NumPy would round float64 to float32 first and so twice.
    """
    wide: Float64 = np.asarray(x, np.float64)
    unit = spacing(wide, dtype)
    return np.where(np.isfinite(wide), np.rint(wide / unit) * unit, wide)


def ulp_distance(
    got: Array, exact: Array, dtype: str = "float32", magnitude: Array | None = None
) -> Float64:
    """|got - exact| in units of the last place of `exact`, or of `magnitude` where given."""
    ours: Float64 = np.asarray(got, np.float64)
    truth: Float64 = np.asarray(exact, np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.abs(ours - truth)
    gap = np.where((ours == truth) | (np.isnan(ours) & np.isnan(truth)), 0.0, gap)
    gap = np.where(np.isnan(gap), np.inf, gap)
    return gap / spacing(truth if magnitude is None else magnitude, dtype)


def bits_unequal(a: Array, b: Array) -> int:
    """Number of entries whose bits differ; -0 is not +0. Shapes and dtypes must be equal."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(
            f"`a` and `b` must have one shape and dtype; got {a.shape} {a.dtype} and {b.shape} "
            f"{b.dtype}. Cast or reshape one of them."
        )
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    return int(np.count_nonzero(a.reshape(-1).view(kind) != b.reshape(-1).view(kind)))


def dtype_named(name: str) -> np.dtype[np.generic]:
    """NumPy dtype of a name, bfloat16 included."""
    return np.dtype(getattr(ml_dtypes, name, name))
