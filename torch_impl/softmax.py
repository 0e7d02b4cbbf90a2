"""Softmax of a block of logits with its target column taken out: steps 3 to 6 of `xentlib.nll`.

Shapes: B rows of a block, V vocabulary. `z_BV` holds logits and is overwritten in place.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Block",
    "Coefficients",
    "Labelled",
    "RestStats",
    "TokenStats",
    "below",
    "dlogits_",
    "exp_difference",
    "rest_stats",
    "take_target",
    "token_stats",
]

# exp of this is 0 in float64 too: stands for -inf where a product with 0 must stay 0.
FLOOR = -1e4


class Block:
    """Scratch of a block: one [B, V] buffer, and a second for exp on CPU. Reused by every block."""

    def __init__(
        self,
        rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        diff: bool = True,
    ) -> None:
        self.diff_BV = torch.empty(rows if diff else 0, vocab_size, dtype=dtype, device=device)
        # The CPU's float32 exp goes to MKL, 30 times slower where the result is subnormal (751
        # ms against 24 ms for 65 M entries). The backward of log_softmax, g - exp(z) * sum(g),
        # has a vectorised exp (0.98 ULP at worst) that is 3 times faster still, and multiplies.
        self.onehot_BV: Tensor | None = None
        if device.type == "cpu" and dtype == torch.float32:
            self.onehot_BV = torch.zeros(rows, vocab_size, dtype=dtype)

    def scaled_exp(
        self, z_BV: Tensor, y_B1: Tensor, scale_B1: Tensor | float, out_BV: Tensor
    ) -> None:
        """out = scale * exp(z); 0 in the target column, whose logit must be -inf or 0."""
        if self.onehot_BV is None:
            torch.exp(z_BV, out=out_BV)
            out_BV.mul_(scale_B1)
        else:
            g_BV = self.onehot_BV[: z_BV.shape[0]]
            minus = (
                -scale_B1 if isinstance(scale_B1, Tensor) else z_BV.new_full(y_B1.shape, -scale_B1)
            )
            g_BV.scatter_(1, y_B1, minus)
            torch.ops.aten._log_softmax_backward_data.out(g_BV, z_BV, 1, z_BV.dtype, out=out_BV)
            g_BV.scatter_(1, y_B1, 0.0)
        out_BV.scatter_(1, y_B1, 0.0)


class Coefficients(NamedTuple):
    """Of dz, per token: what a loss makes, and all that step 6 needs of it.

    dz_v = p_v (alpha + beta (z_v - lse)) - gamma w_v for the rest, dz_y = own for the target.
    """

    alpha: Tensor
    beta: Tensor | None  # of an entropy
    gamma: Tensor | None  # of label smoothing
    own: Tensor


def dlogits_(
    z_BV: Tensor,
    y_B1: Tensor,
    lse_B: Tensor,
    of: Coefficients,
    block: Block,
    class_weights_V: Tensor | None = None,
) -> None:
    """Step 6: logits with -inf in the target column become dz, 0 in that column.

    `class_weights_V` are w of the first columns, 1 without.
    """
    z_BV.sub_(lse_B[:, None])
    if of.beta is None:
        block.scaled_exp(z_BV, y_B1, of.alpha[:, None], z_BV)
    else:
        p_BV = block.diff_BV[: z_BV.shape[0]]
        block.scaled_exp(z_BV, y_B1, 1.0, p_BV)
        # The floor: p = 0 times a log p of -inf must be 0.
        z_BV.clamp_(min=FLOOR).mul_(of.beta[:, None]).add_(of.alpha[:, None]).mul_(p_BV)
    if of.gamma is None:
        return
    if class_weights_V is None:
        z_BV.sub_(of.gamma[:, None])
    else:
        z_BV[:, : class_weights_V.shape[0]].addr_(of.gamma, class_weights_V, alpha=-1.0)
    z_BV.scatter_(1, y_B1, 0.0)


class RestStats(NamedTuple):
    """Of the columns other than the target, d = z - max: what token_stats needs.

    Entries of exp(d) that are 1 are counted, the others summed: a sum that holds a 1 rounds a small
    remainder away, and lse near 0 with it (3.7 ULP against 1.7, row A3).
    """

    m: Tensor
    ones: Tensor  # how many exp(d) are 1; 0 where there is no column, or none above -inf
    s: Tensor  # sum of the exp(d) below 1
    sum_ed: Tensor | None  # sum of exp(d) * d: entropy
    sum_d: Tensor | None  # sum of d, or of w d with class weights: label smoothing
    top: Tensor | None = None  # column of the largest, the first of several; exact to 2^24


class TokenStats(NamedTuple):
    """Per token, in the compute dtype."""

    lse: Tensor
    logprob: Tensor
    p_y: Tensor
    p_rest: Tensor  # 1 - p_y, from r / S: no cancellation for confident tokens
    entropy: Tensor  # 0 where it was not asked for
    mean_logp: Tensor | None  # mean over the vocabulary of z - lse, or of w (z - lse)
    correct: Tensor  # 1 or 0
    predicted: Tensor | None = None  # the class of the largest logit, the first of several


class Labelled(NamedTuple):
    """What step 5 needs to know of each token's label."""

    target: Tensor  # its class
    weight: Tensor | float  # of that class
    total: Tensor | float  # weight of all classes


def take_target(z_BV: Tensor, y_B1: Tensor) -> Tensor:
    """Read the target's logit and put -inf in its place."""
    z_y = z_BV.gather(1, y_B1)
    z_BV.scatter_(1, y_B1, -torch.inf)
    return z_y[:, 0]


def rest_stats(
    z_BV: Tensor,
    y_B1: Tensor,
    block: Block,
    *,
    entropy: bool,
    smoothing: bool,
    columns: int | None = None,
    class_weights_V: Tensor | None = None,
    predicted: bool = False,
) -> RestStats:
    """Step 4. Sums are relative to the rest's own maximum, so its largest terms are exact.

    `columns` of the logits are classes, all by default; others are at -inf.
    """
    top = None
    if predicted:
        m, top = z_BV.max(1, keepdim=True)
        top = top[:, 0].to(z_BV.dtype)
    else:
        m = z_BV.amax(1, keepdim=True)
    m = torch.where(m == -torch.inf, 0.0, m)  # no other column, or none above -inf
    d_BV = block.diff_BV[: z_BV.shape[0]]
    torch.sub(z_BV, m, out=d_BV)
    sum_d = sum_of_rest(d_BV, y_B1, columns, class_weights_V) if smoothing else None
    e_BV = torch.empty_like(d_BV) if entropy else d_BV
    block.scaled_exp(d_BV, y_B1, 1.0, e_BV)
    sum_ed = d_BV.clamp_(min=FLOOR).mul_(e_BV).sum(1) if entropy else None
    everything = e_BV.sum(1)
    s = e_BV.frac_().sum(1)
    return RestStats(m[:, 0], (everything - s).round_(), s, sum_ed, sum_d, top)


def sum_of_rest(
    d_BV: Tensor, y_B1: Tensor, columns: int | None, class_weights_V: Tensor | None
) -> Tensor:
    """Over the classes other than the target, each times its weight."""
    rest_BV = d_BV.scatter(1, y_B1, 0.0)[:, :columns]
    return (rest_BV if class_weights_V is None else rest_BV * class_weights_V).sum(1)


def exp_difference(a: Tensor, b: Tensor) -> Tensor:
    """exp(a - b) with the rounding error of the difference put back (TwoDiff).

    At a - b = -50 that error alone would be 2e-6, four times the bound of row A4.
    """
    d = a - b
    back = d - a
    error = (a - (d - back)) - (b + back)
    # A difference that overflows has no error to put back.
    return torch.exp(d) * torch.where(d == -torch.inf, 1.0, 1.0 + error)


def below(rest: RestStats, m: Tensor) -> Tensor:
    """How far the rest's own maximum is below that of all; never so far that a product with it
    overflows before it meets its factor of 0, as classes that are masked with finfo.min did."""
    return torch.where(rest.ones == 0, 0.0, (rest.m - m).clamp(min=FLOOR))


def token_stats(z_y: Tensor, rest: RestStats, vocab_size: int, labelled: Labelled) -> TokenStats:
    """Step 5, on vectors of one entry per token."""
    m_rest = torch.where(rest.ones == 0, -torch.inf, rest.m)
    m = torch.maximum(z_y, m_rest)
    scale = torch.where(rest.ones == 0, 0.0, exp_difference(rest.m, m))
    r = scale * (rest.ones + rest.s)
    t = torch.exp(z_y - m)
    total = r + t
    # A maximum that is not finite leaves nothing to compare: NaN, as log_softmax has it. A row of
    # -inf throughout must not look like a label that has all of the probability.
    top = (z_y == m) & ~torch.isinf(m)
    # S without the 1 of its largest term, which would round a small remainder away (row A3).
    above_one = torch.where(top, r, (rest.ones - 1.0) + rest.s + t)
    log_total = torch.where(above_one < 1.0, torch.log1p(above_one), torch.log(total))
    logprob = torch.where(top, -log_total, (z_y - m) - log_total)
    lse = torch.where(torch.isinf(m), m, m + log_total)
    p_y, p_rest = t / total, r / total
    entropy, mean_logp = torch.zeros_like(lse), None
    if rest.sum_ed is not None:
        rest_part = scale * (rest.sum_ed + below(rest, m) * (rest.ones + rest.s))
        own_part = torch.where(t == 0, 0.0, t * (z_y - m))
        entropy = log_total - (rest_part + own_part) / total
    if rest.sum_d is not None:
        others = labelled.total - labelled.weight
        own = labelled.weight * logprob
        mean_logp = (rest.sum_d + others * (rest.m - lse) + own) / vocab_size
    predicted = None
    if rest.top is not None:
        target = labelled.target.to(lse.dtype)
        predicted = torch.where(z_y == m_rest, torch.minimum(target, rest.top), rest.top)
        predicted = torch.where(z_y > m_rest, target, predicted)
    correct = (z_y > m_rest).to(lse.dtype)
    return TokenStats(lse, logprob, p_y, p_rest, entropy, mean_logp, correct, predicted)
