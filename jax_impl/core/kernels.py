"""The seam for kernels: what happens to a block of logits between the product that makes them and
the products that take dz, in two calls.

Shapes: T rows of a chunk, V columns of this device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

from xentlib.algebra import Coefficients, NonTargetStats, WantedStats
from xentlib.arguments import Scalars


class LogitTransform(NamedTuple):
    """What step 2 makes of a product, and what weighs classes: the same for a whole call."""

    bias_V: jax.Array | None = None
    scale: jax.Array | None = None
    scalars: Scalars = Scalars()
    class_weights_V: jax.Array | None = None  # 0 where a column is no class
    padded_from: jax.Array | int | None = None  # the first column that is no class; None: all are


class LogitsBlock(NamedTuple):
    """A block of logits: the rows of a chunk."""

    z_TV: jax.Array  # as the product has left it
    y_T1: jax.Array  # the target's column
    temperature_T: jax.Array | None
    valid_T: jax.Array  # False: the row does not count
    owned_T: jax.Array | None  # the target is a class of this device; None: all are


class Kernels(Protocol):
    """Both calls, for the blocks of one call."""

    def __init__(self, shape: LogitTransform) -> None: ...

    def stats(
        self, rows: LogitsBlock, wanted: WantedStats
    ) -> tuple[jax.Array, NonTargetStats, Any]:
        """Steps 2 to 4: bias, scale, softcap and temperature, the target's logit, the statistics of
        the rest, and what `dz` of the same kernels may use of the same rows."""

    def dz(
        self,
        rows: LogitsBlock,
        lse_T: jax.Array,
        of: Coefficients,
        *,
        left: Any = None,
        round_to: str | None = None,
        column_sums: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Steps 6 and 7: dz of the rest through the softcap, 0 in the target's column and where a
        row does not count, rounded to `round_to`; dz of the target [T], 0 where that is not of this
        device or the row does not count; and if wanted for the sums [V] over the rows of the rest's
        dz. The latter two are not rounded. `left` is what `stats` of these rows has left, if it was
        called."""


def runnable() -> dict[str, type[Kernels]]:
    """By name, all that can run on this machine."""
    from xentlib.jax.core.xla import XLA

    return {"xla": XLA}


def kernels_for(platform: str) -> type[Kernels]:
    """Who computes both steps on a kind of device."""
    return runnable()["xla"]
