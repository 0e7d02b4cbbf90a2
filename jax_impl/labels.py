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
from xentlib.labels import any_of_next


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
    only_arrays(
        labels=labels,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        position_ids=position_ids,
        where=where,
    )
    ignore_index = plain(ignore_index)
    arrays = (labels, segment_ids, cu_seqlens, position_ids, where)
    shift = check_next_token_labels(shift, ignore_index, *map(array_spec, arrays))
    if cu_seqlens is not None and concrete_on_cpu(cu_seqlens):
        first = int(np.asarray(cu_seqlens)[0])
        LABELS.require("offsets", first == 0, first=first)
    ids = {"labels": labels, "segment_ids": segment_ids, "position_ids": position_ids}
    check_kept(labels, ignore_index, ids)
    length = labels.shape[-1]
    rows = [jnp.asarray(x) for x in ids.values() if x is not None]
    ignored = np.asarray(ignore_index, rows[0].dtype)
    if where is not None:  # what does not count is no target; below it has none
        where = jnp.asarray(where).astype(bool)
        rows[0] = jnp.where(where, rows[0], ignored)
    if sequence_parallel is None:
        columns = min(shift, length)
        after = [jnp.zeros_like(x[..., :columns]) for x in rows]
        after[0] = jnp.full_like(after[0], ignored)
        start: jax.Array | int = 0
    else:
        after, start = next_columns(rows, shift, ignored, sequence_parallel)
        columns = after[0].shape[-1]
    tokens, *packing = (jnp.concatenate(both, axis=-1) for both in zip(rows, after))
    shifted = tokens[..., columns:]
    begins = None  # whether a document does, at each token of this slice and of the columns
    for x in packing:
        before = jnp.concatenate([x[..., :1], x[..., :-1]], axis=-1)
        step = 0 if position_ids is None else 1
        begins = (x < before) | (x - step != before)  # 0 - 1 is 255 in uint8
    if cu_seqlens is not None:
        # Offsets before this slice fall on its first token; those behind are dropped.
        offsets = jnp.maximum(jnp.asarray(cu_seqlens).astype(jnp.int32) - start, 0)
        begins = jnp.zeros(length + columns, bool).at[offsets].set(True, mode="drop")
    if begins is not None:
        shifted = jnp.where(any_of_next(begins, columns), ignored, shifted)
    if where is not None:
        shifted = jnp.where(where, shifted, ignored)
    return shifted


def next_columns(
    rows: list[jax.Array], shift: int, ignored: Any, axis: Any
) -> tuple[list[jax.Array], jax.Array]:
    """The columns behind this slice, of each of `rows`, as many as `shift` asks for and the whole
    row has; where this slice starts.

    One collective: a permute of the next slice's first columns, or, where those of several slices
    are needed, an all-gather of all.
    """
    try:
        size = lax.axis_size(axis)
    except (NameError, TypeError):
        PLACEMENTS.refuse("axis", argument="sequence_parallel", name=axis)
    length = rows[0].shape[-1]
    columns = min(shift, size * length)
    start = lax.axis_index(axis) * length
    # The widest integer holds all bits of the others, so that one array takes all rows.
    wide = max((x.dtype for x in rows), key=lambda dtype: dtype.itemsize)
    local = jnp.stack([x.astype(wide) for x in rows])
    if columns <= length:
        theirs = lax.ppermute(local[..., :columns], axis, [(r + 1, r) for r in range(size - 1)])
    else:
        whole = lax.all_gather(local, axis, axis=local.ndim - 1, tiled=True)
        whole = jnp.pad(whole, [(0, 0)] * (local.ndim - 1) + [(0, columns)])
        theirs = lax.dynamic_slice_in_dim(whole, start + length, columns, axis=-1)
    label, *packing = (c.astype(x.dtype) for c, x in zip(theirs, rows))
    behind = start + length + np.arange(columns, dtype=start.dtype) >= size * length
    return [jnp.where(behind, ignored, label), *packing], start
