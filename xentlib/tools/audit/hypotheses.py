"""What a step would return under a reading of its task: the right one, or that of a defect.

A reading is one choice for each of some questions: which label belongs to which token, what the
sum is divided by, over whom it is taken, which logits the head gives, which terms the loss has,
which gradients come from above, what is done to the finished gradient, and what number is left
over. The right choice is the default.

A reading is a factor for every token and every term of the loss: for the log-probability of the
label at a shift, for the uniform part of label smoothing, for the z-loss. In the right one it is 1
for tokens that count. Gradients are sums over tokens of factor times d logits times hidden state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xentlib.tools.audit.problem import Array
from xentlib.ulp import round_to

# Terms of a loss. A label's is named by where the label stands from the position: the token after
# it is "+1"; "row" is the next row's first token, "class 0" what -100 is clipped to.
SHIFTS = {"+1": 1, "0": 0, "+2": 2, "-1": -1}
LABELS = (*SHIFTS, "row", "class 0")
DIVERGENCE, UNIFORM, Z_LOSS, SOFTMAX, ENTROPY = (
    "divergence",
    "uniform",
    "z-loss",
    "softmax",
    "entropy",
)


class Labelled(NamedTuple):
    """[R, M, B, L] labels, which of them take part, and whether the others are counted still."""

    labels: Array | None = None
    keep: Array | None = None
    counted: bool = False


class Reduced(NamedTuple):
    """Over whom a gradient is summed. `own`: "" over all ranks; of this rank's tokens alone, "part"
    of the right sum, "times" the number of ranks, or the "mean" of its own. `rows`: each rank's
    slice of the head's rows is its own. `root`: every rank has what this one has. `first`: but the
    first micro-batch's is summed over all."""

    own: str = ""
    rows: bool = False
    root: int | None = None
    first: bool = False


class Head(NamedTuple):
    """Options other than the problem's; whether the bias is added; by how many positions a
    teacher's logits are late; the order in which options are applied, if not the right one; whether
    the derivative of the softcap is left out; and what is rounded to `dtype`, of the "operands" of
    the product, the "logits", their "gradient", the "result" and what is "added" up."""

    changes: tuple[tuple[str, Any], ...] = ()
    bias: bool = True
    late: int = 0
    order: str = ""
    constant: bool = False
    dtype: str = ""
    rounded: tuple[str, ...] = ()

    def round(self, x: Array, what: str) -> Array:
        if not self.dtype or what not in self.rounded:
            return x
        if self.dtype == "tfloat32 cut":  # what tensor cores read of float32
            return (x.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
        return round_to(x, self.dtype)


class Terms(NamedTuple):
    """Factors of the terms of a loss. `everywhere`: those that positions without a label have too,
    with this `share`; on padding too, or not."""

    label: float = 1.0
    uniform: float = 1.0
    z_loss: float = 1.0
    everywhere: tuple[str, ...] = ()
    share: float = 1.0
    padding: bool = True


class Upstream(NamedTuple):
    """What multiplies the gradients that arrive: `entropy` those of entropies; every token may have
    the `same` one, the "first" or the "mean"."""

    entropy: float = 1.0
    same: str = ""


class Hypothesis(NamedTuple):
    labels: Labelled = Labelled()
    divisor: Any = "tokens"
    reduced: Reduced = Reduced()
    head: Head = Head()
    terms: Terms = Terms()
    upstream: Upstream = Upstream()
    lost: bool = False  # the gradient of the bias
    scale: float = 1.0
    decay: float = 0.0  # times the head, which is added to its gradient
    clip: float = 1.0  # of the largest entry of the weight's gradient, for all entries


class Numbers(NamedTuple):
    """What a step returns, or would: one entry a rank. None: not there, not looked at."""

    loss: Array | None  # [R]; of `logprobs` the values, [R, outputs, N]
    d_weight: Array  # [R, V, H]
    d_bias: Array | None  # [R, V]
    d_hidden: Array | None = None  # [R, M, B, L, H]
