"""Arguments of the commands, as tables, and the types that they have in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

# Flag; a type, a tuple of choices, or bool for a switch; default; metavar; help.
Row = tuple[str, Any, Any, str | None, str]


def add_rows(parser: argparse.ArgumentParser, rows: Iterable[Row], **common: Any) -> None:
    """Arguments from a table; help ends with the default where there is one."""
    for flag, kind, default, metavar, words in rows:
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=words)
            continue
        end = "" if default is None else f" (default: %(default){'g' if kind is number else 's'})"
        of: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        of |= {"default": default, "metavar": metavar, "help": words + end, **common}
        parser.add_argument(flag, **of)


def whole(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more; got {text!r}")
    return value


def seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 or more; got {text!r}")
    return int(text)


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number; got {text!r}")
    return value
