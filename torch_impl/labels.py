"""Labels in PyTorch: next-token ones, as `xentlib.labels` defines them, and which tokens count.

Shapes: N tokens, M valid tokens.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib import labels as spec
from xentlib.checks import check_label_range, check_next_token_labels
from xentlib.plan import VocabShard
from xentlib.torch.describe import describe
from xentlib.torch.head import find_group

__all__ = ["Tokens", "check_labels", "next_token_labels", "select_tokens"]


def next_token_labels(
    labels: Tensor,
    *,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ignore_index: int = -100,
    sequence_parallel: Any = None,
) -> Tensor:
    check_next_token_labels(
        describe(labels), describe(segment_ids), describe(cu_seqlens), ignore_index
    )
    length = labels.shape[-1]
    rows = [labels] if segment_ids is None else [labels, segment_ids]
    if sequence_parallel is None:
        after = [torch.full_like(x[..., :1], v) for x, v in zip(rows, (ignore_index, 0))]
        start: Tensor | int = 0
    else:
        after, start = next_slice(rows, ignore_index, sequence_parallel)
    shifted, *segments = (
        torch.cat([x[..., 1:], column[..., :length]], dim=-1) for x, column in zip(rows, after)
    )
    if segment_ids is not None:
        shifted = torch.where(segments[0] == segment_ids, shifted, ignore_index)
    if cu_seqlens is not None:
        last = cu_seqlens.to(labels.device, torch.int64) - 1 - start
        # Ends outside of this slice, and of an empty first document, fall into one column more.
        ends = torch.zeros(length + 1, dtype=torch.bool, device=labels.device)
        ends[last.clamp(-1, length)] = True
        shifted = torch.where(ends[:-1], ignore_index, shifted)
    return shifted


def next_slice(rows: list[Tensor], ignore_index: int, parallel: Any) -> tuple[list[Tensor], Tensor]:
    """First column of the next slice that has one, of each of `rows`; where this slice starts.

    One all-gather of a length and one column, whatever they hold. No value is read on the host.
    """
    group = find_group(parallel, "sequence_parallel")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    *leading, length = rows[0].shape
    mine = rows[0].new_zeros(1 + len(rows) * math.prod(leading), dtype=torch.int64)
    mine[0] = length
    if length:
        mine[1:] = torch.cat([x[..., 0].flatten().long() for x in rows])
    # Behind the last slice: one column of `ignore_index`, so that there always is a next one.
    slices = mine.new_full((world + 1, mine.numel()), ignore_index)
    slices[world, 0] = 1
    # PyTorch 2.13 warns of all_gather_into_tensor.
    dist.all_gather(list(slices[:world]), mine, group=group)
    lengths, later = slices[:, 0], slices[rank + 1 :]
    follows = (later[:, 0] > 0).int().argmax(dim=0, keepdim=True)
    columns = later.index_select(0, follows)[0, 1:].view(len(rows), *leading, 1)
    return [c.to(x.dtype) for c, x in zip(columns, rows)], lengths[:rank].sum()


next_token_labels.__doc__ = spec.next_token_labels.__doc__


class Tokens(NamedTuple):
    """Step 1: the tokens that count. On CPU only they are computed, since reading their number
    costs no device sync; elsewhere every token is, the rest masked."""

    labels: Tensor  # [N] int64, the target's column; 0 where a label is no class
    owned: Tensor | None  # [N] the column is on this rank; None: they all are
    valid: Tensor  # [N]
    bad: Tensor  # [N] valid, with a label outside the vocabulary; never on CPU
    rows: Tensor | None  # [M] where the computed tokens are; None if all N are
    packed: bool

    @property
    def computed(self) -> int:
        return self.valid.shape[0] if self.rows is None else self.rows.shape[0]

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Places of the computed tokens from `start` to `stop`."""
        return slice(start, stop) if self.rows is None else self.rows[start:stop]

    def clean(self, values: Tensor) -> Tensor:
        """Values [..., N]: NaN where the label was bad, 0 where the token is not valid."""
        values = torch.where(self.bad, torch.nan, values)
        return torch.where(self.valid, values, 0.0)


def check_labels(labels: Tensor, bad: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Refuse a label outside the vocabulary where it can be read without a device sync."""
    if labels.device.type == "cpu" and bad.any():
        check_label_range(int(labels[bad][0]), vocab_size, ignore_index)


def select_tokens(
    labels: Tensor,
    where: Tensor | None,
    ignore_index: int,
    vocab_size: int,
    shard: VocabShard | None,
) -> Tokens:
    """A shard's columns are counted from its start; a target elsewhere is in the spare column. Its
    labels are checked once all ranks are known to have the same."""
    labels = labels.long()
    valid_N = labels != ignore_index
    if where is not None:
        valid_N = valid_N & where
    in_range_N = (labels >= 0) & (labels < vocab_size)
    bad_N = valid_N & ~in_range_N
    packed = labels.device.type == "cpu"
    if shard is None:
        check_labels(labels, bad_N, ignore_index, vocab_size)
    rows_M = valid_N.nonzero()[:, 0] if packed else None
    if rows_M is not None and rows_M.shape[0] == labels.shape[0]:
        rows_M = None
    labels = torch.where(valid_N & in_range_N, labels, 0)
    owned_N = None
    if shard is not None:
        owned_N = (labels >= shard.start) & (labels < shard.stop)
        labels = torch.where(owned_N, labels - shard.start, shard.size)
    return Tokens(labels, owned_N, valid_N, bad_N, rows_M, packed)
