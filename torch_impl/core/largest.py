"""The largest logits of a row: which columns they are in, alike on every device and in both
frameworks. `torch.topk` takes any of several that are equal.

Shapes: B rows of a block, V columns, K of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from xentlib.math.softmax import BLOCK_COLUMNS
from xentlib.torch.core.device import host_readable


def largest(z_BV: Tensor, count: int) -> Tensor:
    """[B, K] columns, K = `count` or all there are, of several that are equal the lowest; their
    order among these is any. On a device nothing is read."""
    width = z_BV.shape[1]
    count = min(count, width)
    # A CPU takes them in one pass; elsewhere `topk` makes many, of all columns twice.
    if host_readable(z_BV) or 2 * count * BLOCK_COLUMNS > width:
        return top_columns(z_BV, count)
    # They are in the blocks with the K largest maxima, of several that are equal the lowest: each
    # of these has a column that comes before any column of another block.
    whole = width // BLOCK_COLUMNS * BLOCK_COLUMNS
    parts = z_BV[:, :whole].unflatten(1, (-1, BLOCK_COLUMNS)), z_BV[:, None, whole:]
    maxima = torch.cat([x.amax(2) for x in parts if x.shape[2]], 1)
    blocks = torch.sort(top_columns(maxima, count), dim=1).values
    within = torch.arange(BLOCK_COLUMNS, device=z_BV.device)
    columns = (blocks[:, :, None] * BLOCK_COLUMNS + within).flatten(1)
    values = z_BV.gather(1, columns.clamp(max=width - 1))
    values.masked_fill_(columns >= width, -torch.inf)  # of a last block that is not full
    return columns.gather(1, top_columns(values, count)).clamp(max=width - 1)


def top_columns(z_BV: Tensor, count: int) -> Tensor:
    """The same, of all columns at once."""
    width = z_BV.shape[1]
    if not count:
        return torch.empty(z_BV.shape[0], 0, dtype=torch.int64, device=z_BV.device)
    values, columns = z_BV.topk(min(count + 1, width), dim=1)
    next_B, values, columns = values[:, -1], values[:, :count], columns[:, :count]
    if count == width:
        return columns
    # Where the next one is equal to the last, others of these columns may be the lowest.
    if not host_readable(z_BV):
        return lowest(z_BV, values, columns)
    tied_B = next_B == values[:, -1]
    if bool(tied_B.any()):
        columns[tied_B] = lowest(z_BV[tied_B], values[tied_B], columns[tied_B])
    return columns


def lowest(z_BV: Tensor, values_BK: Tensor, columns_BK: Tensor) -> Tensor:
    """With the lowest columns of those that are equal to the last."""
    width, count = z_BV.shape[1], values_BK.shape[1]
    last = values_BK[:, -1:]
    above = (values_BK > last).sum(1, keepdim=True)
    descending = torch.arange(width, 0, -1, dtype=torch.int32, device=z_BV.device)
    keys = torch.where(z_BV == last, descending, 0).topk(count, dim=1).values
    ranks = torch.arange(count, device=z_BV.device)
    equal = width - keys.long().gather(1, (ranks - above).clamp(min=0))
    # A row with NaN may return any columns.
    return torch.where(ranks < above, columns_BK, equal).clamp(max=width - 1)
