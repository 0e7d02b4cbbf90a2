"""One problem through one backend, NumPy in and NumPy out. Frameworks are loaded on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.nll import OUTPUTS
from xentlib.parity.device import numpy_of, on_jax, on_torch
from xentlib.parity.problem import Problem, Upstream

__all__ = ["GRADIENTS", "GivenLogits", "Outcome", "PerToken", "run", "run_given", "run_logprobs"]

Array = npt.NDArray[Any]
Wrap = Callable[[Any, int], Any] | None
GRADIENTS = ("d_hidden", "d_weight", "d_bias")
PER_TOKEN = ("logprobs", "entropy", "lse", "correct")


def _gradients(outcome: Outcome | PerToken) -> dict[str, Array]:
    """By name, those that were asked for. A NamedTuple takes no method from a base class."""
    pairs = ((name, getattr(outcome, name)) for name in GRADIENTS)
    return {name: value for name, value in pairs if value is not None}


class Outcome(NamedTuple):
    """Everything a call gives; None where it was not asked for."""

    loss: Array
    num_tokens: Array
    weight_sum: Array
    z_loss: Array
    logprobs: Array | None
    entropy: Array | None
    lse: Array | None
    correct: Array | None
    predicted: Array | None
    d_hidden: Array | None = None
    d_weight: Array | None = None
    d_bias: Array | None = None

    def gradients(self) -> dict[str, Array]:
        return _gradients(self)


def run(
    backend: str,
    problem: Problem,
    *,
    audit: bool = False,
    chunk_tokens: int | None = None,
    outputs: Sequence[str] = OUTPUTS,
    gradient: bool = True,
    wrap: Wrap = None,
) -> Outcome:
    """`chunked_nll` of `backend` ("torch" or "jax") and its gradients for `problem.upstream`.

    Args:
        audit: compute in float64.
        chunk_tokens: rows of a chunk; None for the backend's default.
        wrap: in JAX, what becomes of the function of hidden, weight and bias: `shard_map` of it.
    """
    keywords = dict(problem.options, outputs=tuple(outputs), **_how(problem, audit, chunk_tokens))
    if backend == "torch":
        return _run_torch(problem, keywords, gradient)
    return _run_jax(problem, keywords, gradient, wrap)


def _how(problem: Problem, audit: bool, chunk_tokens: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"compute_dtype": "float64"} if audit else {}
    if chunk_tokens is not None:
        itemsize = 8 if audit or problem.hidden.dtype == np.float64 else 4
        layout = problem.options.get("weight_layout", "VH")
        vocab = problem.weight.shape[0 if layout == "VH" else 1]
        found["max_chunk_bytes"] = chunk_tokens * max(vocab, 1) * itemsize
    return found


class PerToken(NamedTuple):
    """Everything a call of `chunked_logprobs` gives."""

    logprobs: Array
    entropy: Array | None
    lse: Array
    correct: Array
    d_hidden: Array | None = None
    d_weight: Array | None = None
    d_bias: Array | None = None

    def gradients(self) -> dict[str, Array]:
        return _gradients(self)


def run_logprobs(
    backend: str,
    problem: Problem,
    upstream: Upstream,
    *,
    audit: bool = False,
    chunk_tokens: int | None = None,
    wrap: Wrap = None,
) -> PerToken:
    """`chunked_logprobs` of `backend`, and its gradients for `upstream`; no entropy without one."""
    keywords = {
        **problem.per_token_options,
        **_how(problem, audit, chunk_tokens),
        "entropy": upstream.d_entropy is not None,
    }
    arrays = (problem.hidden, problem.weight, problem.bias)
    run_it = _logprobs_torch if backend == "torch" else _logprobs_jax
    values, gradients = run_it("chunked_logprobs", problem, arrays, keywords, upstream, wrap)
    return PerToken(*values, *gradients)


class GivenLogits(NamedTuple):
    """Everything a call of `vocab_parallel_logprobs` gives."""

    logprobs: Array
    entropy: Array | None
    lse: Array
    correct: Array
    d_logits: Array


def run_given(
    backend: str,
    problem: Problem,
    upstream: Upstream,
    *,
    audit: bool = False,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
    wrap: Wrap = None,
) -> GivenLogits:
    """`vocab_parallel_logprobs` of `backend` for a problem whose weight is its logits transposed,
    in float64 where `audit`; they take the leading dimensions of the labels."""
    logits = np.ascontiguousarray(problem.weight.T)
    logits = logits.reshape(*problem.labels.shape, logits.shape[1])
    keywords = {
        name: value
        for name, value in {**problem.options, **_how(problem, False, chunk_tokens)}.items()
        if name in ("ignore_index", "temperature", "vocab_parallel", "max_chunk_bytes")
    }
    keywords["entropy"] = upstream.d_entropy is not None
    if label_smoothing:
        keywords["label_smoothing"] = label_smoothing
    arrays = (logits.astype(np.float64) if audit else logits,)
    run_it = _logprobs_torch if backend == "torch" else _logprobs_jax
    values, gradients = run_it("vocab_parallel_logprobs", problem, arrays, keywords, upstream, wrap)
    if audit:  # float64 in, float64 out: rounded here to what the contract compares
        values[:3] = [None if x is None else x.astype(np.float32) for x in values[:3]]
        gradients = [x.astype(np.float32) for x in gradients]
    return GivenLogits(*values, *gradients)


def _arguments(leaves: Sequence[Any], labels: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named ones, of a head (hidden, weight, bias) or of logits."""
    if len(leaves) == 1:
        return [leaves[0], labels], {}
    return [leaves[0], leaves[1], labels], {"bias": leaves[2]}


def _logprobs_torch(
    function: str,
    problem: Problem,
    arrays: tuple[Array | None, ...],
    keywords: dict[str, Any],
    upstream: Upstream,
    wrap: Wrap,
) -> tuple[list[Any], list[Any]]:
    import torch

    from xentlib import torch as ours

    leaves = [on_torch(x) for x in arrays]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    positional, named = _arguments(leaves, on_torch(problem.labels))
    result = getattr(ours, function)(
        *positional,
        where=on_torch(problem.where),
        **named,
        **{name: on_torch(value) for name, value in keywords.items()},
    )
    pairs = [(x, on_torch(g)) for x, g in zip(result, upstream) if g is not None]
    torch.autograd.backward([x for x, _ in pairs], [g.to(x.dtype) for x, g in pairs])
    values = [None if x is None else x.detach() for x in result]
    grads = [None if leaf is None else leaf.grad for leaf in leaves]
    return _crossed(values), _crossed(grads)


def _logprobs_jax(
    function: str,
    problem: Problem,
    arrays: tuple[Array | None, ...],
    keywords: dict[str, Any],
    upstream: Upstream,
    wrap: Wrap,
) -> tuple[list[Any], list[Any]]:
    import jax

    from xentlib import jax as ours

    double = "float64" in (keywords.get("compute_dtype"), np.asarray(arrays[0]).dtype.name)
    with jax.enable_x64(double):
        cross = on_jax if wrap is None else _on_none

        constants = {name: cross(value) for name, value in keywords.items()}
        labels, where = cross(problem.labels), cross(problem.where)

        def values(*leaves: Any) -> tuple[Any, Any]:
            positional, named = _arguments(leaves, labels)
            result = getattr(ours, function)(*positional, where=where, **named, **constants)
            used = [x for x, g in zip(result, upstream) if g is not None]
            return used, result

        leaves = [cross(x) for x in arrays]
        call = values if wrap is None else wrap(values, len(leaves))
        used, pull, result = jax.vjp(call, *leaves, has_aux=True)
        given = [cross(g) for g in upstream if g is not None]
        grads = pull([g.astype(x.dtype) for x, g in zip(used, given, strict=True)])
        return _crossed(_gathered([*result], wrap)), _crossed(_gathered([*grads], wrap))


def _run_torch(problem: Problem, keywords: dict[str, Any], gradient: bool) -> Outcome:
    import torch

    from xentlib.torch import chunked_nll

    leaves = [on_torch(x) for x in (problem.hidden, problem.weight, problem.bias)]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_(gradient)
    result = chunked_nll(
        leaves[0],
        leaves[1],
        on_torch(problem.labels),
        bias=leaves[2],
        where=on_torch(problem.where),
        token_weights=on_torch(problem.token_weights),
        class_weights=on_torch(problem.class_weights),
        **{name: on_torch(value) for name, value in keywords.items()},
    )
    grads: list[Any] = [None, None, None]
    if gradient:
        result.loss.backward(torch.full_like(result.loss, problem.upstream))
        grads = [None if leaf is None else leaf.grad for leaf in leaves]
    return _outcome(
        {k: None if x is None else x.detach() for k, x in result._asdict().items()}, grads
    )


def _run_jax(problem: Problem, keywords: dict[str, Any], gradient: bool, wrap: Wrap) -> Outcome:
    import jax

    from xentlib.jax import chunked_nll

    double = keywords.get("compute_dtype") == "float64" or problem.hidden.dtype == np.float64
    with jax.enable_x64(double):
        cross = on_jax if wrap is None else _on_none

        constants = {name: cross(value) for name, value in keywords.items()}
        labels = cross(problem.labels)
        where, token_weights = cross(problem.where), cross(problem.token_weights)
        class_weights = cross(problem.class_weights)

        def loss(hidden: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
            result = chunked_nll(
                hidden,
                weight,
                labels,
                bias=bias,
                where=where,
                token_weights=token_weights,
                class_weights=class_weights,
                **constants,
            )
            return result.loss, result

        leaves = [cross(x) for x in (problem.hidden, problem.weight, problem.bias)]
        grads: Sequence[Any] = (None, None, None)
        call = loss if wrap is None else wrap(loss, len(leaves))
        if gradient:
            value, pull, result = jax.vjp(call, *leaves, has_aux=True)
            grads = pull(jax.numpy.asarray(problem.upstream, value.dtype))
        else:
            _, result = call(*leaves)
        values = dict(zip(result._fields, _gathered([*result], wrap), strict=True))
        return _outcome(values, _gathered([*grads], wrap))


def _on_none(x: Any) -> Any:
    """A NumPy array in JAX, on no device in particular, as what is spread over several must be."""
    import jax

    return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x


def _gathered(values: list[Any], wrap: Wrap) -> list[Any]:
    """Off the devices that they are spread over."""
    import jax

    found: list[Any] = values if wrap is None else jax.device_get(values)
    return found


def _crossed(values: list[Any]) -> list[Any]:
    return [None if x is None else numpy_of(x) for x in values]


def _outcome(values: dict[str, Any], grads: list[Any]) -> Outcome:
    names = Outcome._fields[: -len(GRADIENTS)]
    found = Outcome(*_crossed([*(values[name] for name in names), *grads]))
    if found.predicted is None:
        return found
    return found._replace(predicted=found.predicted.astype(np.int64))  # int32 in JAX
