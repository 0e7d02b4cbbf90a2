"""What a command says to its user beside its results."""

from __future__ import annotations

import sys


class UsageError(Exception):
    """What the user can put right: one sentence on stderr, exit status 2."""


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)
