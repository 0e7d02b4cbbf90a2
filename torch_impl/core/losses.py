"""What a loss makes of a token's statistics: its values, and the coefficients of its dz.

Shapes: N tokens, V vocabulary, B rows of a block of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from xentlib.torch.core.kernels import Coefficients
from xentlib.torch.core.softmax import Labelled, TokenStats

__all__ = ["Loss", "coefficients", "values_of"]


class Loss(NamedTuple):
    """What the operator of a loss takes beside a `HeadCall`."""

    token_weights: Tensor | None
    class_weights: Tensor | None
    denominator: Tensor | None
    label_smoothing: float
    z_loss: float
    mean: bool
    entropy: bool
    predicted: bool
    output_dtype: torch.dtype
    needs: list[bool]  # gradients of hidden, weight, bias


def values_of(stats: TokenStats, labelled: Labelled, loss: Loss) -> Tensor:
    """[7, tokens]: loss, its z-loss part, logprob, entropy, lse, correct, predicted."""
    total, z_term = token_loss(stats, labelled, loss)
    predicted = torch.zeros_like(total) if stats.predicted is None else stats.predicted
    values = (total, z_term, stats.logprob, stats.entropy, stats.lse, stats.correct, predicted)
    return torch.stack(values)


def token_loss(stats: TokenStats, labelled: Labelled, loss: Loss) -> tuple[Tensor, Tensor]:
    """Per token: the loss, and the part of it that z-loss contributes."""
    nll = -stats.logprob
    if loss.class_weights is not None:
        nll = nll * labelled.weight
    if stats.mean_logp is not None:
        nll = (1.0 - loss.label_smoothing) * nll - loss.label_smoothing * stats.mean_logp
    z_term = torch.zeros_like(nll)
    if loss.z_loss:
        z_term = loss.z_loss * stats.lse * stats.lse
    return nll + z_term, z_term


def coefficients(
    stats: TokenStats, factor_B: Tensor, labelled: Labelled, loss: Loss, vocab_size: int
) -> Coefficients:
    """Step 6, per token: of dz times the factor."""
    eps, uniform = loss.label_smoothing, loss.label_smoothing / vocab_size
    extra = torch.zeros_like(stats.lse)
    if loss.z_loss:
        extra = 2.0 * loss.z_loss * stats.lse
    slope: Tensor = 1.0 + extra
    left: Tensor | float = eps - uniform
    if loss.class_weights is not None:
        slope, left = (1.0 - eps) * labelled.weight + extra, 0.0
        if uniform:  # 0 times a sum with inf is NaN: 1 / count of a class that is not there
            slope = (1.0 - eps) * labelled.weight + uniform * labelled.total + extra
            left = uniform * (labelled.total - labelled.weight)
    return Coefficients(
        alpha=factor_B * slope,
        beta=None,
        gamma=factor_B * uniform if uniform else None,
        # slope * p_y - (1 - eps) - eps / V with p_y = 1 - p_rest: exactly -p_rest without options.
        own=factor_B * (extra + left - slope * stats.p_rest),
    )
