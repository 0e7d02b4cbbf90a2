"""Token counts of micro-batches, and what a traced program says of a loss: whether it is a mean or
a sum of `chunked_nll`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal

from xentlib.checks.validators import ArraySpec, plain
from xentlib.checks.window import (
    WINDOWS,
    check_integer_count,
    check_loss_sum,
    check_own_count,
    check_returned_sum,
    check_token_count,
)
from xentlib.divergence import DivergenceOutput
from xentlib.jax.array_spec import array_spec, concrete_on_cpu
from xentlib.nll import NLLOutput
from xentlib.results import is_loss_output

Output = TypeVar("Output", NLLOutput[Any], DivergenceOutput[Any])

SUM = "Pass reduction='sum' to it."
# Names in a program, which no function of the caller's takes out, cached or not.
DIVIDED, SUMMED, COUNT = "xentlib mean", "xentlib sum", "xentlib count"
SINCE, SHARE = "divided by its count", "1 / count"
STRONGEST = (SUMMED, SINCE, DIVIDED, COUNT, SHARE)
# Primitives through which a sum stays a sum, and a mean a mean.
SAME = {"add", "add_any", "broadcast_in_dim", "clamp", "convert_element_type", "copy", "max", "min"}
SAME |= {"name", "neg", "pbroadcast", "pcast", "psum", "psum_invariant", "pvary"}
SAME |= {"reduce_precision", "reduce_sum", "reshape", "reshard", "select_n", "sharding_constraint"}
SAME |= {"squeeze", "sub"}
LOOPS = ("cond", "scan", "while")
# What `chunked_nll` has returned, traced or not, by the arrays' identities: a loss that is a sum, a
# mean, or both, and counts beside a mean.
RETURNED: dict[int, tuple[weakref.ref[Any], tuple[str, ...]]] = {}
# The sum that was returned beside a count, where it could be read.
RETURNED_SUMS: dict[int, tuple[weakref.ref[Any], Any]] = {}


def labelled(out: Output, denominator: Any) -> Output:
    """An output whose loss and counts have names in the program that they are traced into;
    `denominator` as it was given."""
    total = checkpoint_name(out.loss, SUMMED if out.denominator is None else DIVIDED)
    number, weight = (checkpoint_name(x, COUNT) for x in (out.num_tokens, out.weight_sum))
    if out.denominator is None:
        remember(total, SUMMED)
        if not isinstance(total, jax.core.Tracer):  # read, if at all, where it is added up
            RETURNED_SUMS[id(number)] = weakref.ref(number, partial(forget, id(number))), total
    else:
        # What 1 divides is a sum too. A sum of weights is not read: that would be a wait.
        remember(total, DIVIDED, *((SUMMED,) if known(denominator) == 1 else ()))
        remember(number, COUNT)
        remember(weight, COUNT)
    return out._replace(loss=total, num_tokens=number, weight_sum=weight)


def remember(x: Any, *names: str) -> None:
    RETURNED[id(x)] = weakref.ref(x, partial(forget, id(x))), names


def forget(key: int, _: Any) -> None:
    RETURNED.pop(key, None)
    RETURNED_SUMS.pop(key, None)


def returned(x: Any) -> tuple[str, ...]:
    """What it is, if it is the very array that `chunked_nll` has returned: what has left a `jit`
    says nothing."""
    reference, names = RETURNED.get(id(x), (None, ()))
    return names if reference is not None and reference() is x else ()


def check_name(loss: Any, mean: bool) -> None:
    """Refuse a loss of `chunked_nll` under another name than that of what it is."""
    names = returned(loss)
    if not names or COUNT in names:
        return
    if mean:
        WINDOWS.require("mean", DIVIDED in names)
    else:
        check_loss_sum(array_spec(loss), SUMMED not in names, SUM)


def check_traced(loss: Any, jaxpr: Any) -> None:
    """Refuse a loss, the first output of a program, that is a mean of `chunked_nll`."""
    kind = kinds(jaxpr, ())[0]
    check_loss_sum(ArraySpec(loss.shape, str(loss.dtype)), kind == DIVIDED, SUM)
    WINDOWS.require("undivided", kind != SINCE)


def kinds(jaxpr: Any, of_inputs: Sequence[str]) -> list[str]:
    """Of each output what it is of a call of `chunked_nll`, "" where it is something else, was
    multiplied, or comes out of a loop."""
    kind_of: dict[Any, str] = dict(zip(jaxpr.invars, of_inputs))

    def of(x: Any) -> str:
        return "" if isinstance(x, Literal) else kind_of.get(x, "")

    for eqn in jaxpr.eqns:
        name, inputs = eqn.primitive.name, [of(x) for x in eqn.invars]
        inner = [eqn.params[x] for x in ("jaxpr", "call_jaxpr") if x in eqn.params]
        outputs = [""]
        if name == "name" and eqn.params["name"] in STRONGEST:
            outputs = [eqn.params["name"]]
        elif inner and name not in LOOPS:
            program = getattr(inner[0], "jaxpr", inner[0])
            if len(program.invars) == len(inputs):
                outputs = kinds(program, inputs)
        elif name in ("div", "mul"):
            outputs = [quotient(name, *inputs)]
        elif name in SAME:
            one = next((x for x in STRONGEST if x in inputs), "")
            outputs = inputs if len(inputs) == len(eqn.outvars) else [one]
        kind_of.update(zip(eqn.outvars, outputs))
    return [of(x) for x in jaxpr.outvars]


def quotient(name: str, a: str, b: str) -> str:
    """Of a division, or a product with what is one over a count."""
    if {a, b} == ({SUMMED, COUNT} if name == "div" else {SUMMED, SHARE}):
        return SINCE if name == "mul" or a == SUMMED else ""
    if name == "div":
        return a if a in (SUMMED, SINCE, DIVIDED) else SHARE if b == COUNT else ""
    return ""


def loss_and_count(loss: Any, num_tokens: Any = None, *, mean: bool = False) -> tuple[Any, Any]:
    """A sum, or where it is named one a mean, and the weight of its tokens: an `NLLOutput`'s, or as
    they were given."""
    out, divided = loss if is_loss_output(loss) else None, False
    if num_tokens is not None and not isinstance(num_tokens, jax.Array):
        num_tokens = np.asarray(num_tokens)
    if out is not None:
        loss, divided = out.loss, out.denominator is not None
        number, total = known(out.num_tokens), known(out.weight_sum)
        reference, total_then = RETURNED_SUMS.get(id(out.num_tokens), (None, None))
        if reference is not None and reference() is out.num_tokens:
            check_returned_sum(known(loss), known(total_then), number, total)
        if num_tokens is None:
            num_tokens = out.weight_sum
        check_own_count(known(num_tokens), total if mean else number, total)
        if mean:
            WINDOWS.require("mean", divided and known(out.denominator) in (None, total))
    if isinstance(plain(loss), (int, float)):
        loss = np.asarray(loss, np.float64)
    check_loss_sum(array_spec(loss), divided and not mean, SUM)
    value, count = known(loss), None if num_tokens is None else known(num_tokens)
    check_token_count("num_tokens", array_spec(num_tokens), count, True, value)
    return loss, num_tokens


def token_count_of(out: Any, weighted: bool) -> Any:
    """The number or the weight of an `NLLOutput`'s tokens; any other count as it is.

    Where weights are not counted and the loss has some, the number is no denominator: refused, or
    -1 where that is traced.
    """
    if not is_loss_output(out):
        if out is None:
            check_token_count("token_count", None, None, weighted)
        WINDOWS.require("no_pair", not isinstance(out, (tuple, list)), kind=type(out).__name__)
        WINDOWS.require("count_of_sum", COUNT not in returned(out))
        return out
    check_loss_sum(array_spec(out.loss), out.denominator is not None, SUM)
    number, weight = jnp.asarray(out.num_tokens), jnp.asarray(out.weight_sum)
    if weighted:
        return weight
    alike = weight == number.astype(weight.dtype)
    if known(alike) is False:
        check_integer_count(array_spec(weight))
    return jnp.where(alike, number, -1)


def known(x: Any) -> Any:
    """A number that can be read without waiting, or None."""
    return np.asarray(x).item() if concrete_on_cpu(x) and not np.ndim(x) else None
