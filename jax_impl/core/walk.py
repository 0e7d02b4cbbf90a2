"""The walk over logits, chunk by chunk, of a head or given: steps 1 and 2 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.call import Constants, Options, with_arrays
from xentlib.jax.core.device import traits
from xentlib.jax.core.gemm import contract
from xentlib.jax.core.kernels import Kernels, Rows, Shape, kernels_for
from xentlib.jax.core.tokens import Tokens, select_tokens
from xentlib.jax.derivatives import differentiated_once
from xentlib.jax.ranks import Alike, alike, shard_here, vary, varying
from xentlib.plan import MAX_ROWS, ChunkPlan, VocabShard, plan_chunks

__all__ = ["Chunk", "Walk", "at_rows", "only_chunk", "over_chunks", "scaled", "unpack", "walk_of"]

T = TypeVar("T")


class Walk(NamedTuple):
    """A call, its valid tokens packed to the front (step 1): what the loop over chunks reads."""

    options: Options
    constants: Constants
    hidden: jax.Array  # [N, H]; the logits, if they are given
    operand: jax.Array | None  # the head in the GEMM dtype, with `column_multiple`'s zeros
    columns: int  # of this device, without those
    tokens: Tokens
    num_valid: jax.Array  # []
    order: jax.Array  # [M] the token of each packed row
    shard: VocabShard | None
    alike: Alike | None  # what devices with other shards must have too
    plan: ChunkPlan
    chunk_rows: int
    shape: Shape

    @property
    def axes(self) -> tuple[int, int]:
        """Of the head: V, H."""
        return (1, 0) if self.options.transposed else (0, 1)

    @property
    def vocab_size(self) -> int:
        """Classes of all shards."""
        return self.columns if self.shard is None else self.shard.vocab_size

    @property
    def kernels(self) -> Kernels:
        return kernels_for(jax.default_backend())(self.shape)


def padded_from(shard: VocabShard | None) -> jax.Array | None:
    """The first column that is no class, where there may be one."""
    if shard is None or isinstance(shard.padding, int):
        return None
    size: jax.Array = shard.size
    return size


class Chunk(NamedTuple):
    """Rows of a chunk, and their logits."""

    start: jax.Array
    rows_T: jax.Array  # which token
    x_TH: jax.Array
    block: Rows


def walk_of(
    options: Options,
    hidden: jax.Array,
    weight: jax.Array | None,
    labels: jax.Array,
    bias: jax.Array | None,
    constants: Constants,
) -> Walk:
    """Step 1: valid tokens first; their number bounds the loop, chunks without any cost nothing.

    `hidden` is [N, H], everything else flat. Without a `weight` it is the logits.
    """
    options = with_arrays(options, constants)
    num_tokens, hidden_size = hidden.shape
    columns = hidden_size if weight is None else weight.shape[1 if options.transposed else 0]
    shard = None
    if options.axis is not None:
        shard = shard_here(options.axis, columns, constants.shard)
    tokens = select_tokens(labels, constants.where, options.ignore_index, columns, shard)
    same = None
    if options.axis is not None:
        if weight is None:
            some = hidden[:3]
        else:
            every = slice(None, None, max(1, columns // 2))
            some = weight[:, every] if options.transposed else weight[every]
        same = alike(
            options.axis,
            labels,
            tokens.valid,
            constants.temperature,
            None if weight is None else hidden,
            None if constants.shard is not None else some,
            options.compute_dtype,
        )
    plan = plan_chunks(
        num_tokens if isinstance(num_tokens, int) else UNKNOWN_TOKENS,
        columns,
        hidden_size,
        dtype=options.gemm_dtype,
        compute_dtype=options.compute_dtype,
        max_chunk_bytes=options.chunk_bytes,
        least=traits().least_rows,
    )
    first: Any = padded_from(shard)
    if first is not None and weight is not None:
        # dz is 0 there, but 0 * NaN is not: in d hidden, and from a softcap's derivative.
        weight = zero_from(first, weight, 1 if options.transposed else 0)
        bias = None if bias is None else zero_from(first, bias, 0)
    more = 0 if weight is None else -columns % traits().column_multiple
    if weight is not None:
        weight = weight.astype(options.gemm_dtype)
    if more and weight is not None:
        first = columns if first is None else first
        weight = jnp.pad(weight, [(0, 0), (0, more)][:: 1 if options.transposed else -1])
        bias = None if bias is None else jnp.pad(bias, (0, more))
    rows = plan.even_tokens if isinstance(num_tokens, int) else plan.chunk_tokens
    order_N = jnp.argsort(~tokens.valid, stable=True).astype(jnp.int32)
    # Where N is not known, a chunk more, so that there is one for certain.
    padding = -num_tokens % rows + (0 if isinstance(num_tokens, int) else rows)
    shape = Shape(
        bias_V=None if bias is None else bias.astype(options.compute_dtype),
        scale=constants.logit_scale,
        softcap=options.softcap,
        class_weights_V=own_weights(options, constants.class_weights, shard, columns + more),
        padded_from=first,
    )
    return Walk(
        options,
        constants,
        hidden,
        weight,
        columns,
        tokens,
        tokens.valid.sum(dtype=jnp.int32),
        jnp.pad(order_N, (0, padding)),
        shard,
        same,
        plan,
        rows,
        shape,
    )


def own_weights(
    options: Options, weights: jax.Array | None, shard: VocabShard | None, columns: int
) -> jax.Array | None:
    """Class weights of this device's columns, 0 where one is no class."""
    if weights is None:
        return None
    weights = weights.astype(options.compute_dtype)
    if shard is None:
        return jnp.pad(weights, (0, columns - weights.size))
    padded = jnp.pad(weights, (0, columns))
    own: jax.Array = lax.dynamic_slice(padded, (shard.start,), (columns,))
    return jnp.where(jnp.arange(columns) < shard.size, own, 0.0)


# Of a program exported for any number of them: chunks of as many rows as there can be.
UNKNOWN_TOKENS = 2 * MAX_ROWS


def is_size(size: Any, number: int) -> bool:
    """False of a size that is not known: in a program exported for any number of tokens."""
    return isinstance(size, int) and size == number


def zero_from(first: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < first, x, 0)


def over_chunks(
    walk: Walk,
    body: Callable[[Chunk, T], T],
    carry: T,
    *used: Any,
    only: Chunk | None = None,
    exchange: bool = False,
) -> T:
    """`body(chunk, carry)` for every chunk that holds a valid token, ascending; the body uses
    arrays of the chunks and of `used`. `only` is the one chunk there is, if its logits are there.
    A body with an `exchange` between devices runs for every chunk, on all of them; its carry must
    have the types of what it returns.
    """
    if not exchange:
        carry = vary(carry, varying(walk, used))
    if is_size(walk.tokens.labels.size, 0):
        return carry
    if only is not None:
        last: T = differentiated_once(body(only, carry))
        return last
    one = is_size(walk.order.size, walk.chunk_rows) and not exchange
    if one and walk.operand is not None and walk.constants.class_weights is None:
        # Its sums begin within the branch: the product itself is d weight, where a loop adds one
        # to zeros, both in memory that nothing has touched before. With class weights XLA would
        # contract a sum whose product it takes out of a loop: other bits than in two chunks (A10).
        def whole() -> T:
            return body(
                _logits(walk, jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, carry)
            )

        found: T = differentiated_once(lax.cond(walk.num_valid > 0, whole, lambda: carry))
        return found
    trips: Any = (walk.num_valid + walk.chunk_rows - 1) // walk.chunk_rows
    if exchange:
        trips = walk.order.size // walk.chunk_rows
    result: T = differentiated_once(
        lax.fori_loop(0, trips, lambda index, carry: body(_logits(walk, index), carry), carry)
    )
    return result


def only_chunk(walk: Walk) -> Chunk | None:
    """Logits of all tokens, where one chunk holds them: they need not be computed again."""
    whole = is_size(walk.order.size, walk.chunk_rows) and not is_size(walk.tokens.labels.size, 0)
    return _logits(walk, jnp.zeros((), jnp.int32)) if whole else None


def _logits(walk: Walk, index: jax.Array) -> Chunk:
    """Step 2 for one chunk. Rows after the last valid token are 0."""
    options, compute = walk.options, walk.options.compute_dtype
    start = index * walk.chunk_rows
    in_chunk_T = start + jnp.arange(walk.chunk_rows, dtype=jnp.int32) < walk.num_valid
    rows_T = lax.dynamic_slice(walk.order, (start,), (walk.chunk_rows,))
    hidden = walk.hidden
    if walk.operand is None:
        # XLA on CPU gathers from a float32 copy of 16-bit floats. Outside the loop that is one of
        # all N rows (twice the logits' bytes); what depends on the chunk stays in the loop.
        hidden, rows_T = lax.optimization_barrier((hidden, rows_T))
    x_TH = jnp.where(in_chunk_T[:, None], hidden[rows_T], 0).astype(options.gemm_dtype)
    if walk.operand is None:
        z_TV = x_TH.astype(compute)
    else:
        z_TV = contract(x_TH, walk.operand, 1, walk.axes[1], compute)
    return Chunk(start, rows_T, x_TH, block_at(walk, rows_T, z_TV, in_chunk_T))


def block_at(walk: Walk, rows_T: jax.Array, z_TV: jax.Array, in_chunk_T: jax.Array) -> Rows:
    """Logits of some tokens, with what is known of each."""
    tokens, temperature_T = walk.tokens, None
    if walk.constants.temperature is not None:
        per_token = jnp.broadcast_to(walk.constants.temperature, tokens.labels.shape)
        temperature_T = per_token[rows_T].astype(walk.options.compute_dtype)
    owned_T = None if tokens.owned is None else tokens.owned[rows_T]
    return Rows(z_TV, tokens.labels[rows_T][:, None], temperature_T, in_chunk_T, owned_T)


def at_rows(walk: Walk, chunk: Chunk, packed: T) -> T:
    """Of arrays [M + 1], the rows of a chunk.

    One row more than the chunks have: a slice of all rows is no slice to XLA, which would then take
    what follows out of a loop of one chunk, to the products.
    """
    found: T = jax.tree.map(
        lambda x: lax.dynamic_slice(x, (chunk.start,), (walk.chunk_rows,)), packed
    )
    return found


def scaled(walk: Walk, factor_N: jax.Array) -> jax.Array:
    """A token's factor through scale and temperature: what step 7 can do before there is a dz."""
    constants, dtype = walk.constants, factor_N.dtype
    if constants.logit_scale is not None:
        factor_N = factor_N * constants.logit_scale.astype(dtype)
    if constants.temperature is not None:
        factor_N = factor_N / jnp.broadcast_to(constants.temperature, factor_N.shape).astype(dtype)
    return factor_N


def unpack(walk: Walk, rows_RM: jax.Array) -> jax.Array:
    """Packed rows of per-token values as [R, N]: 0 if not valid, NaN if not in the vocabulary."""
    num_tokens = walk.tokens.labels.shape[0]
    values_RN = jnp.zeros((rows_RM.shape[0], num_tokens), rows_RM.dtype)
    values_RN = values_RN.at[:, walk.order[:num_tokens]].set(rows_RM[:, :num_tokens])
    values_RN = jnp.where(walk.tokens.bad[None, :], jnp.nan, values_RN)
    return jnp.where(walk.tokens.valid[None, :], values_RN, 0.0)
