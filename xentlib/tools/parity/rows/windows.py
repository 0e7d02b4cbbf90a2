"""A12: a problem's tokens in a window of uneven micro-batches, one without a valid token, through
`TokenNormalizer`, `accumulate_grads` and `token_normalized`, against the oracle of one batch; A2:
through `Evaluation`.

Shapes: N tokens of the problem, M micro-batches of up to n tokens.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.tools.harness.backends import GRADIENTS, Outcome
from xentlib.tools.harness.device import numpy_of, on_jax, on_torch
from xentlib.tools.harness.findings import BOTH, Findings, check_gradient, label
from xentlib.tools.harness.problems import Problem
from xentlib.tools.parity.rows.head import same
from xentlib.tools.parity.rows.mutants import array_mutants

Array = npt.NDArray[Any]
# Where micro-batches begin, as a share of the tokens; the third one is empty.
EDGES = (0.0, 0.4, 0.45, 0.45, 0.9, 1.0)
ROADS = {
    "torch": ("precount", "postscale"),
    "jax": ("accumulate_grads", *(["token_normalized"] if find_spec("optax") else [])),
}


def windows(findings: Findings, problem: Problem) -> None:
    """Every path of each backend, and its evaluation."""
    reference = problem.reference()
    count = np.asarray(reference.num_tokens, np.int64)
    of_loss = {"oracle": reference.loss, "magnitude": reference.loss_magnitude}
    for backend in findings.backends:
        details: dict[str, Any] = {"backend": backend, "case": problem.text}
        mean = evaluated(backend, problem).astype(np.float32)
        findings.check("A2", mean, quantity="loss of an evaluation", **of_loss, **details)
        for road in ROADS[backend]:
            details["case"] = f"{problem.text}, {road}"
            outcome = run_window(backend, problem, road)
            tokens = outcome.num_tokens.astype(np.int64)
            findings.check("A0", tokens, count, quantity="tokens of a window", **details)
            if outcome.loss is not None:
                loss = outcome.loss.astype(np.float32)
                findings.check("A2", loss, quantity="loss of a window", **of_loss, **details)
            for name, got in outcome.gradients().items():
                named = {"quantity": label(name), **details}
                findings.measurements += check_gradient("A12", name, got, reference, **named)
        oracle, bound = reference.d_bias, reference.bound_bias
        wrong = {**array_mutants(outcome.d_bias, oracle), "mean of means": mean_of_means(problem)}
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
        details = {"backend": BOTH, "case": f"{problem.text}, {road}"}
        same(findings, "A1", ours, theirs, of_window, GRADIENTS, **details)


def of_window(name: str) -> str:
    return f"{label(name)} of a window"


# --- a window in each backend ---------------------------------------------------------------------


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


def run_window(backend: str, problem: Problem, road: str, *, audit: bool = False) -> Outcome:
    """The window of a problem with a bias, mean reduction and no weights, by one of `ROADS`;
    gradients are multiplied by the problem's upstream one."""
    options = {**problem.options, "reduction": "sum"}
    if audit:
        options["compute_dtype"] = "float64"
    road_of = _torch if backend == "torch" else _jax
    loss, count, gradients = road_of(problem, options, road)
    loss = None if loss is None else np.array(loss)
    named = {f"d_{name}": np.array(g) for name, g in gradients.items()}
    return Outcome(loss, np.array(count), **named)


def evaluated(backend: str, problem: Problem) -> Array:
    """The mean loss of a problem's micro-batches, by `Evaluation`."""
    options = {**problem.options, "reduction": "sum"}
    arrays: Any = on_torch if backend == "torch" else on_jax
    ours = import_module(f"xentlib.{backend}")
    weight, bias = arrays(problem.weight), arrays(problem.bias)
    evaluation = ours.Evaluation()
    for rows, labels in zip(*micro_batches(problem), strict=True):
        hidden = arrays(problem.hidden[rows])
        evaluation = evaluation.add(
            ours.chunked_nll(hidden, weight, arrays(labels), bias=bias, **options)
        )
    mean: Array = numpy_of(evaluation.mean_loss())
    return mean


Parts = tuple[Any, Any, dict[str, Any]]  # loss, tokens, gradients


def _torch(problem: Problem, options: dict[str, Any], road: str) -> Parts:
    import torch

    from xentlib.torch import TokenNormalizer, chunked_nll

    leaves = {name: on_torch(x) for name, x in problem.leaves.items()}
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


def _jax(problem: Problem, options: dict[str, Any], road: str) -> Parts:
    import jax

    from xentlib.jax import accumulate_grads, chunked_nll, token_normalized

    jnp = jax.numpy

    def sum_and_count(p: Any, batch: Any) -> Any:
        r, y = batch
        out = chunked_nll(p["hidden"][r], p["weight"], y, bias=p["bias"], **options)
        return out.loss * jnp.asarray(problem.upstream, out.loss.dtype), out.num_tokens

    with jax.enable_x64("compute_dtype" in options):
        params = {name: on_jax(x) for name, x in problem.leaves.items()}
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
