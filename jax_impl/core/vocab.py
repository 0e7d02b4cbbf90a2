"""A vocabulary over the devices of a mesh axis, inside `shard_map`: whose classes are where, the
sums over them, and the types that say over which axes a value varies.

Under `check_vma=True` JAX tracks, in the type of each value, over which mesh axes it varies; the
helpers here keep those types right. Without it no type says that a value varies, and a gradient
means what it does for `lax.psum` there: each device has an output of its own, whose cotangents add
up.

Shapes: N tokens.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.arguments import Arguments
from xentlib.checks.placement import PLACEMENTS
from xentlib.checks.shards import SHARDS, check_shard
from xentlib.checks.validators import check_shards, plain
from xentlib.jax.core.algebra import ALGEBRA
from xentlib.math.softmax import BlockStats, NonTargetStats
from xentlib.shards import PaddedVocab, VocabShard

T = TypeVar("T")


class Axis(NamedTuple):
    """The mesh axis that a vocabulary is spread over, and how many classes its shards hold."""

    name: str | tuple[str, ...]
    vocab_size: int


def axis_of(args: Arguments, b: Any = None) -> Axis | None:
    """Of `vocab_parallel`, for this device's rows of a head, and of its low-rank part."""
    parallel, weight = args.vocab_parallel, args.weight
    if parallel is None or jnp.ndim(weight) != 2:  # the latter is refused where shapes are checked
        return None
    columns = jnp.shape(weight)[0 if args.weight_layout == "VH" else 1]
    return axis_for(parallel, columns, weight=weight, bias=args.bias, b=b)


def axis_for(parallel: Any, columns: int, shard: VocabShard | None = None, **local: Any) -> Axis:
    """Of `vocab_parallel`, with `columns` on each device. `local` must differ between them."""
    name, vocab_size = parallel if isinstance(parallel, PaddedVocab) else (parallel, None)
    vocab_size = plain(vocab_size)
    if shard is not None:
        check_shard(shard, columns)
        vocab_size = shard.vocab_size
    try:
        ranks = lax.axis_size(name)
    except (NameError, TypeError, ValueError):
        PLACEMENTS.refuse("axis", argument="vocab_parallel", name=name)
    if vocab_size is None:
        vocab_size = ranks * columns
    check_shards((columns,) * ranks, vocab_size)
    # All but one device's may be padding: where there are types they tell, below.
    if ranks > 1 and columns == vocab_size and not checks_types(name):
        SHARDS.refuse("whole_head", vocab_size=columns, ranks=ranks)
    for argument, value in local.items():
        if value is not None:
            varies = varies_over(value, name)
            PLACEMENTS.require("varying", varies, name=argument, axis=name)
    return Axis(name, vocab_size)


def varies_over(value: Any, name: Any) -> bool:
    """Over a mesh axis by type; True of anything where there are no such types."""
    return varying(lax.axis_index(name)) <= varying(value)


def checks_types(name: Any) -> bool:
    """Whether `shard_map` runs with `check_vma=True`: an axis index then varies by type."""
    return bool(varying(lax.axis_index(name)))


def shard_here(axis: Axis, columns: int, ends: jax.Array | None) -> VocabShard:
    """This device's classes. Where none were given every device has as many columns, and what lies
    beyond the vocabulary is padding."""
    if ends is not None:
        start, stop = ends
        return VocabShard(start, stop, axis.vocab_size, columns - (stop - start))
    start = jnp.minimum(lax.axis_index(axis.name) * columns, axis.vocab_size).astype(jnp.int32)
    stop = jnp.minimum(start + columns, axis.vocab_size)
    padded = lax.axis_size(axis.name) * columns != axis.vocab_size
    return VocabShard(start, stop, axis.vocab_size, columns - (stop - start) if padded else 0)


def varying(*trees: Any) -> frozenset[Any]:
    """Mesh axes over which any array of the trees varies by type."""
    leaves = [x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    return frozenset().union(*[jax.typeof(x).mat.varying for x in leaves])


def vary(tree: T, axes: frozenset[Any]) -> T:
    """The same values, varying over `axes` by type: what a loop carries must be from the start."""

    def one(x: Any) -> Any:
        missing = tuple(sorted(axes - varying(x), key=str))
        return lax.pcast(x, missing, to="varying") if missing else x

    result: T = jax.tree.map(one, tree)
    return result


def as_primal(gradient: jax.Array, primal: jax.Array) -> jax.Array:
    """A gradient summed over what its primal does not vary over: d hidden over the vocabulary's
    axis, d weight over those of the data. Nothing without types, where `shard_map` sums."""
    extra = tuple(sorted(varying(gradient) - varying(primal), key=str))
    summed: jax.Array = lax.psum(gradient, extra) if extra else gradient
    return vary(summed, varying(primal))


def upstream_of(gradient: T, axis: Axis | None) -> T:
    """Of all devices' outputs together, where each has one of its own."""
    if axis is None:
        return gradient

    def one(g: Any) -> Any:
        return lax.psum(g, axis.name) if varies_over(g, axis.name) else g

    result: T = jax.tree.map(one, gradient)
    return result


def agreed_upstream(gradient: jax.Array, counts: jax.Array, axes: Any) -> jax.Array:
    """One number that all devices have as their upstream gradient, of those with tokens that
    count; NaN where they differ, 0 where no device has any."""
    # NaN as inf of both signs: what a MAX makes of a NaN depends on the device.
    both = jnp.where(jnp.isnan(gradient), jnp.inf, jnp.stack([gradient, -gradient]))
    largest, least = lax.pmax(jnp.where(counts, both, -jnp.inf), axes)
    agreed = jnp.where(largest == -least, largest, jnp.nan)
    nowhere = (largest == -jnp.inf) & (least == -jnp.inf)
    upstream: jax.Array = jnp.where(nowhere, 0.0, agreed)
    return upstream


def combine(
    axis: Axis,
    z_y: jax.Array,
    owned: jax.Array,
    start: jax.Array,
    blocks: BlockStats,
    weights: jax.Array,
    consistency: Any = None,
) -> tuple[jax.Array, NonTargetStats]:
    """Target's logit and statistics of the rest over all shards, with one MAX and one packed SUM.
    NaN where devices differ in what they must have the same, by `consistency`, a
    `RankConsistency`.

    `start` is this shard's first class; `weights` that of the rest's classes, for label smoothing:
    their number without any.
    """
    m_local = ALGEBRA.largest(blocks)
    if consistency is None:
        m = lax.pmax(m_local, axis.name)
    else:
        largest = lax.pmax(jnp.concatenate([m_local, consistency.packed()]), axis.name)
        m, largest = jnp.split(largest, [m_local.size])
    m = jnp.where(m == -jnp.inf, 0.0, m)
    if blocks.top is not None:
        blocks = blocks._replace(top=blocks.top + start.astype(m.dtype))
    sums, first = ALGEBRA.block_sums(m, blocks)
    terms: list[Any] = [jnp.where(owned, z_y, 0.0), sums, None, None]
    if blocks.sum_d is not None:
        terms[2] = ALGEBRA.moved(blocks.sum_d, weights, m_local, m)
    if first is not None:
        rank = jnp.arange(lax.axis_size(axis.name), dtype=jnp.int32)[:, None]
        terms[3] = jnp.where(rank == lax.axis_index(axis.name), first[None, :], 0.0)
    leaves, tree = jax.tree.flatten(terms)
    rows = [x if x.ndim == 2 else x[None] for x in leaves]
    ends = list(itertools.accumulate(len(x) for x in rows))[:-1]
    summed = jnp.split(lax.psum(jnp.concatenate(rows), axis.name), ends)
    z_y, sums, sum_d, tops = jax.tree.unflatten(
        tree, [x.reshape(y.shape) for x, y in zip(summed, leaves, strict=True)]
    )
    if consistency is not None:
        z_y = jnp.where(consistency.broken(largest), jnp.nan, z_y)
    first = None if tops is None else tops.min(axis=0)
    return z_y, ALGEBRA.from_sums(m, sums, first, sum_d)


def sum_blocks(axis: Axis | None, sums_kbN: jax.Array) -> jax.Array:
    """[k, N] over all columns, and over all shards, exactly."""
    words = ALGEBRA.words(jnp.moveaxis(sums_kbN, 1, 0).reshape(sums_kbN.shape[1], -1))
    if axis is not None:
        words = lax.psum(words, axis.name)
    total: jax.Array = ALGEBRA.value(words, sums_kbN).reshape(len(sums_kbN), -1)
    return total
