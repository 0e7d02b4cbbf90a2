"""Log-probabilities in float64: every value and gradient of `chunked_logprobs` in closed form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xentlib.reference.gradients import gradients_of
from xentlib.reference.softmax import Float64, Softmax, f64


class LogprobReference(NamedTuple):
    """Per-token values and the gradients of sum(g * value) in float64; names as in NLLReference."""

    logprobs: Float64
    entropy: Float64
    lse: Float64
    correct: NDArray[np.bool_]
    d_hidden: Float64
    d_weight: Float64
    d_bias: Float64
    bound_hidden: Float64
    bound_weight: Float64
    bound_bias: Float64
    magnitude_hidden: Float64
    magnitude_weight: Float64
    magnitude_bias: Float64
    ids_logprobs: Float64 | None = None


def logprobs_reference(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    where: Any = None,
    kept: Any = None,
    ids: Any = None,
    ignore_index: int = -100,
    logit_scale: Any = 1.0,
    softcap: float | None = None,
    temperature: Any = 1.0,
    d_logprobs: Any = 0.0,
    d_entropy: Any = 0.0,
    d_lse: Any = 0.0,
    d_ids_logprobs: Any = None,
    label_smoothing: float = 0.0,
    dz_dtype: str = "float64",
    weight_layout: str = "VH",
) -> LogprobReference:
    """Per-token outputs in float64 from NumPy arrays; arguments as in `chunked_logprobs`.

    The bound on the error of the entropy's gradient, p (log p + entropy) times its upstream
    gradient, follows the errors of p, of z - lse and of the entropy itself:

        eH = E_p[(A + E_p[A] + |z - lse| + |lse| + 2) (|z - lse| + 1)] + log S + entropy

    Args:
        d_logprobs: upstream gradient of the log-probabilities, a number or one for each token.
        d_entropy: the same of the entropies.
        d_lse: the same of the log-sum-exps.
        d_ids_logprobs: [..., K] of the log-probabilities of `ids`, or None.
        label_smoothing: of `vocab_parallel_logprobs`.
        dz_dtype: round dz once to this dtype before the gradient GEMMs (rounding point 5).
    """
    s = Softmax(
        hidden, weight, labels, bias, where, ignore_index,
        logit_scale, softcap, temperature, weight_layout, kept,
    )  # fmt: skip
    rows, y_N = np.arange(s.z.shape[0]), s.onehot.argmax(axis=1)

    def upstream(g: Any) -> Float64:
        flat = np.broadcast_to(f64(g), s.leading).reshape(-1)
        return np.where(s.valid, flat, 0.0)[:, None]

    g_logprob, g_entropy, g_lse = upstream(d_logprobs), upstream(d_entropy), upstream(d_lse)
    with np.errstate(invalid="ignore"):
        log_p = np.where(s.p > 0, s.z - s.lse[:, None], 0.0)
    above = log_p + s.entropy[:, None]
    dz = s.p * ((g_lse - g_logprob) - g_entropy * above)
    p_y = s.p[rows, y_N]
    dz[rows, y_N] = g_logprob[:, 0] * s.p_rest + p_y * (
        g_lse[:, 0] - g_entropy[:, 0] * above[rows, y_N]
    )
    logprob, uniform = s.logprob, label_smoothing / s.z.shape[1]
    if label_smoothing:
        with np.errstate(invalid="ignore"):
            smooth = (s.z - s.lse[:, None]).mean(axis=1)
        logprob = (1 - label_smoothing) * logprob + label_smoothing * smooth
        dz += g_logprob * uniform
        dz[rows, y_N] -= g_logprob[:, 0] * label_smoothing
    step = s.a + s.expected_a + s.distance + np.abs(s.lse)[:, None] + 2
    entropy_error = (s.p * step * (s.distance + 1)).sum(axis=1) + np.abs(s.log_total) + s.entropy
    bz = (np.abs(g_logprob) + np.abs(g_lse)) * s.p_error + np.abs(g_entropy) * s.p * (
        np.abs(above) * step + step + entropy_error[:, None]
    )
    bz += 2 * np.abs(g_logprob) * (uniform + label_smoothing * s.onehot)
    factor = sum(np.abs(g)[:, 0] for g in (g_logprob, g_entropy, g_lse))
    ids_logprobs = None
    if ids is not None:
        ids_NK = np.asarray(ids).reshape(len(s.valid), -1).astype(np.int64)
        there = (ids_NK >= 0) & s.valid[:, None]
        ids_NK = np.where(there, ids_NK, 0)
        values = np.where(there, np.take_along_axis(s.log_p, ids_NK, 1), 0.0)
        ids_logprobs = values.reshape(*s.leading, -1)
        if d_ids_logprobs is not None:
            g_NK = np.where(there, f64(d_ids_logprobs).reshape(ids_NK.shape), 0.0)
            g_NK = np.where(np.isneginf(values), 0.0, g_NK)
            for k, g_N1 in enumerate(g_NK.T[..., None]):
                is_id = np.arange(s.z.shape[1]) == ids_NK[:, k, None]
                dz += g_N1 * (is_id - s.p)
                bz += np.abs(g_N1) * (s.p * step + 2 * np.abs(is_id - s.p))
            factor = factor + np.abs(g_NK).sum(axis=1)
    gradients = gradients_of(s, dz, bz, dz_dtype, 1.0, np.asarray(factor))
    return LogprobReference(
        logprobs=s.per_token(logprob),
        entropy=s.per_token(s.entropy),
        lse=s.per_token(s.lse),
        correct=s.correct.reshape(s.leading),
        **gradients,
        ids_logprobs=ids_logprobs,
    )
