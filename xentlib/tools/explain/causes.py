"""The causes that are looked for, as data: what a reading has instead of what is right.

A cause replaces one field of a `Reading`, in one of several forms; two causes of different fields
can be there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

from xentlib.tools.explain.readings import Problem, Reading, rows_before_padding

Forms = Callable[[Problem], dict[str, Any]]
DTYPES = ("bfloat16", "float16")
ROWS = {"the hidden states": ("hidden",), "the head": ("weight",), "both": ("hidden", "weight")}
# Frameworks pad a vocabulary to a multiple of one of these.
MULTIPLES = (8, 16, 32, 64, 128, 256, 512, 1024)
# What people set.
TEMPERATURES = tuple(k / 20 for k in range(2, 41))
TOP_K = (5, 10, 20, 30, 40, 50, 64, 100, 200, 500, 1000)
TOP_P = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99)


class Cause(NamedTuple):
    """One entry of `CAUSES`.

    Attributes:
        name: as a report has it, and the heading of docs/ratios.md that says what to do.
        field: of `Reading`, that it replaces.
        sentence: how the log-probabilities were computed.
        needs: what the call must have, in the words of a report.
        forms: values of the field by their words; none where the call has not what is needed.
        paired: whether it is looked for in pairs too, and not alone or beside what explains a part.
    """

    name: str
    field: str
    sentence: str
    needs: str
    forms: Forms
    paired: bool = True

    @property
    def page(self) -> str:
        return f"ratios.md#{self.name.replace(' ', '-')}"


class Form(NamedTuple):
    """A cause in one of its forms; `words` say which, empty where it has one alone."""

    cause: Cause
    words: str
    value: Any


def applied(field: str, declared: Any, none: Any) -> Forms:
    """An option that was declared and not applied."""
    return lambda p: {} if getattr(p.right, field) == declared else {"": none}


def padded(p: Problem) -> dict[str, Any]:
    """Rows that `vocab_size` leaves out, or zeros up to a multiple where it leaves out none."""
    rows, all_rows = p.right.classes[0], len(p.heads["weight"])
    if rows < all_rows:
        return {f"{all_rows - rows} rows of the head": (all_rows, 0)}
    zeros = sorted({-rows % multiple for multiple in MULTIPLES} - {0})
    return {f"{k} rows of zeros": (rows, k) for k in zeros}


def fewer(p: Problem) -> dict[str, Any]:
    all_rows = len(p.heads["weight"])
    rows = rows_before_padding(p.heads["weight"]) if p.right.classes[0] == all_rows else None
    return {} if rows is None else {f"{rows} of {all_rows} rows": (rows, 0)}


def temperatures(p: Problem) -> dict[str, Any]:
    """Others than the declared one, and than the causes that have a name."""
    named = (1.0, p.right.temperature, p.right.temperature**2)
    return {f"{x:g}": x for x in TEMPERATURES if x not in named}


def filters(p: Problem) -> dict[str, Any]:
    if p.filtered:
        return {}
    kept = {f"top_k={k}": (k, None) for k in TOP_K if k < p.right.classes[0]}
    return kept | {f"top_p={x:g}": (None, x) for x in TOP_P}


CAUSES = (
    Cause("ids shifted by one", "shift",
        "Each hidden state was scored against the id before or after its own.", "",
        lambda p: {"the id after": 1, "the id before": -1}),
    Cause("log-probabilities shifted by one", "column",
        "Each entry is the log-probability of the token before or after its own.", "",
        lambda p: {"the token after": 1, "the token before": -1}),
    Cause("old head", "head", "The head was `old_weight`.", "`old_weight`",
        lambda p: {"": "old_weight"} if "old_weight" in p.heads else {}),
    Cause("bias not applied", "bias", "The head's bias was not added.", "a bias",
        lambda p: {} if p.bias is None else {"": False}),
    Cause("logit scale not applied", "logit_scale",
        "The logits were not multiplied by their scale.", "a logit scale",
        applied("logit_scale", 1.0, 1.0)),
    Cause("softcap not applied", "softcap", "The logits were not capped.", "a softcap",
        applied("softcap", None, None)),
    Cause("temperature not applied", "temperature",
        "The logits were not divided by the temperature.", "a temperature",
        applied("temperature", 1.0, 1.0)),
    Cause("temperature applied twice", "temperature",
        "The logits were divided by the temperature twice.", "a temperature",
        lambda p: {} if p.right.temperature == 1.0 else {"": p.right.temperature**2}),
    Cause("another temperature", "temperature",
        "The logits were divided by another temperature than the call has.", "",
        temperatures, paired=False),
    Cause("kept ids not applied", "kept",
        "The softmax was that of the whole vocabulary, not of the ids that top-p or top-k keeps.",
        "kept ids, top-p or top-k", lambda p: {"": False} if p.filtered else {}),
    Cause("top-p or top-k not declared", "kept",
        "The softmax was that of the classes that top-p or top-k keeps, and the call has neither.",
        "a call without kept ids, top-p and top-k", filters, paired=False),
    Cause("padding of the vocabulary takes part", "classes",
        "Rows that pad the vocabulary took part in the softmax.", "", padded),
    Cause("padding of the vocabulary left out", "classes",
        "Rows at the end of the head, which are all equal, did not take part in the softmax.",
        "padding rows at the end of the head", fewer),
    Cause("operands rounded to 16 bits", "operands",
        "Hidden states or head were rounded to 16 bits before their product.", "",
        lambda p: {f"{what} to {x}": (x, *names) for x in DTYPES for what, names in ROWS.items()}),
    Cause("logits rounded to 16 bits", "rounded",
        "The logits were stored in 16 bits on the way to the softmax.", "",
        lambda p: {f"to {x}, {how}": (x, how) for x in DTYPES for how in ("once", "each time")}),
    Cause("log-probabilities rounded to 16 bits", "result",
        "The log-probabilities were returned in 16 bits.", "",
        lambda p: {f"to {x}": x for x in DTYPES}),
)  # fmt: skip


def forms(problem: Problem) -> dict[str, list[Form]]:
    """By the name of the cause."""
    return {
        cause.name: [Form(cause, words, value) for words, value in cause.forms(problem).items()]
        for cause in CAUSES
    }


def reading(problem: Problem, chosen: tuple[Form, ...]) -> Reading:
    """The right one but for these causes."""
    return problem.right._replace(**{form.cause.field: form.value for form in chosen})


def pairs(visible: list[Form]) -> Iterator[tuple[Form, ...]]:
    """Of causes that can be there at once."""
    for one, other in combinations(visible, 2):
        if one.cause.field != other.cause.field:
            yield one, other
