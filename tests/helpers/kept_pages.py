"""Memory that the tests' process keeps: asking the system for pages, and giving them back, was a
seventh of its time (4.3 s of 30, of JAX's part of test_nll and test_lowrank_jax; 2.3 s with this).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def keep_pages() -> None:
    """An array of the oracle's that is freed is the next one's place. 32 MiB is the most that glibc
    takes, and what it comes to by itself where it may also give back the rest."""
    if sys.platform == "linux":
        malloc = ctypes.CDLL(None)
        if hasattr(malloc, "mallopt"):
            malloc.mallopt(M_MMAP_THRESHOLD, 1 << 25)
            malloc.mallopt(M_TRIM_THRESHOLD, 1 << 30)


def on_one_piece(call: Callable[..., Any], *arguments: Any) -> Any:
    """Its result. CPython lays frames on pieces of 16 KiB, which it takes from the system when a
    call crosses the end of one and gives back when that call returns: a loop that calls across it
    does so each time. A frame of 1.1 MB has a piece of 2 MiB, whose rest is for all above it."""
    return call(*arguments)


on_one_piece.__code__ = on_one_piece.__code__.replace(co_stacksize=140_000)
