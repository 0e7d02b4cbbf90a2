"""Step 1 in JAX: which tokens count, and where their labels are.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xentlib.arguments import Arguments
from xentlib.checks.call import CALLS
from xentlib.checks.validators import holds
from xentlib.jax.array_spec import concrete_on_cpu
from xentlib.jax.core.call import Arrays
from xentlib.math.softmax import TargetInfo
from xentlib.shards import VocabShard

# The column of a class that is not among this device's: past any, however far zeros fill a head up.
# No column equals it, `mode="clip"` reads the last one, and `mode="drop"` writes nothing.
ELSEWHERE = np.iinfo(np.int32).max


class FurtherClasses(NamedTuple):
    """Classes of each token whose logits are taken out, as the target's is: [N, K] each."""

    ids: jax.Array  # the target's where there is none
    columns: jax.Array  # as `Tokens.labels`
    owned: jax.Array | None


class Tokens(NamedTuple):
    """Step 1: the tokens that count."""

    # [N] int32, the target's column: 0 where a label is no class, `ELSEWHERE` on other devices
    labels: jax.Array
    targets: jax.Array  # [N] int32, its class: the column of a whole vocabulary
    owned: jax.Array | None  # [N] the column is on this device; None: they all are
    valid: jax.Array  # [N]
    bad: jax.Array  # [N] valid, with a label or a further class outside the vocabulary
    more: FurtherClasses | None = None


def select_tokens(
    arrays: Arrays, ignore_index: int, columns: int, shard: VocabShard | None
) -> Tokens:
    """A shard's columns are counted from its start."""
    labels = widen_labels(arrays.labels)
    valid_N = valid_tokens(labels, arrays.where, ignore_index)
    vocab_size = columns if shard is None else shard.vocab_size
    in_range_N = (labels >= 0) & (labels < vocab_size)
    bad_N = valid_N & ~in_range_N
    labels = jnp.where(valid_N & in_range_N, labels, 0).astype(jnp.int32)
    ids = arrays.ids
    if ids is not None:
        bad_N |= valid_N & ((ids < -1) | (ids >= vocab_size)).any(axis=1)
        there = (ids >= 0) & (ids < vocab_size)
        ids = jnp.where(there, ids, labels[:, None]).astype(jnp.int32)
    if shard is None:
        more = None if ids is None else FurtherClasses(ids, ids, None)
        return Tokens(labels, labels, None, valid_N, bad_N, more)
    return of_shard(labels, valid_N, bad_N, shard, ids)


def of_shard(
    targets_N: jax.Array,
    valid_N: jax.Array,
    bad_N: jax.Array,
    shard: VocabShard,
    ids_NK: jax.Array | None = None,
) -> Tokens:
    """Columns of a shard are counted from its start."""

    def placed(classes: jax.Array) -> tuple[jax.Array, jax.Array]:
        owned = (classes >= shard.start) & (classes < shard.stop)
        return jnp.where(owned, classes - shard.start, ELSEWHERE), owned

    column_N, owned_N = placed(targets_N)
    more = None if ids_NK is None else FurtherClasses(ids_NK, *placed(ids_NK))
    return Tokens(column_N, targets_N, owned_N, valid_N, bad_N, more)


def check_kept(labels: Any, ignore_index: int, ids: dict[str, Any]) -> None:
    """Refuse numbers that JAX would make others of: without 64-bit types it keeps 32 bits."""
    kept = jax.dtypes.canonicalize_dtype(labels.dtype)
    if holds(str(labels.dtype), ignore_index) and not holds(str(kept), ignore_index):
        CALLS.refuse("narrowed", name="ignore_index", value=ignore_index, dtype=kept)
    for name, x in ids.items():
        if isinstance(x, np.ndarray):
            kept = jax.dtypes.canonicalize_dtype(x.dtype)
            lost = x[x.astype(kept) != x]
            if lost.size:
                CALLS.refuse("narrowed", name=name, value=int(lost[0]), dtype=kept)


def widen_labels(labels: Any) -> Any:
    """Labels in a dtype that holds `ignore_index` and V, so that 156 in uint8 is never -100."""
    return labels.astype(np.int32) if labels.dtype.itemsize < 4 else labels


def valid_tokens(labels: Any, where: Any, ignore_index: int) -> Any:
    held = holds(str(labels.dtype), ignore_index)
    mask = labels != np.asarray(ignore_index, labels.dtype) if held else labels == labels
    return mask if where is None else mask & where


def on_host(labels: Any, where: Any, ignore_index: int) -> tuple[Any, Any]:
    """Labels, and which of them are valid, of arrays that can be read."""
    labels, where = widen_labels(np.asarray(labels)), None if where is None else np.asarray(where)
    return labels, valid_tokens(labels, where, ignore_index)


def check_values(args: Arguments, vocab_size: int) -> None:
    """Refuse a label outside the vocabulary, and a denominator of 0 for tokens that count, where
    values can be read."""
    labels, where, ignore_index = args.labels, args.where, args.ignore_index
    weights, denominator = args.token_weights, args.denominator
    check_labels(labels, where, ignore_index, vocab_size)
    if denominator is None or not concrete_on_cpu(labels, where, weights, denominator):
        return
    _, valid = on_host(labels, where, ignore_index)
    count = valid if weights is None else np.asarray(weights).astype(np.float64)[valid]
    divisor = float(np.asarray(denominator))
    if valid.any() and divisor <= 0 and (divisor < 0 or count.sum() != 0):
        CALLS.refuse("denominator", value=divisor)


def check_labels(labels: Any, where: Any, ignore_index: int, vocab_size: int) -> None:
    """Refuse a label outside the vocabulary, where values can be read."""
    check_kept(labels, ignore_index, {})
    if not concrete_on_cpu(labels, where):
        return
    labels, valid = on_host(labels, where, ignore_index)
    offenders = labels[valid & ((labels < 0) | (labels >= vocab_size))]
    if offenders.size:
        offender = int(offenders[0])
        CALLS.refuse("labels", offender=offender, ignore_index=ignore_index, vocab_size=vocab_size)


def target_info(logits: Any, rows: jax.Array | slice) -> TargetInfo:
    """Of some tokens, of what has a vocabulary, tokens and class weights."""
    target, weights = logits.tokens.targets[rows], logits.arrays.class_weights
    if weights is None:
        return TargetInfo(target, 1.0, float(logits.vocab_size))
    weights = weights.astype(logits.options.compute_dtype)
    return TargetInfo(target, weights[target], weights.sum())
