"""A divergence in windows of micro-batches and in evaluations, as a loss of `chunked_nll` is: its
sum and its count go in, its mean is refused, and uneven micro-batches are one batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.teacher import TeacherHead

N, H, WIDTH, V = 24, 16, 8, 61
CUTS = (0, 5, 17, N)


def arrays() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    labels = rng.integers(0, V, N)
    labels[::5] = -100
    x = {"hidden": draw(N, H), "head": draw(V, H) / 2, "of_teacher": draw(N, WIDTH)}
    return {**x, "rows": draw(V, WIDTH), "labels": labels}


def held(got: Any, exact: Any, backend: str) -> None:
    pair = np.asarray(got), np.asarray(exact).astype(np.float64)
    assert not failures(check("A9", *pair, metrics=("rho / u",), backend=backend))


@pytest.mark.torch
def test_windows_and_evaluations_of_torch() -> None:
    """A12."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import Evaluation, TokenNormalizer, chunked_divergence

    x = {name: torch.from_numpy(value) for name, value in arrays().items()}
    head = torch.nn.Linear(H, V, bias=False)
    with torch.no_grad():
        head.weight.copy_(x["head"])

    def call(part: slice, **options: Any) -> Any:
        teacher = TeacherHead(x["of_teacher"][part], x["rows"])
        hidden, labels = x["hidden"][part], x["labels"][part]
        return chunked_divergence(hidden, head, teacher, labels=labels, **options)

    parts = [slice(*cut) for cut in pairwise(CUTS)]
    whole = call(slice(None))
    whole.loss.backward()
    exact, head.weight.grad = head.weight.grad, None
    labels = [x["labels"][part] for part in parts]
    with TokenNormalizer(head).window(labels=labels) as window:
        for part in window.micro_batches(parts):
            window.backward(call(part, reduction="sum"))
    held(head.weight.grad, exact, "torch")
    evaluation = Evaluation()
    for part in parts:
        evaluation.add(call(part, reduction="sum"))
    held(evaluation.mean_loss(), whole.loss.detach(), "torch")
    evaluation = Evaluation()
    with pytest.raises(ValueError, match="sum"):
        evaluation.add(call(parts[0]))


@pytest.mark.jax
def test_windows_and_evaluations_of_jax() -> None:
    """A12."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import Evaluation, accumulate_grads, chunked_divergence

    x = arrays()
    batches = {
        k: x[k].reshape(3, N // 3, *x[k].shape[1:]) for k in ("hidden", "of_teacher", "labels")
    }

    def loss(head: Any, batch: Any, **options: Any) -> Any:
        teacher = TeacherHead(batch["of_teacher"], x["rows"])
        return chunked_divergence(batch["hidden"], head, teacher, labels=batch["labels"], **options)

    stats, grads = jax.jit(
        lambda head: accumulate_grads(lambda w, b: loss(w, b, reduction="sum"), head, batches)
    )(x["head"])
    value, exact = jax.jit(jax.value_and_grad(lambda head: loss(head, x).loss))(x["head"])
    held(grads, exact, "jax")
    held(stats.loss, value, "jax")
    evaluation = Evaluation()
    for k in range(3):
        batch = {name: value[k] for name, value in batches.items()}
        evaluation = evaluation.add(loss(x["head"], batch, reduction="sum"))
    held(evaluation.mean_loss(), value, "jax")
    with pytest.raises(ValueError, match="sum"):
        accumulate_grads(loss, x["head"], batches)
