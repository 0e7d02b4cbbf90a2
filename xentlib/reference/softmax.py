"""What both heads share, in float64: logits, their softmax, and the running error bound of p."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def f64(x: Any) -> Float64:
    return np.asarray(x).astype(np.float64, copy=False)


class Softmax:
    """What both heads share: [N, V] logits and their softmax, [N] values, and error bounds."""

    def __init__(
        self,
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
        kept: Any = None,
    ) -> None:
        self.turned = weight_layout == "HV"
        self.leading: tuple[int, ...] = np.asarray(labels).shape
        self.hidden = f64(hidden)
        x_NH = self.hidden.reshape(-1, self.hidden.shape[-1])
        w_VH = self.w_VH = f64(weight).T if self.turned else f64(weight)
        y_N = np.asarray(labels).reshape(-1).astype(np.int64)
        num_tokens, vocab_size = x_NH.shape[0], w_VH.shape[0]
        valid = self.valid = y_N != ignore_index
        if where is not None:
            valid &= np.asarray(where).reshape(-1)
        # Not valid: taken out before any arithmetic.
        x_NH = self.x_NH = np.where(valid[:, None], x_NH, 0.0)
        y_N = np.where(valid, y_N, 0)
        rows = np.arange(num_tokens)
        onehot = self.onehot = np.zeros((num_tokens, vocab_size))
        onehot[rows, y_N] = 1.0

        scale = f64(logit_scale)
        temp_N = np.broadcast_to(f64(temperature).reshape(-1), (num_tokens,))[:, None]
        self.outer: Float64 = scale / temp_N  # [N, 1] or [1, 1]
        b_V = np.zeros(vocab_size) if bias is None else f64(bias)
        x = x_NH @ w_VH.T + b_V
        a = np.abs(x_NH) @ np.abs(w_VH).T + np.abs(np.where(np.isfinite(b_V), b_V, 0.0))
        u = scale * x
        a = np.abs(scale) * a + (np.abs(u) if scale != 1 else 0.0)
        self.jacobian = np.ones_like(u)
        self.jacobian_error = np.zeros_like(u)
        if softcap is not None:
            inner = np.abs(u / softcap)
            t = np.tanh(u / softcap)
            # sech^2; 1 - t^2 cancels where the cap saturates. Relative error: 2 |t| times that of
            # the argument, which is divided once, and those of exp and four operations.
            e = np.exp(-2 * inner)
            self.jacobian = 4 * e / (1 + e) ** 2
            self.jacobian_error = self.jacobian * (2 * np.abs(t) * (a / softcap + inner) + 6)
            a = self.jacobian * a + 3 * softcap * np.abs(t)
            u = softcap * t
        z: Float64 = u / temp_N
        if kept is not None:
            z = np.where(self.among(kept, vocab_size), z, -np.inf)
        a = np.where(np.isfinite(z), a / temp_N + (np.abs(z) if np.any(temp_N != 1) else 0.0), 0.0)

        z_y = z[rows, y_N]
        m = z.max(axis=1)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            d = z - m[:, None]
            e = np.exp(d)
            r = np.where(onehot == 1, 0.0, e).sum(axis=1)
            total = r + e[rows, y_N]
            log_total = np.where(z_y == m, np.log1p(r), np.log(total))
            lse = m + log_total
            self.logprob = np.where(z_y == m, -log_total, (z_y - m) - log_total)
            p = e / total[:, None]
            self.entropy: Float64 = log_total - np.where(p == 0, 0.0, p * d).sum(axis=1)
            self.p_rest: Float64 = r / total
        with np.errstate(invalid="ignore"):
            self.distance = np.where(p > 0, np.abs(z - lse[:, None]), 0.0)  # |z - lse|
        self.a: Float64 = a  # A of the package's docstring
        self.expected_a: Float64 = (p * a).sum(axis=1, keepdims=True)  # E_p[A], [N, 1]
        self.z, self.z_y, self.p, self.lse, self.log_total = z, z_y, p, lse, log_total

    def among(self, kept: Any, vocab_size: int) -> NDArray[np.bool_]:
        """[N, V] which classes count: those of `kept`, all in a row that has none."""
        kept_NK = np.asarray(kept).reshape(len(self.valid), -1).astype(np.int64)
        there = (kept_NK >= 0) & self.valid[:, None]
        counts = np.zeros((len(kept_NK), vocab_size), bool)
        rows, columns = np.nonzero(there)
        counts[rows, kept_NK[rows, columns]] = True
        among: NDArray[np.bool_] = counts | ~there.any(axis=1)[:, None]
        return among

    @property
    def log_p(self) -> Float64:
        """[N, V], of the largest from the sum without it."""
        top = self.z.argmax(axis=1)[:, None]
        d = self.z - np.take_along_axis(self.z, top, 1)
        e = np.exp(d)
        np.put_along_axis(e, top, 0.0, 1)
        log_p: Float64 = d - np.log1p(e.sum(axis=1))[:, None]
        return log_p

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
