"""Next-token labels in PyTorch, as `xentlib.labels` defines them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from xentlib.checks.labels import LABELS, check_next_token_labels
from xentlib.checks.validators import plain
from xentlib.labels import any_of_next
from xentlib.torch.array_spec import array_spec, only_tensors
from xentlib.torch.core.device import onto
from xentlib.torch.micro_batch import readable
from xentlib.torch.placement.rows import find_group


def next_token_labels(
    labels: Tensor,
    *,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    position_ids: Tensor | None = None,
    where: Tensor | None = None,
    shift: int = 1,
    ignore_index: int = -100,
    sequence_parallel: Any = None,
) -> Tensor:
    """Shift token ids so that position t carries the label it must predict, the token at t + 1.

    out[..., t] = labels[..., t + shift] where t + shift exists and belongs to the same packed
    document, `ignore_index` elsewhere. Count tokens after this shift, never before: a document of n
    tokens has n - shift targets, or none.

    Args:
        labels: [..., L] integers, token ids or labels already masked with `ignore_index`.
        segment_ids: [..., L] integers, the number of the document that each token belongs to. A
            document is an unbroken run: an id that comes back after another one is a new document.
        cu_seqlens: [documents + 1] integers, offsets of the documents of one packed row,
            `0, len_0, len_0 + len_1, ...`; empty documents are allowed.
        position_ids: [..., L] integers, each token's place in its document. A document begins where
            that is not the place before plus one, wherever it starts to count; so each token of
            left padding (1, 1, 1 or 0, 0, 0 before 0, 1, 2) is a document of its own. Places that
            repeat or leave some out within a document (those of images, say) would split it there:
            pass `segment_ids` then. Of the three descriptions, one may be passed.
        where: [..., L] bool or integers 0 and 1, which tokens count: an attention mask, say. A
            token has a label if it and its target do both, so padding on either side neither
            predicts nor is predicted. As `segment_ids` a mask would make a document of the padding.
        shift: how many tokens ahead the target is, an integer >= 1: 1 for the next token, 2 and
            more for the further heads of multi-token prediction. From L on, nothing is predicted.
        ignore_index: written where there is nothing to predict.
        sequence_parallel: the ranks that the sequence is spread over: in PyTorch a ProcessGroup or
            a one-dimensional DeviceMesh, in JAX the name of a mesh axis inside `shard_map`.
            `labels`, `segment_ids`, `position_ids` and `where` are then this rank's consecutive
            slice of those of the whole row, in rank order; in PyTorch slices may differ in length,
            and be empty. `cu_seqlens` are the offsets of the whole row, the same on every rank, as
            `shift` is. `shift` columns are exchanged, in one collective; they may lie in several
            slices (in JAX all slices are gathered then). Where a rank holds two (zig-zag context
            parallelism), shift before slicing instead.

    Returns:
        [..., L] of the dtype of `labels`; the input is not written to.

    Raises:
        TypeError: not integers (uint64 is refused too), a dtype that cannot hold `ignore_index`,
            or no process group.
        ValueError: a shift below 1, shapes that do not belong together, two descriptions of the
            packing, a mesh of several dimensions, a mesh axis that is not there, or a NumPy array's
            64-bit numbers that a JAX without 64-bit types would change.

    Numerics: integers only (contract row A0).
    """
    only_tensors(
        labels=labels,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        where=where,
    )
    ignore_index = plain(ignore_index)
    arrays = (labels, segment_ids, cu_seqlens, position_ids, where)
    shift = check_next_token_labels(shift, ignore_index, *map(array_spec, arrays))
    if cu_seqlens is not None and readable(cu_seqlens):
        first = int(cu_seqlens[0])
        LABELS.require("offsets", first == 0, first=first)
    length = labels.shape[-1]
    # PyTorch has few operators for uint16 and uint32: no order, sum, clamp or gather.
    rows = [x.long() for x in (labels, segment_ids, position_ids) if x is not None]
    if where is not None:  # what does not count is no target; below it has none
        where = onto(where, labels.device).bool()
        rows[0] = torch.where(where, rows[0], ignore_index)
    if sequence_parallel is None:
        columns = min(shift, length)
        after = [torch.full_like(x[..., :columns], ignore_index) for x in rows]
        start: Tensor | int = 0
    else:
        columns = shift
        after, start = next_columns(rows, columns, ignore_index, sequence_parallel)
    local, theirs = rows[0][..., columns:], after[0][..., max(columns - length, 0) :]
    shifted = torch.cat([local, theirs], dim=-1)
    packing = [torch.cat(both, dim=-1) for both in zip(rows[1:], after[1:])]
    begins = None  # whether a document does, at each token of this slice and of the columns
    if packing:
        step = 0 if position_ids is None else 1
        begins = packing[0].diff(dim=-1, prepend=packing[0][..., :1]) != step
    if cu_seqlens is not None:
        # Offsets before this slice fall on its first token, those behind into a spare column.
        offsets = onto(cu_seqlens, labels.device).long() - start
        marks = offsets.new_zeros(length + columns + 1, dtype=torch.bool)
        begins = marks.scatter(0, offsets.clamp(0, length + columns), True)[:-1]
    if begins is not None:
        shifted = torch.where(any_of_next(begins, columns), ignore_index, shifted)
    if where is not None:
        shifted = torch.where(where, shifted, ignore_index)
    return shifted.to(labels.dtype)


def next_columns(
    rows: list[Tensor], columns: int, ignore_index: int, parallel: Any
) -> tuple[list[Tensor], Tensor]:
    """The `columns` behind this slice, of each of `rows`; where this slice starts.

    One all-gather of a length and the first columns of each slice, whatever they hold: those behind
    this slice may lie in several. No value is read on the host.
    """
    group = find_group(parallel, "sequence_parallel")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    *leading, length = rows[0].shape
    lanes = len(rows) * math.prod(leading)
    first = torch.stack(rows)[..., :columns]
    first = pad(first, (0, columns - first.shape[-1]))
    local = torch.cat([first.new_full((1,), length), first.flatten()])
    slices = local.new_empty((world, local.numel()))
    # PyTorch 2.13 warns of all_gather_into_tensor.
    dist.all_gather(list(slices), local, group=group)
    lengths = slices[:, 0]
    ends = lengths.cumsum(0)
    place = ends[rank] + torch.arange(columns, device=ends.device)
    owner = torch.searchsorted(ends, place, right=True)  # `world` behind the last slice
    inside = owner < world
    owner = owner.clamp(max=world - 1)
    column = torch.where(inside, place - (ends - lengths)[owner], 0)
    columns_there = slices[:, 1:].view(world, lanes, columns)[owner, :, column]
    columns_there = torch.where(inside, columns_there.T, ignore_index)
    return list(columns_there.view(len(rows), *leading, columns)), ends[rank] - length
