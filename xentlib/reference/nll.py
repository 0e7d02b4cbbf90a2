"""The loss in float64: every value and gradient of `chunked_nll` in closed form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xentlib.reference.gradients import gradients_of
from xentlib.reference.softmax import Float64, Softmax, f64


class NLLReference(NamedTuple):
    """Values and gradients in float64. `bound_*` are the running error bounds in units of u;
    `*magnitude*` are sums of the absolute terms, the scale on which a sum is cancelled; `margin` is
    by how much the largest logit is larger than any other, in units of the larger one.
    `bound_logprobs` and `bound_tokens` are of each log-probability and of each term of the loss."""

    loss: Float64
    num_tokens: int
    weight_sum: Float64
    z_loss: Float64
    logprobs: Float64
    entropy: Float64
    lse: Float64
    correct: NDArray[np.bool_]
    predicted: NDArray[np.int64]
    margin: Float64
    d_hidden: Float64
    d_weight: Float64
    d_bias: Float64
    loss_magnitude: Float64
    bound_logprobs: Float64
    bound_tokens: Float64
    bound_hidden: Float64
    bound_weight: Float64
    bound_bias: Float64
    magnitude_hidden: Float64
    magnitude_weight: Float64
    magnitude_bias: Float64


def divided_by(count: int, weight_sum: float, reduction: str, denominator: Any) -> float:
    """The sum over tokens is divided by this: by 1 where it is of nothing."""
    divisor = weight_sum if reduction == "mean" else 1.0
    if denominator is not None:
        divisor = float(f64(denominator))
    return 1.0 if count == 0 or weight_sum == divisor == 0 else divisor


def nll_reference(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    where: Any = None,
    token_weights: Any = None,
    class_weights: Any = None,
    ignore_index: int = -100,
    logit_scale: Any = 1.0,
    softcap: float | None = None,
    temperature: Any = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    denominator: Any = None,
    upstream: float = 1.0,
    recompute: bool = False,
    dz_dtype: str = "float64",
    weight_layout: str = "VH",
    exact_logits: bool = False,
) -> NLLReference:
    """Loss head in float64 from NumPy arrays; arguments as in `chunked_nll`.

    Args:
        upstream: gradient of whatever follows with respect to the loss.
        recompute: the upstream gradient is in dz before it is rounded, and not behind the GEMMs.
        dz_dtype: round dz once to this dtype before the gradient GEMMs (rounding point 5), so that
            row A7 measures everything but that rounding.
        exact_logits: what the head multiplies is exact, as of logits that are given: A is 0.
    """
    s = Softmax(
        hidden, weight, labels, bias, where, ignore_index,
        logit_scale, softcap, temperature, weight_layout,
    )  # fmt: skip
    if exact_logits:
        s.a, s.expected_a = np.zeros_like(s.a), np.zeros_like(s.expected_a)
    num_tokens, vocab_size = s.z.shape
    rows, y_N = np.arange(num_tokens), s.onehot.argmax(axis=1)
    c_V = np.ones(vocab_size) if class_weights is None else f64(class_weights)
    c_y, total = c_V[y_N], c_V.sum()
    smooth = np.zeros(num_tokens)
    if label_smoothing:
        with np.errstate(invalid="ignore"):
            smooth = ((s.z - s.lse[:, None]) * c_V).mean(axis=1)
    nll = -(1 - label_smoothing) * c_y * s.logprob - label_smoothing * smooth
    z_term = z_loss * s.lse * s.lse
    weights = np.ones(num_tokens) if token_weights is None else f64(token_weights).reshape(-1)
    weights = np.where(s.valid, weights, 0.0)
    count = int(s.valid.sum())
    weight_sum = (weights * c_y).sum()
    divisor = divided_by(count, float(weight_sum), reduction, denominator)

    def masked(value: Float64) -> Float64:
        return np.where(s.valid, value, 0.0)

    terms = masked(weights * (nll + z_term)) / divisor
    uniform = label_smoothing / vocab_size
    slope = (1 - label_smoothing) * c_y + uniform * total + 2 * z_loss * s.lse
    dz = s.p * slope[:, None] - uniform * c_V
    dz[rows, y_N] = 2 * z_loss * s.lse + uniform * (total - c_y) - slope * s.p_rest
    slope_error = 2 * z_loss * (s.expected_a[:, 0] + np.abs(s.lse))
    if class_weights is not None:
        slope_error = slope_error + 3 * np.abs(slope)
    bz = np.abs(slope)[:, None] * s.p_error + s.p * slope_error[:, None] + 2 * uniform * c_V
    factor = (weights / divisor * upstream)[:, None]
    behind = 1.0 if recompute else upstream
    gradients = gradients_of(s, factor * dz, np.abs(factor) * bz, dz_dtype, behind, factor[:, 0])
    # What the errors of z_y and of lse move, with two roundings.
    moved_N = s.a[rows, y_N] + s.expected_a[:, 0] + np.abs(s.logprob) + np.abs(s.log_total) + 2
    bound_N = np.abs(slope) * moved_N + np.abs(z_term)
    return NLLReference(
        loss=np.asarray(terms.sum()),
        num_tokens=count,
        weight_sum=np.asarray(weight_sum),
        z_loss=np.asarray((masked(weights * z_term) / divisor).sum()),
        logprobs=s.per_token(s.logprob),
        entropy=s.per_token(s.entropy),
        lse=s.per_token(s.lse),
        correct=s.correct.reshape(s.leading),
        predicted=s.predicted,
        margin=s.margin,
        loss_magnitude=np.asarray(np.abs(terms).sum()),
        bound_logprobs=s.per_token(moved_N),
        bound_tokens=s.per_token(np.abs(weights / divisor) * bound_N),
        **gradients,
    )
