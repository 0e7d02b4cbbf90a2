"""Softmax statistics per token: step 5 of `xentlib.nll`, on vectors of one entry per token."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.core.kernels import RestStats

__all__ = ["FLOOR", "Labelled", "TokenStats", "below", "exp", "exp_difference", "token_stats"]

# exp of this is 0 in float64 too: stands for -inf where a product with 0 must stay 0.
FLOOR = -1e4


def exp(x: jax.Array) -> jax.Array:
    return lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)


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
    """Step 5, from the target's logit and the statistics of the rest."""
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
