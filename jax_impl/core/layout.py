"""How the logits of a chunk lie in memory: [T, V]; or, on a device where classes lead, [B, C, T] of
B blocks of C = `BLOCK_COLUMNS` classes. Arrays of both are called `_TV`, and what depends on which
it is stands here.

Where classes lead, arrays are that from the product that makes logits to the products that take dz:
XLA does not fuse a reduction into what stands before a change of shape, and each such array cost
a TPU 8 bytes a logit.

Shapes: T rows of a chunk, V columns of this device, b blocks of them, K columns of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from xentlib.jax.core.device import device_info
from xentlib.math.softmax import BLOCK_COLUMNS


def from_rows(x_TV: jax.Array) -> jax.Array:
    """Of [T, V], filled up with zeros to whole blocks where classes lead."""
    if not device_info().classes_lead:
        return x_TV
    rows, columns = x_TV.shape
    blocks = -(-columns // BLOCK_COLUMNS)
    x_VT = jnp.pad(x_TV, ((0, 0), (0, blocks * BLOCK_COLUMNS - columns))).T
    return x_VT.reshape(blocks, BLOCK_COLUMNS, rows)


def to_rows(x_TV: jax.Array) -> jax.Array:
    """[T, V], with what fills up whole blocks."""
    if not device_info().classes_lead:
        return x_TV
    blocks, columns, rows = x_TV.shape
    return x_TV.reshape(blocks * columns, rows).T


def per_row(x_T1: jax.Array) -> jax.Array:
    """What each row has, [T, 1], beside all of its columns."""
    return x_T1.T[None] if device_info().classes_lead else x_T1


def per_token(x_T: jax.Array) -> jax.Array:
    """The same of [T]."""
    return per_row(x_T[:, None])


def per_class(x_V: jax.Array) -> jax.Array:
    """What each column has, beside all rows."""
    if not device_info().classes_lead:
        return x_V[None, :]
    return x_V.reshape(x_V.size // BLOCK_COLUMNS, BLOCK_COLUMNS, 1)


def per_block(x_Tb: jax.Array, like_TV: jax.Array) -> jax.Array:
    """What each row has of each block, beside all of the block's columns."""
    if device_info().classes_lead:
        return x_Tb.T[:, None, :]
    return jnp.repeat(x_Tb, BLOCK_COLUMNS, axis=1)[:, : like_TV.shape[1]]


def columns_of(like_TV: jax.Array) -> jax.Array:
    """The number of each column, int32, beside all rows."""
    if not device_info().classes_lead:
        return lax.broadcasted_iota(jnp.int32, like_TV.shape, 1)
    return per_class(jnp.arange(like_TV.shape[0] * BLOCK_COLUMNS, dtype=jnp.int32))


def at_columns(columns_TK: jax.Array) -> tuple[jax.Array, ...]:
    """An index of [T, K]."""
    rows = jnp.arange(columns_TK.shape[0], dtype=jnp.int32)[:, None]
    if device_info().classes_lead:
        return columns_TK // BLOCK_COLUMNS, columns_TK % BLOCK_COLUMNS, rows
    return rows, columns_TK


def take(x_TV: jax.Array, columns_TK: jax.Array) -> jax.Array:
    """[T, K]; of a column that there is not, of no meaning."""
    if device_info().classes_lead:
        return x_TV.at[at_columns(columns_TK)].get(mode="clip")
    return jnp.take_along_axis(x_TV, columns_TK, axis=1, mode="clip")


def take_one(x_TV: jax.Array, column_T1: jax.Array, *, stored: bool) -> jax.Array:
    """[T] of one column of each row; of one that there is not, of no meaning. `stored`: it is an
    array in memory, and not made on the way, of which a TPU's gather would store one: 34 bytes a
    logit of a softcap's loss and gradients, not 26."""
    if stored or not device_info().classes_lead:
        return take(x_TV, column_T1)[:, 0]
    only = columns_of(x_TV) == per_row(column_T1)
    taken: jax.Array = jnp.where(only, x_TV, 0.0).sum(axis=(0, 1))
    return taken


def width(x_TV: jax.Array) -> int:
    """Columns, or whole blocks of them where classes lead."""
    return x_TV.shape[0 if device_info().classes_lead else 1]


def of_width(x_TV: jax.Array, size: int, nothing: float) -> jax.Array:
    """Filled up with `nothing`, or cut."""
    axis = 0 if device_info().classes_lead else 1
    more = size - x_TV.shape[axis]
    if more < 0:
        return lax.slice_in_dim(x_TV, 0, size, axis=axis)
    fill = [(0, more if n == axis else 0) for n in range(x_TV.ndim)]
    return jnp.pad(x_TV, fill, constant_values=nothing) if more else x_TV


def by_blocks(x_TV: jax.Array, add: Callable[[Any, Any], Any], nothing: float) -> jax.Array:
    """[T, b]: the columns of each block added, or compared.

    On a CPU window by window, in the order of the columns: XLA's own sum has another order for
    fewer than 32 sums, and a V that is no multiple would cost a copy.
    """
    start = np.array(nothing, x_TV.dtype)
    if device_info().classes_lead:
        leading: jax.Array = lax.reduce(x_TV, start, add, (1,))
        return leading.T
    fill, window = ((0, 0), (0, -x_TV.shape[1] % BLOCK_COLUMNS)), (1, BLOCK_COLUMNS)
    if x_TV.shape[1] == 1:  # whose window XLA takes for as many columns as it has: 128 times x
        alone: jax.Array = add(start, x_TV)
        return alone
    if device_info().adds_windows:
        of_windows: jax.Array = lax.reduce_window(x_TV, start, add, window, window, fill)
        return of_windows
    x_TV = jnp.pad(x_TV, fill, constant_values=nothing)
    by_block = x_TV.reshape(x_TV.shape[0], -1, BLOCK_COLUMNS)
    block_sums: jax.Array = lax.reduce(by_block, start, add, (2,))
    return block_sums


def sums_by_blocks(terms: list[jax.Array]) -> list[jax.Array]:
    """[T, b] of each: where classes lead in one pass, without an array of the terms."""
    if not device_info().classes_lead:
        return [by_blocks(x, lax.add, 0.0) for x in terms]
    zeros = tuple(np.array(0.0, x.dtype) for x in terms)
    sums = lax.reduce(
        tuple(terms), zeros, lambda a, b: tuple(x + y for x, y in zip(a, b, strict=True)), (1,)
    )
    return [x.T for x in sums]


def turned_around(x_VH: jax.Array) -> jax.Array:
    """[H, V], once it is there as [V, H]: or XLA turns what it is rounded from, which is twice as
    large."""
    by_rows = with_layout_constraint(x_VH, Layout((0, 1)))
    turned: jax.Array = with_layout_constraint(by_rows.T, Layout((0, 1)))
    return turned
