"""Training in one backend, one optimizer step a window; and what both backends' loops take and hand
over: the optimizer's numbers, and each step.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
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


class HeadWindow(NamedTuple):
    """What one backend makes of the head of a step alone, with its `chunked_nll` and its
    accumulation."""

    loss: float
    num_tokens: int
    gradient: Float32  # [V, H]


# A loop says of each step its loss, its tokens, hidden states and labels of each micro-batch, the
# head and its gradient.
Record = Callable[[float, int, Sequence[tuple[Any, Any]], Any, Any], None]
NAMES = {"torch": "PyTorch", "jax": "JAX"}


def train(
    backend: str,
    windows: Sequence[TextWindow],
    weights: Weights,
    *,
    sizes: ModelSizes,
    optimizer: AdamW = ADAMW,
    observe: Callable[[HeadStep], None] | None = None,
    progress: Progress | None = None,
) -> TrainingCurve:
    """One optimizer step a window, in "torch" or "jax", fp32; the tokens are what it counted.

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
    counts: list[int] = []
    watching = 0.0

    def record(
        loss: float, count: int, taken: Sequence[tuple[Any, Any]], head: Any, gradient: Any
    ) -> None:
        nonlocal watching
        before = time.perf_counter()
        if observe is not None:
            hidden, labels = map(np.stack, zip(*taken, strict=True))
            arrays = (hidden, np.asarray(head), labels, loss, np.asarray(gradient))
            observe(HeadStep(len(losses), *arrays))
        losses.append(loss)
        counts.append(count)
        progress.advance(f"loss {loss:.3f}")
        watching += time.perf_counter() - before

    loop = import_module(f"xentlib.tools.parity.training.in_{backend}")
    start = time.perf_counter()
    loop.train(windows, weights, sizes, optimizer, record)
    seconds = time.perf_counter() - start - watching
    return TrainingCurve(backend, tuple(losses), tuple(counts), seconds)
