"""One thing that was looked at: what was found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# usable; usable, but look at it; not there, and nothing needs it; cannot be used as it is.
Status = Literal["ok", "note", "absent", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one thing in one part of the report."""

    part: str  # "backends", "kernels", ...
    name: str  # "torch"
    status: Status
    said: str  # what was found
    cure: str = ""  # what to do, where there is something to do


def bad(findings: list[Finding]) -> list[Finding]:
    return [one for one in findings if one.status == "bad"]
