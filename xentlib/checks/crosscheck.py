"""What `CrossCheck` is asked for."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["check_schedule"]

AGAINST = ("oracle", "other")
EXCEEDED = ("warn", "raise")


def check_schedule(
    every: object, against: object, tokens: object, exceeded: object, counterpart: str
) -> None:
    """`counterpart` is the backend that the run does not use."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(
            f"`every` must be a positive number of steps; got {every!r}. 1 checks each step."
        )
    if against not in AGAINST:
        raise ValueError(
            f"`against` must be 'oracle' or 'other', the backend that the step does not use; "
            f"got {against!r}."
        )
    if exceeded not in EXCEEDED:
        raise ValueError(f"`exceeded` must be 'warn' or 'raise'; got {exceeded!r}.")
    if tokens is not None and (
        isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1
    ):
        raise ValueError(
            f"`tokens` must be the number of tokens to compare, or None for all; got {tokens}."
        )
    if tokens is not None and against == "other":
        raise ValueError(
            "`tokens` must be None with `against='other'`, which works in chunks; got "
            f"{tokens}. Leave it out, or compare with the oracle."
        )
    if against == "other" and find_spec(counterpart) is None:
        raise ImportError(
            f"`against='other'` must find {counterpart}, which is not installed. Run: pip "
            f"install 'xentlib[{counterpart}]', or use `against='oracle'`."
        )
