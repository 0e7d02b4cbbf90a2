"""Labels in JAX: next-token ones, as `xentlib.labels` defines them, and which tokens count.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib import labels as spec
from xentlib.checks import (
    check_axis,
    check_divisor,
    check_label_range,
    check_narrowed,
    check_next_token_labels,
    holds,
    plain,
)
from xentlib.jax.describe import Constants, Options, concrete_on_cpu, describe
from xentlib.jax.head import shard_here
from xentlib.plan import VocabShard

__all__ = ["check_division", "check_labels", "find_targets", "next_token_labels"]


def next_token_labels(
    labels: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    position_ids: jax.Array | None = None,
    shift: int = 1,
    ignore_index: int = -100,
    sequence_parallel: Any = None,
) -> jax.Array:
    ignore_index = plain(ignore_index)
    shift = check_next_token_labels(
        describe(labels),
        describe(segment_ids),
        describe(cu_seqlens),
        describe(position_ids),
        shift,
        ignore_index,
    )
    ids = {"labels": labels, "segment_ids": segment_ids, "position_ids": position_ids}
    check_kept(labels, ignore_index, ids)
    length = labels.shape[-1]
    rows = [jnp.asarray(x) for x in ids.values() if x is not None]
    ignored = np.asarray(ignore_index, rows[0].dtype)
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
    return shifted


def any_of_next(begins: jax.Array, columns: int) -> jax.Array:
    """Whether a document begins at any of the `columns` tokens behind each, by doubling. A running
    count would make the compiler gather whole rows where an Auto axis spreads them."""
    seen = 1
    while seen < columns:
        step = min(seen, columns - seen)
        begins = begins[..., :-step] | begins[..., step:]
        seen += step
    return begins[..., 1:]


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
        check_axis(axis, "sequence_parallel")
    length = rows[0].shape[-1]
    columns = min(shift, size * length)
    start = lax.axis_index(axis) * length
    # The widest integer holds all bits of the others, so that one array takes all rows.
    wide = max((x.dtype for x in rows), key=lambda dtype: dtype.itemsize)
    mine = jnp.stack([x.astype(wide) for x in rows])
    if columns <= length:
        theirs = lax.ppermute(mine[..., :columns], axis, [(r + 1, r) for r in range(size - 1)])
    else:
        whole = lax.all_gather(mine, axis, axis=mine.ndim - 1, tiled=True)
        whole = jnp.pad(whole, [(0, 0)] * (mine.ndim - 1) + [(0, columns)])
        theirs = lax.dynamic_slice_in_dim(whole, start + length, columns, axis=-1)
    label, *packing = (c.astype(x.dtype) for c, x in zip(theirs, rows))
    behind = start + length + np.arange(columns, dtype=start.dtype) >= size * length
    return [jnp.where(behind, ignored, label), *packing], start


next_token_labels.__doc__ = spec.next_token_labels.__doc__


def check_kept(labels: Any, ignore_index: int, ids: dict[str, Any]) -> None:
    """Refuse numbers that JAX would make others of: without 64-bit types it keeps 32 bits."""
    kept = jax.dtypes.canonicalize_dtype(labels.dtype)
    if holds(str(labels.dtype), ignore_index) and not holds(str(kept), ignore_index):
        check_narrowed("ignore_index", ignore_index, str(kept))
    for name, x in ids.items():
        if isinstance(x, np.ndarray):
            kept = jax.dtypes.canonicalize_dtype(x.dtype)
            lost = x[x.astype(kept) != x]
            if lost.size:
                check_narrowed(name, int(lost[0]), str(kept))


def widen_labels(labels: Any) -> Any:
    """Labels in a dtype that holds `ignore_index` and V, so that 156 in uint8 is never -100."""
    return labels.astype(np.int32) if labels.dtype.itemsize < 4 else labels


def valid_tokens(labels: Any, where: Any, ignore_index: int) -> Any:
    held = holds(str(labels.dtype), ignore_index)
    mask = labels != np.asarray(ignore_index, labels.dtype) if held else labels == labels
    return mask if where is None else mask & where


def find_targets(
    options: Options, labels: jax.Array, constants: Constants, columns: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, VocabShard | None]:
    """Columns of the labels (the last plus one if on another device) and their classes, which
    tokens are valid, which of them have a label outside the vocabulary, which labels are here, and
    this device's shard."""
    labels = widen_labels(labels)
    valid_N = valid_tokens(labels, constants.where, options.ignore_index)
    shard = None
    if options.axis is not None:
        shard = shard_here(options.axis, columns, constants.shard)
    in_range_N = (labels >= 0) & (labels < (columns if shard is None else shard.vocab_size))
    bad_N = valid_N & ~in_range_N
    labels = jnp.where(valid_N & in_range_N, labels, 0).astype(jnp.int32)
    if shard is None:
        return labels, labels, valid_N, bad_N, None, None
    owned_N = (labels >= shard.start) & (labels < shard.stop)
    column_N = jnp.where(owned_N, labels - shard.start, columns)
    return column_N, labels, valid_N, bad_N, owned_N, shard


def check_division(
    labels: Any, where: Any, ignore_index: int, weights: Any, denominator: Any
) -> None:
    """Refuse a denominator of 0 for tokens that count, where values can be read."""
    if denominator is None or not concrete_on_cpu(labels, where, weights, denominator):
        return
    valid = valid_tokens(
        widen_labels(np.asarray(labels)), None if where is None else np.asarray(where), ignore_index
    )
    count = valid if weights is None else np.asarray(weights).astype(np.float64)[valid]
    divisor = float(np.asarray(denominator))
    if valid.any() and divisor <= 0 and (divisor < 0 or count.sum() != 0):
        check_divisor(divisor)


def check_labels(labels: Any, where: Any, ignore_index: int, vocab_size: int) -> None:
    """Refuse a label outside the vocabulary, where values can be read."""
    check_kept(labels, ignore_index, {})
    if not concrete_on_cpu(labels, where):
        return
    labels = widen_labels(np.asarray(labels))
    valid = valid_tokens(labels, None if where is None else np.asarray(where), ignore_index)
    offenders = labels[valid & ((labels < 0) | (labels >= vocab_size))]
    if offenders.size:
        check_label_range(int(offenders[0]), vocab_size, ignore_index)
