"""Where the head lives, in JAX: a vocabulary's rows on this device, inside `shard_map`.

Under `check_vma=True` a type says over which mesh axes a value varies; the helpers here keep those
types right. Without it nothing varies by type, and a gradient means what it does for `lax.psum`
there: each device has an output of its own, whose cotangents add up.

Shapes: N tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.checks import check_axis, check_shard, check_shards, check_varying
from xentlib.jax.softmax import RestStats, exp_difference
from xentlib.plan import PaddedVocab, VocabShard

__all__ = [
    "Axis",
    "as_primal",
    "axis_for",
    "axis_of",
    "combine",
    "shard_here",
    "upstream_of",
    "vary",
    "varying",
]

T = TypeVar("T")


class Axis(NamedTuple):
    """The mesh axis that a vocabulary is spread over, and how many classes its shards hold."""

    name: str | tuple[str, ...]
    vocab_size: int


def axis_of(parallel: Any, weight: Any, bias: Any, layout: str) -> Axis | None:
    """Of `vocab_parallel`, for this device's rows of a head."""
    if parallel is None or jnp.ndim(weight) != 2:  # the latter is refused where shapes are checked
        return None
    columns = jnp.shape(weight)[0 if layout == "VH" else 1]
    return axis_for(parallel, columns, weight=weight, bias=bias)


def axis_for(parallel: Any, columns: int, shard: VocabShard | None = None, **local: Any) -> Axis:
    """Of `vocab_parallel`, with `columns` on each device. `local` must differ between them."""
    name, vocab_size = parallel if isinstance(parallel, PaddedVocab) else (parallel, None)
    if shard is not None:
        check_shard(shard, columns)
        vocab_size = shard.vocab_size
    try:
        ranks = lax.axis_size(name)
    except (NameError, TypeError, ValueError):
        check_axis(name)
    if vocab_size is None:
        vocab_size = ranks * columns
    check_shards((columns,) * ranks, vocab_size)
    index = varying(lax.axis_index(name))
    for argument, value in local.items():
        if value is not None:
            check_varying(argument, index <= varying(value), name)
    return Axis(name, vocab_size)


def checks_types(name: Any) -> bool:
    """Whether `shard_map` runs with `check_vma=True`: an axis index then varies by type."""
    return bool(varying(lax.axis_index(name)))


def shard_here(axis: Axis, columns: int, given: jax.Array | None) -> VocabShard:
    """This device's classes. Where none were given every device has as many columns, and what lies
    beyond the vocabulary is padding."""
    if given is not None:
        start, stop = given
        return VocabShard(start, stop, axis.vocab_size, columns - (stop - start))
    start = jnp.minimum(lax.axis_index(axis.name) * columns, axis.vocab_size).astype(jnp.int32)
    stop = jnp.minimum(start + columns, axis.vocab_size)
    padded = lax.axis_size(axis.name) * columns != axis.vocab_size
    return VocabShard(start, stop, axis.vocab_size, columns - (stop - start) if padded else 0)


def varying(*trees: Any) -> frozenset[Any]:
    """Mesh axes over which any array of the trees varies by type."""
    leaves = (x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array))
    return frozenset().union(*(jax.typeof(x).mat.varying for x in leaves))


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
        own = not checks_types(axis.name) or varying(lax.axis_index(axis.name)) <= varying(g)
        return lax.psum(g, axis.name) if own else g

    result: T = jax.tree.map(one, gradient)
    return result


def combine(
    axis: Axis, z_y: jax.Array, owned: jax.Array, size: jax.Array, rest: RestStats
) -> tuple[jax.Array, RestStats]:
    """Target's logit and statistics of the rest over all shards, with one MAX and one packed SUM.

    `size` is the number of this shard's classes.
    """
    none = rest.ones == 0
    m_local = jnp.where(none, -jnp.inf, rest.m)
    m = lax.pmax(m_local, axis.name)
    m = jnp.where(m == -jnp.inf, 0.0, m)
    top = m_local == m
    scale = jnp.where(none, 0.0, exp_difference(rest.m, m))
    below = jnp.where(none, 0.0, rest.m - m)
    total = rest.ones + rest.s
    packed = [
        jnp.where(owned, z_y, 0.0),
        jnp.where(top, rest.ones, 0.0),
        jnp.where(top, rest.s, scale * total),
    ]
    if rest.sum_ed is not None:
        packed.append(scale * (rest.sum_ed + below * total))
    if rest.sum_d is not None:
        columns = size.astype(z_y.dtype) - owned.astype(z_y.dtype)
        packed.append(rest.sum_d + columns * (rest.m - m))
    z_y, ones, s, *more = lax.psum(jnp.stack(packed), axis.name)
    sum_ed = more.pop(0) if rest.sum_ed is not None else None
    return z_y, RestStats(m, ones, s, sum_ed, more.pop(0) if rest.sum_d is not None else None)
