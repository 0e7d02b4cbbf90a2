"""The seam for kernels: what happens to a block of logits between the product that makes them and
the products that take dz, in two calls.

Shapes: B rows of a block, V columns of this rank, one more where a vocabulary is sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

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

    columns: int  # that are classes; the others are at -inf
    bias_V: Tensor | None = None
    scale: Tensor | None = None
    softcap: float | None = None
    class_weights_V: Tensor | None = None  # of the columns that are classes


class Asked(NamedTuple):
    """Statistics of a call beside those that every call needs."""

    entropy: bool = False
    smoothing: bool = False
    predicted: bool = False


@dataclass(slots=True)
class Rows:
    """A block of a chunk, small enough to stay in a CPU's cache."""

    span: slice  # within the chunk
    places: slice | Tensor  # within the N tokens
    z_BV: Tensor  # overwritten by every call
    y_B1: Tensor  # the target's column
    temperature_B: Tensor | None
    valid_B: Tensor | None  # False: the row does not count; None: all do
    owned_B: Tensor | None  # the target is a class of this rank; None: all are
    fresh: bool = True  # `z_BV` is as the product has left it
    derivative_BV: Tensor | None = None  # of the softcap, where a first call leaves it for a second


class RestStats(NamedTuple):
    """Of the columns other than the target, d = z - max: what token_stats needs.

    Entries of exp(d) that are 1 are counted, the others summed: a sum that holds a 1 rounds a small
    remainder away, and lse near 0 with it (3.7 ULP against 1.7, row A3).
    """

    m: Tensor
    ones: Tensor  # how many exp(d) are 1; 0 where there is no column, or none above -inf
    s: Tensor  # sum of the exp(d) below 1
    sum_ed: Tensor | None  # sum of exp(d) * d: entropy
    sum_d: Tensor | None  # sum of d, or of w d with class weights: label smoothing
    top: Tensor | None = None  # column of the largest, the first of several; exact to 2^24


class Coefficients(NamedTuple):
    """Of dz, per token: what a loss makes, and all that step 6 needs of it.

    dz_v = p_v (alpha + beta (z_v - lse)) - gamma w_v for the rest, dz_y = own for the target.
    """

    alpha: Tensor
    beta: Tensor | None  # of an entropy
    gamma: Tensor | None  # of label smoothing
    own: Tensor


class Kernels(Protocol):
    """Both calls, with the scratch that they share. Made for a chunk; given up before its GEMMs."""

    def __init__(
        self, rows: int, width: int, dtype: torch.dtype, device: torch.device, shape: Shape
    ) -> None:
        """For blocks of so many rows and columns."""

    def stats(self, rows: Rows, asked: Asked, *, dz_follows: bool) -> tuple[Tensor, RestStats]:
        """Steps 2 to 4, of fresh rows: bias, scale, softcap and temperature, the target's logit,
        the statistics of the rest. Leaves `rows` as `dz` of the same kernels wants them, with the
        softcap's derivative if `dz_follows` at once."""

    def dz(
        self,
        rows: Rows,
        lse_B: Tensor,
        of: Coefficients,
        *,
        round_to: torch.dtype | None = None,
        column_sums: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Steps 6 and 7, of fresh rows or of what `stats` has left: dz of the rest through the
        softcap in place of the logits, 0 in the target's column and where a row does not count,
        rounded to `round_to`. Returns dz of the target [B], 0 where that is not of this rank or the
        row does not count, and if asked for the sums [V] over the rows of the rest's dz; neither is
        rounded."""


def runnable() -> dict[str, type[Kernels]]:
    """By name, all that can run on this machine."""
    from xentlib.torch.core.eager import Eager

    return {"eager": Eager}


def kernels_for(device: torch.device, dtype: torch.dtype) -> type[Kernels]:
    """Who computes both steps on a device in this dtype."""
    return runnable()["eager"]
