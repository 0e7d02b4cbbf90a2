"""Next-token labels in JAX, as `xentlib.labels` defines them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.checks.labels import LABELS, check_next_token_labels
from xentlib.checks.placement import PLACEMENTS
from xentlib.checks.validators import plain
from xentlib.jax.array_spec import array_spec, concrete_on_cpu, only_arrays
from xentlib.jax.core.tokens import check_kept
from xentlib.labels import PIECES, any_of_next


def next_token_labels(
    labels: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    where: jax.Array | None = None,
    shift: int = 1,
    ignore_index: int = -100,
    sequence_parallel: Any = None,
    layout: str = "contiguous",
) -> jax.Array:
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
    only_arrays(
        labels=labels,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        where=where,
    )
    ignore_index = plain(ignore_index)
    arrays = map(array_spec, (labels, segment_ids, cu_seqlens, position_ids, where))
    shift = check_next_token_labels(shift, ignore_index, layout, sequence_parallel, *arrays)
    pieces = PIECES[layout]
    length, left_over = divmod(labels.shape[-1], pieces)
    LABELS.require("pieces", not left_over, length=labels.shape[-1])
    if cu_seqlens is not None and concrete_on_cpu(cu_seqlens):
        first = int(np.asarray(cu_seqlens)[0])
        LABELS.require("offsets", first == 0, first=first)
    ids = {"labels": labels, "segment_ids": segment_ids, "position_ids": position_ids}
    check_kept(labels, ignore_index, ids)
    rows = [jnp.asarray(x) for x in ids.values() if x is not None]
    ignored = np.asarray(ignore_index, rows[0].dtype)
    if where is not None:  # what does not count is no target; below it has none
        where = jnp.asarray(where).astype(bool)
        rows[0] = jnp.where(where, rows[0], ignored)
    rows = [x.reshape(*x.shape[:-1], pieces, length) for x in rows]
    if sequence_parallel is None:
        columns = min(shift, length)
        after = [jnp.zeros_like(x[..., :columns]) for x in rows]
        after[0] = jnp.full_like(after[0], ignored)
        start: Any = np.zeros(1, np.int32)
    else:
        after, start = next_columns(rows, shift, ignored, sequence_parallel)
        columns = after[0].shape[-1]
    tokens, *packing = (jnp.concatenate(both, axis=-1) for both in zip(rows, after))
    shifted = tokens[..., columns:]
    begins = None  # whether a document does, at each token of a piece and of the columns behind it
    for x in packing:
        before = jnp.concatenate([x[..., :1], x[..., :-1]], axis=-1)
        step = 0 if position_ids is None else 1
        begins = (x < before) | (x - step != before)  # 0 - 1 is 255 in uint8
    if cu_seqlens is not None:
        # Offsets before a piece fall on its first token; those behind are dropped.
        offsets = jnp.asarray(cu_seqlens).astype(jnp.int32)[None] - start[:, None]
        index = (np.arange(pieces)[:, None], jnp.maximum(offsets, 0))
        begins = jnp.zeros((pieces, length + columns), bool).at[index].set(True, mode="drop")
    if begins is not None:
        shifted = jnp.where(any_of_next(begins, columns), ignored, shifted)
    shifted = shifted.reshape(labels.shape)
    if where is not None:
        shifted = jnp.where(where, shifted, ignored)
    return shifted


def next_columns(
    rows: list[jax.Array], shift: int, ignored: Any, axis: Any
) -> tuple[list[jax.Array], jax.Array]:
    """The columns behind each piece of this device, of each of `rows`, as many as `shift` asks for
    and the whole row has; where these pieces start.

    One collective: a permute of the next slice's first columns, or, where those of several slices
    are needed, or of two pieces that lie in opposite directions, an all-gather.
    """
    try:
        size = lax.axis_size(axis)
    except (NameError, TypeError):
        PLACEMENTS.refuse("axis", argument="sequence_parallel", name=axis)
    pieces, length = rows[0].shape[-2:]
    row = size * pieces * length
    columns, sent = min(shift, row), min(shift, length)
    rank = lax.axis_index(axis)
    here = jnp.stack([rank, 2 * size - 1 - rank][:pieces])
    # The widest integer holds all bits of the others, so that one array takes all rows.
    wide = max((x.dtype for x in rows), key=lambda dtype: dtype.itemsize)
    first = jnp.stack([x.astype(wide) for x in rows])[..., :sent]
    if pieces == 1 and columns <= length:
        following = lax.ppermute(first, axis, [(r + 1, r) for r in range(size - 1)])
    else:
        heads = lax.all_gather(first, axis, axis=first.ndim - 2)  # [..., size, pieces, sent]
        order = heads[..., 0, :]
        if pieces == 2:
            order = jnp.concatenate([order, heads[..., ::-1, 1, :]], axis=-2)
        order = order.reshape(*order.shape[:-2], size * pieces * sent)
        order = jnp.pad(order, [(0, 0)] * (order.ndim - 1) + [(0, columns)])
        behind = [(here[k] + 1) * sent for k in range(pieces)]
        following = jnp.stack(
            [lax.dynamic_slice_in_dim(order, b, columns, axis=-1) for b in behind], axis=-2
        )
    label, *packing = (c.astype(x.dtype) for c, x in zip(following, rows))
    start = here * length
    behind_row = (
        start[:, None] + np.arange(length, length + columns, dtype=start.dtype)[None] >= row
    )
    return [jnp.where(behind_row, ignored, label), *packing], start
