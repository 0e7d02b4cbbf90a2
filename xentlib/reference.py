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

__all__ = ["LogprobReference", "NLLReference", "logprobs_reference", "nll_reference"]

Float64 = NDArray[np.float64]


class NLLReference(NamedTuple):
    """Values and gradients in float64. `bound_*` are the running error bounds in units of u;
    `*magnitude*` are sums of the absolute terms, the scale on which a sum is cancelled; `margin` is
    by how much the largest logit is larger than any other, in units of the larger one."""

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
    bound_hidden: Float64
    bound_weight: Float64
    bound_bias: Float64
    magnitude_hidden: Float64
    magnitude_weight: Float64
    magnitude_bias: Float64


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


class _Softmax(NamedTuple):
    """What both heads share: [N, V] logits and their softmax, [N] values, and error bounds."""

    leading: tuple[int, ...]
    hidden: Any
    x_NH: Float64
    w_VH: Float64
    turned: bool
    valid: NDArray[np.bool_]
    onehot: Float64
    outer: Float64  # [N, 1] or [1, 1]: scale / temperature
    jacobian: Float64
    jacobian_error: Float64
    z: Float64
    z_y: Float64
    a: Float64  # A of the module's docstring
    expected_a: Float64  # E_p[A], [N, 1]
    distance: Float64  # |z - lse|
    p: Float64
    p_rest: Float64
    log_total: Float64
    lse: Float64
    logprob: Float64
    entropy: Float64

    @property
    def correct(self) -> NDArray[np.bool_]:
        rest = np.where(self.onehot == 1, -np.inf, self.z).max(axis=1)
        found: NDArray[np.bool_] = (self.z_y > rest) & self.valid
        return found

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The first of the largest, -1 for tokens that are not valid."""
        return np.where(self.valid, self.z.argmax(axis=1), -1).reshape(self.leading)

    @property
    def margin(self) -> Float64:
        if self.z.shape[1] < 2:
            return np.full(self.leading, np.inf)
        second, first = np.partition(self.z, -2, axis=1)[:, -2:].T
        with np.errstate(invalid="ignore"):
            size = np.maximum(np.maximum(np.abs(first), np.abs(second)), 1e-300)
            gap: Float64 = (first - second) / size
        return gap.reshape(self.leading)

    @property
    def p_error(self) -> Float64:
        """Bound on the error of p, and of p - y where it is -(1 - p_y)."""
        steps = self.a + self.expected_a + self.distance + np.abs(self.lse)[:, None] + 2
        found: Float64 = self.p * steps + 2 * np.abs(self.p - self.onehot)
        return found

    def per_token(self, value: Float64) -> Float64:
        return np.where(self.valid, value, 0.0).reshape(self.leading)


class _Gradients(NamedTuple):
    d_hidden: Float64
    d_weight: Float64
    d_bias: Float64
    bound_hidden: Float64
    bound_weight: Float64
    bound_bias: Float64
    magnitude_hidden: Float64
    magnitude_weight: Float64
    magnitude_bias: Float64


def _f64(x: Any) -> Float64:
    return np.asarray(x).astype(np.float64)


def _softmax(
    hidden: Any,
    weight: Any,
    labels: Any,
    bias: Any,
    where: Any,
    ignore_index: int,
    logit_scale: Any,
    softcap: float | None,
    temperature: Any,
    weight_layout: str,
) -> _Softmax:
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
        inner = np.abs(u / softcap)
        t = np.tanh(u / softcap)
        # sech^2; 1 - t^2 cancels where the cap saturates. Relative error: 2 |t| times that of the
        # argument, which is divided once, and those of exp and four operations.
        e = np.exp(-2 * inner)
        jacobian = 4 * e / (1 + e) ** 2
        jacobian_error = jacobian * (2 * np.abs(t) * (a / softcap + inner) + 6)
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
    expected_a = (p * a).sum(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        distance = np.where(p > 0, np.abs(z - lse[:, None]), 0.0)
    return _Softmax(
        leading=leading,
        hidden=hidden,
        x_NH=x_NH,
        w_VH=w_VH,
        turned=weight_layout == "HV",
        valid=valid,
        onehot=onehot,
        outer=scale / temp_N,
        jacobian=jacobian,
        jacobian_error=jacobian_error,
        z=z,
        z_y=z_y,
        a=a,
        expected_a=expected_a,
        distance=distance,
        p=p,
        p_rest=p_rest,
        log_total=log_total,
        lse=lse,
        logprob=logprob,
        entropy=entropy,
    )


# float16 dz carries a power of two: the largest factor of a token is put into [2^10, 2^11).
FP16_EXPONENT = 11


def _gradients(
    s: _Softmax, dz: Float64, bz: Float64, dz_dtype: str, upstream: float, factor: Float64
) -> _Gradients:
    """Back through softcap, scale and temperature, and through the two GEMMs.

    `factor` [N] is what multiplies each token, the upstream gradient included.
    """
    bz = np.abs(s.outer) * (bz * s.jacobian + np.abs(dz) * s.jacobian_error)
    dz = np.where(s.valid[:, None], dz * s.jacobian * s.outer, 0.0)
    bz = np.where(s.valid[:, None], bz, 0.0)
    dz_gemm = dz
    if dz_dtype != "float64":
        # The upstream gradient multiplies after the GEMMs, so it is no part of what is rounded.
        power = 1.0
        if dz_dtype == "float16":
            largest = np.abs(np.where(s.valid, factor / upstream, 0.0)).max(initial=0.0)
            power = float(np.ldexp(1.0, FP16_EXPONENT - int(np.frexp(largest)[1])))
        dz_gemm = round_to(dz / upstream * power, dz_dtype) / power * upstream
    total_bz = bz + np.abs(dz)
    d_weight, bound_weight = dz_gemm.T @ s.x_NH, total_bz.T @ np.abs(s.x_NH)
    magnitude_weight = np.abs(dz_gemm).T @ np.abs(s.x_NH)
    return _Gradients(
        d_hidden=(dz_gemm @ s.w_VH).reshape(s.hidden.shape),
        d_weight=d_weight.T if s.turned else d_weight,
        d_bias=dz.sum(axis=0),
        bound_hidden=(total_bz @ np.abs(s.w_VH)).reshape(s.hidden.shape),
        bound_weight=bound_weight.T if s.turned else bound_weight,
        bound_bias=total_bz.sum(axis=0),
        magnitude_hidden=(np.abs(dz_gemm) @ np.abs(s.w_VH)).reshape(s.hidden.shape),
        magnitude_weight=magnitude_weight.T if s.turned else magnitude_weight,
        magnitude_bias=np.abs(dz).sum(axis=0),
    )


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
    dz_dtype: str = "float64",
    weight_layout: str = "VH",
) -> NLLReference:
    """Loss head in float64 from NumPy arrays; arguments as in `chunked_nll`.

    Args:
        upstream: gradient of whatever follows with respect to the loss.
        dz_dtype: round dz once to this dtype before the gradient GEMMs (rounding point 5), so that
            row A7 measures everything but that rounding.
    """
    s = _softmax(
        hidden, weight, labels, bias, where, ignore_index,
        logit_scale, softcap, temperature, weight_layout,
    )  # fmt: skip
    num_tokens, vocab_size = s.z.shape
    rows, y_N = np.arange(num_tokens), s.onehot.argmax(axis=1)
    c_V = np.ones(vocab_size) if class_weights is None else _f64(class_weights)
    c_y, total = c_V[y_N], c_V.sum()
    smooth = np.zeros(num_tokens)
    if label_smoothing:
        with np.errstate(invalid="ignore"):
            smooth = ((s.z - s.lse[:, None]) * c_V).mean(axis=1)
    nll = -(1 - label_smoothing) * c_y * s.logprob - label_smoothing * smooth
    z_term = z_loss * s.lse * s.lse
    weights = np.ones(num_tokens) if token_weights is None else _f64(token_weights).reshape(-1)
    weights = np.where(s.valid, weights, 0.0)
    count = int(s.valid.sum())
    weight_sum = (weights * c_y).sum()
    if denominator is not None:
        divisor = float(_f64(denominator))
    else:
        divisor = float(weight_sum) if reduction == "mean" else 1.0
    if count == 0 or (weight_sum == 0 and divisor == 0):
        divisor = 1.0

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
    gradients = _gradients(s, factor * dz, np.abs(factor) * bz, dz_dtype, upstream, factor[:, 0])
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
        **gradients._asdict(),
    )


def logprobs_reference(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    where: Any = None,
    ignore_index: int = -100,
    logit_scale: Any = 1.0,
    softcap: float | None = None,
    temperature: Any = 1.0,
    d_logprobs: Any = 0.0,
    d_entropy: Any = 0.0,
    d_lse: Any = 0.0,
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
        label_smoothing: of `vocab_parallel_logprobs`.
        dz_dtype: round dz once to this dtype before the gradient GEMMs (rounding point 5).
    """
    s = _softmax(
        hidden, weight, labels, bias, where, ignore_index,
        logit_scale, softcap, temperature, weight_layout,
    )  # fmt: skip
    rows, y_N = np.arange(s.z.shape[0]), s.onehot.argmax(axis=1)

    def upstream(g: Any) -> Float64:
        found = np.broadcast_to(_f64(g), s.leading).reshape(-1)
        return np.where(s.valid, found, 0.0)[:, None]

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
    gradients = _gradients(s, dz, bz, dz_dtype, 1.0, np.asarray(factor))
    return LogprobReference(
        logprobs=s.per_token(logprob),
        entropy=s.per_token(s.entropy),
        lse=s.per_token(s.lse),
        correct=s.correct.reshape(s.leading),
        **gradients._asdict(),
    )
