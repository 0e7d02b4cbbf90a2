"""A12: a problem's tokens in a window of uneven micro-batches, one without a valid token, through
`TokenNormalizer`, `accumulate_grads` and `token_normalized`, against the oracle of one batch; A2:
through `Evaluation`.

Shapes: N tokens of the problem, M micro-batches of up to n tokens.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.parity.device import numpy_of, on_jax, on_torch
from xentlib.parity.mutants import array_mutants
from xentlib.parity.problem import Problem

if TYPE_CHECKING:
    from xentlib.parity.operators import Findings

__all__ = ["ROADS", "Window", "audit", "evaluated", "run_window", "windows"]

Array = npt.NDArray[Any]
# Where micro-batches begin, as a share of the tokens; the third one is empty.
EDGES = (0.0, 0.4, 0.45, 0.45, 0.9, 1.0)
ROADS = {
    "torch": ("precount", "postscale"),
    "jax": ("accumulate_grads", *(["token_normalized"] if find_spec("optax") else [])),
}


class Window(NamedTuple):
    """What a window gives; gradients are multiplied by the problem's upstream one."""

    loss: Array | None
    num_tokens: Array
    d_hidden: Array
    d_weight: Array
    d_bias: Array


def windows(findings: Findings, problem: Problem) -> None:
    """Every path of each backend, and its evaluation."""
    reference = problem.reference()
    for backend in findings.backends:
        findings.check(
            "A2",
            evaluated(backend, problem).astype(np.float32),
            reference.loss,
            magnitude=reference.loss_magnitude,
            backend=backend,
            case=problem.text,
            quantity="loss of an evaluation",
        )
        for road in ROADS[backend]:
            details: dict[str, Any] = {"backend": backend, "case": f"{problem.text}, {road}"}
            found = run_window(backend, problem, road)
            findings.check(
                "A0",
                found.num_tokens.astype(np.int64),
                np.asarray(reference.num_tokens, np.int64),
                quantity="tokens of a window",
                **details,
            )
            if found.loss is not None:
                findings.check(
                    "A2",
                    found.loss.astype(np.float32),
                    reference.loss,
                    magnitude=reference.loss_magnitude,
                    quantity="loss of a window",
                    **details,
                )
            for name in ("hidden", "weight", "bias"):
                got, oracle, bound = (
                    getattr(found, f"d_{name}"),
                    getattr(reference, f"d_{name}"),
                    getattr(reference, f"bound_{name}"),
                )
                details["quantity"] = f"d {name}"
                findings.check("A12", got, oracle, bound, **details)
        wrong = {**array_mutants(got, oracle), "mean of means": mean_of_means(problem)}
        findings.reject("A12", wrong, oracle, bound, backend=backend, quantity="d bias of a window")


def mean_of_means(problem: Problem) -> Array:
    """d bias of the field's bug: each micro-batch's mean, divided by their number."""
    rows, labels = micro_batches(problem)
    parts = [
        problem.changed(hidden=problem.hidden[r], labels=y).reference().d_bias
        for r, y in zip(rows, labels, strict=True)
    ]
    mean: Array = np.mean(parts, axis=0).astype(np.float32)
    return mean


def audit(findings: Findings, problem: Problem) -> None:
    """A1, A12: where each micro-batch is computed in float64 and rounded once, the sums over a
    window are the same float32 additions in both backends, and so is the product with 1 / T."""
    ours = run_window("torch", problem, "postscale", audit=True)
    for road in ROADS["jax"]:
        theirs = run_window("jax", problem, road, audit=True)
        for name in ("d_hidden", "d_weight", "d_bias"):
            findings.check(
                "A1",
                getattr(ours, name),
                getattr(theirs, name),
                backend="torch/jax",
                case=f"{problem.text}, {road}",
                quantity=f"{name.replace('_', ' ')} of a window",
            )


def micro_batches(problem: Problem) -> tuple[Array, Array]:
    """Rows of hidden [M, n] and labels [M, n], filled up with ignored ones."""
    tokens = len(problem.labels)
    edges = [round(share * tokens) for share in EDGES]
    longest = max(stop - start for start, stop in pairwise(edges))
    rows = np.zeros((len(edges) - 1, longest), np.int32)
    labels = np.full_like(rows, problem.options.get("ignore_index", -100))
    for m, (start, stop) in enumerate(pairwise(edges)):
        rows[m, : stop - start] = np.arange(start, stop)
        labels[m, : stop - start] = problem.labels[start:stop]
    return rows, labels


def run_window(backend: str, problem: Problem, road: str, *, audit: bool = False) -> Window:
    """The window of a problem with a bias, mean reduction and no weights, by one of `ROADS`."""
    options = {**problem.options, "reduction": "sum"}
    if audit:
        options["compute_dtype"] = "float64"
    road_of = _torch if backend == "torch" else _jax
    loss, count, gradients = road_of(problem, options, road)
    named = {f"d_{name}": np.array(g) for name, g in gradients.items()}
    return Window(None if loss is None else np.array(loss), np.array(count), **named)


def evaluated(backend: str, problem: Problem) -> Array:
    """The mean loss of a problem's micro-batches, by `Evaluation`."""
    options = {**problem.options, "reduction": "sum"}
    arrays: Any = on_torch if backend == "torch" else on_jax
    if backend == "torch":
        from xentlib import torch as ours
    else:
        from xentlib import jax as ours  # type: ignore[no-redef]
    weight, bias = arrays(problem.weight), arrays(problem.bias)
    evaluation = ours.Evaluation()
    for rows, labels in zip(*micro_batches(problem), strict=True):
        hidden = arrays(problem.hidden[rows])
        evaluation = evaluation.add(
            ours.chunked_nll(hidden, weight, arrays(labels), bias=bias, **options)
        )
    return numpy_of(evaluation.mean_loss())


Found = tuple[Any, Any, dict[str, Any]]  # loss, tokens, gradients


def leaves_of(problem: Problem) -> dict[str, Any]:
    return {"hidden": problem.hidden, "weight": problem.weight, "bias": problem.bias}


def _torch(problem: Problem, options: dict[str, Any], road: str) -> Found:
    import torch

    from xentlib.torch import TokenNormalizer, chunked_nll

    leaves = {name: on_torch(x) for name, x in leaves_of(problem).items()}
    model = torch.nn.ParameterDict(leaves)
    norm = TokenNormalizer(model, mode=road)
    pairs = zip(*micro_batches(problem), strict=True)
    batches = [(on_torch(r), on_torch(y)) for r, y in pairs]
    declared = [y for _, y in batches] if road == "precount" else None
    with norm.window(labels=declared) as window:
        for r, y in window.micro_batches(batches):
            hidden = model["hidden"][r.long()]
            out = chunked_nll(hidden, model["weight"], y, bias=model["bias"], **options)
            window.backward(out.loss * problem.upstream, out.num_tokens)
    loss, count = (float(x) for x in window.stats[:2])
    return loss / problem.upstream, count, {n: numpy_of(p.grad) for n, p in model.items()}


def _jax(problem: Problem, options: dict[str, Any], road: str) -> Found:
    import jax

    from xentlib.jax import accumulate_grads, chunked_nll, token_normalized

    jnp = jax.numpy

    def sum_and_count(p: Any, batch: Any) -> Any:
        r, y = batch
        out = chunked_nll(p["hidden"][r], p["weight"], y, bias=p["bias"], **options)
        return out.loss * jnp.asarray(problem.upstream, out.loss.dtype), out.num_tokens

    with jax.enable_x64("compute_dtype" in options):
        params = {name: on_jax(x) for name, x in leaves_of(problem).items()}
        rows, labels = (on_jax(x) for x in micro_batches(problem))
        if road == "accumulate_grads":
            scan = jax.jit(lambda p, b: accumulate_grads(sum_and_count, p, b))
            stats, gradients = scan(params, (rows, labels))
            return float(stats.loss) / problem.upstream, stats.num_tokens, gradients
        import optax  # type: ignore[import-untyped]

        tx = token_normalized(optax.identity())
        state, total = tx.init(params), 0
        gradient_of = jax.jit(jax.grad(sum_and_count, has_aux=True))
        gradients = params
        for m in range(len(rows)):
            gradients, count = gradient_of(params, (rows[m], labels[m]))
            total += int(count)
            gradients, state = tx.update(
                gradients, state, params, token_count=count, is_last=m == len(rows) - 1
            )
        return None, np.int64(total), gradients
