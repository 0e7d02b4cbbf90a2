"""Which logits a head gives, and what is rounded, in each defect of that kind."""

from __future__ import annotations

from typing import Any

from xentlib.tools.audit.hypotheses import Head
from xentlib.tools.audit.problem import Problem


def rounded(*stages: tuple[str, ...]) -> list[Any]:
    """In either dtype, as far as each of `stages` says."""
    dtypes = ("bfloat16", "float16")
    return [Head(dtype=dtype, rounded=stage) for dtype in dtypes for stage in stages]


LOGITS_ROUNDED = rounded(
    ("logits",),
    ("logits", "gradient"),
    ("operands", "logits", "gradient"),
    ("operands", "logits", "gradient", "result"),
)
OPERANDS_ROUNDED = rounded(("operands",), ("operands", "gradient"))
GRADIENT_ROUNDED = rounded(("gradient",), ("result",), ("gradient", "result"))
TF32 = [
    Head(dtype=dtype, rounded=stage)
    for dtype in ("tfloat32", "tfloat32 cut")
    for stage in (("operands",), ("operands", "gradient"))
]
ADDED = [Head(dtype=dtype, rounded=("added",)) for dtype in ("bfloat16", "float16")]


def exchanged(p: Problem) -> list[Any]:
    """Which divergence it is with student and teacher in each other's place."""
    kind, beta = p.options.divergence, p.options.beta
    if kind == "jsd":
        return [] if beta == 0.5 else [Head(changes=(("beta", 1.0 - (beta or 0.0)),))]
    other = {"forward_kl": "reverse_kl", "reverse_kl": "forward_kl"}
    return [Head(changes=(("kind", other[kind]),))] if kind in other else []


def tempered(p: Problem) -> bool:
    return p.teacher is not None and p.options.temperature != 1.0
