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
from xentlib.labels import PIECES, any_of_next
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
    layout: str = "contiguous",
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
            `labels`, `segment_ids`, `position_ids` and `where` are then this rank's part of those
            of the whole row. `cu_seqlens` are the offsets of the whole row, the same on every rank,
            as `shift` is. The first `shift` columns of each slice or piece are exchanged, in one
            collective; targets may lie several slices ahead.
        layout: which part of the row a rank has. "contiguous": a slice of consecutive tokens, in
            rank order; in PyTorch slices may differ in length, and be empty. "zigzag", with R
            ranks: pieces r and 2 R - 1 - r of 2 R equal pieces of the row on rank r, one after the
            other, so that causal attention costs each rank as much. Where every document is cut
            into such pieces (the THD format of TransformerEngine), shift before slicing.

    Returns:
        [..., L] of the dtype of `labels`; the input is not written to.

    Raises:
        TypeError: not integers (uint64 is refused too), a dtype that cannot hold `ignore_index`,
            or no process group.
        ValueError: a shift below 1, shapes that do not belong together, two descriptions of the
            packing, a mesh of several dimensions, a mesh axis that is not there, or a NumPy array's
            64-bit numbers that a JAX without 64-bit types would change; pieces that differ in
            length and, in PyTorch, `cu_seqlens` that are others on another rank. What only another
            rank knows is not read on a GPU: each label is then one that no vocabulary has, and a
            loss is NaN.

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
    arrays = map(array_spec, (labels, segment_ids, cu_seqlens, position_ids, where))
    shift = check_next_token_labels(shift, ignore_index, layout, sequence_parallel, *arrays)
    if cu_seqlens is not None and readable(cu_seqlens):
        first = int(cu_seqlens[0])
        LABELS.require("offsets", first == 0, first=first)
    # PyTorch has few operators for uint16 and uint32: no order, sum, clamp or gather.
    rows = [x.long() for x in (labels, segment_ids, position_ids) if x is not None]
    offsets = None if cu_seqlens is None else onto(cu_seqlens, labels.device).long()
    if where is not None:  # what does not count is no target; below it has none
        where = onto(where, labels.device).bool()
        rows[0] = torch.where(where, rows[0], ignore_index)
    pieces = PIECES[layout]
    length = labels.shape[-1] // pieces
    # One that is left over is refused where all ranks know of it.
    rows = [x[..., : pieces * length].unflatten(-1, (pieces, length)) for x in rows]
    apart = None
    if sequence_parallel is None:
        columns = min(shift, length)
        after = [torch.full_like(x[..., :columns], ignore_index) for x in rows]
        start = rows[0].new_zeros(1)
    else:
        columns = shift
        tokens = labels.shape[-1]
        after, start, apart = next_columns(
            rows, columns, ignore_index, sequence_parallel, tokens, offsets
        )
    local, following = rows[0][..., columns:], after[0][..., max(columns - length, 0) :]
    shifted = torch.cat([local, following], dim=-1)
    packing = [torch.cat(both, dim=-1) for both in zip(rows[1:], after[1:])]
    begins = None  # whether a document does, at each token of a piece and of the columns behind it
    if packing:
        step = 0 if position_ids is None else 1
        begins = packing[0].diff(dim=-1, prepend=packing[0][..., :1]) != step
    if offsets is not None:
        # Offsets before a piece fall on its first token, those behind into a spare column.
        offsets = (offsets - start[:, None]).clamp(0, length + columns)
        marks = offsets.new_zeros((pieces, length + columns + 1), dtype=torch.bool)
        begins = marks.scatter(-1, offsets, True)[:, :-1]
    if begins is not None:
        shifted = torch.where(any_of_next(begins, columns), ignore_index, shifted)
    shifted = shifted.flatten(-2)
    if where is not None:
        shifted = torch.where(where, shifted, ignore_index)
    if apart is not None:
        shifted = torch.where(apart, out_of_range(labels.dtype, ignore_index), shifted)
    return shifted.to(labels.dtype)


def next_columns(
    rows: list[Tensor],
    columns: int,
    ignore_index: int,
    parallel: Any,
    tokens: int,
    offsets: Tensor | None,
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """The `columns` behind each piece of this rank, of each of `rows`; where these pieces start;
    where no number is read, whether ranks differ in what must be the same.

    One all-gather of three numbers and the first columns of each piece, whatever they hold: those
    behind a piece may lie in several. It has room for two pieces in either layout, so that ranks
    whose layouts differ learn it. No value is read on a host that would wait for it.
    """
    group = find_group(parallel, "sequence_parallel")
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    *leading, pieces, length = rows[0].shape
    lanes = len(rows) * math.prod(leading)
    first = torch.stack(rows)[..., :columns]
    first = pad(first, (0, columns - first.shape[-1])).movedim(-2, 0)
    same = first.new_zeros(1) if offsets is None else offsets.square().sum()[None]
    first = torch.cat([first, first.new_zeros(max(PIECES.values()) - pieces, *first.shape[1:])])
    numbers = [first.new_full((1,), x) for x in (tokens, pieces)]
    local = torch.cat([*numbers, same, first.flatten()])
    ranks = local.new_empty((world, local.numel()))
    # PyTorch 2.13 warns of all_gather_into_tensor.
    dist.all_gather(list(ranks), local, group=group)
    tokens_R, pieces_R, offsets_R = ranks[:, :3].T
    apart = check_same(tokens_R, pieces_R, offsets_R, tokens, pieces)
    heads = ranks[:, 3:].view(world, max(PIECES.values()), lanes, columns)
    lengths = ranks[:, 0] // pieces
    if pieces == 2:  # in the order of the row
        heads = torch.cat([heads[:, 0], heads[:, 1].flip(0)])
        lengths = torch.cat([lengths, lengths.flip(0)])
        here = [rank, 2 * world - 1 - rank]
    else:
        heads, here = heads[:, 0], [rank]
    ends = lengths.cumsum(0)
    end = torch.stack([ends[piece] for piece in here])
    place = end[:, None] + torch.arange(columns, device=ends.device)
    owner = torch.searchsorted(ends, place, right=True)
    inside = owner < len(ends)  # else behind the row
    owner = owner.clamp(max=len(ends) - 1)
    column = torch.where(inside, place - (ends - lengths)[owner], 0)
    there = torch.where(inside[..., None], heads[owner, :, column], ignore_index)
    there = there.movedim(-1, 0).reshape(len(rows), *leading, pieces, columns)
    return list(there), end - length, apart


def check_same(
    tokens_R: Tensor, pieces_R: Tensor, offsets_R: Tensor, tokens: int, pieces: int
) -> Tensor | None:
    """Refuse ranks that differ in what must be the same, or say whether they do."""
    uneven = (tokens_R != tokens_R[0]).any() | (tokens_R[0] % pieces != 0)
    layouts, offsets = ((x != x[0]).any() for x in (pieces_R, offsets_R))
    if readable(tokens_R):
        LABELS.require("one_layout", not layouts)
        LABELS.require("pieces", pieces == 1 or not uneven, length=tokens_R.tolist())
        LABELS.require("one_offsets", not offsets)
        return None
    LABELS.require("pieces", tokens % pieces == 0, length=tokens)
    others = layouts | offsets
    return others if pieces == 1 else uneven | others


def out_of_range(dtype: torch.dtype, ignore_index: int) -> int:
    """A label that no vocabulary has."""
    info = torch.iinfo(dtype)
    return info.max if info.min == 0 else -2 if ignore_index == -1 else -1
