"""A head with a low-rank part: problems, their float64 oracle, and how results are held to it.

Shapes: N tokens, V vocabulary, H hidden width, R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from helpers.held import ROWS as HEAD_ROWS
from helpers.held import hold_gradients
from xentlib.contract import check, failures
from xentlib.tools.harness.problems import Case, Problem, Upstream, build
from xentlib.ulp import dtype_named

ROWS = HEAD_ROWS | {"a": "A6", "b": "A6"}
V = 157
SIZES = (149, 24, V)  # several chunks in both backends
CASES = {
    "plain": Case("low", *SIZES, bias=False),
    "bias, confident": Case("low bias", *SIZES, confident=0.3),
    "options": Case(
        "low options", *SIZES, where=True, token_weights=True, class_weights=True,
        token_temperature=True,
        options={"softcap": 8.0, "label_smoothing": 0.1, "z_loss": 1e-3, "logit_scale": 1.3},
    ),
    "HV": Case("low HV", *SIZES, layout="HV"),
    "no token": Case("low none", *SIZES, ignored=1.0),
}  # fmt: skip


class LowProblem(NamedTuple):
    """A call's arrays, and those of the low-rank part; B is as large as the weight's own terms."""

    base: Problem
    a: Any
    b: Any
    scale: float
    keep: Any = None


def low_problem(
    case: Case, rank: int = 3, *, seed: int = 3, adapter: str | None = None, dropped: float = 0.0
) -> LowProblem:
    """`adapter`: dtype of A and B, if it is not the case's."""
    rng = np.random.default_rng([seed, 17])
    dtype = dtype_named(adapter or case.dtype)
    a = (rng.standard_normal((rank, case.hidden)) / np.sqrt(case.hidden)).astype(dtype)
    b = (rng.standard_normal((case.vocab, rank)) * case.std).astype(dtype)
    keep = rng.random((case.tokens, case.hidden)) >= dropped if dropped else None
    return LowProblem(build(case, seed), a, b, 0.7, keep)


def given_to(p: LowProblem, function: str) -> dict[str, Any]:
    """What a function is given beside hidden states, head and labels."""
    names, options = ("bias", "where"), p.base.per_token_options
    if function == "chunked_nll":
        names, options = (*names, "token_weights", "class_weights"), p.base.options
    named = {name: getattr(p.base, name) for name in names}
    return {name: x for name, x in named.items() if x is not None} | dict(options)


def oracle(p: LowProblem, upstream: Upstream | None = None, dz_dtype: str = "float64") -> Any:
    """Values and gradients of [hidden, u] @ [weight, B].T in float64, chained back to A and hidden,
    with their bounds: those of d u, times A, and one rounding of d u itself."""
    x, w, a, b = (np.asarray(z, np.float64) for z in (p.base.hidden, p.base.weight, p.a, p.b))
    seen, width = x if p.keep is None else x * p.keep, x.shape[-1]
    axis = 0 if p.base.options.get("weight_layout") == "HV" else 1
    wide = p.base.changed(
        hidden=np.concatenate([x, p.scale * seen @ a.T], 1),
        weight=np.concatenate([w, b if axis else b.T], axis),
    )
    if upstream is None:
        found = wide.reference(dz_dtype=dz_dtype)
    else:
        found = wide.per_token_reference(upstream, dz_dtype=dz_dtype)
    more: dict[str, Any] = {}
    for kind in ("d", "bound", "magnitude"):
        both, head = (getattr(found, f"{kind}_{name}") for name in ("hidden", "weight"))
        a_here, seen_here, low = a, seen, p.scale * both[:, width:]
        if kind != "d":
            a_here, seen_here = np.abs(a), np.abs(seen)
        if kind == "bound":
            low = low + np.abs(p.scale * found.d_hidden[:, width:])
        part = low @ a_here
        more[f"{kind}_hidden"] = both[:, :width] + (part if p.keep is None else part * p.keep)
        more[f"{kind}_a"] = low.T @ seen_here
        head = head if axis else head.T
        more[f"{kind}_b"] = head[:, width:]
        more[f"{kind}_weight"] = head[:, :width] if axis else head[:, :width].T
    return SimpleNamespace(**(found._asdict() | more))


def dense(p: LowProblem) -> Problem:
    """The same as one head, weight + scale B A, in float64."""
    assert p.keep is None
    w, a, b = (np.asarray(z, np.float64) for z in (p.base.weight, p.a, p.b))
    merged = p.scale * b @ a
    turned = p.base.options.get("weight_layout") == "HV"
    hidden = np.asarray(p.base.hidden, np.float64)
    return p.base.changed(hidden=hidden, weight=w + (merged.T if turned else merged))


def hold(
    reference: Any,
    got: Mapping[str, Any],
    row: str | None = None,
    metrics: tuple[str, ...] | None = None,
) -> None:
    """Gradients by name."""
    for name, x in got.items():
        hold_gradients(reference, {name: x}, row or ROWS[name], metrics)


def rejected(reference: Any, got: Mapping[str, Any]) -> bool:
    try:
        hold(reference, got)
    except AssertionError:
        return True
    return False


def held_to(row: str, got: Any, want: Any, **more: Any) -> None:
    assert not failures(check(row, got, want, **more))
