"""What tests of the operators share: the parity run's own measurements, held to the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xentlib.contract import failures
from xentlib.parity.cases import GRID
from xentlib.parity.findings import Findings
from xentlib.parity.problem import Case

SMALL = [case for case in GRID if case.id != "large"]
# Its chunks of 8 and 24 rows fill no whole number of vectors.
CAPPED = Case("chunks-softcap", 67, 44, 19, options={"softcap": 1.5})


def by_id(case: Case) -> str:
    return case.id


def hold(measure: Callable[[Findings, Any], None], backends: tuple[str, ...], item: Any) -> None:
    """Measure with the parity run's own function; nothing may fall short."""
    findings = Findings(backends)
    measure(findings, item)
    assert findings.measurements
    assert not failures(findings.measurements)
