"""Problems whose bits are to depend neither on other tokens nor on shards: one for each of what a
token's statistics can come across."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from xentlib.tools.harness.cases import EXTRAS, OPTIONS
from xentlib.tools.harness.problems import Case, Problem, build

SUM: dict[str, Any] = {"reduction": "sum"}
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, **SUM}


@cache
def problems(tokens: int, hidden: int, vocab: int) -> dict[str, Problem]:
    base = Case("invariant", tokens, hidden, vocab, std=3.0, confident=0.3, options=SUM)
    cases = {
        "bias": base,
        "options": replace(base, options={**OPTIONS, **SUM}, **EXTRAS),
        "softcap, HV": replace(base, layout="HV", bias=False, options={"softcap": 4.0, **SUM}),
        "class weights": replace(base, class_weights=True, options=SMOOTHED),
        "confident": replace(base, std=6.0, confident=0.9),
        "flat": replace(base, std=0.01),
        "no token": replace(base, ignored=1.0),
        "bf16": replace(base, dtype="bfloat16"),
        "bf16, options": replace(base, dtype="bfloat16", options={**OPTIONS, **SUM}, **EXTRAS),
    }
    built = {name: build(replace(case, id=name), 3) for name, case in cases.items()}
    return built | {name: change(build(base, 3)) for name, change in CHANGES.items()}


def masked(value: float) -> Callable[[Problem], Problem]:
    """With more than two blocks of classes masked, others here and there, and some labels."""

    def change(problem: Problem) -> Problem:
        assert problem.bias is not None
        classes = np.arange(problem.bias.size)
        bias = np.where((classes < 300) | (classes % 7 == 3), value, problem.bias)
        return problem.changed(bias=bias.astype(np.float32), text=f"masked by {value:g}")

    return change


def tied(problem: Problem) -> Problem:
    """Logits that are small integers: several largest ones, in several blocks."""
    rng = np.random.default_rng(2)
    small = {
        name: rng.integers(-1, 2, x.shape).astype(np.float32)
        for name, x in problem.leaves.items()
        if x is not None
    }
    return problem.changed(**small, text="ties")


CHANGES = {
    "-inf": masked(-np.inf),
    "finfo.min": masked(float(np.finfo(np.float32).min)),
    "ties": tied,
}
