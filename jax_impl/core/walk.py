"""The walk over logits, chunk by chunk, of a head or given: steps 1 and 2 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.binding import Arrays, Constants, Options, with_arrays
from xentlib.jax.core.device import device_info
from xentlib.jax.core.gemm import contract
from xentlib.jax.core.kernels import Kernels, LogitsBlock, LogitTransform, kernels_for
from xentlib.jax.core.lora import LoraActivations, LowRank, add_logits, low_rank, seen_by
from xentlib.jax.core.tokens import Tokens, of_shard, select_tokens
from xentlib.jax.core.vocab import Alike, alike, apart, shard_here, vary, varying
from xentlib.jax.derivatives import differentiated_once
from xentlib.plan import MAX_ROWS, ChunkPlan, VocabShard, pad_rows, plan_chunks

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
    shape: LogitTransform
    low: LowRank | None  # beside the operand
    # Of this device's tokens, where this walk is over those of several devices; see `meet`.
    own: Any = None

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
    block: LogitsBlock
    own_T: jax.Array  # rows of `hidden` that are this device's, N of those that do not count
    low: LoraActivations | None  # what the low-rank part of the head has of them


def walk_of(options: Options, arrays: Arrays) -> Walk:
    """Step 1: valid tokens first; their number bounds the loop, chunks without any cost nothing.

    The arrays are flat. Without a `weight` the hidden states are the logits.
    """
    hidden, weight, labels, bias = arrays.hidden, arrays.weight, arrays.labels, arrays.bias
    constants = arrays.constants
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
        weights = constants.class_weights
        # As numbers, not arrays, options are of the program: the same everywhere.
        numbers = (constants.logit_scale, *constants.scalars.values())
        if options.gathered:  # a loss's denominator is its device's own, as its tokens are
            compute = options.compute_dtype
            same = apart(options.axis, some, compute, class_weights=weights, numbers=numbers)
        else:
            same = alike(
                options.axis,
                labels,
                tokens.valid,
                constants.temperature,
                None if weight is None else hidden,
                None if constants.shard is not None else some,
                options.compute_dtype,
                a=arrays.low_in,
                keep=constants.keep,
                scale=constants.scale,
                token_weights=constants.token_weights,
                class_weights=weights,
                numbers=(*numbers, constants.denominator),
            )
    ranks = lax.axis_size(options.gathered) if options.gathered else 1
    plan = plan_chunks(
        num_tokens * ranks if isinstance(num_tokens, int) else UNKNOWN_TOKENS,
        columns,
        hidden_size,
        dtype=options.gemm_dtype,
        compute_dtype=options.compute_dtype,
        max_chunk_bytes=options.chunk_bytes,
        least=device_info().least_rows,
    )
    first: Any = padded_from(shard)
    low_out = arrays.low_out
    if first is not None and weight is not None:
        # dz is 0 there, but 0 * NaN is not: in d hidden, and from a softcap's derivative.
        weight = zero_from(first, weight, 1 if options.transposed else 0)
        bias = None if bias is None else zero_from(first, bias, 0)
        low_out = None if low_out is None else zero_from(first, low_out, 0)
    more = 0 if weight is None else -columns % device_info().column_multiple
    if weight is not None:
        weight = weight.astype(options.gemm_dtype)
    if more and weight is not None:
        first = columns if first is None else first
        weight = jnp.pad(weight, [(0, 0), (0, more)][:: 1 if options.transposed else -1])
        bias = None if bias is None else jnp.pad(bias, (0, more))
        low_out = None if low_out is None else jnp.pad(low_out, ((0, more), (0, 0)))
    rows = plan.even_tokens if isinstance(num_tokens, int) else plan.chunk_tokens
    if options.gathered:  # as many of each device
        rows = pad_rows(-(-rows // ranks))
    order_N = jnp.argsort(~tokens.valid, stable=True).astype(jnp.int32)
    # Where N is not known, a chunk more, so that there is one for certain.
    padding = -num_tokens % rows + (0 if isinstance(num_tokens, int) else rows)
    shape = LogitTransform(
        bias_V=None if bias is None else bias.astype(options.compute_dtype),
        scale=constants.logit_scale,
        scalars=options.scalars,
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
        None if low_out is None else low_rank(options, arrays.low_in, low_out, constants),
    )


def meet(walk: Walk, numbers: T) -> tuple[Walk, T]:
    """A walk over the tokens of all devices of `gathered`, and their `numbers` [N] in its order;
    what came where there are no such axes.

    A chunk has as many rows of each device, in the order of their indices. What is needed of a
    token beside its hidden states, 4 bytes for its class and 4 for each number, is gathered here,
    once. Hidden states are gathered in the loop, and their gradients scattered there: for 2048
    tokens on each of 4 devices, V = 8192 and H = 512 in bf16 loss and gradients then take 33 MiB of
    a device, where a gather before the loop took 58 and one of the head 73.
    """
    axes = walk.options.gathered
    if not axes:
        return walk, numbers
    assert walk.shard is not None

    def gather(x_RM: jax.Array) -> jax.Array:
        parts = x_RM.reshape(x_RM.shape[0], -1, walk.chunk_rows)
        met: jax.Array = lax.all_gather(parts, axes, axis=2)
        return met.reshape(x_RM.shape[0], -1)

    order_M = walk.order
    counts_M = jnp.arange(order_M.size, dtype=jnp.int32) < walk.num_valid
    targets_M = gather(jnp.where(counts_M, walk.tokens.targets[order_M], -1)[None])[0]
    temperature = walk.constants.temperature
    if temperature is not None:
        temperature = jnp.broadcast_to(temperature, walk.tokens.targets.shape)
    leaves, tree = jax.tree.flatten((numbers, temperature))
    if leaves:
        compute = walk.options.compute_dtype
        leaves = list(gather(jnp.stack([x.astype(compute)[order_M] for x in leaves])))
    numbers, temperature = jax.tree.unflatten(tree, leaves)
    valid_M = targets_M >= 0
    tokens = of_shard(
        jnp.maximum(targets_M, 0), valid_M, jnp.zeros_like(valid_M), walk.columns, walk.shard
    )
    ranks = lax.axis_size(axes)
    return walk._replace(
        constants=walk.constants._replace(temperature=temperature),
        tokens=tokens,
        num_valid=lax.pmax(walk.num_valid, axes) * ranks,
        order=jnp.arange(targets_M.size, dtype=jnp.int32),
        chunk_rows=walk.chunk_rows * ranks,
        own=walk,
    ), numbers


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
    A body with an `exchange` between devices runs for every chunk, on all of them, or for those in
    which one of the devices that meet has a valid token; its carry must have the types of what it
    returns.
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
    if exchange and walk.own is None:
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
    compute = walk.options.compute_dtype
    start = index * walk.chunk_rows
    own = walk if walk.own is None else walk.own
    rows_T, in_chunk_T, x_TH = own_rows(own, index)
    own_T = jnp.where(in_chunk_T, rows_T, own.tokens.labels.shape[0])
    if walk.own is not None:
        x_TH = lax.all_gather(x_TH, walk.options.gathered, tiled=True)
        rows_T = lax.dynamic_slice(walk.order, (start,), (walk.chunk_rows,))
        in_chunk_T = walk.tokens.valid[rows_T]
    activations = None
    if walk.operand is None:
        z_TV = x_TH.astype(compute)
    else:
        z_TV = contract(x_TH, walk.operand, 1, walk.axes[1], compute)
        if walk.low is not None:
            activations = seen_by(walk.low, x_TH, rows_T)
            z_TV = add_logits(walk.low, z_TV, activations)
    return Chunk(start, rows_T, x_TH, block_at(walk, rows_T, z_TV, in_chunk_T), own_T, activations)


def own_rows(walk: Walk, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a chunk: which tokens, whether each counts, and their hidden states, 0 if not."""
    start = index * walk.chunk_rows
    in_chunk_T = start + jnp.arange(walk.chunk_rows, dtype=jnp.int32) < walk.num_valid
    rows_T = lax.dynamic_slice(walk.order, (start,), (walk.chunk_rows,))
    hidden = walk.hidden
    if walk.operand is None:
        # XLA on CPU gathers from a float32 copy of 16-bit floats. Outside the loop that is one of
        # all N rows (twice the logits' bytes); what depends on the chunk stays in the loop.
        hidden, rows_T = lax.optimization_barrier((hidden, rows_T))
    x_TH = jnp.where(in_chunk_T[:, None], hidden[rows_T], 0).astype(walk.options.gemm_dtype)
    return rows_T, in_chunk_T, x_TH


def block_at(walk: Walk, rows_T: jax.Array, z_TV: jax.Array, in_chunk_T: jax.Array) -> LogitsBlock:
    """Logits of some tokens, with what is known of each."""
    tokens, temperature_T = walk.tokens, None
    if walk.constants.temperature is not None:
        per_token = jnp.broadcast_to(walk.constants.temperature, tokens.labels.shape)
        temperature_T = per_token[rows_T].astype(walk.options.compute_dtype)
    owned_T = None if tokens.owned is None else tokens.owned[rows_T]
    return LogitsBlock(z_TV, tokens.labels[rows_T][:, None], temperature_T, in_chunk_T, owned_T)


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
