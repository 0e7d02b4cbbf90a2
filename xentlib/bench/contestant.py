"""What is timed: a named way to the loss, or to the loss and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["BARE", "FLOOR", "KINDS", "OURS", "REUSED", "Contestant", "Field", "Kind"]

Kind = Literal["loss", "loss + gradient"]
KINDS: tuple[Kind, ...] = ("loss", "loss + gradient")

FLOOR = "bare GEMMs"
# The same products into memory that is there already, which no call that returns new gradients has.
REUSED = "bare GEMMs, old buffers"
BARE = (FLOOR, REUSED)
OURS = "xentlib"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of the table.

    `run` returns (loss,) or (loss, d hidden, d weight), perhaps still being computed; bare GEMMs
    return their products in that order.
    """

    name: str
    kind: Kind
    run: Callable[[], tuple[Any, ...]]
    # Bytes that the compiler set aside for temporaries and results, where there is a compiler.
    compiled_bytes: Callable[[], int] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """All contestants of one framework on one case, one dtype and one device."""

    contestants: tuple[Contestant, ...]
    device: str
    wait: Callable[[], None]  # for what is queued on the device
    ready: Callable[[Any], None]  # for one result
    peak_bytes: Callable[[Callable[[], Any]], int] | None  # of one call, by the allocator
