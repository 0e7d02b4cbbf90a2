"""Classes of packages that are never imported here: what is not loaded has no modules to give."""

from __future__ import annotations

import sys

__all__ = ["is_a"]


def is_a(module: str, name: str, x: object) -> bool:
    """Whether `x` is of a class that a module has, if that module is loaded."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(x, found)
