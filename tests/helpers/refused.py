"""What calls say that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["said_by"]


def said_by(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """Of each, the sentence; "nothing" where a call is not refused."""
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except (ValueError, TypeError, RuntimeError) as error:
            found[name] = str(error)
    return found
