"""A problem's tokens in a window of uneven micro-batches, through what accumulates in each backend.

Shapes: N tokens of the problem, M micro-batches of up to n tokens.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.device import numpy_of, on_jax, on_torch
from xentlib.tools.harness.problems import Problem

Array = npt.NDArray[Any]
# Where micro-batches begin, as a share of the tokens; the third one is empty.
EDGES = (0.0, 0.4, 0.45, 0.45, 0.9, 1.0)
ROADS = {
    "torch": ("precount", "postscale"),
    "jax": ("accumulate_grads", *(["token_normalized"] if find_spec("optax") else [])),
}


class WindowOutcome(NamedTuple):
    """What a window gives; gradients are multiplied by the problem's upstream one."""

    loss: Array | None
    num_tokens: Array
    d_hidden: Array
    d_weight: Array
    d_bias: Array


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


def run_window(backend: str, problem: Problem, road: str, *, audit: bool = False) -> WindowOutcome:
    """The window of a problem with a bias, mean reduction and no weights, by one of `ROADS`."""
    options = {**problem.options, "reduction": "sum"}
    if audit:
        options["compute_dtype"] = "float64"
    road_of = _torch if backend == "torch" else _jax
    loss, count, gradients = road_of(problem, options, road)
    named = {f"d_{name}": np.array(g) for name, g in gradients.items()}
    return WindowOutcome(None if loss is None else np.array(loss), np.array(count), **named)


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
    norm = TokenNormalizer(model, mode="precount" if road == "precount" else "postscale")
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
