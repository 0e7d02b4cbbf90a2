"""What the devices of a sharded vocabulary must have the same, in a few numbers that travel with
the MAX.

Shapes: N tokens, H hidden width, E numbers that must be the same, S of them for an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.jax.core.call import Arrays, Options
from xentlib.jax.core.vocab import checks_types, varying
from xentlib.math.soft_labels import SOFT_LABELS
from xentlib.shards import VocabShard


class RankConsistency(NamedTuple):
    """What every device must have the same, as numbers that travel with the MAX."""

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
        differs: jax.Array = wrong
        return differs


# Sums with random signs, each in units of the root of its sum of squares: those of other tokens
# differ by about 1.4, those of one array in two roundings of bfloat16 by 0.004.
SIGNS, SIGNED_TOLERANCE, TOLERANCE = 4, 0.1, 1e-5
SOFTMAX_TOKENS = 8  # at which a softmax of one device's columns is looked for


def consistency_of(
    options: Options, arrays: Arrays, valid: jax.Array, shard: VocabShard
) -> RankConsistency | None:
    """Of a call over shards; None where there is nothing to look at.

    Tokens are the same on every device. Where they are gathered they are its own: the shards must
    differ, and the options must not.
    """
    same, softmax = alike(options, arrays, valid), local_softmax(options, arrays, valid, shard)
    if same is None or softmax is None:
        return same or softmax
    values = jnp.concatenate((same.values, softmax.values))
    tolerances = jnp.concatenate((same.tolerances, softmax.tolerances))
    return RankConsistency(values, tolerances, same.rows)


def local_softmax(
    options: Options, arrays: Arrays, valid: jax.Array, shard: VocabShard
) -> RankConsistency | None:
    """Of some valid tokens whether the probabilities of this device's columns add up to 1. Wrong
    where they do on all devices: of one that has others, the tolerance lets it pass. So does one of
    less than two columns, where equal logits have p = 1."""
    of_labels = options.divergence is not None and options.divergence.kind == SOFT_LABELS
    looked_at = [(arrays.hidden, True)] if arrays.weight is None else []
    if of_labels and arrays.teacher is not None:
        looked_at.append((arrays.teacher.hidden, False))
    if not looked_at or options.gathered or valid.shape[0] == 0:
        return None
    # Filled up, as an exported program does not know whether there are so many.
    counts, some = lax.top_k(jnp.pad(valid.astype(jnp.int32), (0, SOFTMAX_TOKENS)), SOFTMAX_TOKENS)
    counts, columns = counts > 0, shard.stop - shard.start
    tolerances = []
    for x_NC, logits in looked_at:
        x = x_NC.at[some].get(mode="fill", fill_value=0).astype(options.compute_dtype)
        column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
        x = jnp.where(column < columns, jnp.exp(x) if logits else x, 0)
        near = jnp.abs(x.sum(1) - 1) < (1e-3 if x_NC.dtype.itemsize > 2 else 0.05)
        normalised = (near | ~counts).all() & counts.any() & (columns > 1)
        tolerances.append(jnp.where(normalised, -1.0, 1.0).astype(x.dtype))
    return RankConsistency(jnp.zeros(len(tolerances), x.dtype), jnp.stack(tolerances), None)


def alike(options: Options, arrays: Arrays, valid: jax.Array) -> RankConsistency | None:
    """None where the types say that nothing can differ."""
    axis, dtype = options.axis, options.compute_dtype
    assert axis is not None
    rows = None if arrays.shard is not None else some_rows(options, arrays)
    # As numbers, not arrays, options are of the program: the same everywhere.
    numbers = [arrays.logit_scale, *arrays.scalars.values()]
    hidden = None if arrays.weight is None else arrays.hidden
    same: tuple[Any, ...] = ()
    if not options.gathered:
        numbers.append(arrays.denominator)  # a loss's is its device's own where its tokens are
        same = (arrays.labels, valid, arrays.temperature, hidden, arrays.low_in)
        same = (*same, arrays.keep, arrays.scale, arrays.token_weights, arrays.ids)
    if checks_types(axis.name):
        may = varying(same, arrays.class_weights, numbers)
        if not varying(lax.axis_index(axis.name)) & may:
            return None
        rows = None  # they vary by type
    if options.gathered:
        row_numbers = numbers_of(rows, dtype)
        return RankConsistency(*of_options(arrays.class_weights, numbers, dtype), row_numbers)
    (count,) = arrays.labels.shape
    values = [hashed(arrays.labels, valid).astype(dtype)[None]]
    if arrays.ids is not None:
        every = jnp.repeat(valid, arrays.ids.shape[1])
        values.append(hashed(arrays.ids.reshape(-1), every).astype(dtype)[None])
    tolerances = [jnp.zeros(1, dtype)] * len(values)
    per_token = arrays.temperature
    per_token = None if per_token is None else jnp.broadcast_to(per_token, (count,))
    # Of tokens that do not count a weight may be anything, as on devices that pad on their own.
    weights = arrays.token_weights
    weights = None if weights is None else jnp.where(valid, weights, 0)
    for x in (per_token, weights, arrays.low_in, arrays.scale):
        if x is None:
            continue
        x_N = jnp.nan_to_num(x.astype(dtype)).reshape(-1)
        values += [x_N.sum()[None], signs(x_N.size, SIGNS).astype(dtype) @ x_N]
        norm = jnp.sqrt((x_N * x_N).sum())
        tolerances += [TOLERANCE * jnp.abs(x_N).sum()[None]]
        tolerances += [jnp.broadcast_to(SIGNED_TOLERANCE * norm, (SIGNS,))]
    more, theirs = of_options(arrays.class_weights, numbers, dtype)
    values, tolerances = [*values, more], [*tolerances, theirs]
    for x in (hidden, None if arrays.keep is None else arrays.keep.astype(dtype)):
        if x is None:
            continue
        signs_SN = jnp.where(valid[None], signs(count, SIGNS), 0).astype(x.dtype)
        sums_SH = jnp.nan_to_num(jnp.dot(signs_SN, x, preferred_element_type=dtype))
        values += [(sums_SH * signs(sums_SH.shape[1], 1).astype(dtype)).sum(axis=1)]
        tolerances += [SIGNED_TOLERANCE * jnp.sqrt((sums_SH * sums_SH).sum(axis=1))]
    return RankConsistency(
        jnp.concatenate(values), jnp.concatenate(tolerances), numbers_of(rows, dtype)
    )


def hashed(classes: jax.Array, valid: jax.Array) -> jax.Array:
    """A number [] of classes and of which of them count."""
    hashed = jnp.where(valid, classes.astype(jnp.uint32) + 1, 0)
    mixed = hashed * np.uint32(0x9E3779B1) ^ mix(classes.size)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x2C1B3C6D)
    # 24 bits, which float32 holds exactly.
    return ((mixed ^ (mixed >> 12)) & 0xFFFFFF).sum(dtype=jnp.uint32) & 0xFFFFFF


def some_rows(options: Options, arrays: Arrays) -> jax.Array:
    """Three rows of this device's shard, or of its logits."""
    weight, axis = arrays.weight, 1 if options.transposed else 0
    if weight is None:
        return arrays.hidden[:3]
    every = slice(None, None, max(1, weight.shape[axis] // 2))
    return weight[:, every] if options.transposed else weight[every]


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
    """[count] of either sign, from 0.5 to 1, hardly two the same: of signs alone every second
    pair of entries could change places unseen."""
    bits = ((mix(count) >> 7) & 0xFFFF) >> 1
    return signs(count, 1)[0].astype(jnp.float32) * (0.5 + bits.astype(jnp.float32) * 2.0**-16)
