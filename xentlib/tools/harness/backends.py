"""One problem through one backend, NumPy in and NumPy out. Frameworks are loaded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.nll import OUTPUTS
from xentlib.tools.harness.outcomes import GRADIENTS, GivenLogits, Outcome, PerToken
from xentlib.tools.harness.problems import Problem, Upstream
from xentlib.tools.harness.runners import Call, Wrap, runner_of

Array = npt.NDArray[Any]


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
    options = {
        **problem.options,
        "token_weights": problem.token_weights,
        "class_weights": problem.class_weights,
        "outputs": tuple(outputs),
    }
    call = _of_head("chunked_nll", problem, options, audit, chunk_tokens)
    found, grads = runner_of(backend)(call, {"loss": problem.upstream} if gradient else {}, wrap)
    if found["predicted"] is not None:
        found["predicted"] = found["predicted"].astype(np.int64)  # int32 in JAX
    values = (found[name] for name in Outcome._fields[: -len(GRADIENTS)])
    return Outcome(*values, *grads)


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
    options = {**problem.per_token_options, "entropy": upstream.d_entropy is not None}
    call = _of_head("chunked_logprobs", problem, options, audit, chunk_tokens)
    found, grads = runner_of(backend)(call, _by_output(upstream), wrap)
    return PerToken(*found.values(), *grads)


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
    keywords |= {"where": problem.where, "entropy": upstream.d_entropy is not None}
    if label_smoothing:
        keywords["label_smoothing"] = label_smoothing
    leaves = (logits.astype(np.float64) if audit else logits,)
    call = Call("vocab_parallel_logprobs", leaves, problem.labels, keywords)
    found, grads = runner_of(backend)(call, _by_output(upstream), wrap)
    if audit:  # float64 in, float64 out: rounded here to what the contract compares
        rounded = {name: found[name] for name in ("logprobs", "entropy", "lse")}
        found |= {k: None if x is None else x.astype(np.float32) for k, x in rounded.items()}
        grads = [None if x is None else x.astype(np.float32) for x in grads]
    return GivenLogits(*found.values(), *grads)


def _of_head(
    function: str,
    problem: Problem,
    options: dict[str, Any],
    audit: bool,
    chunk_tokens: int | None,
) -> Call:
    leaves = (problem.hidden, problem.weight, problem.bias)
    keywords = {"where": problem.where, **options, **_how(problem, audit, chunk_tokens)}
    return Call(function, leaves, problem.labels, keywords)


def _how(problem: Problem, audit: bool, chunk_tokens: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"compute_dtype": "float64"} if audit else {}
    if chunk_tokens is not None:
        itemsize = 8 if audit or problem.hidden.dtype == np.float64 else 4
        layout = problem.options.get("weight_layout", "VH")
        vocab = problem.weight.shape[0 if layout == "VH" else 1]
        found["max_chunk_bytes"] = chunk_tokens * max(vocab, 1) * itemsize
    return found


def _by_output(upstream: Upstream) -> dict[str, Array]:
    """The gradients that there are, by the output they are of."""
    given = {name.removeprefix("d_"): g for name, g in upstream._asdict().items()}
    return {name: g for name, g in given.items() if g is not None}
