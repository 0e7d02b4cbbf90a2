"""How a step is called, and what is read from what it returns; the same for both backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xentlib.checks.audit import (
    check_arguments,
    check_backward,
    check_gradient,
    check_gradients_there,
    check_hiddens,
    check_loss,
    check_per_token_values,
    check_step,
    check_unchanged,
)
from xentlib.tools.audit.hypotheses import Numbers
from xentlib.tools.audit.problem import Array, Options, Problem

# What a function of hidden states, head and labels may call its arguments, to get them by name.
NAMES = {"hidden", "weight", "labels", "bias", *Options().of_logits, *Options().of_loss}

Step = Callable[..., Any]
ToNumPy = Callable[[Any], Array]


class Returned(NamedTuple):
    """Of a step, as its framework has it; None of what it did not return."""

    whole: Any
    loss: Any
    d_weight: Any = None
    d_bias: Any = None
    d_hiddens: Any = None


def kind_of(step: Step, kind: str | None, declared: Options) -> str:
    """What is asked for, or what the arguments tell: two for a step, three or more for a loss."""
    check_step(step)
    required, asked = _required(step), kind
    if kind is None:
        kind = "step" if required is None or len(required) == 2 else "loss"
    declared.check(kind)
    if required is None:
        return kind
    if kind == "step":
        fits = len(required) == 2
    else:
        fits = len(required) == 3 + declared.bias or set(required) <= NAMES
    check_arguments(asked, required, fits)
    return kind


def arguments(function: Step, given: dict[str, Any], options: Options) -> tuple[Any, Any]:
    """Positional and named arguments for a function of hidden states, head and labels: by name if
    its names are these, in this order if not. Options that it names are passed too."""
    given = {name: x for name, x in given.items() if x is not None}
    names = _names(function)
    told = {**options.of_logits, **options.of_loss}
    named = {name: told[name] for name in names if name in told}
    required = _required(function) or []
    if required and set(required) <= {*given, *told}:
        return (), {**{name: x for name, x in given.items() if name in names}, **named}
    return tuple(given.values()), named


def _names(function: Step) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _required(function: Step) -> list[str] | None:
    """Names of the arguments that must be given; None where nobody can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def returned(result: Any) -> Returned:
    """Loss alone, or with gradients: (loss, of the head) or (loss, of the head, of the hidden
    states). The head's are its weight's, (weight's, bias's), or have names; the loss may have what
    is logged beside it, as `jax.value_and_grad(..., has_aux=True)` returns it."""
    named = _of_name(result, "loss")
    if named is not None:
        return Returned(result, named)
    if not isinstance(result, (tuple, list)) or not result:
        return Returned(result, result)
    loss, *gradients = result
    if isinstance(loss, (tuple, list)) and loss:
        loss = loss[0]
    if not gradients:
        return Returned(result, loss)
    head = gradients[0]
    weight, bias = head, None
    if isinstance(head, Mapping):
        weight, bias = head.get("weight", head.get("kernel")), head.get("bias")
    elif hasattr(head, "weight"):
        weight, bias = head.weight, getattr(head, "bias", None)
    elif isinstance(head, (tuple, list)) and head:
        weight, bias = head[0], head[1] if len(head) > 1 else None
    return Returned(result, loss, weight, bias, gradients[1] if len(gradients) > 1 else None)


def _of_name(result: Any, name: str) -> Any:
    """Of a dict or of an output with fields; None where there is none of the name."""
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def numbers(problem: Problem, result: Returned, to_numpy: ToNumPy, before: Array) -> Numbers:
    """Of one rank, without the leading [R]; the shapes are checked.

    Args:
        before: the head's weight after the step, to see whether the step has changed it.
    """
    loss = None
    if result.loss is not None:
        loss = _one_number(result.loss, to_numpy)
    if result.d_weight is None:
        check_unchanged(problem.weight, before)
    check_gradients_there(result.d_weight, result.whole)
    weight = to_numpy(result.d_weight)
    vocab, width = problem.weight.shape
    if weight.shape == (width, vocab):  # a Flax kernel
        weight = weight.T
    check_gradient("weight", weight.shape, (vocab, width))
    bias = None
    if problem.bias is not None and result.d_bias is not None:
        bias = to_numpy(result.d_bias)
        check_gradient("bias", bias.shape, (vocab,))
    hidden = None
    if result.d_hiddens is not None:
        check_hiddens(result.d_hiddens, problem.micro_batches)
        if all(x is not None for x in result.d_hiddens):
            ranks, _, rows, *rest = problem.hidden.shape
            shapes = (rows, *rest), (ranks * rows, *rest)  # of a rank, of all devices
            each = [to_numpy(x) for x in result.d_hiddens]
            for x in each:
                check_gradient("hidden", x.shape, *shapes)
            hidden = np.stack(each)
    return Numbers(loss, weight, bias, hidden)


def _one_number(given: Any, to_numpy: ToNumPy) -> Array:
    value = to_numpy(given)
    check_loss(given, None if value.dtype.kind in "OSUb" else value.size)
    return value.reshape(())


def stacked(every: list[Numbers]) -> Numbers:
    """[R, ...] of each; None of what some rank has not given."""

    def column(values: list[Array | None]) -> Array | None:
        there = [x for x in values if x is not None]
        return np.stack(there) if len(there) == len(values) else None

    return Numbers(
        column([x.loss for x in every]),
        np.stack([x.d_weight for x in every]),
        column([x.d_bias for x in every]),
        column([x.d_hidden for x in every]),
    )


class Outputs(NamedTuple):
    """What a function returned that is to be differentiated, and the options of the problem that
    this makes: without entropies where it returned none."""

    values: tuple[Any, ...]
    options: Options


def of_function(kind: str, result: Any, options: Options, tokens: int, array: type) -> Outputs:
    """The loss, or log-probabilities and entropies where they are there; of type `array`."""

    def size(x: Any) -> int | None:
        return int(np.prod(getattr(x, "shape", ()), dtype=int)) if isinstance(x, array) else None

    if kind == "loss":
        value = _of_name(result, "loss")
        if value is None:
            value = result[0] if isinstance(result, (tuple, list)) and result else result
        check_backward(kind, value, isinstance(value, array))
        check_loss(value, size(value))
        return Outputs((value,), options)
    outputs = [_of_name(result, "logprobs"), _of_name(result, "entropy")]
    if outputs[0] is None:
        outputs = [*result[:2]] if isinstance(result, (tuple, list)) else [result]
    there = tuple(x for x in outputs if x is not None)
    check_per_token_values([size(x) for x in there], tokens, result)
    return Outputs(there, replace(options, entropy=len(there) == 2))
