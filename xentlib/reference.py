"""The float64 oracle: every value and gradient of the loss head in closed form, and how far a
correct float32 implementation may stray from it.

Shapes: N tokens, V vocabulary, H hidden width. Everything is held at once, so keep N * V small.

The running error bound, in units of u = 2^-24, is

    A    = |X||W|^T + |bias|, carried through scale, softcap and temperature
    Bz   = f * [p (A + E_p[A] + |z - lse| + |lse| + 2) + 2 |p - y|]
    B_dX = (Bz + |dz|) |W|     B_dW = (Bz + |dz|)^T |X|     B_db = sum over tokens of Bz + |dz|

f the token's factor. It follows each rounding once; it grows with the data, not with luck.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xentlib.ulp import round_to

__all__ = ["NLLReference", "nll_reference"]

Float64 = NDArray[np.float64]


class NLLReference(NamedTuple):
    """Values and gradients in float64. `bound_*` are the running error bounds in units of u;
    `*magnitude*` are sums of the absolute terms, the scale on which a sum is cancelled."""

    loss: Float64
    num_tokens: int
    weight_sum: Float64
    z_loss: Float64
    logprobs: Float64
    entropy: Float64
    lse: Float64
    correct: NDArray[np.bool_]
    d_hidden: Float64
    d_weight: Float64
    d_bias: Float64
    loss_magnitude: Float64
    bound_hidden: Float64
    bound_weight: Float64
    bound_bias: Float64
    magnitude_hidden: Float64
    magnitude_weight: Float64
    magnitude_bias: Float64


def _f64(x: Any) -> Float64:
    return np.asarray(x).astype(np.float64)


def nll_reference(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    where: Any = None,
    token_weights: Any = None,
    ignore_index: int = -100,
    logit_scale: Any = 1.0,
    softcap: float | None = None,
    temperature: Any = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    denominator: Any = None,
    upstream: float = 1.0,
    dz_dtype: str = "float64",
    weight_layout: str = "VH",
) -> NLLReference:
    """Loss head in float64 from NumPy arrays; arguments as in `chunked_nll`.

    Args:
        upstream: gradient of whatever follows with respect to the loss.
        dz_dtype: round dz once to this dtype before the gradient GEMMs (rounding point 5), so that
            row A7 measures everything but that rounding.
    """
    leading = np.asarray(labels).shape
    hidden = _f64(hidden)
    x_NH = hidden.reshape(-1, hidden.shape[-1])
    w_VH = _f64(weight) if weight_layout == "VH" else _f64(weight).T
    y_N = np.asarray(labels).reshape(-1).astype(np.int64)
    num_tokens, vocab_size = x_NH.shape[0], w_VH.shape[0]
    valid = y_N != ignore_index
    if where is not None:
        valid &= np.asarray(where).reshape(-1)
    # Not valid: taken out before any arithmetic.
    x_NH = np.where(valid[:, None], x_NH, 0.0)
    y_N = np.where(valid, y_N, 0)
    rows = np.arange(num_tokens)
    onehot = np.zeros((num_tokens, vocab_size))
    onehot[rows, y_N] = 1.0

    scale = _f64(logit_scale)
    temp_N = np.broadcast_to(_f64(temperature).reshape(-1), (num_tokens,))[:, None]
    b_V = np.zeros(vocab_size) if bias is None else _f64(bias)
    x = x_NH @ w_VH.T + b_V
    a = np.abs(x_NH) @ np.abs(w_VH).T + np.abs(np.where(np.isfinite(b_V), b_V, 0.0))
    u = scale * x
    a = np.abs(scale) * a + (np.abs(u) if scale != 1 else 0.0)
    jacobian = np.ones_like(u)
    jacobian_error = np.zeros_like(u)
    if softcap is not None:
        t = np.tanh(u / softcap)
        jacobian = 1 - t * t
        jacobian_error = 2 * np.abs(t) * (jacobian * a / softcap + 2 * np.abs(t)) + 1
        a = jacobian * a + 3 * softcap * np.abs(t)
        u = softcap * t
    z = u / temp_N
    a = np.where(np.isfinite(z), a / temp_N + (np.abs(z) if np.any(temp_N != 1) else 0.0), 0.0)

    z_y = z[rows, y_N]
    m = z.max(axis=1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        d = z - m[:, None]
        e = np.exp(d)
        r = np.where(onehot == 1, 0.0, e).sum(axis=1)
        e_y = e[rows, y_N]
        total = r + e_y
        log_total = np.where(z_y == m, np.log1p(r), np.log(total))
        lse = m + log_total
        logprob = np.where(z_y == m, -log_total, (z_y - m) - log_total)
        p = e / total[:, None]
        entropy = log_total - np.where(p == 0, 0.0, p * d).sum(axis=1)
        p_rest = r / total
        smooth = (z - lse[:, None]).mean(axis=1) if label_smoothing else np.zeros(num_tokens)
    nll = -(1 - label_smoothing) * logprob - label_smoothing * smooth
    z_term = z_loss * lse * lse
    weights = np.ones(num_tokens) if token_weights is None else _f64(token_weights).reshape(-1)
    weights = np.where(valid, weights, 0.0)
    count = int(valid.sum())
    weight_sum = weights.sum()
    if denominator is not None:
        divisor = float(_f64(denominator))
    else:
        divisor = float(weight_sum) if reduction == "mean" else 1.0
    if count == 0 or (weight_sum == 0 and divisor == 0):
        divisor = 1.0

    def masked(value: Float64) -> Float64:
        return np.where(valid, value, 0.0)

    terms = masked(weights * (nll + z_term)) / divisor
    factor = weights / divisor * upstream
    slope = 1 + 2 * z_loss * lse
    uniform = label_smoothing / vocab_size
    dz = p * slope[:, None] - uniform
    dz[rows, y_N] = 2 * z_loss * lse + label_smoothing - uniform - slope * p_rest
    expected_a = (p * a).sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        distance = np.where(p > 0, np.abs(z - lse[:, None]), 0.0)
    slope_error = (2 * z_loss * (expected_a[:, 0] + np.abs(lse)))[:, None]
    bz = np.abs(slope)[:, None] * (
        p * (a + expected_a + distance + np.abs(lse)[:, None] + 2) + 2 * np.abs(p - onehot)
    )
    bz = bz + p * slope_error + 2 * uniform
    # Back through softcap, scale and temperature.
    outer = factor[:, None] * scale / temp_N
    bz = np.abs(outer) * (bz * jacobian + np.abs(dz) * jacobian_error)
    dz = np.where(valid[:, None], dz * jacobian * outer, 0.0)
    bz = np.where(valid[:, None], bz, 0.0)
    dz_gemm = dz
    if dz_dtype != "float64":
        # The upstream gradient multiplies after the GEMMs, so it is no part of what is rounded.
        dz_gemm = round_to(dz / upstream, dz_dtype) * upstream
    total_bz = bz + np.abs(dz)
    d_weight, bound_weight = dz_gemm.T @ x_NH, total_bz.T @ np.abs(x_NH)
    magnitude_weight = np.abs(dz_gemm).T @ np.abs(x_NH)
    turned = weight_layout == "HV"
    return NLLReference(
        loss=np.asarray(terms.sum()),
        num_tokens=count,
        weight_sum=np.asarray(weight_sum),
        z_loss=np.asarray((masked(weights * z_term) / divisor).sum()),
        logprobs=masked(logprob).reshape(leading),
        entropy=masked(entropy).reshape(leading),
        lse=masked(lse).reshape(leading),
        correct=((z_y > np.where(onehot == 1, -np.inf, z).max(axis=1)) & valid).reshape(leading),
        d_hidden=(dz_gemm @ w_VH).reshape(hidden.shape),
        d_weight=d_weight.T if turned else d_weight,
        d_bias=dz.sum(axis=0),
        loss_magnitude=np.asarray(np.abs(terms).sum()),
        bound_hidden=(total_bz @ np.abs(w_VH)).reshape(hidden.shape),
        bound_weight=bound_weight.T if turned else bound_weight,
        bound_bias=total_bz.sum(axis=0),
        magnitude_hidden=(np.abs(dz_gemm) @ np.abs(w_VH)).reshape(hidden.shape),
        magnitude_weight=magnitude_weight.T if turned else magnitude_weight,
        magnitude_bias=np.abs(dz).sum(axis=0),
    )
