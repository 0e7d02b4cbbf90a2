"""How the head is placed, in JAX: a vocabulary's rows on this device, inside `shard_map`, and
shards over the axes that spread tokens, gathered once.

Under `check_vma=True` JAX tracks, in the type of each value, over which mesh axes it varies; the
helpers here keep those types right. Without it no type says that a value varies, and a gradient
means what it does for `lax.psum` there: each device has an output of its own, whose cotangents add
up.

Shapes: N tokens, H hidden width, E numbers that must be alike, S of them for an array.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib.checks.operand import plain
from xentlib.checks.placement import check_axis, check_varying
from xentlib.checks.shards import check_shard, check_shards
from xentlib.jax.softmax import RestStats, below, exp_difference
from xentlib.plan import PaddedVocab, VocabShard

__all__ = [
    "Alike",
    "Axis",
    "Placement",
    "Spread",
    "alike",
    "as_primal",
    "axis_for",
    "axis_of",
    "combine",
    "of_all_tokens",
    "over_mesh",
    "own_piece",
    "place",
    "placed",
    "shard_here",
    "upstream_of",
    "vary",
    "varying",
    "whole_rows",
]

T = TypeVar("T")


class Axis(NamedTuple):
    """The mesh axis that a vocabulary is spread over, and how many classes its shards hold."""

    name: str | tuple[str, ...]
    vocab_size: int


Axes = tuple[Any, ...]  # names of mesh axes, the slowest first


class Spread(NamedTuple):
    """Inside a `shard_map` of ours: axes that spread tokens, and those that shard each dimension of
    what this device needs of the head."""

    tokens: Axes
    weight: tuple[Axes, Axes]
    bias: tuple[Axes]


class Placement(NamedTuple):
    """Of a call on whole arrays: where each array's parts are on a mesh."""

    mesh: Any
    tokens: P  # of the leading dimensions
    weight: P
    bias: P
    axis: Axis | None
    spread: Spread


def axis_of(parallel: Any, weight: Any, bias: Any, layout: str) -> Axis | None:
    """Of `vocab_parallel`, for this device's rows of a head."""
    if parallel is None or jnp.ndim(weight) != 2:  # the latter is refused where shapes are checked
        return None
    columns = jnp.shape(weight)[0 if layout == "VH" else 1]
    return axis_for(parallel, columns, weight=weight, bias=bias)


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
    index = varying(lax.axis_index(name))
    for argument, value in local.items():
        if value is not None:
            check_varying(argument, index <= varying(value), name)
    return Axis(name, vocab_size)


def axes_of(entry: Any) -> Axes:
    """Of one dimension in a PartitionSpec."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)


def placed(parallel: Any, hidden: Any, weight: Any, bias: Any, layout: str) -> Placement | None:
    """By the arrays' types, on a mesh with Explicit axes; `NLLHead` brings its own."""
    if isinstance(parallel, Placement):
        return parallel
    specs = [explicit(x) for x in (hidden, weight, bias)]
    meshes = [found[0] for found in specs if found]
    if not meshes or jnp.ndim(weight) != 2:  # the latter is refused where shapes are checked
        return None
    tokens, head, own = (found[1] if found else P() for found in specs)
    tokens = P(*tokens[: jnp.ndim(hidden) - 1])
    return place(meshes[0], tokens, head, own, jnp.shape(weight), layout, parallel)


def explicit(x: Any) -> tuple[Any, P] | None:
    """Mesh and spec of an array whose type says how it is sharded."""
    if not isinstance(x, jax.Array):
        return None
    found = jax.typeof(x).sharding
    named = {name for entry in found.spec for name in axes_of(entry)}
    return (found.mesh, found.spec) if named else None


def place(
    mesh: Any, tokens: P, weight: P, bias: P, shape: tuple[int, ...], layout: str, parallel: Any
) -> Placement:
    """Axes of the vocabulary that spread no tokens, the leading ones, stay spread; shards over
    token axes are gathered by us, over others by the compiler before the call.

    `parallel` names the axes that stay spread, or None.
    """
    name, classes = parallel if isinstance(parallel, PaddedVocab) else (parallel, None)
    over = tuple(one for entry in tokens for one in axes_of(entry))
    entries = (*weight, None, None)[:2]
    v, h = map(axes_of, entries if layout == "VH" else entries[::-1])
    if name is None:
        token_axes = [i for i, one in enumerate(v) if one in over]
        kept = v[: min(token_axes, default=len(v))]
    else:
        kept = axes_of(name)

    def pieces(axes: Axes, kept: Axes = ()) -> Axes:
        rest = axes[len(kept) :] if axes[: len(kept)] == kept else ()
        return tuple(one for one in rest if one in over)

    cut = (pieces(v, kept), pieces(h))
    own = pieces(axes_of((*bias, None)[0]), kept)
    columns = shape[0 if layout == "VH" else 1]
    axis = None
    if kept:
        ranks = math.prod(mesh.shape[one] for one in kept)
        classes = columns if classes is None else classes
        check_shards((columns // ranks,) * ranks, classes)
        axis = Axis(kept if len(kept) > 1 else kept[0], classes)
    specs = ((*kept, *cut[0]) or None, cut[1] or None)
    if layout == "HV":
        cut, specs = cut[::-1], specs[::-1]
    return Placement(
        mesh, tokens, P(*specs), P((*kept, *own) or None), axis, Spread(over, cut, (own,))
    )


def over_mesh(call: Any, place: Placement, arrays: Any, outputs: Any) -> Any:
    """`call` on each device's part of the arrays that `prepare` made; `outputs` is like its result
    and true where there is one entry per token.

    Gradients come back where the arrays were.
    """
    _, _, labels, bias, constants = arrays
    leading, rows = labels.ndim, place.tokens
    specs = (
        P(*(*rows, *(None,) * leading)[:leading], None),
        place.weight,
        rows,
        None if bias is None else place.bias,
        jax.tree.map(lambda x: rows if x.ndim == leading else P(), constants)._replace(
            class_weights=None if constants.class_weights is None else P()
        ),
    )
    types = dict(zip(place.mesh.axis_names, place.mesh.axis_types))
    names = {name for name, kind in types.items() if kind is not AxisType.Manual}
    if AxisType.Explicit in types.values():
        arrays = jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, NamedSharding(place.mesh, spec)), arrays, specs
        )
    return jax.shard_map(
        call,
        mesh=place.mesh,
        in_specs=specs,
        out_specs=jax.tree.map(lambda per_token: rows if per_token else P(), outputs),
        axis_names=names,
    )(*arrays)


def whole_rows(
    spread: Spread | None,
    transposed: bool,
    hidden: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """What this device multiplies, gathered once, before the loop."""
    if spread is None:
        return uncut(hidden, 1), uncut(weight, 0 if transposed else 1), bias

    def gather(x: jax.Array, cut: tuple[Axes, ...]) -> jax.Array:
        for dimension, names in enumerate(cut):
            x = lax.all_gather(x, names, axis=dimension, tiled=True) if names else x
        return x

    bias = None if bias is None else gather(bias, spread.bias)
    return hidden, gather(weight, spread.weight), bias


def uncut(x: jax.Array, dimension: int) -> jax.Array:
    """Not sharded in `dimension`, where the compiler places arrays: sharded there, it would
    multiply shards and sum [chunk, V] logits over devices in each iteration."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1 or AxisType.Auto not in mesh.axis_types:
        return x
    spec = P(*(None if i == dimension else P.UNCONSTRAINED for i in range(x.ndim)))
    found: jax.Array = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return found


def own_piece(gradient: jax.Array, cut: tuple[Axes, ...]) -> jax.Array:
    """Summed over the devices that have the other shards."""
    for dimension, names in enumerate(cut):
        if names:
            gradient = lax.psum_scatter(gradient, names, scatter_dimension=dimension, tiled=True)
    return gradient


def of_all_tokens(spread: Spread | None, x: T) -> T:
    """Sums over the tokens of this device, made those of all."""
    total: T = lax.psum(x, spread.tokens) if spread and spread.tokens else x
    return total


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
) -> Alike | None:
    """Of one call over shards; None where the types say that nothing can differ."""
    if checks_types(axis.name):
        may = varying(labels, valid, temperature, hidden)
        if not varying(lax.axis_index(axis.name)) & may:
            return None
        rows = None  # they vary by type
    (count,) = labels.shape
    own = jnp.where(valid, labels.astype(jnp.uint32) + 1, 0)
    mixed = own * np.uint32(0x9E3779B1) ^ mix(count)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x2C1B3C6D)
    # 24 bits, which float32 holds exactly.
    total = ((mixed ^ (mixed >> 12)) & 0xFFFFFF).sum(dtype=jnp.uint32) & 0xFFFFFF
    values, tolerances = [total.astype(dtype)[None]], [jnp.zeros(1, dtype)]
    if temperature is not None:
        x_N = jnp.nan_to_num(jnp.broadcast_to(temperature, (count,)).astype(dtype))
        values += [x_N.sum()[None], signs(count, SIGNS).astype(dtype) @ x_N]
        norm = jnp.sqrt((x_N * x_N).sum())
        tolerances += [TOLERANCE * jnp.abs(x_N).sum()[None]]
        tolerances += [jnp.broadcast_to(SIGNED_TOLERANCE * norm, (SIGNS,))]
    if hidden is not None:
        signs_SN = jnp.where(valid[None], signs(count, SIGNS), 0).astype(hidden.dtype)
        sums_SH = jnp.nan_to_num(jnp.dot(signs_SN, hidden, preferred_element_type=dtype))
        values += [(sums_SH * signs(sums_SH.shape[1], 1).astype(dtype)).sum(axis=1)]
        tolerances += [SIGNED_TOLERANCE * jnp.sqrt((sums_SH * sums_SH).sum(axis=1))]
    some = None
    if rows is not None and rows.size:
        x = jnp.nan_to_num(rows.astype(dtype))
        some = jnp.stack([x.sum(), x.min(), x.max()])
    return Alike(jnp.concatenate(values), jnp.concatenate(tolerances), some)


def mix(count: int) -> jax.Array:
    index = jnp.arange(count, dtype=jnp.uint32)
    return (index * np.uint32(0x85EBCA77)) ^ ((index * np.uint32(0xC2B2AE3D)) >> 13)


def signs(count: int, number: int) -> jax.Array:
    """[number, count] of 1 and -1."""
    bits = mix(count)[None] >> jnp.arange(7, 7 + number, dtype=jnp.uint32)[:, None]
    return 1 - 2 * (bits & 1).astype(jnp.int32)


def combine(
    axis: Axis,
    z_y: jax.Array,
    owned: jax.Array,
    start: jax.Array,
    rest: RestStats,
    weights: jax.Array,
    alike: Alike | None,
) -> tuple[jax.Array, RestStats]:
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
    top = m_local == m
    scale = jnp.where(none, 0.0, exp_difference(rest.m, m))
    total = rest.ones + rest.s
    packed = [
        jnp.where(owned, z_y, 0.0),
        jnp.where(top, rest.ones, 0.0),
        jnp.where(top, rest.s, scale * total),
    ]
    if rest.sum_ed is not None:
        packed.append(scale * (rest.sum_ed + below(rest, m) * total))
    if rest.sum_d is not None:
        packed.append(rest.sum_d + weights * (rest.m - m))
    if rest.top is not None:
        mine = jnp.where(top & ~none, rest.top + start.astype(m.dtype), jnp.inf)
        rank = jnp.arange(lax.axis_size(axis.name), dtype=jnp.int32)[:, None]
        here = rank == lax.axis_index(axis.name)
        packed += list(jnp.where(here, mine[None, :], 0.0))
    z_y, ones, s, *more = lax.psum(jnp.stack(packed), axis.name)
    if alike is not None:
        z_y = jnp.where(alike.broken(largest), jnp.nan, z_y)
    sum_ed = more.pop(0) if rest.sum_ed is not None else None
    sum_d = more.pop(0) if rest.sum_d is not None else None
    first = jnp.stack(more).min(axis=0) if more else None
    return z_y, RestStats(m, ones, s, sum_ed, sum_d, first)
