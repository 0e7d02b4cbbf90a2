"""What a command says to its user beside its results."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UsageError(Exception):
    """What the user can put right: one sentence on stderr, exit status 2."""


@contextmanager
def writing(flag: str, path: Path, what: str = "file") -> Iterator[None]:
    """Around what writes to the path that a flag names."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"`{flag}` must be a {what} that can be written; got '{path}': {error.strerror}."
        ) from error


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
