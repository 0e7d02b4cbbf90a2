"""One problem through one backend, NumPy in and NumPy out. Frameworks are loaded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.checks import OUTPUTS
from xentlib.interop import to_jax, to_numpy, to_torch
from xentlib.parity.problem import Problem, Upstream

__all__ = ["GRADIENTS", "Outcome", "PerToken", "run", "run_logprobs"]

Array = npt.NDArray[Any]
GRADIENTS = ("d_hidden", "d_weight", "d_bias")
PER_TOKEN = ("logprobs", "entropy", "lse", "correct")


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
    d_hidden: Array | None = None
    d_weight: Array | None = None
    d_bias: Array | None = None

    def gradients(self) -> dict[str, Array]:
        pairs = ((name, getattr(self, name)) for name in GRADIENTS)
        return {name: value for name, value in pairs if value is not None}


def run(
    backend: str,
    problem: Problem,
    *,
    audit: bool = False,
    chunk_tokens: int | None = None,
    outputs: Sequence[str] = OUTPUTS,
    gradient: bool = True,
) -> Outcome:
    """`chunked_nll` of `backend` ("torch" or "jax") and its gradients for `problem.upstream`.

    Args:
        audit: compute in float64.
        chunk_tokens: rows of a chunk; None for the backend's default.
    """
    keywords = dict(problem.options, outputs=tuple(outputs), **_how(problem, audit, chunk_tokens))
    return (_run_torch if backend == "torch" else _run_jax)(problem, keywords, gradient)


def _how(problem: Problem, audit: bool, chunk_tokens: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"compute_dtype": "float64"} if audit else {}
    if chunk_tokens is not None:
        itemsize = 8 if audit or problem.hidden.dtype == np.float64 else 4
        layout = problem.options.get("weight_layout", "VH")
        vocab = problem.weight.shape[0 if layout == "VH" else 1]
        found["max_chunk_bytes"] = chunk_tokens * vocab * itemsize
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
        pairs = ((name, getattr(self, name)) for name in GRADIENTS)
        return {name: value for name, value in pairs if value is not None}


def run_logprobs(
    backend: str,
    problem: Problem,
    upstream: Upstream,
    *,
    audit: bool = False,
    chunk_tokens: int | None = None,
) -> PerToken:
    """`chunked_logprobs` of `backend`, and its gradients for `upstream`; no entropy without one."""
    keywords = {
        **problem.per_token_options,
        **_how(problem, audit, chunk_tokens),
        "entropy": upstream.d_entropy is not None,
    }
    return (_logprobs_torch if backend == "torch" else _logprobs_jax)(problem, keywords, upstream)


def _logprobs_torch(problem: Problem, keywords: dict[str, Any], upstream: Upstream) -> PerToken:
    import torch

    from xentlib.torch import chunked_logprobs

    def cross(x: Any) -> Any:
        return to_torch(x, copy=True) if isinstance(x, np.ndarray) else x

    leaves = [cross(x) for x in (problem.hidden, problem.weight, problem.bias)]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    result = chunked_logprobs(
        leaves[0],
        leaves[1],
        cross(problem.labels),
        bias=leaves[2],
        where=cross(problem.where),
        **{name: cross(value) for name, value in keywords.items()},
    )
    pairs = [(x, cross(g)) for x, g in zip(result, upstream) if g is not None]
    torch.autograd.backward([x for x, _ in pairs], [g.to(x.dtype) for x, g in pairs])
    values = [None if x is None else x.detach() for x in result]
    grads = [None if leaf is None else leaf.grad for leaf in leaves]
    return PerToken(*_crossed([*values, *grads]))


def _logprobs_jax(problem: Problem, keywords: dict[str, Any], upstream: Upstream) -> PerToken:
    import jax

    from xentlib.jax import chunked_logprobs

    double = keywords.get("compute_dtype") == "float64" or problem.hidden.dtype == np.float64
    with jax.enable_x64(double):

        def cross(x: Any) -> Any:
            return to_jax(x, copy=True) if isinstance(x, np.ndarray) else x

        constants = {name: cross(value) for name, value in keywords.items()}
        labels, where = cross(problem.labels), cross(problem.where)

        def values(hidden: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
            result = chunked_logprobs(hidden, weight, labels, bias=bias, where=where, **constants)
            used = [x for x, g in zip(result, upstream) if g is not None]
            return used, result

        leaves = [cross(x) for x in (problem.hidden, problem.weight, problem.bias)]
        used, pull, result = jax.vjp(values, *leaves, has_aux=True)
        given = [cross(g) for g in upstream if g is not None]
        grads = pull([g.astype(x.dtype) for x, g in zip(used, given, strict=True)])
        return PerToken(*_crossed([*result, *grads]))


def _run_torch(problem: Problem, keywords: dict[str, Any], gradient: bool) -> Outcome:
    import torch

    from xentlib.torch import chunked_nll

    def cross(x: Any) -> Any:
        return to_torch(x, copy=True) if isinstance(x, np.ndarray) else x

    leaves = [cross(x) for x in (problem.hidden, problem.weight, problem.bias)]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_(gradient)
    result = chunked_nll(
        leaves[0],
        leaves[1],
        cross(problem.labels),
        bias=leaves[2],
        where=cross(problem.where),
        token_weights=cross(problem.token_weights),
        **{name: cross(value) for name, value in keywords.items()},
    )
    grads: list[Any] = [None, None, None]
    if gradient:
        result.loss.backward(torch.tensor(problem.upstream, dtype=result.loss.dtype))
        grads = [None if leaf is None else leaf.grad for leaf in leaves]
    return _outcome([None if x is None else x.detach() for x in result], grads)


def _run_jax(problem: Problem, keywords: dict[str, Any], gradient: bool) -> Outcome:
    import jax

    from xentlib.jax import chunked_nll

    double = keywords.get("compute_dtype") == "float64" or problem.hidden.dtype == np.float64
    with jax.enable_x64(double):

        def cross(x: Any) -> Any:
            return to_jax(x, copy=True) if isinstance(x, np.ndarray) else x

        constants = {name: cross(value) for name, value in keywords.items()}
        labels = cross(problem.labels)
        where, token_weights = cross(problem.where), cross(problem.token_weights)

        def loss(hidden: Any, weight: Any, bias: Any) -> tuple[Any, Any]:
            result = chunked_nll(
                hidden,
                weight,
                labels,
                bias=bias,
                where=where,
                token_weights=token_weights,
                **constants,
            )
            return result.loss, result

        leaves = [cross(x) for x in (problem.hidden, problem.weight, problem.bias)]
        grads: Sequence[Any] = (None, None, None)
        if gradient:
            value, pull, result = jax.vjp(loss, *leaves, has_aux=True)
            grads = pull(jax.numpy.asarray(problem.upstream, value.dtype))
        else:
            _, result = loss(*leaves)
        return _outcome(list(result), list(grads))


def _crossed(values: list[Any]) -> list[Any]:
    return [None if x is None else np.array(to_numpy(x)) for x in values]


def _outcome(values: list[Any], grads: list[Any]) -> Outcome:
    return Outcome(*_crossed([*values, *grads]))
