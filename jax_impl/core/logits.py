"""Logits, chunk by chunk, of a head or precomputed: steps 1 and 2 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.core.call import Arrays, Options, with_arrays
from xentlib.jax.core.consistency import RankConsistency, consistency_of
from xentlib.jax.core.device import device_info
from xentlib.jax.core.gemm import product
from xentlib.jax.core.kernels import XLA, LogitsBlock, LogitTransform
from xentlib.jax.core.layout import from_rows
from xentlib.jax.core.lora import LoraActivations, LowRank, activations_of, add_logits, low_rank
from xentlib.jax.core.tokens import Tokens, select_tokens
from xentlib.jax.core.vocab import shard_here
from xentlib.plan import GROUP_TOKENS, MAX_ROWS, ChunkPlan, even_classes, pad_rows, plan_chunks
from xentlib.shards import VocabShard

# Of a program exported for any number of them: chunks of as many rows as there can be.
UNKNOWN_TOKENS = 2 * MAX_ROWS


class ChunkedLogits(NamedTuple):
    """Logits that are made chunk by chunk, of a head or precomputed: a call, its valid tokens
    packed to the front (step 1), and what the loop over chunks reads."""

    options: Options
    arrays: Arrays  # flat; without a `weight` the hidden states are the logits
    # The head in the GEMM dtype, with `column_multiple`'s zeros but where classes lead; as it is
    # where it is read in blocks
    operand: jax.Array | None
    columns: int  # of this device, without those
    tokens: Tokens
    num_valid: jax.Array  # []
    order: jax.Array  # [M] the token of each packed row
    shard: VocabShard | None
    consistency: RankConsistency | None  # what devices with other shards must have the same
    plan: ChunkPlan
    chunk_rows: int
    shape: LogitTransform
    low: LowRank | None  # beside the operand
    # Of this device's tokens, where these are of several devices'; see `gather_tokens`.
    local: Any = None
    in_order: bool = False  # `order` is that of the tokens: rows that do not count stay among them
    # Of the blocks in which the head is read, one after the other, by the tokens of a chunk or by
    # all; 0: rows of logits are whole
    block_classes: int = 0
    first: Any = None  # of one such block, the column that it begins with
    paired: Any = None  # `ChunkedLogits` of a teacher, in the same blocks

    @property
    def axes(self) -> tuple[int, int]:
        """Of the head: V, H."""
        return (1, 0) if self.options.transposed else (0, 1)

    @property
    def blocks(self) -> int:
        return -(-self.columns // self.block_classes)

    @property
    def vocab_size(self) -> int:
        """Classes of all shards."""
        return self.columns if self.shard is None else self.shard.vocab_size

    @property
    def kernels(self) -> XLA:
        return XLA(self.shape)


class Chunk(NamedTuple):
    """Rows of a chunk, and their logits."""

    start: jax.Array
    rows_T: jax.Array  # which token
    x_TH: jax.Array
    block: LogitsBlock
    own_T: jax.Array  # rows of `hidden` that are this device's, N of those that do not count
    low: LoraActivations | None  # what the low-rank part of the head has of them


def chunked_logits(
    options: Options,
    arrays: Arrays,
    paired_with: ChunkedLogits | None = None,
    *,
    in_blocks: bool = False,
) -> ChunkedLogits:
    """Step 1: valid tokens first; their number bounds the loop, chunks without any cost nothing.

    The arrays are flat. Without a `weight` the hidden states are the logits. `paired_with`: in the
    chunks of other logits of the same tokens. `in_blocks`: no dz is made of the logits that the
    statistics are of, so a head of more classes than a block is read in blocks.
    """
    weight, bias, low_out = arrays.weight, arrays.bias, arrays.low_out
    options = with_arrays(options, arrays.scalars)
    num_tokens, hidden_size = arrays.hidden.shape
    columns = hidden_size if weight is None else weight.shape[1 if options.transposed else 0]
    shard = consistency = None
    if options.axis is not None:
        shard = shard_here(options.axis, columns, arrays.shard)
    tokens = select_tokens(arrays, options.ignore_index, columns, shard)
    if shard is not None:
        consistency = consistency_of(options, arrays, tokens.valid, shard)
    ranks = lax.axis_size(options.gathered) if options.gathered else 1
    size, most = 0, options.block_classes
    if in_blocks and weight is not None and 0 < most < columns:
        size = even_classes(columns, most)
        size = size if size < columns else 0
    plan = plan_chunks(
        num_tokens * ranks if isinstance(num_tokens, int) else UNKNOWN_TOKENS,
        size or columns,
        hidden_size,
        dtype=options.gemm_dtype,
        compute_dtype=options.compute_dtype,
        max_chunk_bytes=options.chunk_bytes,
        least=device_info().least_rows,
    )
    if size:
        plan = replace(plan, chunk_tokens=min(plan.chunk_tokens, GROUP_TOKENS))
    first: Any = None  # the first column that is no class, where there may be one
    if shard is not None and not isinstance(shard.padding, int):
        first = shard.size
    if first is not None and weight is not None and not size:
        # dz is 0 there, but 0 * NaN is not: in d hidden, and from a softcap's derivative.
        weight = zero_from(first, weight, 1 if options.transposed else 0)
        bias = None if bias is None else zero_from(first, bias, 0)
        low_out = None if low_out is None else zero_from(first, low_out, 0)
    # Precomputed logits, to blocks of the softmax; a block of classes is filled up by itself.
    filled_up = (weight is not None or device_info().classes_lead) and not size
    more = -columns % device_info().column_multiple if filled_up else 0
    first = columns if more and first is None else first
    if weight is not None and not size:
        weight = weight.astype(options.gemm_dtype)
    if more and weight is not None:
        if not device_info().classes_lead:  # where `product` does so
            weight = jnp.pad(weight, [(0, 0), (0, more)][:: 1 if options.transposed else -1])
        bias = None if bias is None else jnp.pad(bias, (0, more))
        low_out = None if low_out is None else jnp.pad(low_out, ((0, more), (0, 0)))
    rows = plan.even_tokens if isinstance(num_tokens, int) else plan.chunk_tokens
    rows = max(rows, pad_rows(-(-device_info().least_entries // max(1, columns))))
    rows += -rows % device_info().row_multiple
    if options.gathered:  # as many of each device
        rows = pad_rows(-(-rows // ranks))
    dense = weight is None or (arrays.teacher is not None and arrays.teacher.weight is None)
    in_order = dense and device_info().slices_rows and not options.gathered
    parts = dividing(rows, num_tokens) if in_order else None
    rows, in_order = parts or rows, parts is not None
    if paired_with is not None:
        rows, in_order = paired_with.chunk_rows, paired_with.in_order
    if in_order:
        order_N = jnp.arange(num_tokens, dtype=jnp.int32)
    else:
        order_N = jnp.argsort(~tokens.valid, stable=True).astype(jnp.int32)
    # Where N is not known, a chunk more, so that there is one for certain.
    padding = -num_tokens % rows + (0 if isinstance(num_tokens, int) else rows)
    shape = LogitTransform(
        bias_V=None if bias is None else bias.astype(options.compute_dtype),
        scale=arrays.logit_scale,
        scalars=options.scalars,
        class_weights_V=own_weights(options, arrays.class_weights, shard, columns + more),
        padded_from=first,
        top_k=options.top_k,
    )
    return ChunkedLogits(
        options,
        arrays,
        weight,
        columns,
        tokens,
        tokens.valid.sum(dtype=jnp.int32),
        jnp.pad(order_N, (0, padding)),
        shard,
        consistency,
        plan,
        rows,
        shape,
        None if low_out is None else low_rank(options, arrays, low_out),
        in_order=in_order,
        block_classes=size,
    )


def dividing(rows: int, num_tokens: Any) -> int | None:
    """At most these rows, of which all tokens have whole chunks."""
    multiple = device_info().row_multiple
    if not isinstance(num_tokens, int) or num_tokens % multiple:
        return None
    return next((n for n in range(rows, 0, -multiple) if num_tokens % n == 0), None)


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
    part: jax.Array = lax.dynamic_slice(padded, (shard.start,), (columns,))
    return jnp.where(jnp.arange(columns, dtype=jnp.int32) < shard.size, part, 0.0)


def is_size(size: Any, number: int) -> bool:
    """False of a size that is not known: in a program exported for any number of tokens."""
    return isinstance(size, int) and size == number


def zero_from(first: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < first, x, 0)


def logits_of(logits: ChunkedLogits, index: jax.Array) -> Chunk:
    """Step 2 for one chunk. Rows after the last valid token are 0."""
    compute = logits.options.compute_dtype
    start = index * logits.chunk_rows
    local = logits if logits.local is None else logits.local
    rows_T, in_chunk_T, x_TH = own_rows(local, index)
    own_T = jnp.where(in_chunk_T, rows_T, local.tokens.labels.shape[0])
    if logits.local is not None:
        x_TH = lax.all_gather(x_TH, logits.options.gathered, tiled=True)
        rows_T = lax.dynamic_slice(logits.order, (start,), (logits.chunk_rows,))
        in_chunk_T = logits.tokens.valid[rows_T]
    activations = None
    if logits.block_classes:
        z_TV = jnp.zeros((logits.chunk_rows, 0), compute)  # in a loop over blocks
    elif logits.operand is None:
        z_TV = from_rows(x_TH.astype(compute))
    else:
        z_TV = product(x_TH, logits.operand, logits.axes[1], compute)
        if logits.low is not None:
            activations = activations_of(logits.low, x_TH, rows_T)
            z_TV = add_logits(logits.low, z_TV, activations)
    tokens, temperature_T = logits.tokens, None
    if logits.arrays.temperature is not None:
        per_token = jnp.broadcast_to(logits.arrays.temperature, tokens.labels.shape)
        temperature_T = per_token[rows_T].astype(compute)
    owned_T = None if tokens.owned is None else tokens.owned[rows_T]
    y_T1 = tokens.labels[rows_T][:, None]
    more = None if tokens.more is None else jax.tree.map(lambda x: x[rows_T], tokens.more)
    block = LogitsBlock(z_TV, y_T1, temperature_T, in_chunk_T, owned_T, more)
    return Chunk(start, rows_T, x_TH, block, own_T, activations)


def own_rows(logits: ChunkedLogits, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of a chunk: which tokens, whether each counts, and their hidden states, 0 if not."""
    start, hidden = index * logits.chunk_rows, logits.arrays.hidden
    if logits.in_order:
        rows_T = lax.dynamic_slice(logits.order, (start,), (logits.chunk_rows,))
        in_chunk_T = logits.tokens.valid[rows_T]
        x_TH = lax.dynamic_slice_in_dim(hidden, start, logits.chunk_rows)
        x_TH = jnp.where(in_chunk_T[:, None], x_TH, 0).astype(logits.options.gemm_dtype)
        return rows_T, in_chunk_T, x_TH
    in_chunk_T = start + jnp.arange(logits.chunk_rows, dtype=jnp.int32) < logits.num_valid
    rows_T = lax.dynamic_slice(logits.order, (start,), (logits.chunk_rows,))
    if logits.operand is None:
        # XLA on CPU gathers from a float32 copy of 16-bit floats. Outside the loop that is one of
        # all N rows (twice the logits' bytes); what depends on the chunk stays in the loop.
        hidden, rows_T = lax.optimization_barrier((hidden, rows_T))
    x_TH = jnp.where(in_chunk_T[:, None], hidden[rows_T], 0).astype(logits.options.gemm_dtype)
    return rows_T, in_chunk_T, x_TH


def scaled(logits: ChunkedLogits, factor_N: jax.Array) -> jax.Array:
    """A token's factor through scale and temperature: what step 7 can do before there is a dz."""
    scale, temperature, dtype = logits.arrays.logit_scale, logits.arrays.temperature, factor_N.dtype
    if scale is not None:
        factor_N = factor_N * scale.astype(dtype)
    if temperature is not None:
        factor_N = factor_N / jnp.broadcast_to(temperature, factor_N.shape).astype(dtype)
    return factor_N
