"""Wrong answers that look right: row A14 demands that the check of every other row rejects them.

Each is what a known bug would have returned (docs/failure-modes.md), made from the oracle or from
the right answer itself; none of them needs a framework.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.reference import NLLReference
from xentlib.tools.harness.problems import Problem
from xentlib.ulp import round_to

Array = npt.NDArray[Any]


def array_mutants(got: Array, exact: Any) -> dict[str, Array]:
    """0, -g, 1.001 g and a dropped row, in the dtype of `got`.

    1.001 times the exact value, rounded: 1.001 times a bf16 number rounds back to that number.
    """
    exact = np.asarray(exact, np.float64)
    dropped = np.array(got)
    mutants = {
        "zero": np.zeros_like(got),
        "negated": -got,
        "times 1.001": round_to(exact * 1.001, got.dtype.name).astype(got.dtype),
    }
    if dropped.ndim:
        size = np.abs(exact).reshape(len(exact), -1).sum(axis=1)
        dropped[size.argmax()] = 0
        mutants["dropped row"] = dropped
    return mutants


def problem_mutants(
    problem: Problem, pick: Callable[[NLLReference], Any], dtype: Any, *, dz_dtype: str = "float64"
) -> dict[str, Array]:
    """What `pick` of the oracle would be for a subtly different problem.

    The problem must have mean reduction and no token weights, so that each change matters; without
    ignored tokens two of them are left out.
    """
    valid = problem.valid
    vocab_size = problem.reference().d_bias.size
    tokens = valid.size
    first_chunk = np.arange(tokens) < tokens // 4
    changed = {
        "dropped chunk": problem.changed(
            labels=np.where(first_chunk, -100, problem.labels),
            options={**problem.options, "denominator": float(valid.sum())},
        ),
        "labels off by one": problem.changed(
            labels=np.where(valid, (problem.labels + 1) % vocab_size, problem.labels)
        ),
        "N_total for N_valid": problem.changed(
            options={**problem.options, "denominator": float(tokens)}
        ),
        "padding unmasked": problem.changed(labels=np.where(valid, problem.labels, 0), where=None),
    }
    if valid.all():  # nothing to count or to mask
        del changed["N_total for N_valid"], changed["padding unmasked"]
    results = {}
    for name, mutant in changed.items():
        value = np.asarray(pick(mutant.reference(dz_dtype=dz_dtype)))
        results[name] = round_to(value, np.dtype(dtype).name).astype(dtype)
    return results
