"""Softmax statistics per token: step 5 of `xentlib.nll`, on vectors of one entry per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xentlib.torch.core.kernels import RestStats

__all__ = [
    "FLOOR",
    "Labelled",
    "TokenStats",
    "below",
    "exp_difference",
    "joined",
    "relative_to",
    "token_stats",
]

# exp of this is 0 in float64 too: stands for -inf where a product with 0 must stay 0.
FLOOR = -1e4


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


def relative_to(m: Tensor, rest: RestStats, weights: Tensor | float) -> RestStats:
    """Statistics of some columns, as terms of the sums that have `m`, no smaller, for maximum.

    `weights` is that of the columns, for label smoothing: their number without any.
    """
    none = rest.ones == 0
    top = torch.where(none, -torch.inf, rest.m) == m
    scale = torch.where(none, 0.0, exp_difference(rest.m, m))
    total = rest.ones + rest.s
    first = None
    if rest.top is not None:
        first = torch.where(top & ~none, rest.top, torch.inf)
    return RestStats(
        m,
        torch.where(top, rest.ones, 0.0),
        torch.where(top, rest.s, scale * total),
        None if rest.sum_ed is None else scale * (rest.sum_ed + below(rest, m) * total),
        None if rest.sum_d is None else rest.sum_d + weights * (rest.m - m),
        first,
    )


def joined(
    a: RestStats, a_weights: Tensor | float, b: RestStats, b_weights: Tensor | float
) -> RestStats:
    """Of the columns of both."""
    m = torch.maximum(*(torch.where(x.ones == 0, -torch.inf, x.m) for x in (a, b)))
    m = torch.where(m == -torch.inf, 0.0, m)
    a, b = relative_to(m, a, a_weights), relative_to(m, b, b_weights)

    def added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        return None if x is None or y is None else x + y

    return RestStats(
        m,
        a.ones + b.ones,
        a.s + b.s,
        added(a.sum_ed, b.sum_ed),
        added(a.sum_d, b.sum_d),
        None if a.top is None or b.top is None else torch.minimum(a.top, b.top),
    )


def token_stats(z_y: Tensor, rest: RestStats, vocab_size: int, labelled: Labelled) -> TokenStats:
    """Step 5, from the target's logit and the statistics of the rest."""
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
