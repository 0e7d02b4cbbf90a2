"""What a part of a parity run says about how far it has come."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """What a part of the run may say about itself."""

    def stage(self, name: str, total: int) -> None:
        """Begin `name`, made of `total` steps (0: not known); the stage before it is over."""

    def advance(self, note: str = "") -> None:
        """One step of the stage is done; `note` says what it was."""


class SilentProgress:
    """Says nothing."""

    def stage(self, name: str, total: int) -> None:
        pass

    def advance(self, note: str = "") -> None:
        pass
