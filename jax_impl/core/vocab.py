"""A vocabulary over the devices of a mesh axis, inside `shard_map`: whose classes are where, what
all must have alike, the sums over them, and the types that say over which axes a value varies.

Under `check_vma=True` JAX tracks, in the type of each value, over which mesh axes it varies; the
helpers here keep those types right. Without it no type says that a value varies, and a gradient
means what it does for `lax.psum` there: each device has an output of its own, whose cotangents add
up.

Shapes: N tokens, H hidden width, E numbers that must be alike, S of them for an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.algebra import NonTargetStats
from xentlib.arguments import Arguments
from xentlib.checks.placement import check_axis, check_varying
from xentlib.checks.shards import check_shard, check_shards, refuse_whole_head
from xentlib.checks.validators import plain
from xentlib.jax.core.algebra import ALGEBRA
from xentlib.plan import PaddedVocab, VocabShard

T = TypeVar("T")


class Axis(NamedTuple):
    """The mesh axis that a vocabulary is spread over, and how many classes its shards hold."""

    name: str | tuple[str, ...]
    vocab_size: int


def axis_of(given: Arguments, b: Any = None) -> Axis | None:
    """Of `vocab_parallel`, for this device's rows of a head, and of its low-rank part."""
    parallel, weight = given.vocab_parallel, given.weight
    if parallel is None or jnp.ndim(weight) != 2:  # the latter is refused where shapes are checked
        return None
    columns = jnp.shape(weight)[0 if given.weight_layout == "VH" else 1]
    return axis_for(parallel, columns, weight=weight, bias=given.bias, b=b)


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
        check_axis(name)
    if vocab_size is None:
        vocab_size = ranks * columns
    check_shards((columns,) * ranks, vocab_size)
    # All but one device's may be padding: where there are types they tell, below.
    if ranks > 1 and columns == vocab_size and not checks_types(name):
        refuse_whole_head(columns, ranks)
    for argument, value in local.items():
        if value is not None:
            check_varying(argument, varies_over(value, name), name)
    return Axis(name, vocab_size)


def varies_over(value: Any, name: Any) -> bool:
    """Over a mesh axis by type; True of anything where there are no such types."""
    return varying(lax.axis_index(name)) <= varying(value)


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
    found: jax.Array = jnp.where((largest == -jnp.inf) & (least == -jnp.inf), 0.0, agreed)
    return found


class Alike(NamedTuple):
    """What every device must have alike, as numbers that travel with the MAX."""

    values: jax.Array  # [E]
    tolerances: jax.Array  # [E]
    rows: jax.Array | None  # [3] of this device's rows, which must not be all devices'

    def packed(self) -> jax.Array:
        rows = self.values[:0] if self.rows is None else self.rows
        return jnp.concatenate([self.values, -self.values, self.tolerances, rows, -rows])

    def broken(self, largest: jax.Array) -> jax.Array:
        """Of the maximum over the devices: whether they differ, or hold the same shard."""
        count = self.values.shape[0]
        high, low, tolerance = jnp.reshape(largest[: 3 * count], (3, count))
        wrong = (high + low > tolerance).any()
        if self.rows is not None:
            high, low = jnp.reshape(largest[3 * count :], (2, 3))
            wrong |= (high + low == 0).all() & (high[1] < high[2])
        found: jax.Array = wrong
        return found


# Sums with random signs, each in units of the root of its sum of squares: those of other tokens
# differ by about 1.4, those of one array in two roundings of bfloat16 by 0.004.
SIGNS, SIGNED_TOLERANCE, TOLERANCE = 4, 0.1, 1e-5


def alike(
    axis: Axis,
    labels: jax.Array,
    valid: jax.Array,
    temperature: jax.Array | None,
    hidden: jax.Array | None,
    rows: jax.Array | None,
    dtype: str,
    *,
    a: jax.Array | None = None,
    keep: jax.Array | None = None,
    scale: jax.Array | None = None,
    token_weights: jax.Array | None = None,
    class_weights: jax.Array | None = None,
    numbers: Sequence[jax.Array | None] = (),
) -> Alike | None:
    """Of one call over shards; None where the types say that nothing can differ. `numbers` are its
    options that are one number, None where it is the neutral one or no array."""
    if checks_types(axis.name):
        may = varying(labels, valid, temperature, hidden, a, keep, scale, token_weights)
        if not varying(lax.axis_index(axis.name)) & (may | varying(class_weights, numbers)):
            return None
        rows = None  # they vary by type
    (count,) = labels.shape
    own = jnp.where(valid, labels.astype(jnp.uint32) + 1, 0)
    mixed = own * np.uint32(0x9E3779B1) ^ mix(count)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x2C1B3C6D)
    # 24 bits, which float32 holds exactly.
    total = ((mixed ^ (mixed >> 12)) & 0xFFFFFF).sum(dtype=jnp.uint32) & 0xFFFFFF
    values, tolerances = [total.astype(dtype)[None]], [jnp.zeros(1, dtype)]
    per_token = None if temperature is None else jnp.broadcast_to(temperature, (count,))
    # Of tokens that do not count a weight may be anything, as on devices that pad on their own.
    weights = None if token_weights is None else jnp.where(valid, token_weights, 0)
    for x in (per_token, weights, a, scale):
        if x is None:
            continue
        x_N = jnp.nan_to_num(x.astype(dtype)).reshape(-1)
        values += [x_N.sum()[None], signs(x_N.size, SIGNS).astype(dtype) @ x_N]
        norm = jnp.sqrt((x_N * x_N).sum())
        tolerances += [TOLERANCE * jnp.abs(x_N).sum()[None]]
        tolerances += [jnp.broadcast_to(SIGNED_TOLERANCE * norm, (SIGNS,))]
    more, theirs = of_options(class_weights, numbers, dtype)
    values, tolerances = [*values, more], [*tolerances, theirs]
    for x in (hidden, None if keep is None else keep.astype(dtype)):
        if x is None:
            continue
        signs_SN = jnp.where(valid[None], signs(count, SIGNS), 0).astype(x.dtype)
        sums_SH = jnp.nan_to_num(jnp.dot(signs_SN, x, preferred_element_type=dtype))
        values += [(sums_SH * signs(sums_SH.shape[1], 1).astype(dtype)).sum(axis=1)]
        tolerances += [SIGNED_TOLERANCE * jnp.sqrt((sums_SH * sums_SH).sum(axis=1))]
    return Alike(jnp.concatenate(values), jnp.concatenate(tolerances), numbers_of(rows, dtype))


def apart(
    axis: Axis,
    rows: jax.Array,
    dtype: str,
    *,
    class_weights: jax.Array | None = None,
    numbers: Sequence[jax.Array | None] = (),
) -> Alike | None:
    """The same of a call whose devices have tokens of their own: their shards must differ, their
    options must not."""
    types = checks_types(axis.name)
    if types and not varying(lax.axis_index(axis.name)) & varying(class_weights, numbers):
        return None
    of_rows = None if types else numbers_of(rows, dtype)
    return Alike(*of_options(class_weights, numbers, dtype), of_rows)


def of_options(
    class_weights: jax.Array | None, numbers: Sequence[jax.Array | None], dtype: str
) -> tuple[jax.Array, jax.Array]:
    """[E] of what is one for each class, or one number, and by how much they may differ."""
    values, tolerances = [jnp.zeros(0, dtype)], [jnp.zeros(0, dtype)]
    for x in numbers:
        if x is not None:
            one = jnp.nan_to_num(x.astype(dtype)).reshape(1)
            values, tolerances = [*values, one], [*tolerances, TOLERANCE * jnp.abs(one)]
    if class_weights is not None:
        x_V = jnp.nan_to_num(class_weights.astype(dtype))
        values += [(factors(x_V.size).astype(dtype) * x_V).sum()[None]]
        tolerances += [TOLERANCE * jnp.sqrt((x_V * x_V).sum())[None]]
    return jnp.concatenate(values), jnp.concatenate(tolerances)


def numbers_of(rows: jax.Array | None, dtype: str) -> jax.Array | None:
    if rows is None or not rows.size:
        return None
    x = jnp.nan_to_num(rows.astype(dtype))
    return jnp.stack([x.sum(), x.min(), x.max()])


def mix(count: int) -> jax.Array:
    index = jnp.arange(count, dtype=jnp.uint32)
    return (index * np.uint32(0x85EBCA77)) ^ ((index * np.uint32(0xC2B2AE3D)) >> 13)


def signs(count: int, number: int) -> jax.Array:
    """[number, count] of 1 and -1."""
    bits = mix(count)[None] >> jnp.arange(7, 7 + number, dtype=jnp.uint32)[:, None]
    return 1 - 2 * (bits & 1).astype(jnp.int32)


def factors(count: int) -> jax.Array:
    """[count] of either sign, from 0.5 to 1, hardly two alike: of signs alone every second pair of
    entries could change places unseen."""
    bits = ((mix(count) >> 7) & 0xFFFF) >> 1
    return signs(count, 1)[0].astype(jnp.float32) * (0.5 + bits.astype(jnp.float32) * 2.0**-16)


def combine(
    axis: Axis,
    z_y: jax.Array,
    owned: jax.Array,
    start: jax.Array,
    rest: NonTargetStats,
    weights: jax.Array,
    alike: Alike | None,
) -> tuple[jax.Array, NonTargetStats]:
    """Target's logit and statistics of the rest over all shards, with one MAX and one packed SUM.
    NaN where devices disagree on what they must have `alike`.

    `start` is this shard's first class; `weights` that of the rest's classes, for label smoothing:
    their number without any.
    """
    none = rest.ones == 0
    m_local = jnp.where(none, -jnp.inf, rest.m)
    if alike is None:
        m = lax.pmax(m_local, axis.name)
    else:
        largest = lax.pmax(jnp.concatenate([m_local, alike.packed()]), axis.name)
        m, largest = jnp.split(largest, [m_local.size])
    m = jnp.where(m == -jnp.inf, 0.0, m)
    if rest.top is not None:
        rest = rest._replace(top=rest.top + start.astype(m.dtype))
    of_all = ALGEBRA.relative_to(m, rest, weights)
    packed = [jnp.where(owned, z_y, 0.0), of_all.ones, of_all.s]
    packed += [x for x in (of_all.sum_ed, of_all.sum_d) if x is not None]
    if of_all.top is not None:
        rank = jnp.arange(lax.axis_size(axis.name), dtype=jnp.int32)[:, None]
        here = rank == lax.axis_index(axis.name)
        packed += list(jnp.where(here, of_all.top[None, :], 0.0))
    z_y, ones, s, *more = lax.psum(jnp.stack(packed), axis.name)
    if alike is not None:
        z_y = jnp.where(alike.broken(largest), jnp.nan, z_y)
    sum_ed = more.pop(0) if rest.sum_ed is not None else None
    sum_d = more.pop(0) if rest.sum_d is not None else None
    first = jnp.stack(more).min(axis=0) if more else None
    return z_y, NonTargetStats(m, ones, s, sum_ed, sum_d, first)
