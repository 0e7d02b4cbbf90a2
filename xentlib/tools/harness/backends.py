"""One problem through a public function of a backend, and its gradients: NumPy in and NumPy out.
Frameworks are loaded on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from xentlib.nll import OUTPUTS
from xentlib.options import DIVERGENCE_OUTPUTS
from xentlib.teacher import TeacherLogits
from xentlib.tools.harness.device import numpy_of, on_jax, on_torch
from xentlib.tools.harness.problems import Problem, Upstream

Array = npt.NDArray[Any]
Wrap = Callable[[Any, int], Any] | None
LARGEST = ("correct", "predicted")  # what says which logit is the largest
GRADIENTS = ("d_hidden", "d_weight", "d_bias")


class Outcome(NamedTuple):
    """Everything a call gives, in arrays; None of what its function has not, or was not asked
    for."""

    loss: Any = None
    num_tokens: Any = None
    weight_sum: Any = None
    z_loss: Any = None
    nll: Any = None
    divergence: Any = None
    teacher_entropy: Any = None
    logprobs: Any = None
    entropy: Any = None
    lse: Any = None
    correct: Any = None
    predicted: Any = None
    ids_logprobs: Any = None
    top_ids: Any = None
    top_logprobs: Any = None
    d_hidden: Any = None
    d_weight: Any = None
    d_bias: Any = None
    d_logits: Any = None

    def by_name(self) -> dict[str, Array]:
        """What there is."""
        return {name: x for name, x in self._asdict().items() if x is not None}

    def gradients(self) -> dict[str, Array]:
        return {name: x for name, x in self.by_name().items() if name.startswith("d_")}


class Call(NamedTuple):
    """One call of a public function, in NumPy arrays."""

    function: str
    leaves: dict[str, Array | None]  # hidden, weight and bias of a head; or logits
    labels: Array
    keywords: dict[str, Any]

    def of(self, ours: Any, leaves: dict[str, Any], labels: Any, keywords: dict[str, Any]) -> Any:
        """The function of a backend, of these arguments as that backend has them."""
        leaves, function = dict(leaves), getattr(ours, self.function)
        if TEACHER in leaves:  # a leaf, so that it may be spread as the student's is
            array, teacher = constant(leaves.pop(TEACHER)), keywords["teacher"]
            name = "logits" if isinstance(teacher, TeacherLogits) else "weight"
            keywords = {**keywords, "teacher": teacher._replace(**{name: array})}
        if self.function == "vocab_parallel_divergence":
            out = function(**leaves, **keywords)
            return Outcome(None, out.num_tokens, out.weight_sum, divergence=out.loss)
        return function(**leaves, labels=labels, **keywords)


TEACHER = "teacher_array"


def constant(x: Any) -> Any:
    if hasattr(x, "detach"):
        return x.detach()
    import jax

    return jax.lax.stop_gradient(x)


def outcome_of(backend: str, call: Call, upstream: Mapping[str, Any], wrap: Wrap = None) -> Outcome:
    """A call and, for the gradients of its outputs by name, those of its leaves; without any,
    forward alone. `wrap` is for JAX: what becomes of the function of the leaves."""
    result, gradients = _torch(call, upstream) if backend == "torch" else _jax(call, upstream, wrap)
    values = {name: x for name, x in result._asdict().items() if name in Outcome._fields}
    pairs = zip(call.leaves, gradients, strict=True)
    values |= {f"d_{name}": g for name, g in pairs if name != TEACHER}
    outcome = Outcome(**{name: numpy_of(x) for name, x in values.items()})
    # int32 in JAX
    classes = {x: getattr(outcome, x) for x in ("predicted", "top_ids")}
    return outcome._replace(**{n: x.astype(np.int64) for n, x in classes.items() if x is not None})


def _torch(call: Call, upstream: Mapping[str, Any]) -> tuple[Any, Sequence[Any]]:
    import torch

    from xentlib import torch as ours

    leaves = {name: on_torch(x) for name, x in call.leaves.items()}
    for leaf in leaves.values():
        if leaf is not None:
            leaf.requires_grad_(bool(upstream))
    keywords = {name: on_torch(value) for name, value in call.keywords.items()}
    result = call.of(ours, leaves, on_torch(call.labels), keywords)
    if upstream:
        outputs = [getattr(result, name) for name in upstream]
        gradients = [
            torch.as_tensor(on_torch(g), dtype=x.dtype, device=x.device)
            for x, g in zip(outputs, upstream.values(), strict=True)
        ]
        torch.autograd.backward(outputs, gradients)
    return result, [None if x is None else x.grad for x in leaves.values()]


def _jax(call: Call, upstream: Mapping[str, Any], wrap: Wrap) -> tuple[Any, Sequence[Any]]:
    import jax

    from xentlib import jax as ours

    def cross(x: Any) -> Any:
        """What is spread over several devices must be on no device in particular before."""
        if wrap is None:
            return on_jax(x)
        return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x

    leaf_dtype = np.asarray(next(iter(call.leaves.values()))).dtype.name
    with jax.enable_x64("float64" in (call.keywords.get("compute_dtype"), leaf_dtype)):
        keywords = {name: cross(value) for name, value in call.keywords.items()}
        labels = cross(call.labels)

        def function(*leaves: Any) -> tuple[Any, Any]:
            result = call.of(ours, dict(zip(call.leaves, leaves)), labels, keywords)
            return [getattr(result, name) for name in upstream], result

        leaves = [cross(x) for x in call.leaves.values()]
        wrapped = function if wrap is None else wrap(function, len(leaves))
        gradients: Any = [None] * len(leaves)
        if upstream:
            outputs, pull, result = jax.vjp(wrapped, *leaves, has_aux=True)
            of_outputs = [cross(g) for g in upstream.values()]
            gradients = pull([jax.numpy.asarray(g, x.dtype) for x, g in zip(outputs, of_outputs)])
        else:
            _, result = wrapped(*leaves)
        if wrap is not None:  # off the devices that they are spread over
            result, gradients = jax.device_get((result, gradients))
        return result, gradients


class How(TypedDict, total=False):
    """How a problem is run, whatever the function."""

    audit: bool  # compute in float64
    chunk_tokens: int | None  # rows of a chunk; None for the backend's default
    wrap: Wrap  # in JAX, what becomes of the function of the leaves: `shard_map` of it


def run(
    backend: str,
    problem: Problem,
    *,
    outputs: Sequence[str] = OUTPUTS,
    gradient: bool = True,
    recompute: bool = False,
    **how: Unpack[How],
) -> Outcome:
    """`chunked_nll` of `backend` ("torch" or "jax") and its gradients for `problem.upstream`."""
    keywords = {
        **problem.options,
        **{name: getattr(problem, name) for name in ("where", "token_weights", "class_weights")},
        **_options(problem, **how),
        "outputs": tuple(outputs),
        "recompute": recompute,
    }
    if problem.soft is not None:
        keywords["outputs"] = tuple(x for x in outputs if x not in LARGEST)
    call = Call("chunked_nll", problem.leaves, problem.given_labels, keywords)
    upstream = {"loss": problem.upstream} if gradient else {}
    return outcome_of(backend, call, upstream, how.get("wrap"))


def run_logprobs(backend: str, problem: Problem, upstream: Upstream, **how: Unpack[How]) -> Outcome:
    """`chunked_logprobs` of `backend`, and its gradients for `upstream`; no entropy without one."""
    keywords = {**problem.per_token_options, **_options(problem, **how)}
    keywords |= {"where": problem.where, "entropy": upstream.d_entropy is not None}
    keywords |= further(problem)
    call = Call("chunked_logprobs", problem.leaves, problem.labels, keywords)
    return outcome_of(backend, call, with_ids(problem, upstream), how.get("wrap"))


def further(problem: Problem) -> dict[str, Array]:
    """Classes beside the labels, of a call that has any."""
    classes = {"kept": problem.kept, "ids": problem.ids}
    return {name: x for name, x in classes.items() if x is not None}


def with_ids(problem: Problem, upstream: Upstream) -> dict[str, Array]:
    """Gradients by output, with those of further classes."""
    of_ids = {} if problem.d_ids is None else {"ids_logprobs": problem.d_ids}
    return {**upstream.by_output, **of_ids}


def run_given(
    backend: str,
    problem: Problem,
    upstream: Upstream,
    *,
    label_smoothing: float = 0.0,
    **how: Unpack[How],
) -> Outcome:
    """`vocab_parallel_logprobs` of `backend` for a problem whose weight is its logits transposed,
    in float64 where `audit`; they take the leading dimensions of the labels."""
    audit = how.pop("audit", False)
    logits = np.ascontiguousarray(problem.weight.T, np.float64 if audit else None)
    logits = logits.reshape(*problem.labels.shape, logits.shape[1])
    keywords = {
        name: value
        for name, value in {**problem.options, **_options(problem, **how)}.items()
        if name in ("ignore_index", "temperature", "vocab_parallel", "max_chunk_bytes")
    }
    keywords |= {"where": problem.where, "entropy": upstream.d_entropy is not None}
    keywords |= further(problem)
    if label_smoothing:
        keywords["label_smoothing"] = label_smoothing
    call = Call("vocab_parallel_logprobs", {"logits": logits}, problem.given_labels, keywords)
    outcome = outcome_of(backend, call, with_ids(problem, upstream), how.get("wrap"))
    # float64 in, float64 out: rounded here to what the contract compares.
    wide = {n: x for n, x in outcome.by_name().items() if audit and x.dtype == np.float64}
    return outcome._replace(**{name: x.astype(np.float32) for name, x in wide.items()})


def run_divergence(
    backend: str,
    problem: Problem,
    *,
    outputs: Sequence[str] = DIVERGENCE_OUTPUTS,
    **how: Unpack[How],
) -> Outcome:
    """`chunked_divergence` of `backend`, and its gradients for `problem.upstream`."""
    assert problem.teacher is not None
    keywords = {**problem.options, **_options(problem, **how), "teacher": problem.teacher}
    keywords |= {"where": problem.where, "token_weights": problem.token_weights}
    keywords["outputs"] = tuple(outputs)
    if "max_chunk_bytes" in keywords:  # of the logits of both
        keywords["max_chunk_bytes"] *= 2
    leaves = {**problem.leaves, TEACHER: problem.teacher.weight}
    call = Call("chunked_divergence", leaves, problem.labels, keywords)
    return outcome_of(backend, call, {"loss": problem.upstream}, how.get("wrap"))


def run_given_divergence(
    backend: str, logits: Array, teacher: Array, upstream: Array, wrap: Wrap = None, **options: Any
) -> Outcome:
    """`vocab_parallel_divergence` of `backend`, and its gradient for each token's `upstream`."""
    keywords = {**options, "teacher": TeacherLogits(teacher)}
    leaves: dict[str, Array | None] = {"logits": logits, TEACHER: teacher}
    call = Call("vocab_parallel_divergence", leaves, np.zeros(0, np.int32), keywords)
    return outcome_of(backend, call, {"divergence": upstream}, wrap)


def run_given_pair(
    backend: str, problem: Problem, upstream: Upstream, **how: Unpack[How]
) -> Outcome:
    """The same of a problem whose weight and teacher's weight are the logits transposed; tokens
    have the upstream gradient of log-probabilities."""
    assert problem.teacher is not None
    logits, teacher = (np.ascontiguousarray(x.T) for x in (problem.weight, problem.teacher.weight))
    of_tokens, options = np.asarray(upstream.d_logprobs), problem.options | _options(problem, **how)
    return run_given_divergence(backend, logits, teacher, of_tokens, how.get("wrap"), **options)


def _options(
    problem: Problem, audit: bool = False, chunk_tokens: int | None = None, wrap: Wrap = None
) -> dict[str, Any]:
    options: dict[str, Any] = {"compute_dtype": "float64"} if audit else {}
    if chunk_tokens is not None:
        itemsize = 8 if audit or problem.hidden.dtype == np.float64 else 4
        vocab = problem.weight.shape[problem.vocab_axis]
        options["max_chunk_bytes"] = chunk_tokens * max(vocab, 1) * itemsize
    return options
