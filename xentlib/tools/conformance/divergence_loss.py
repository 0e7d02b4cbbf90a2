"""The adapter of another library's divergence, and what is refused of one.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from xentlib.checks.audit import described
from xentlib.checks.divergence import REDUCTIONS, check_kind
from xentlib.checks.validators import Refusals, check_flag
from xentlib.tools.conformance.losses import DTYPES, Loss, check_backend, check_names

OPTIONS = ("where", "temperature")
RETURNS = {
    "mean": "the mean, an array of shape ()",
    "sum": "the sum, an array of shape ()",
    "none": "one number for each token, an array of shape {tokens}",
}
ADAPTERS = Refusals(
    ValueError,
    reduction="`reduction` must be 'mean', 'sum' or 'none', which says what `function` returns; "
    "got {reduction!r}. {way}",
    squared="`temperature_squared` must be False without 'temperature' in `options`; got True. Add "
    "it, or leave both out.",
    takes="`function` must take (student, teacher) and what `options` names; got one of "
    "({parameters}) with {options}. Wrap it in a function that does.",
    seed="`seed` must be an integer >= 0; got {seed!r}. Leave it out for 0.",
)


class ReturnedError(ValueError):
    """Something else than the declared reduction, which is no error of the function's own."""


RETURNED = Refusals(
    ReturnedError,
    returned="`function` must return {what} that can be differentiated, with "
    "reduction={reduction!r}; got {came}. Of a tuple return the divergence alone, or name the "
    "reduction that it has.",
)
ADAPTER_TYPES = Refusals(
    TypeError,
    divergence="`divergence` must be a `DivergenceLoss`; got {came}. {way}",
    logits="`function` must be a function of the student's and the teacher's logits; got {came}. "
    "Pass the function itself, not what it returns.",
)


@dataclass(frozen=True, slots=True)
class DivergenceLoss:
    """A divergence of another library, in the contract's words: the adapter.

        DivergenceLoss("mine", "torch", lambda student, teacher: mine(student, teacher))

    Attributes:
        name: of the report.
        backend: "torch" or "jax", whose arrays it is given and whose autograd it is in.
        function: `function(student, teacher, **options)` of logits, [N, V] each, in this order;
            the teacher's are a constant.
        kind: "forward_kl", "reverse_kl" or "jsd", as in `chunked_divergence`.
        beta: of "jsd", the teacher's share of the mixture.
        reduction: what it returns: "mean" over the tokens that count, or their "sum", []; or
            "none", [N]. torch's "batchmean" of [N, V] is a mean here.
        options: which of these two it has, by name: where, [N], True for tokens that count;
            temperature, a number that the logits of both are divided by. Cases that need another
            one are left out, and listed.
        temperature_squared: whether it multiplies by the temperature squared.
        infinite: whether it takes logits of -inf. If not, no case has any.
        dtypes: of the logits that it takes.
        version: of the library.
        note: for the report, what a reader of its rows should know.
    """

    name: str
    backend: str
    function: Callable[..., Any]
    kind: str = "forward_kl"
    beta: float | None = None
    reduction: str = "mean"
    options: tuple[str, ...] = ()
    temperature_squared: bool = False
    infinite: bool = True
    dtypes: tuple[str, ...] = DTYPES
    version: str = ""
    note: str = ""

    @property
    def how(self) -> dict[str, Any]:
        """Which divergence, as functions of xentlib take it."""
        return {"kind": self.kind} | ({} if self.beta is None else {"beta": self.beta})


def check_divergence_loss(loss: Any) -> None:
    if not isinstance(loss, DivergenceLoss):
        way = "Wrap the function: DivergenceLoss('mine', 'torch', function)."
        if isinstance(loss, Loss):
            way = "`conform` takes a `Loss`, of hidden states, head and labels."
        ADAPTER_TYPES.refuse("divergence", came=described(loss), way=way)
    ADAPTER_TYPES.require("logits", callable(loss.function), came=described(loss.function))
    check_backend(loss.backend)
    check_kind(loss)  # type: ignore[arg-type]
    way = "Call that of torch for [N, V] a 'mean'." if loss.reduction == "batchmean" else ""
    known = loss.reduction in REDUCTIONS
    ADAPTERS.require("reduction", known, reduction=loss.reduction, way=way or "Name one.")
    check_names(loss, OPTIONS, DTYPES)
    for name in ("temperature_squared", "infinite"):
        check_flag(name, getattr(loss, name))
    tempered = "temperature" in loss.options
    ADAPTERS.require("squared", tempered or not loss.temperature_squared)
    try:
        signature = inspect.signature(loss.function)
    except (TypeError, ValueError):
        return  # nobody can tell
    try:
        signature.bind(None, None, **dict.fromkeys(loss.options))
    except TypeError:
        parameters = ", ".join(signature.parameters)
        options = ", ".join(loss.options) or "no options"
        ADAPTERS.refuse("takes", parameters=parameters, options=options)


def check_returned(reduction: str, out: Any, array: type, graph: bool, tokens: int) -> None:
    shape = (tokens,) if reduction == "none" else ()
    if isinstance(out, array) and getattr(out, "shape", None) == shape and graph:
        return
    came = described(out) + ("" if graph or not isinstance(out, array) else " without a graph")
    what = RETURNS[reduction].format(tokens=shape)
    RETURNED.refuse("returned", what=what, reduction=reduction, came=came)
