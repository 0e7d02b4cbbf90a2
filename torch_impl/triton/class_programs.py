"""Triton programs of further classes of a token: one a row of logits.

Shapes: T rows of a chunk, V columns, K classes of each row, columns of this rank or not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xentlib.torch.triton.elementary import stored


@triton.jit
def take_out_rows(
    z_ptr, ld, y_ptr, valid_ptr, bias_ptr, temperature_ptr, ld_temperature, columns_ptr, K,
    z_more_ptr, V, TILE: tl.constexpr,
):  # fmt: skip
    """Logits of further classes of a row, 0 of those that are no columns, then -inf in the columns
    of those that are not the target's."""
    row = tl.program_id(0).to(tl.int64)
    y, row_ptr = tl.load(y_ptr + row), z_ptr + row * ld
    columns_ptr += row * K
    if z_more_ptr is not None:
        temperature = 1.0
        if temperature_ptr is not None:
            temperature = tl.load(temperature_ptr + row * ld_temperature)
        for start in range(0, K, TILE):
            k = start + tl.arange(0, TILE)
            column = tl.load(columns_ptr + k, mask=k < K, other=-1)
            here = (column >= 0) & (column < V)
            z = tl.load(row_ptr + column, mask=here, other=0.0).to(tl.float32)
            if bias_ptr is not None:
                z += tl.load(bias_ptr + column, mask=here, other=0.0)
            if temperature_ptr is not None:
                z = tl.div_rn(z, temperature)
            tl.store(z_more_ptr + row * K + k, z, mask=k < K)
        tl.debug_barrier()  # one that is named twice is read twice
    for start in range(0, K, TILE):
        k = start + tl.arange(0, TILE)
        column = tl.load(columns_ptr + k, mask=k < K, other=-1)
        here = (column >= 0) & (column < V) & (column != y)
        none = tl.full([TILE], float("-inf"), tl.float32).to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + column, none, mask=here)


@triton.jit
def put_rows(
    z_ptr, ld, dz_ptr, ld_dz, y_ptr, valid_ptr, columns_ptr, K, dz_more_ptr, V,
    ROUND: tl.constexpr, IN_PLACE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dz of further classes into their columns: of one that is named twice the sum."""
    row = tl.program_id(0).to(tl.int64)
    y, row_ptr = tl.load(y_ptr + row), dz_ptr + row * ld_dz
    columns_ptr += row * K
    dz_more_ptr += row * K
    for start in range(0, K, TILE):
        k = start + tl.arange(0, TILE)
        column = tl.load(columns_ptr + k, mask=k < K, other=-1)
        total = tl.zeros([TILE], tl.float32)
        for first in range(0, K, TILE):
            j = first + tl.arange(0, TILE)
            another = tl.load(columns_ptr + j, mask=j < K, other=-1)
            dz = tl.load(dz_more_ptr + j, mask=j < K, other=0.0)
            same = column[:, None] == another[None, :]
            total += tl.sum(tl.where(same, dz[None, :], 0.0), 1)
        here = (column >= 0) & (column < V) & (column != y)
        tl.store(row_ptr + column, stored(total, dz_ptr, ROUND), mask=here)
