"""Training in one backend, one optimizer step a window; and what both backends' loops take and hand
over: the optimizer's numbers, the teacher of a student, and each step.

Shapes: M micro-batches, B sequences, L positions, H hidden width, Ht the teacher's, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.tools.parity.progress import Progress
from xentlib.tools.parity.result import TrainingCurve
from xentlib.tools.parity.training.model import ModelSizes, Weights
from xentlib.tools.parity.training.text import TextWindow

Float32 = npt.NDArray[np.float32]


class AdamW(NamedTuple):
    """What `torch.optim.AdamW` and `optax.adamw` both understand by these numbers.

    p <- p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p), on every
    parameter; torch decays first, from the same p.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


ADAMW = AdamW()


class Teacher(NamedTuple):
    """What a student is distilled from: a model of its own width, whose weights stay."""

    sizes: ModelSizes
    weights: Weights


# Of `chunked_divergence`, as in Hinton's distillation (arXiv 1503.02531).
DISTILLATION: dict[str, Any] = {
    "kind": "forward_kl",
    "temperature": 2.0,
    "temperature_squared": True,
    "nll_weight": 0.5,
}


class HeadStep(NamedTuple):
    """What went into the head at one step, and the gradient of the head that came out.

    The arrays are the run's own: valid during the call that hands them over, not to be written to.
    """

    step: int
    hidden: Float32  # [M, B, L, H]
    head: Float32  # [V, H]
    labels: npt.NDArray[np.int32]  # [M, B, L], shifted
    loss: float  # of the window, a token
    gradient: Float32  # [V, H], what was stepped on
    taught: tuple[Float32, ...] = ()  # the teacher's hidden states [M, B, L, Ht] and head [V, Ht]


class HeadWindow(NamedTuple):
    """What one backend makes of the head of a step alone, with its `chunked_nll`, or
    `chunked_divergence`, and its accumulation."""

    loss: float
    num_tokens: int
    gradient: Float32  # [V, H]


# A loop says of each step its loss, its tokens, what each micro-batch takes (hidden states, labels,
# hidden states of a teacher), the head and its gradient.
Record = Callable[[float, int, Sequence[tuple[Any, ...]], Any, Any], None]
NAMES = {"torch": "PyTorch", "jax": "JAX"}


def train(
    backend: str,
    windows: Sequence[TextWindow],
    weights: Weights,
    *,
    sizes: ModelSizes,
    teacher: Teacher | None = None,
    optimizer: AdamW = ADAMW,
    observe: Callable[[HeadStep], None] | None = None,
    progress: Progress | None = None,
) -> tuple[TrainingCurve, Weights]:
    """One optimizer step a window, in "torch" or "jax", fp32: the curve, whose tokens are what it
    counted, and the weights after the last step.

    Args:
        backend: "torch" or "jax".
        windows: what each step reads.
        weights: first values of the parameters; copied.
        sizes: of the model; `sizes.length` is the windows' L.
        teacher: of whom the model learns, by `chunked_divergence`; None for the text alone, by
            `chunked_nll`.
        optimizer: the same numbers for both frameworks.
        observe: called at every step; the time it takes is not counted.
        progress: told about every step.

    Raises:
        ValueError: an unknown backend.
        ModuleNotFoundError: its framework is not installed; JAX needs flax and optax as well.
    """
    progress = progress or Progress()
    if backend not in NAMES:
        raise ValueError(f"`backend` must be 'torch' or 'jax'; got {backend!r}.")
    what = "distillation" if teacher else "training"
    progress.stage(f"{what}, {NAMES[backend]}", len(windows))
    losses: list[float] = []
    counts: list[int] = []
    watching = 0.0

    def record(
        loss: float, count: int, taken: Sequence[tuple[Any, ...]], head: Any, gradient: Any
    ) -> None:
        nonlocal watching
        before = time.perf_counter()
        if observe is not None:
            hidden, labels, *taught = map(np.stack, zip(*taken, strict=True))
            arrays = (hidden, np.asarray(head), labels, loss, np.asarray(gradient))
            heads = [teacher.weights["head"]] if teacher else []
            observe(HeadStep(len(losses), *arrays, (*taught, *heads)))
        losses.append(loss)
        counts.append(count)
        progress.advance(f"loss {loss:.3f}")
        watching += time.perf_counter() - before

    loop = import_module(f"xentlib.tools.parity.training.in_{backend}")
    start = time.perf_counter()
    after: Weights = loop.train(windows, weights, sizes, teacher, optimizer, record)
    seconds = time.perf_counter() - start - watching
    return TrainingCurve(backend, tuple(losses), tuple(counts), seconds), after
