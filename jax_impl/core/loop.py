"""The loop over chunks of logits, and whose tokens are in them.

Shapes: N tokens, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.core.logits import Chunk, ChunkedLogits, is_size, logits_of
from xentlib.jax.core.tokens import of_shard
from xentlib.jax.core.vocab import vary, varying
from xentlib.jax.derivatives import differentiated_once

T = TypeVar("T")


def gather_tokens(logits: ChunkedLogits, numbers: T) -> tuple[ChunkedLogits, T]:
    """Logits of the tokens of all devices of `gathered`, and their `numbers` [N] in the order of
    these; the same where there are no such axes.

    A chunk has as many rows of each device, in the order of their indices. What is needed of a
    token beside its hidden states, 4 bytes for its class and 4 for each number, is gathered here,
    once. Hidden states are gathered in the loop, and their gradients scattered there: for 2048
    tokens on each of 4 devices, V = 8192 and H = 512 in bf16 loss and gradients then take 33 MiB of
    a device, where a gather before the loop took 58 and one of the head 73.
    """
    axes = logits.options.gathered
    if not axes:
        return logits, numbers
    assert logits.shard is not None

    def gather(x_RM: jax.Array) -> jax.Array:
        parts = x_RM.reshape(x_RM.shape[0], -1, logits.chunk_rows)
        gathered: jax.Array = lax.all_gather(parts, axes, axis=2)
        return gathered.reshape(x_RM.shape[0], -1)

    order_M = logits.order
    counts_M = jnp.arange(order_M.size, dtype=jnp.int32) < logits.num_valid
    more = logits.tokens.more
    classes = [logits.tokens.targets, *(() if more is None else more.ids.T)]
    of_order = jnp.stack([x[order_M] for x in classes])
    targets_M, *ids = gather(jnp.where(counts_M, of_order, -1))
    temperature = logits.arrays.temperature
    if temperature is not None:
        temperature = jnp.broadcast_to(temperature, logits.tokens.targets.shape)
    leaves, tree = jax.tree.flatten((numbers, temperature))
    if leaves:
        compute = logits.options.compute_dtype
        leaves = list(gather(jnp.stack([x.astype(compute)[order_M] for x in leaves])))
    numbers, temperature = jax.tree.unflatten(tree, leaves)
    valid_M = targets_M >= 0
    tokens = of_shard(
        jnp.maximum(targets_M, 0),
        valid_M,
        jnp.zeros_like(valid_M),
        logits.shard,
        # Beside the targets, as there may be none: of `top_k` alone.
        None if more is None else jnp.maximum(jnp.stack([targets_M, *ids], 1)[:, 1:], 0),
    )
    ranks = lax.axis_size(axes)
    return logits._replace(
        arrays=logits.arrays._replace(temperature=temperature),
        tokens=tokens,
        num_valid=lax.pmax(logits.num_valid, axes) * ranks,
        order=jnp.arange(targets_M.size, dtype=jnp.int32),
        chunk_rows=logits.chunk_rows * ranks,
        local=logits,
    ), numbers


def over_chunks(
    logits: ChunkedLogits,
    body: Callable[[Chunk, T], T],
    carry: T,
    *used: Any,
    only: Chunk | None = None,
    exchange: bool = False,
) -> T:
    """`body(chunk, carry)` for every chunk that holds a valid token, ascending; the body uses
    arrays of the chunks and of `used`. `only` is the one chunk there is, if its logits are there.
    A body with an `exchange` between devices runs for every chunk, on all of them, or for those in
    which one of the devices whose tokens are gathered has a valid token; its carry must have the
    types of what it returns.
    """
    if not exchange:
        carry = vary(carry, varying(logits, used))
    if is_size(logits.tokens.labels.size, 0):
        return carry
    if only is not None:
        last: T = differentiated_once(body(only, carry))
        return last
    one = is_size(logits.order.size, logits.chunk_rows) and not exchange
    one = one and logits.first is None  # whose sums have begun before
    if one and logits.operand is not None and logits.arrays.class_weights is None:
        # Its sums begin within the branch: the product itself is d weight, where a loop adds one
        # to zeros, both in memory that nothing has touched before. With class weights XLA would
        # contract a sum whose product it takes out of a loop: other bits than in two chunks (A10).
        def whole() -> T:
            return body(
                logits_of(logits, jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, carry)
            )

        once: T = differentiated_once(lax.cond(logits.num_valid > 0, whole, lambda: carry))
        return once
    trips: Any = (logits.num_valid + logits.chunk_rows - 1) // logits.chunk_rows
    if (exchange and logits.local is None) or logits.in_order:
        trips = logits.order.size // logits.chunk_rows
    result: T = differentiated_once(
        lax.fori_loop(0, trips, lambda index, carry: body(logits_of(logits, index), carry), carry)
    )
    return result


def only_chunk(logits: ChunkedLogits) -> Chunk | None:
    """Logits of all tokens, where one chunk holds them: they need not be computed again."""
    whole = is_size(logits.order.size, logits.chunk_rows) and not is_size(
        logits.tokens.labels.size, 0
    )
    return logits_of(logits, jnp.zeros((), jnp.int32)) if whole else None


def at_rows(logits: ChunkedLogits, chunk: Chunk, packed: T) -> T:
    """Of arrays [..., M + 1], the rows of a chunk.

    One row more than the chunks have: a slice of all rows is no slice to XLA, which would then take
    what follows out of a loop of one chunk, to the products.
    """
    rows: T = jax.tree.map(
        lambda x: lax.dynamic_slice_in_dim(x, chunk.start, logits.chunk_rows, x.ndim - 1), packed
    )
    return rows


def unpack(logits: ChunkedLogits, rows_RM: jax.Array) -> jax.Array:
    """Packed rows of per-token values as [R, N]: 0 if not valid, NaN if not in the vocabulary."""
    num_tokens = logits.tokens.labels.shape[0]
    values_RN = jnp.zeros((rows_RM.shape[0], num_tokens), rows_RM.dtype)
    values_RN = values_RN.at[:, logits.order[:num_tokens]].set(rows_RM[:, :num_tokens])
    values_RN = jnp.where(logits.tokens.bad[None, :], jnp.nan, values_RN)
    return jnp.where(logits.tokens.valid[None, :], values_RN, 0.0)
