"""Which set-ups of a module's table its tests are about, in a run that has some of its cases: ranks
that start once for all of them need not have the others."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

__all__ = ["collected"]

Key = TypeVar("Key", bound=Hashable)


def collected(
    request: Any, table: Iterable[Key], *always: Key, test: str | None = None
) -> list[Key]:
    """Those keys of `table`, in its order, that are a parameter, or all parameters, of a collected
    case of the module, or of its function `test` alone; and those that its tests look up by name,
    `always`. A key that a test looks up and that is neither is a KeyError there."""
    asked: list[Any] = [*always]
    for item in request.session.items:
        if item.path == request.node.path and test in (None, item.originalname):
            values = tuple(item.callspec.params.values()) if hasattr(item, "callspec") else ()
            asked += [*values, values]
    known = [*table]
    found = {key for key in asked if isinstance(key, type(known[0])) and key in known}
    return [key for key in known if key in found]
