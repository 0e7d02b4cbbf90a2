"""Meshes over the first of this process's devices."""

from __future__ import annotations

import math
from typing import Any

import jax


def mesh_of(types: Any = None, **axes: int) -> Any:
    """By the axes' names; Explicit axes unless told otherwise."""
    count = math.prod(axes.values())
    types = None if types is None else (types,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=jax.devices()[:count])
