"""What tests of the operators share: the parity run's own measurements, held to the contract."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from xentlib.contract import failures
from xentlib.tools.harness.cases import BASE, GRID
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case

SMALL = [case for case in GRID if case.id != "large"]
# What a case is about besides its sizes can be seen at those of another one: the same program in
# JAX, half a second each; and in half as many classes.
BASED, NO_BIAS, HALF = ("confident", "all-ignored", "minus-infinity"), (131, 131, 509), 2053
# Its chunks of 8 and 24 rows fill no whole number of vectors.
CAPPED = Case("chunks-softcap", 67, 44, 19, options={"softcap": 1.5})


def shared(case: Case) -> Case:
    """With the sizes of "base", or of all cases that have neither a bias nor options."""
    sizes = (case.tokens, case.hidden, min(case.vocab, HALF))
    if case.id in BASED:
        sizes = (BASE.tokens, BASE.hidden, BASE.vocab)
    elif not case.bias and not case.options:
        sizes = NO_BIAS
    return replace(case, **dict(zip(("tokens", "hidden", "vocab"), sizes)))


def by_id(case: Case) -> str:
    return case.id


# Cases that float32 and one 16-bit dtype have, in JAX; all have them in PyTorch and under --full.
TWICE = (
    *("sum-bf16", "denominator-bf16", "odd-width-bf16"),
    *("sum-fp16", "denominator-fp16", "kernel-layout-fp16", "class-weights-fp16"),
)


def few_programs(cases: Sequence[Case], left: Collection[str] = TWICE) -> list[Any]:
    """Of a test in both backends: JAX, which takes a second or more to trace and compile each of
    its programs, has the cases in `left` under --full alone."""
    assert {case.id for case in cases} & set(left)
    mark = pytest.mark.full(backend="jax")
    return [
        pytest.param(case, id=case.id, marks=[mark] if case.id in left else []) for case in cases
    ]


def hold(measure: Callable[[Findings, Any], None], backends: tuple[str, ...], item: Any) -> None:
    """Measure with the parity run's own function; nothing may fall short."""
    findings = Findings(backends)
    measure(findings, item)
    assert findings.measurements
    assert not failures(findings.measurements)
