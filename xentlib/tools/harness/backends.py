"""One problem through one backend, NumPy in and NumPy out, and what comes out. Frameworks are
loaded on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.nll import OUTPUTS
from xentlib.tools.harness.problems import Problem, Upstream
from xentlib.tools.harness.runners import Call, Wrap, runner_of

Array = npt.NDArray[Any]
GRADIENTS = ("d_hidden", "d_weight", "d_bias")


def _gradients(outcome: Outcome | PerToken) -> dict[str, Array]:
    """By name, those that were asked for. A NamedTuple takes no method from a base class."""
    pairs = ((name, getattr(outcome, name)) for name in GRADIENTS)
    return {name: value for name, value in pairs if value is not None}


class Outcome(NamedTuple):
    """Everything a call of `chunked_nll` gives."""

    loss: Array
    num_tokens: Array | None
    weight_sum: Array | None
    z_loss: Array | None
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


class GivenLogits(NamedTuple):
    """Everything a call of `vocab_parallel_logprobs` gives."""

    logprobs: Array
    entropy: Array | None
    lse: Array
    correct: Array
    d_logits: Array


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
    outputs_of, grads = runner_of(backend)(
        call, {"loss": problem.upstream} if gradient else {}, wrap
    )
    if outputs_of["predicted"] is not None:
        outputs_of["predicted"] = outputs_of["predicted"].astype(np.int64)  # int32 in JAX
    values = (outputs_of[name] for name in Outcome._fields[: -len(GRADIENTS)])
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
    results, grads = runner_of(backend)(call, _by_output(upstream), wrap)
    return PerToken(*results.values(), *grads)


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
    results, grads = runner_of(backend)(call, _by_output(upstream), wrap)
    if audit:  # float64 in, float64 out: rounded here to what the contract compares
        rounded = {name: results[name] for name in ("logprobs", "entropy", "lse")}
        results |= {k: None if x is None else x.astype(np.float32) for k, x in rounded.items()}
        grads = [None if x is None else x.astype(np.float32) for x in grads]
    return GivenLogits(*results.values(), *grads)


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
    options: dict[str, Any] = {"compute_dtype": "float64"} if audit else {}
    if chunk_tokens is not None:
        itemsize = 8 if audit or problem.hidden.dtype == np.float64 else 4
        layout = problem.options.get("weight_layout", "VH")
        vocab = problem.weight.shape[0 if layout == "VH" else 1]
        options["max_chunk_bytes"] = chunk_tokens * max(vocab, 1) * itemsize
    return options


def _by_output(upstream: Upstream) -> dict[str, Array]:
    """The gradients that there are, by the output they are of."""
    given = {name.removeprefix("d_"): g for name, g in upstream._asdict().items()}
    return {name: g for name, g in given.items() if g is not None}
