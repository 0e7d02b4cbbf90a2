"""Leaves of a call of a head in JAX, and how results are compared.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import jax
import numpy as np

from xentlib.interop import to_jax
from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.ulp import bits_unequal

OUTPUTS = ("logprobs", "entropy", "lse", "correct")
N, H, V = 221, 24, 157
CASE = Case("behaviour", N, H, V, ignored=0.2, confident=0.3)
BUDGET = 64 * V * 4  # 64 rows a chunk: four chunks, the last one ragged


NAMES = ("hidden", "weight", "bias")


def arrays(case: Case = CASE, seed: int = 3) -> tuple[tuple, Problem]:
    """(hidden, weight, bias), labels, and the problem they came from."""
    p = build(case, seed)
    leaves = tuple(to_jax(x, copy=True) for x in (p.hidden, p.weight, p.bias))
    return (*leaves, to_jax(p.labels, copy=True)), p


def same(a, b) -> bool:
    a, b = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(a) == len(b) and all(
        x.dtype == y.dtype and bits_unequal(np.asarray(x), np.asarray(y)) == 0
        for x, y in zip(a, b, strict=True)
    )
