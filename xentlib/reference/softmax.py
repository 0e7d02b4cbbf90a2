"""What both heads share, in float64: logits, their softmax, and the running error bound of p."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


class Softmax(NamedTuple):
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
    a: Float64  # A of the package's docstring
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
        correct: NDArray[np.bool_] = (self.z_y > rest) & self.valid
        return correct

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
        error: Float64 = self.p * steps + 2 * np.abs(self.p - self.onehot)
        return error

    def per_token(self, value: Float64) -> Float64:
        return np.where(self.valid, value, 0.0).reshape(self.leading)


def f64(x: Any) -> Float64:
    return np.asarray(x).astype(np.float64, copy=False)


def softmax(
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
) -> Softmax:
    leading = np.asarray(labels).shape
    hidden = f64(hidden)
    x_NH = hidden.reshape(-1, hidden.shape[-1])
    w_VH = f64(weight) if weight_layout == "VH" else f64(weight).T
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

    scale = f64(logit_scale)
    temp_N = np.broadcast_to(f64(temperature).reshape(-1), (num_tokens,))[:, None]
    b_V = np.zeros(vocab_size) if bias is None else f64(bias)
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
    return Softmax(
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
