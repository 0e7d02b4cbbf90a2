"""Training in one backend, one optimizer step a window; and what both backends' loops take and hand
over: the optimizer's numbers, and each step.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.tools.parity.progress import Progress
from xentlib.tools.parity.result import TrainingCurve
from xentlib.tools.parity.training.model import ModelSizes, Weights
from xentlib.tools.parity.training.text import TextWindow

Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdamW:
    """What `torch.optim.AdamW` and `optax.adamw` both understand by these numbers.

    p <- p - lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p), on every
    parameter; torch decays first, from the same p.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1


ADAMW = AdamW()


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What went into the head at one step, and the gradient of the head that came out.

    The arrays are the run's own: valid during the call that hands them over, not to be written to.
    """

    step: int
    hidden: Float32  # [M, B, L, H]
    head: Float32  # [V, H]
    labels: npt.NDArray[np.int32]  # [M, B, L], shifted
    loss: float  # of the window, a token
    gradient: Float32  # [V, H], what was stepped on


# A loop says of each step its loss, its tokens and what went through the head.
Record = Callable[[float, int, HeadStep], None]


def head_step(
    step: int, taken: Sequence[tuple[Any, Any]], head: Any, loss: float, gradient: Any
) -> HeadStep:
    hidden, labels = zip(*taken, strict=True)
    return HeadStep(
        step,
        np.stack(hidden),
        np.asarray(head),
        np.stack(labels),
        loss,
        np.asarray(gradient),
    )


NAMES = {"torch": "PyTorch", "jax": "JAX"}
LossHook = Callable[[HeadStep], None]


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One backend's run. `curve.tokens` is what the backend counted."""

    curve: TrainingCurve
    head_gradient_norms: tuple[float, ...]  # Frobenius, of every step


def train(
    backend: str,
    windows: Sequence[TextWindow],
    weights: Weights,
    *,
    sizes: ModelSizes,
    optimizer: AdamW = ADAMW,
    observe: LossHook | None = None,
    progress: Progress | None = None,
) -> TrainingRun:
    """One optimizer step a window, in "torch" or "jax", fp32.

    Args:
        backend: "torch" or "jax".
        windows: what each step reads.
        weights: first values of the parameters; copied.
        sizes: of the model; `sizes.length` is the windows' L.
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
    progress.stage(f"training, {NAMES[backend]}", len(windows))
    losses: list[float] = []
    tokens: list[int] = []
    norms: list[float] = []
    watching = 0.0

    def record(loss: float, count: int, head_step: HeadStep) -> None:
        nonlocal watching
        losses.append(loss)
        tokens.append(count)
        norms.append(float(np.linalg.norm(head_step.gradient)))
        before = time.perf_counter()
        if observe is not None:
            observe(head_step)
        progress.advance(f"loss {loss:.3f}")
        watching += time.perf_counter() - before

    loop = import_module(f"xentlib.tools.parity.training.loop_{backend}")
    start = time.perf_counter()
    loop.train(windows, weights, sizes, optimizer, record)
    seconds = time.perf_counter() - start - watching
    curve = TrainingCurve(backend, tuple(losses), tuple(tokens), seconds)
    return TrainingRun(curve, tuple(norms))
