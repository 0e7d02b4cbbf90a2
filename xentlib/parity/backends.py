"""One problem through one backend, NumPy in and NumPy out. Frameworks are loaded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.checks import OUTPUTS
from xentlib.interop import to_jax, to_numpy, to_torch
from xentlib.parity.problem import Problem

__all__ = ["GRADIENTS", "Outcome", "run"]

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
    keywords = dict(problem.options, outputs=tuple(outputs))
    if audit:
        keywords["compute_dtype"] = "float64"
    if chunk_tokens is not None:
        itemsize = 8 if audit or problem.hidden.dtype == np.float64 else 4
        vocab = problem.weight.shape[0 if keywords.get("weight_layout", "VH") == "VH" else 1]
        keywords["max_chunk_bytes"] = chunk_tokens * vocab * itemsize
    return (_run_torch if backend == "torch" else _run_jax)(problem, keywords, gradient)


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


def _outcome(values: list[Any], grads: list[Any]) -> Outcome:
    crossed: list[Any] = [None if x is None else np.array(to_numpy(x)) for x in (*values, *grads)]
    return Outcome(*crossed)
