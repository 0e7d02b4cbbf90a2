"""The seam for kernels: what happens to a block of logits between the product that makes them and
the products that take dz, in two calls.

Shapes: T rows of a chunk, V columns of this device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

__all__ = [
    "Asked",
    "Coefficients",
    "Kernels",
    "RestStats",
    "Rows",
    "Shape",
    "kernels_for",
    "runnable",
]


class Shape(NamedTuple):
    """What step 2 makes of a product, and what weighs classes: the same for a whole call."""

    bias_V: jax.Array | None = None
    scale: jax.Array | None = None
    softcap: float | jax.Array | None = None
    class_weights_V: jax.Array | None = None  # 0 where a column is no class
    padded_from: jax.Array | int | None = None  # the first column that is no class; None: all are


class Asked(NamedTuple):
    """Statistics of a call beside those that every call needs."""

    entropy: bool = False
    smoothing: bool = False
    predicted: bool = False


class Rows(NamedTuple):
    """A block of logits: the rows of a chunk."""

    z_TV: jax.Array  # as the product has left it
    y_T1: jax.Array  # the target's column
    temperature_T: jax.Array | None
    valid_T: jax.Array  # False: the row does not count
    owned_T: jax.Array | None  # the target is a class of this device; None: all are


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


class Coefficients(NamedTuple):
    """Of dz, per token: what a loss makes, and all that step 6 needs of it.

    dz_v = p_v (alpha + beta (z_v - lse)) - gamma w_v for the rest, dz_y = own for the target.
    """

    alpha: jax.Array
    beta: jax.Array | None  # of an entropy
    gamma: jax.Array | None  # of label smoothing
    own: jax.Array


class Kernels(Protocol):
    """Both calls, for the blocks of one call."""

    def __init__(self, shape: Shape) -> None: ...

    def stats(self, rows: Rows, asked: Asked) -> tuple[jax.Array, RestStats, Any]:
        """Steps 2 to 4: bias, scale, softcap and temperature, the target's logit, the statistics of
        the rest, and what `dz` of the same kernels may use of the same rows."""

    def dz(
        self,
        rows: Rows,
        lse_T: jax.Array,
        of: Coefficients,
        *,
        left: Any = None,
        round_to: str | None = None,
        column_sums: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Steps 6 and 7: dz of the rest through the softcap, 0 in the target's column and where a
        row does not count, rounded to `round_to`; dz of the target [T], 0 where that is not of this
        device or the row does not count; and if asked for the sums [V] over the rows of the rest's
        dz. The latter two are not rounded. `left` is what `stats` of these rows has left, if it was
        called."""


def runnable() -> dict[str, type[Kernels]]:
    """By name, all that can run on this machine."""
    from xentlib.jax.core.xla import XLA

    return {"xla": XLA}


def kernels_for(platform: str) -> type[Kernels]:
    """Who computes both steps on a kind of device."""
    return runnable()["xla"]
