"""Softmax of a chunk of logits with its target column taken out: steps 3 to 6 of `xentlib.nll`.

Shapes: T rows of a chunk, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "Coefficients",
    "Labelled",
    "RestStats",
    "TokenStats",
    "below",
    "dlogits",
    "exp",
    "exp_difference",
    "rest_stats",
    "take_target",
    "token_stats",
]

# exp of this is 0 in float64 too: stands for -inf where a product with 0 must stay 0.
FLOOR = -1e4


def exp(x: jax.Array) -> jax.Array:
    return lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)


class Coefficients(NamedTuple):
    """Of dz, per token: what a loss makes, and all that step 6 needs of it.

    dz_v = p_v (alpha + beta (z_v - lse)) - gamma w_v for the rest, dz_y = own for the target.
    """

    alpha: jax.Array
    beta: jax.Array | None  # of an entropy
    gamma: jax.Array | None  # of label smoothing
    own: jax.Array


def dlogits(
    z_TV: jax.Array,
    rest_TV: jax.Array | None,
    lse_T: jax.Array,
    of: Coefficients,
    class_weights_V: jax.Array | None = None,
) -> jax.Array:
    """Step 6: from logits with -inf in the target column, dz with 0 in that column.

    `rest_TV` says which columns are classes other than the target, which only a gamma needs;
    `class_weights_V` are w, 1 without.
    """
    log_p_TV = z_TV - lse_T[:, None]
    slope_TV = of.alpha[:, None]
    if of.beta is not None:
        # The floor: p = 0 times a log p of -inf must be 0.
        slope_TV = slope_TV + of.beta[:, None] * jnp.maximum(log_p_TV, FLOOR)
    dz_TV = exp(log_p_TV) * slope_TV
    if of.gamma is None:
        return dz_TV
    assert rest_TV is not None
    share_TV = of.gamma[:, None]
    if class_weights_V is not None:
        share_TV = share_TV * class_weights_V[None, :]
    return jnp.where(rest_TV, dz_TV - share_TV, 0.0)


class RestStats(NamedTuple):
    """Of the columns other than the target, d = z - max: what token_stats needs.

    Entries of exp(d) that are 1 are counted, the others summed: a sum that holds a 1 rounds a small
    remainder away, and lse near 0 with it (3.7 ULP against 1.7, row A3).
    """

    m: jax.Array
    ones: jax.Array  # how many exp(d) are 1; 0 where there is no column, or none above -inf
    s: jax.Array  # sum of the exp(d) below 1
    sum_ed: jax.Array | None  # sum of exp(d) * d: entropy
    sum_d: jax.Array | None  # sum of d, or of w d with class weights: label smoothing
    top: jax.Array | None = None  # column of the largest, the first of several; exact to 2^24


class TokenStats(NamedTuple):
    """Per token, in the compute dtype."""

    lse: jax.Array
    logprob: jax.Array
    p_y: jax.Array
    p_rest: jax.Array  # 1 - p_y, from r / S: no cancellation for confident tokens
    entropy: jax.Array  # 0 where it was not asked for
    mean_logp: jax.Array | None  # mean over the vocabulary of z - lse, or of w (z - lse)
    correct: jax.Array  # 1 or 0
    predicted: jax.Array | None = None  # the class of the largest logit, the first of several


class Labelled(NamedTuple):
    """What step 5 needs to know of each token's label."""

    target: jax.Array  # its class
    weight: jax.Array | float  # of that class
    total: jax.Array | float  # weight of all classes


def take_target(
    z_TV: jax.Array, y_T1: jax.Array, size: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The target's logit, its mask, and the logits with -inf in its place.

    A target in column V is on another device: none is taken out. Columns from `size` on are no
    classes, and go with it.
    """
    column_TV = lax.broadcasted_iota(jnp.int32, z_TV.shape, 1)
    target_TV = column_TV == y_T1
    if size is not None:
        target_TV |= column_TV >= size
    z_y = jnp.take_along_axis(z_TV, y_T1, axis=1, mode="clip")[:, 0]
    return z_y, target_TV, jnp.where(target_TV, -jnp.inf, z_TV)


def rest_stats(
    z_TV: jax.Array,
    target_TV: jax.Array,
    *,
    entropy: bool,
    smoothing: bool,
    predicted: bool = False,
    class_weights_V: jax.Array | None = None,
) -> RestStats:
    """Step 4. Sums are relative to the rest's own maximum, so its largest terms are exact."""
    top = z_TV.argmax(axis=1).astype(z_TV.dtype) if predicted else None
    m = z_TV.max(axis=1, keepdims=True)
    m = jnp.where(m == -jnp.inf, 0.0, m)  # no other column, or none above -inf
    d_TV = z_TV - m
    e_TV = exp(d_TV)
    sum_d = None
    if smoothing:
        rest_TV = jnp.where(target_TV, 0.0, d_TV)
        if class_weights_V is not None:
            rest_TV = rest_TV * class_weights_V[None, :]
        sum_d = rest_TV.sum(axis=1)
    sum_ed = (e_TV * jnp.maximum(d_TV, FLOOR)).sum(axis=1) if entropy else None
    # Two sums one after the other, so that the fractions can take the place of e.
    everything, e_TV = lax.optimization_barrier((e_TV.sum(axis=1), e_TV))
    s = (e_TV - jnp.floor(e_TV)).sum(axis=1)
    return RestStats(m[:, 0], jnp.round(everything - s), s, sum_ed, sum_d, top)


def exp_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """exp(a - b) with the rounding error of the difference put back (TwoDiff).

    At a - b = -50 that error alone would be 2e-6, four times the bound of row A4.
    """
    d = a - b
    back = d - a
    error = (a - (d - back)) - (b + back)
    # A difference that overflows has no error to put back.
    return exp(d) * jnp.where(d == -jnp.inf, 1.0, 1.0 + error)


def below(rest: RestStats, m: jax.Array) -> jax.Array:
    """How far the rest's own maximum is below that of all; never so far that a product with it
    overflows before it meets its factor of 0, as classes that are masked with finfo.min did."""
    return jnp.where(rest.ones == 0, 0.0, jnp.maximum(rest.m - m, FLOOR))


def token_stats(z_y: jax.Array, rest: RestStats, vocab_size: int, labelled: Labelled) -> TokenStats:
    """Step 5, on vectors of one entry per token."""
    m_rest = jnp.where(rest.ones == 0, -jnp.inf, rest.m)
    m = jnp.maximum(z_y, m_rest)
    scale = jnp.where(rest.ones == 0, 0.0, exp_difference(rest.m, m))
    r = scale * (rest.ones + rest.s)
    t = exp(z_y - m)
    total = r + t
    # A maximum that is not finite leaves nothing to compare: NaN, as log_softmax has it. A row of
    # -inf throughout must not look like a label that has all of the probability.
    top = (z_y == m) & ~jnp.isinf(m)
    # S without the 1 of its largest term, which would round a small remainder away (row A3).
    above_one = jnp.where(top, r, (rest.ones - 1.0) + rest.s + t)
    log_total = jnp.where(above_one < 1.0, jnp.log1p(above_one), jnp.log(total))
    logprob = jnp.where(top, -log_total, (z_y - m) - log_total)
    lse = jnp.where(jnp.isinf(m), m, m + log_total)
    p_y, p_rest = t / total, r / total
    entropy, mean_logp = jnp.zeros_like(lse), None
    if rest.sum_ed is not None:
        rest_part = scale * (rest.sum_ed + below(rest, m) * (rest.ones + rest.s))
        own_part = jnp.where(t == 0, 0.0, t * (z_y - m))
        entropy = log_total - (rest_part + own_part) / total
    if rest.sum_d is not None:
        others = labelled.total - labelled.weight
        own = labelled.weight * logprob
        mean_logp = (rest.sum_d + others * (rest.m - lse) + own) / vocab_size
    predicted = None
    if rest.top is not None:
        target = labelled.target.astype(lse.dtype)
        predicted = jnp.where(z_y == m_rest, jnp.minimum(target, rest.top), rest.top)
        predicted = jnp.where(z_y > m_rest, target, predicted)
    correct = (z_y > m_rest).astype(lse.dtype)
    return TokenStats(lse, logprob, p_y, p_rest, entropy, mean_logp, correct, predicted)
