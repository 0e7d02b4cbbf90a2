"""The loss of class probabilities in float64: every value and gradient in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np

from xentlib.reference.gradients import gradients_of
from xentlib.reference.nll import NLLReference, divided_by
from xentlib.reference.softmax import Float64, Softmax, f64


def soft_reference(
    hidden: Any,
    weight: Any,
    probs: Any,
    *,
    bias: Any = None,
    where: Any = None,
    token_weights: Any = None,
    class_weights: Any = None,
    logit_scale: Any = 1.0,
    softcap: float | None = None,
    temperature: Any = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    denominator: Any = None,
    upstream: Any = 1.0,
    dz_dtype: str = "float64",
    weight_layout: str = "VH",
    d_logprobs: Any = None,
) -> NLLReference:
    """From NumPy arrays; arguments as in `chunked_nll`, `probs` [..., V] in place of labels.

    Args:
        upstream: gradient of whatever follows with respect to the loss.
        dz_dtype: round dz once to this dtype before the gradient GEMMs (rounding point 5).
        d_logprobs: [...] gradient of each token's sum_v a_v log p_v, in place of a loss.
    """
    leading = np.shape(hidden)[:-1]
    s = Softmax(
        hidden, weight, np.zeros(leading, np.int64), bias, where, -100,
        logit_scale, softcap, temperature, weight_layout,
    )  # fmt: skip
    num_tokens, vocab_size = s.z.shape
    c_V = np.ones(vocab_size) if class_weights is None else f64(class_weights)
    q = np.where(s.valid[:, None], f64(probs).reshape(num_tokens, vocab_size), 0.0)
    a = c_V * ((1 - label_smoothing) * q + label_smoothing / vocab_size)
    log_p = s.log_p

    def summed(x: Float64, of: Float64) -> Float64:
        total: Float64 = np.where(x == 0, 0.0, x * of).sum(axis=1)
        return total

    logprob, nll, total = summed(q, log_p), -summed(a, log_p), a.sum(axis=1)
    z_term = z_loss * s.lse * s.lse
    weights = np.ones(num_tokens) if token_weights is None else f64(token_weights).reshape(-1)
    weights = np.where(s.valid, weights, 0.0)
    count, weight_sum = int(s.valid.sum()), weights.sum()
    divisor = divided_by(count, float(weight_sum), reduction, denominator)
    factor_N = weights / divisor * upstream
    if d_logprobs is not None:
        factor_N = np.where(s.valid, -f64(d_logprobs).reshape(-1), 0.0)

    def masked(value: Float64) -> Float64:
        return np.where(s.valid, value, 0.0)

    terms = masked(weights * (nll + z_term)) / divisor
    slope = total + 2 * z_loss * s.lse
    dz = s.p * slope[:, None] - a
    # A label's share of p is not known from the others: p is off at every class.
    steps = s.a + s.expected_a + s.distance + np.abs(s.log_total)[:, None] + 4
    bz = s.p * (np.abs(slope)[:, None] * steps + 2 * z_loss * s.expected_a) + 2 * a
    factor = factor_N[:, None]
    gradients = gradients_of(s, factor * dz, np.abs(factor) * bz, dz_dtype, upstream, factor[:, 0])
    # A label's share of dz goes through both products, and each term after it is rounded at its
    # size: n roundings add up to about sqrt(n) of them. The terms of a label that is a class are
    # added last. Products add in blocks of some hundred terms.
    for name, length in (("hidden", vocab_size), ("weight", count)):
        added = np.sqrt(min(length, 512)) * gradients[f"magnitude_{name}"]
        gradients[f"bound_{name}"] = gradients[f"bound_{name}"] + added
    moved = s.a + s.expected_a + np.abs(log_p) + np.abs(s.log_total)[:, None] + 4
    return NLLReference(
        loss=np.asarray(terms.sum()),
        num_tokens=count,
        weight_sum=np.asarray(weight_sum),
        z_loss=np.asarray((masked(weights * z_term) / divisor).sum()),
        logprobs=s.per_token(logprob),
        entropy=s.per_token(s.entropy),
        lse=s.per_token(s.lse),
        correct=s.correct.reshape(s.leading),
        predicted=s.predicted,
        margin=s.margin,
        loss_magnitude=np.asarray(np.abs(terms).sum()),
        bound_logprobs=s.per_token(summed(q, moved)),
        bound_tokens=s.per_token(np.abs(weights / divisor) * (summed(a, moved) + np.abs(z_term))),
        **gradients,
    )
