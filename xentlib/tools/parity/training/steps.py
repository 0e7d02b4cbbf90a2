"""What both backends' training loops take and hand over: the optimizer's numbers, and each step.

Shapes: M micro-batches, B sequences, L positions, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
    step: int, seen: Sequence[tuple[Any, Any]], head: Any, loss: float, gradient: Any
) -> HeadStep:
    hidden, labels = zip(*seen, strict=True)
    return HeadStep(
        step,
        np.stack(hidden),
        np.asarray(head),
        np.stack(labels),
        loss,
        np.asarray(gradient),
    )
