"""Training steps as strangers write them, wrong and right ones, for a test of the audit that knows
nothing of how it decides. Many are the defect of a thread in a public repository, which is cited.
The modules need their framework, so nothing is imported from here but the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Planted", "Table"]


class Planted(NamedTuple):
    """One step, and what a truthful report of it says."""

    what: str  # the defect in a line; of a right step what is unusual in it
    step: Any
    expected: str  # "wrong" or "right"
    options: dict[str, Any]  # of the audited problem
    axis: tuple[str, ...] = ()  # patterns, all of which a truthful report has
    source: str = ""  # owner/repository#number, where there is a thread of it
    needs: str = ""  # what the data must have for the defect to show at all


class Table(dict[str, Planted]):
    """Steps by the names of their functions, in the order of the file."""

    def wrong(
        self, what: str, *axis: str, source: str = "", needs: str = "", **options: Any
    ) -> Callable[[Any], Any]:
        return self._planted(Planted(what, None, "wrong", options, axis, source, needs))

    def right(self, what: str, source: str = "", **options: Any) -> Callable[[Any], Any]:
        return self._planted(Planted(what, None, "right", options, (), source))

    def _planted(self, row: Planted) -> Callable[[Any], Any]:
        def add(step: Any) -> Any:
            name = step.__name__
            assert name not in self, f"{name} is planted twice"
            self[name] = row._replace(step=step)
            return step

        return add
