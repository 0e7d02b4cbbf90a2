"""The seam for kernels: what happens to a block of logits between the product that makes them and
the products that take dz, in two calls; as XLA compiles them, on any device and in any dtype.

Shapes: T rows of a chunk, V columns of this device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.arguments import Scalars
from xentlib.jax.core.algebra import exp
from xentlib.jax.core.device import device_info
from xentlib.jax.core.gemm import column_sums as sums_of_columns
from xentlib.jax.core.gemm import round_to as rounded
from xentlib.jax.core.largest import largest
from xentlib.jax.core.layout import (
    at_columns,
    by_blocks,
    columns_of,
    per_block,
    per_class,
    per_row,
    per_token,
    sums_by_blocks,
    take,
    take_one,
    to_rows,
)
from xentlib.jax.core.tokens import ELSEWHERE, FurtherClasses
from xentlib.math.softmax import FLOOR, BlockStats, Coefficients, WantedStats


class LogitTransform(NamedTuple):
    """Bias, scale, softcap and class weights of the call."""

    bias_V: jax.Array | None = None
    scale: jax.Array | None = None
    scalars: Scalars = Scalars()
    class_weights_V: jax.Array | None = None  # 0 where a column is no class
    padded_from: jax.Array | int | None = None  # the first column that is no class; None: all are
    top_k: int = 0  # of each row's largest columns are further classes too


class LogitsBlock(NamedTuple):
    """A block of logits: the rows of a chunk."""

    z_TV: jax.Array  # as the product has left it
    y_T1: jax.Array  # the target's column
    temperature_T: jax.Array | None
    valid_T: jax.Array  # False: the row does not count
    owned_T: jax.Array | None  # the target is a class of this device; None: all are
    more: FurtherClasses | None = None  # of the rows


class Logits(NamedTuple):
    """Of a block: -inf in the target's column, and where a column is no class."""

    z_TV: jax.Array
    taken_TV: jax.Array  # where those -inf are
    z_y: jax.Array
    derivative_TV: jax.Array | None  # of the softcap
    z_more_TK: jax.Array | None = None  # of further classes, in whose columns -inf is too
    # Columns of the largest, -1 for none, as numbers of the dtype, and their logits: the same
    top_TK: jax.Array | None = None
    z_top_TK: jax.Array | None = None


class XLA(NamedTuple):
    """Both calls, for the blocks of one call of the head's function."""

    shape: LogitTransform

    def stats(self, rows: LogitsBlock, wanted: WantedStats) -> tuple[jax.Array, BlockStats, Logits]:
        """Steps 2 to 4: bias, scale, softcap and temperature, the target's logit, the statistics of
        the rest, and what `dz` may use of the same rows."""
        logits = self.prepare(rows)
        return logits.z_y, self.rest_stats(logits, wanted), logits

    def dz(
        self,
        rows: LogitsBlock,
        lse_T: jax.Array,
        of: Coefficients,
        *,
        left: Logits | None = None,
        round_to: str | None = None,
        column_sums: bool = False,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Steps 6 and 7: dz of the rest through the softcap, 0 in the target's column and where a
        row does not count, rounded to `round_to`; dz of the target [T], 0 where that is not of this
        device or the row does not count; and if wanted for the sums [V] over the rows of the rest's
        dz. The latter two are not rounded. `left` is what `stats` of these rows has left, if it was
        called."""
        if self.shape.scalars.softcap is not None and not device_info().stores_exp:
            # Made again from the product: as arrays, the capped logits and the cap's derivative
            # cost a GPU 26 bytes a logit, not 22, and another half of a chunk.
            left, rows = None, rows._replace(z_TV=lax.optimization_barrier(rows.z_TV))
        logits = self.prepare(rows) if left is None else left
        dz_TV, dz_y_T = self.dlogits(logits, lse_T, of), of.target
        if rows.more is not None and of.more is not None:
            dz_TV = dz_TV.at[at_columns(rows.more.columns)].add(of.more, mode="drop")
        if logits.derivative_TV is not None:
            dz_y_T = dz_y_T * take_one(logits.derivative_TV, rows.y_T1, stored=False)
        here_T = rows.valid_T if rows.owned_T is None else rows.valid_T & rows.owned_T
        dz_y_T = jnp.where(here_T, dz_y_T, 0.0)
        dz_TV, sums_V = self.chained(
            rows, logits, dz_TV, round_to=round_to, column_sums=column_sums
        )
        return dz_TV, dz_y_T, sums_V

    def chained(
        self,
        rows: LogitsBlock,
        logits: Logits,
        dz_TV: jax.Array,
        *,
        round_to: str | None = None,
        column_sums: bool = False,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Step 7 of dz, and its sums."""
        if logits.derivative_TV is not None:
            dz_TV = dz_TV * logits.derivative_TV
        dz_TV = jnp.where(per_token(rows.valid_T), dz_TV, 0.0)
        sums_V = sums_of_columns(to_rows(dz_TV), dz_TV.dtype.name) if column_sums else None
        return dz_TV if round_to is None else rounded(dz_TV, round_to), sums_V

    def prepare(self, rows: LogitsBlock) -> Logits:
        """Bias, scale, softcap and temperature; of a target on another device none is taken out."""
        shape, z_TV, derivative_TV = self.shape, rows.z_TV, None
        if shape.bias_V is not None:
            z_TV = z_TV + per_class(shape.bias_V)
        if shape.scale is not None:
            z_TV = z_TV * shape.scale.astype(z_TV.dtype)
        if shape.scalars.softcap is not None:
            capped_TV = z_TV / shape.scalars.softcap
            # sech^2. 1 - tanh^2 cancels where the cap saturates: at a cap of 0.7 and logits of
            # standard deviation 32 it has no digit left.
            e_TV = exp(-2.0 * jnp.abs(capped_TV))
            derivative_TV = 4.0 * e_TV / ((1.0 + e_TV) * (1.0 + e_TV))
            z_TV = jnp.tanh(capped_TV) * shape.scalars.softcap
        if rows.temperature_T is not None:
            z_TV = z_TV / per_token(rows.temperature_T)
        taken_TV = is_target(rows, z_TV)
        if shape.padded_from is not None:
            taken_TV |= columns_of(z_TV) >= shape.padded_from
        z_y = take_one(z_TV, rows.y_T1, stored=z_TV is rows.z_TV)
        z_more, top, z_top, taken = None, None, None, []
        if rows.more is not None:
            z_more = take(z_TV, rows.more.columns)
            taken.append(rows.more.columns)
        if shape.top_k:
            top, z_top = largest(to_rows(z_TV), shape.top_k, shape.padded_from)
            taken.append(jnp.where(top < 0, ELSEWHERE, top))
            top = top.astype(z_TV.dtype)
        for columns in taken:
            z_TV = z_TV.at[at_columns(columns)].set(-jnp.inf, mode="drop")
        others_TV = jnp.where(taken_TV, -jnp.inf, z_TV)
        return Logits(others_TV, taken_TV, z_y, derivative_TV, z_more, top, z_top)

    def rest_stats(self, logits: Logits, wanted: WantedStats) -> BlockStats:
        """Step 4. Sums are relative to a block's own maximum, so its largest terms are exact."""
        z_TV, sum_d, top = logits.z_TV, None, None
        m_Tb = by_blocks(z_TV, lax.max, -jnp.inf)
        if wanted.smoothing:
            # Barriers, or XLA makes one maximum and one sum of a row, 4 bytes a logit each.
            m_T1 = lax.optimization_barrier(m_Tb).max(axis=1, keepdims=True)
            finite = per_row(jnp.where(m_T1 == -jnp.inf, 0.0, m_T1))
            rest_TV = jnp.where(logits.taken_TV, 0.0, z_TV - finite)
            if self.shape.class_weights_V is not None:
                rest_TV = rest_TV * per_class(self.shape.class_weights_V)
            if device_info().adds_windows:
                sum_d = rest_TV.sum(axis=1)
            else:
                blocks_Tb = by_blocks(rest_TV, lax.add, 0.0)
                sum_d = lax.optimization_barrier(blocks_Tb).sum(axis=1)
        m_Tb = jnp.where(m_Tb == -jnp.inf, 0.0, m_Tb)  # no other column, or none above -inf
        # As wide as the logits, whose memory exp(d) can take then.
        m_TV = per_block(m_Tb, z_TV)
        if wanted.predicted:
            columns_TV = columns_of(z_TV).astype(z_TV.dtype)
            top = by_blocks(jnp.where(z_TV < m_TV, jnp.inf, columns_TV), lax.min, jnp.inf).T
        d_TV = z_TV - m_TV
        e_TV = exp(d_TV)
        more = [e_TV * jnp.maximum(d_TV, FLOOR)] if wanted.entropy else []
        everything, s, *of_ed = sums_of_exp(e_TV, *more)
        ones, sum_ed = jnp.round(everything - s), of_ed[0].T if of_ed else None
        return BlockStats(m_Tb.T, ones.T, s.T, sum_ed, top, sum_d)

    def dlogits(self, logits: Logits, lse_T: jax.Array, of: Coefficients) -> jax.Array:
        """Step 6: dz, 0 in the target's column."""
        log_p_TV = logits.z_TV - per_token(lse_T)
        slope_TV = per_token(of.alpha)
        if of.beta is not None:
            # The floor: p = 0 times a log p of -inf must be 0.
            slope_TV = slope_TV + per_token(of.beta) * jnp.maximum(log_p_TV, FLOOR)
        dz_TV: jax.Array = exp(log_p_TV) * slope_TV
        if of.gamma is None:
            return dz_TV
        share_TV = per_token(of.gamma)
        if self.shape.class_weights_V is not None:
            share_TV = share_TV * per_class(self.shape.class_weights_V)
        return jnp.where(logits.taken_TV, 0.0, dz_TV - share_TV)


def is_target(rows: LogitsBlock, like_TV: jax.Array) -> jax.Array:
    """The target's column of each row, of none where it is on another device."""
    return columns_of(like_TV) == per_row(rows.y_T1)


def sums_of_exp(e_TV: jax.Array, *more: jax.Array) -> list[jax.Array]:
    """[T, b] of e = exp(z - m), of its fractions, and of more terms."""
    if not device_info().stores_exp:
        return sums_by_blocks([e_TV, e_TV - jnp.floor(e_TV), *more])
    of_more = [by_blocks(x, lax.add, 0.0) for x in more]
    # Two sums one after the other, so that the fractions can take the place of e.
    everything, e_TV = lax.optimization_barrier((by_blocks(e_TV, lax.add, 0.0), e_TV))
    return [everything, by_blocks(e_TV - jnp.floor(e_TV), lax.add, 0.0), *of_more]


def runnable() -> dict[str, type[XLA]]:
    """By name, all that can run on this machine."""
    return {"xla": XLA}
