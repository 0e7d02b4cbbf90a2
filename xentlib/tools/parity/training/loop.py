"""Training in one backend, one optimizer step a window."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import numpy as np

from xentlib.tools.parity.progress import Progress, SilentProgress
from xentlib.tools.parity.result import TrainingCurve
from xentlib.tools.parity.training.model import ModelSizes, Weights
from xentlib.tools.parity.training.steps import ADAMW, AdamW, HeadStep
from xentlib.tools.parity.training.windows import TextWindow

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
    progress = progress or SilentProgress()
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
