"""Divergences in float64: every value and gradient of `chunked_divergence` in closed form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xentlib.reference.gradients import gradients_of
from xentlib.reference.nll import divided_by
from xentlib.reference.softmax import Float64, Softmax, f64


class DivergenceReference(NamedTuple):
    """Values and gradients in float64; names as in NLLReference. `bound_divergence` is of each
    token's divergence; `dz` [N, V] that of sum(upstream * divergence) by the logits, `bound_dz` its
    bound, and `terms_dz` the size of the terms that it is made of."""

    loss: Float64
    num_tokens: int
    weight_sum: Float64
    nll: Float64
    divergence: Float64
    logprobs: Float64
    entropy: Float64
    teacher_entropy: Float64
    loss_magnitude: Float64
    bound_divergence: Float64
    dz: Float64
    bound_dz: Float64
    terms_dz: Float64
    d_hidden: Float64
    d_weight: Float64
    d_bias: Float64
    bound_hidden: Float64
    bound_weight: Float64
    bound_bias: Float64
    magnitude_hidden: Float64
    magnitude_weight: Float64
    magnitude_bias: Float64


class Terms(NamedTuple):
    """Of a kind of divergence, by token and class, from d = log p_S - log p_T."""

    value: Float64  # non-negative terms of the divergence
    slope: Float64  # |its derivative by d|
    dz: Float64
    parts: Float64  # |terms of dz|
    dz_slope: Float64  # |the derivative of dz by d|


def terms_of(kind: str, beta: float, p_s: Float64, p_t: Float64, d: Float64) -> Terms:
    def mean(x: Float64) -> Float64:
        total: Float64 = (p_s * x).sum(axis=1, keepdims=True)
        return total

    if kind == "forward_kl":
        value = p_t * (np.expm1(d) - d)
        dz = p_t * np.expm1(d)
        return Terms(value, np.abs(dz), dz, np.abs(dz), p_s)
    if kind == "reverse_kl":
        value = p_s * (np.expm1(-d) + d)
        dz = p_s * (d - mean(d))
        parts = p_s * (np.abs(d) + mean(np.abs(d)))
        return Terms(value, p_s * np.abs(d), dz, parts, p_s + parts)
    if kind != "jsd":
        raise ValueError(f"the oracle has no {kind!r}")
    m = beta * p_t + (1 - beta) * p_s
    # log(m / p_T), and log(p_S / m): of the two log1p is exact for one.
    small = np.log1p(np.where(d <= 0, 1 - beta, beta) * np.expm1(-np.abs(d)))
    log_m_t = np.where(d <= 0, small, d + small)
    v = np.where(d <= 0, d - small, -small)
    value = beta * p_t * (np.expm1(log_m_t) - log_m_t) + (1 - beta) * p_s * (np.expm1(-v) + v)
    dz = (1 - beta) * p_s * (v - mean(v))
    parts = (1 - beta) * p_s * (np.abs(v) + mean(np.abs(v)))
    dz_slope = (1 - beta) * p_s * (beta * p_t / m + np.abs(v))
    return Terms(value, (1 - beta) * p_s * np.abs(v), dz, parts, dz_slope)


def divergence_reference(
    hidden: Any,
    weight: Any,
    teacher_hidden: Any,
    teacher_weight: Any,
    *,
    kind: str = "forward_kl",
    beta: float = 0.5,
    labels: Any = None,
    nll_weight: float = 0.0,
    bias: Any = None,
    where: Any = None,
    token_weights: Any = None,
    ignore_index: int = -100,
    logit_scale: Any = 1.0,
    softcap: float | None = None,
    temperature: Any = 1.0,
    temperature_squared: bool = False,
    reduction: str = "mean",
    denominator: Any = None,
    upstream: Any = 1.0,
    dz_dtype: str = "float64",
    weight_layout: str = "VH",
    teacher: dict[str, Any] | None = None,
    exact_logits: bool = False,
) -> DivergenceReference:
    """In float64 from NumPy arrays; arguments as in `chunked_divergence`.

    With eD the error of d in units of u, and E_S, E_T means over the two distributions,

        eD = A_S + A_T + E_S[A_S] + E_T[A_T] + |z_S - z_T| + |lse_S - lse_T| + 2 |d| + 2
        e_D = sum_v |dD / dd| eD + sum_v terms (A + E[A] + |log p| + 4)
        Bz = |dz / dd| eD + parts (A + E[A] + |log p| + 6)

    Args:
        teacher_hidden: [..., Ht].
        teacher_weight: [V, Ht].
        upstream: gradient of whatever follows with respect to the loss, [...] with
            `reduction="none"`.
        dz_dtype: round dz once to this dtype before the gradient GEMMs (rounding point 5).
        teacher: its `bias`, `logit_scale`, `softcap`, `temperature` and `weight_layout`.
        exact_logits: what the heads multiply is exact, as of logits that are given: A is 0.
    """
    leading = np.shape(hidden)[:-1]
    labels = np.zeros(leading, np.int64) if labels is None else labels
    of_teacher = teacher or {}
    student = Softmax(
        hidden, weight, labels, bias, where, ignore_index,
        logit_scale, softcap, temperature, weight_layout,
    )  # fmt: skip
    other = Softmax(
        teacher_hidden, teacher_weight, labels, of_teacher.get("bias"), where, ignore_index,
        of_teacher.get("logit_scale", 1.0), of_teacher.get("softcap"),
        of_teacher.get("temperature", temperature), of_teacher.get("weight_layout", "VH"),
    )  # fmt: skip
    plain = student  # of which the labels' loss is: without temperature
    if nll_weight and np.any(np.asarray(temperature) != 1.0):
        plain = Softmax(
            hidden, weight, labels, bias, where, ignore_index,
            logit_scale, softcap, 1.0, weight_layout,
        )  # fmt: skip
    p_s, p_t = student.p, other.p
    with np.errstate(invalid="ignore"):
        log_s, log_t = (x.z - x.lse[:, None] for x in (student, other))
        d = np.where((p_s == 0) & (p_t == 0), 0.0, log_s - log_t)
    terms = terms_of(kind, beta, p_s, p_t, d)
    a = np.zeros_like(d)
    if not exact_logits:
        a = student.a + other.a + student.expected_a + other.expected_a
    apart = np.abs(student.z - other.z) + np.abs(student.lse - other.lse)[:, None]
    d_error = a + apart + 2 * np.abs(d) + 2
    distance = np.minimum(np.abs(log_s), np.abs(log_t))  # of the larger of the two
    near = a + distance + 4
    error_N = (terms.slope * d_error + terms.value * near).sum(axis=1)
    # Errors of the mean that dz is beside, and of the mean of what is rounded in it.
    bz = terms.dz_slope * d_error + terms.parts * (near + 2)
    if kind != "forward_kl":
        bz = bz + p_s * bz.sum(axis=1, keepdims=True)

    num_tokens = p_s.shape[0]
    rows, y_N = np.arange(num_tokens), student.onehot.argmax(axis=1)
    tau_N = np.broadcast_to(f64(temperature).reshape(-1), (num_tokens,))
    squared_N = tau_N**2 if temperature_squared else np.ones(num_tokens)
    weights = np.ones(num_tokens) if token_weights is None else f64(token_weights).reshape(-1)
    weights = np.where(student.valid, weights, 0.0)
    count, weight_sum = int(student.valid.sum()), weights.sum()
    each = reduction == "none"
    how = ("sum", None) if each else (reduction, denominator)
    divisor = divided_by(count, float(weight_sum), *how)
    divergence = terms.value.sum(axis=1)
    nll = -nll_weight * plain.logprob
    loss_N = np.where(student.valid, weights * (squared_N * divergence + nll), 0.0) / divisor
    nll_N = np.where(student.valid, weights * nll, 0.0) / divisor
    # By the logits after their temperature, as the divergence's.
    of_labels = plain.p.copy()
    of_labels[rows, y_N] = -plain.p_rest
    weighed = nll_weight * tau_N[:, None]
    dz = squared_N[:, None] * terms.dz + weighed * of_labels
    bz = squared_N[:, None] * bz + weighed * (plain.p_error + 2 * plain.onehot)
    g_N = np.broadcast_to(f64(upstream), leading).reshape(-1)
    g_N = np.where(student.valid, g_N, 0.0)
    factor = (weights / divisor * g_N)[:, None]
    # What multiplies after the GEMMs is no part of what is rounded.
    after = 1.0 if each else float(upstream)
    bound = np.abs(factor) * bz
    gradients = gradients_of(student, factor * dz, bound, dz_dtype, after, factor[:, 0])
    return DivergenceReference(
        loss=loss_N.reshape(leading) if each else np.asarray(loss_N.sum()),
        num_tokens=count,
        weight_sum=np.asarray(weight_sum),
        nll=np.asarray(nll_N.sum()),
        divergence=student.per_token(divergence),
        logprobs=student.per_token(student.logprob),
        entropy=student.per_token(student.entropy),
        teacher_entropy=student.per_token(other.entropy),
        loss_magnitude=np.asarray(np.abs(loss_N).sum()),
        bound_divergence=student.per_token(error_N),
        dz=factor * dz,
        bound_dz=bound,
        terms_dz=np.abs(factor) * squared_N[:, None] * terms.parts,
        **gradients,
    )
