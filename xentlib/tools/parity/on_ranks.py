"""Sections of a parity run whose calls are made by ranks, which are launched before their turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from xentlib.tools.harness.cases import Extent
from xentlib.tools.harness.findings import Findings
from xentlib.tools.parity.progress import Planned


class OnRanks:
    """What measures such a section.

    Args:
        launch: of a backend, the section's extent and `slowness`: the results of its ranks.
        measure: holds the results of each backend against the contract's rows.
    """

    def __init__(
        self,
        launch: Callable[[str, Extent, float], Any],
        measure: Callable[[Findings, Extent, dict[str, Any]], None],
    ) -> None:
        self._launch, self._measure = launch, measure
        self._launched: dict[tuple[str, Extent], Future[Any]] = {}

    def __call__(self, findings: Findings, extent: Extent) -> None:
        results = {}
        for backend in findings.backends:
            ahead = self._launched.pop((backend, extent), None)
            results[backend] = (
                self._launch(backend, extent, findings.slowness)
                if ahead is None
                else ahead.result()
            )
        self._measure(findings, extent, results)

    def ahead(self, backends: Sequence[str], extent: Extent) -> Callable[[], None]:
        """What a thread calls to launch them; the section waits for it from now on."""
        futures: dict[str, Future[Any]] = {backend: Future() for backend in backends}
        self._launched |= {(backend, extent): future for backend, future in futures.items()}

        def launch() -> None:
            for backend, future in futures.items():
                try:
                    future.set_result(self._launch(backend, extent, 1.0))
                except Exception as error:  # noqa: BLE001 - raised where the section waits
                    future.set_exception(error)

        return launch


def launch_ahead(parts: Iterable[Planned]) -> None:
    """Launch the ranks of these sections, one after another, while others are measured: two cores
    are then busy, where one section keeps 1.4 so. The thread ends with this process."""
    launches = [part.ahead() for part in parts if part.ahead]

    def launch() -> None:
        for of_one in launches:
            of_one()

    if launches:
        threading.Thread(target=launch, daemon=True).start()
