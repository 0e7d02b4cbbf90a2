"""How a step is called, and what is read from what it returns; the same for both backends."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from xentlib.checks import audit as checks
from xentlib.checks.audit import STEPS, described
from xentlib.tools.audit.diagnose import oracle_of
from xentlib.tools.audit.hypotheses import Numbers
from xentlib.tools.audit.oracle import Oracle
from xentlib.tools.audit.problem import Array, Options, Problem

# What a function of hidden states, head and labels may call its arguments, to get them by name.
WEIGHTS = ("weight", "kernel", "embedding")  # an embedding's is a tied head's, [V, H]
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
    checks.check_step(step)
    (_, required), asked = _parameters(step), kind
    if kind is None:
        kind = "step" if required is None or len(required) == 2 else "loss"
    declared.check(kind)
    if required is None:
        return kind
    if kind == "step":
        fits = len(required) == 2
    else:
        fits = len(required) == 3 + declared.bias or set(required) <= NAMES
    checks.check_arguments(asked, required, fits)
    return kind


def call(function: Step, leaves: dict[str, Any], options: Options) -> Any:
    """A function of hidden states, head and labels, which are given by name if its names are these,
    in this order if not. Options that it names are passed too."""
    leaves = {name: x for name, x in leaves.items() if x is not None}
    names, required = _parameters(function)
    every = {**options.of_logits, **options.of_loss}
    named = {name: every[name] for name in names if name in every}
    if required and set(required) <= {*leaves, *every}:
        return function(**{name: x for name, x in leaves.items() if name in names}, **named)
    return function(*leaves.values(), **named)


def _parameters(function: Step) -> tuple[list[str], list[str] | None]:
    """Names of the arguments that can be given by name, and of those that must be given; None
    where nobody can tell."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [], None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p.name for p in parameters if p.default is p.empty and p.kind in kinds]
    return names, None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else required


def returned(result: Any, problem: Problem) -> Returned:
    """Loss alone, or with gradients: (loss, of the head) or (loss, of the head, of the hidden
    states). The head's are its weight's, (weight's, bias's), or have names, also within a tree of
    all parameters; the loss may have what is logged beside it, as `jax.value_and_grad(...,
    has_aux=True)` returns it."""
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
        named = [*_with_weights(head)] or [(None, None)]
        sizes = problem.weight.shape, problem.weight.shape[::-1]
        fits = [x for x in named if getattr(x[0], "shape", None) in sizes]
        weight, bias = (fits or named)[0]
    elif hasattr(head, "weight"):
        weight, bias = head.weight, getattr(head, "bias", None)
    elif isinstance(head, (tuple, list)) and head:
        weight, bias = head[0], head[1] if len(head) > 1 else None
    return Returned(result, loss, weight, bias, gradients[1] if len(gradients) > 1 else None)


def _with_weights(tree: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Weight and bias of each mapping in a tree that has a weight, the outermost first."""
    weights = [tree[name] for name in WEIGHTS if name in tree]
    if weights and not isinstance(weights[0], Mapping):
        yield weights[0], tree.get("bias")
    for child in tree.values():
        if isinstance(child, Mapping):
            yield from _with_weights(child)


def _of_name(result: Any, name: str) -> Any:
    """Of a dict or of an output with fields; None where there is none of the name."""
    return result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)


def numbers(problem: Problem, result: Returned, to_numpy: ToNumPy, before: Array) -> Numbers:
    """Of one rank, without the leading [R]; the shapes are checked.

    Args:
        before: the head's weight after the step, to see whether the step has changed it.
    """
    loss = None if result.loss is None else to_numpy(result.loss)
    if loss is not None:
        checks.check_loss(result.loss, None if loss.dtype.kind in "OSUb" else loss.size)
        loss = loss.reshape(())
    if result.d_weight is None:
        STEPS.require("unchanged", np.array_equal(problem.weight, before))
        STEPS.refuse("gradients", came=described(result.whole))
    weight = to_numpy(result.d_weight)
    vocab, width = problem.weight.shape
    if weight.shape == (width, vocab):  # a Flax kernel
        weight = weight.T
    checks.check_gradient("weight", weight.shape, (vocab, width))
    bias = hidden = None
    if problem.bias is not None and result.d_bias is not None:
        bias = to_numpy(result.d_bias)
        checks.check_gradient("bias", bias.shape, (vocab,))
    if result.d_hiddens is not None:
        checks.check_hiddens(result.d_hiddens, problem.micro_batches)
        if all(x is not None for x in result.d_hiddens):
            ranks, _, rows, *rest = problem.hidden.shape
            shapes = (rows, *rest), (ranks * rows, *rest)  # of a rank, of all devices
            each = [to_numpy(x) for x in result.d_hiddens]
            for x in each:
                checks.check_gradient("hidden", x.shape, *shapes)
            hidden = np.stack(each)
    return Numbers(loss, weight, bias, hidden)


def stacked(of_ranks: list[Numbers]) -> Numbers:
    """[R, ...] of each; None of what some rank has not given."""
    columns = zip(*of_ranks, strict=True)
    every: Any = (None if any(x is None for x in one) else np.stack(one) for one in columns)
    return Numbers(*every)


# --- functions of hidden states, head and labels --------------------------------------------------


def of_function(kind: str, result: Any, tokens: int, array: type) -> tuple[Any, ...]:
    """What is to be differentiated of what a function returned: the loss, or log-probabilities and
    entropies where they are there; of type `array`."""

    def size(x: Any) -> int | None:
        return int(np.prod(getattr(x, "shape", ()), dtype=int)) if isinstance(x, array) else None

    if kind == "loss":
        value = _of_name(result, "loss")
        if value is None:
            value = result[0] if isinstance(result, (tuple, list)) and result else result
        checks.check_graph(kind, value, isinstance(value, array))
        checks.check_loss(value, size(value))
        return (value,)
    outputs = [_of_name(result, "logprobs"), _of_name(result, "entropy")]
    if outputs[0] is None:
        outputs = [*result[:2]] if isinstance(result, (tuple, list)) else [result]
    values = tuple(x for x in outputs if x is not None)
    per_token = values and all(size(x) == tokens for x in values)
    STEPS.require("per_token", per_token, tokens=tokens, came=described(result))
    return values


def upstream_of(kind: str, options: Options, values: Sequence[Any]) -> tuple[Oracle, list[Any]]:
    """The oracle of a function that returned these values, without entropies where it returned
    none; and the gradient that arrives for each."""
    if kind == "loss":
        oracle = oracle_of(kind, options)
        return oracle, [np.float32(oracle.problem.upstream)]
    oracle = oracle_of(kind, replace(options, entropy=len(values) == 2))
    return oracle, [oracle.problem.d_logprobs, oracle.problem.d_entropy]


def numbers_of_function(problem: Problem, values: Sequence[Any], *gradients: Any) -> Numbers:
    """Of one rank, a loss's for an upstream gradient of 1; `gradients` are those of hidden states,
    weight and bias."""
    each = problem.kind == "logprobs"
    flat = np.stack([np.asarray(x, np.float64).reshape(-1) for x in values])
    scale = 1.0 if each else problem.upstream
    d_hidden, d_weight, d_bias = (
        None if g is None else np.asarray(g, np.float64)[None] / scale for g in gradients
    )
    assert d_hidden is not None
    assert d_weight is not None
    by_rank = d_hidden.reshape(problem.hidden.shape)
    return Numbers(flat[None] if each else flat[0], d_weight, d_bias, by_rank)
