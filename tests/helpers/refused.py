"""What calls say that are refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["said_by", "said_on_ranks"]
Calls = Mapping[str, Callable[[], Any]]
ERRORS: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)


def said_by(
    calls: Calls,
    errors: tuple[type[Exception], ...] = ERRORS,
    then: Callable[[], Any] = lambda: None,
) -> dict[str, str]:
    """Of each, the sentence; "nothing" where a call is not refused. `then` is called after each."""
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing"
        except errors as error:
            said[name] = str(error)
        then()
    return said


def said_on_ranks(calls: Calls) -> list[str]:
    """Of each, its name and what this rank refuses by itself: not a collective that fails."""
    import torch.distributed as dist

    said = said_by(calls, ERRORS[:2], dist.barrier)
    return [f"{name}: {text}" for name, text in said.items()]
