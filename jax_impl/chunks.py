"""What the heads share: tokens packed and split into chunks, and steps 1, 2, 7 and 8 of
`xentlib.nll` for one chunk.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.jax.call import Constants, Options, with_arrays
from xentlib.jax.describe import Needs
from xentlib.jax.gemm import column_sums, contract, least_rows, round_to
from xentlib.jax.head import (
    Alike,
    Spread,
    alike,
    as_primal,
    combine,
    own_piece,
    vary,
    varying,
)
from xentlib.jax.softmax import (
    Labelled,
    RestStats,
    TokenStats,
    exp,
    rest_stats,
    take_target,
    token_stats,
)
from xentlib.jax.tokens import find_targets
from xentlib.plan import MAX_ROWS, ChunkPlan, VocabShard, plan_chunks

__all__ = [
    "Asked",
    "Chunk",
    "Chunks",
    "Gradients",
    "add_gradients",
    "all_stats",
    "as_bits",
    "cut",
    "fp16_exponent",
    "from_bits",
    "labelled_at",
    "only_chunk",
    "over_chunks",
    "own_weights",
    "rest_of",
    "round_gradients",
    "rows_of",
    "scaled",
    "stats_of",
    "unpack",
    "without_power",
    "zero_gradients",
]

# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11

T = TypeVar("T")


class Asked(NamedTuple):
    """Statistics of a call beside those that every call needs."""

    entropy: bool = False
    smoothing: bool = False
    predicted: bool = False


class Gradients(NamedTuple):
    """Accumulators in the compute dtype, empty where not wanted.

    Never None: JAX keeps the residual tree of the last trace of a function beside a cached earlier
    one, and fails where their numbers of leaves differ.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: jax.Array


class Chunks(NamedTuple):
    """A call, its valid tokens packed to the front (step 1)."""

    options: Options
    constants: Constants
    hidden: jax.Array  # [N, H]; the logits, if they are given
    operand: jax.Array | None  # the head in the GEMM dtype
    bias: jax.Array | None  # [V], compute dtype
    # [N] int32; 0 if not valid or not in the vocabulary, past the last column if elsewhere
    labels: jax.Array
    targets: jax.Array  # [N] int32, their classes: the column of a whole vocabulary
    valid: jax.Array  # [N]
    bad: jax.Array  # [N] valid, and the label lies outside the vocabulary
    num_valid: jax.Array  # []
    order: jax.Array  # [M] the token of each packed row
    owned: jax.Array | None  # [N] the label is on this device; None: they all are
    shard: VocabShard | None
    alike: Alike | None  # what devices with other shards must have too
    plan: ChunkPlan
    chunk: int

    @property
    def axes(self) -> tuple[int, int]:
        """Of the head: V, H."""
        return (1, 0) if self.options.transposed else (0, 1)

    @property
    def columns(self) -> int:
        return int(
            self.hidden.shape[1] if self.operand is None else self.operand.shape[self.axes[0]]
        )

    @property
    def vocab_size(self) -> int:
        """Classes of all shards."""
        return self.columns if self.shard is None else self.shard.vocab_size

    @property
    def padded_from(self) -> jax.Array | None:
        return padded_from(self.shard)


def padded_from(shard: VocabShard | None) -> jax.Array | None:
    """The first column that is no class, where there may be one."""
    if shard is None or isinstance(shard.padding, int):
        return None
    size: jax.Array = shard.size
    return size


class Chunk(NamedTuple):
    """Rows of a chunk, its logits, and the softcap's derivative."""

    start: jax.Array
    in_chunk_T: jax.Array
    rows_T: jax.Array  # which token
    x_TH: jax.Array
    y_T1: jax.Array
    z_TV: jax.Array
    derivative_TV: jax.Array | None


def cut(
    options: Options,
    hidden: jax.Array,
    weight: jax.Array | None,
    labels: jax.Array,
    bias: jax.Array | None,
    constants: Constants,
) -> Chunks:
    """Step 1: valid tokens first; their number bounds the loop, chunks without any cost nothing.

    `hidden` is [N, H], everything else flat. Without a `weight` it is the logits.
    """
    options = with_arrays(options, constants)
    num_tokens, hidden_size = hidden.shape
    columns = hidden_size if weight is None else weight.shape[1 if options.transposed else 0]
    given = labels
    labels, targets_N, valid_N, bad_N, owned_N, shard = find_targets(
        options, labels, constants, columns
    )
    same = None
    if options.axis is not None:
        if weight is None:
            some = hidden[:3]
        else:
            every = slice(None, None, max(1, columns // 2))
            some = weight[:, every] if options.transposed else weight[every]
        same = alike(
            options.axis,
            given,
            valid_N,
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
        least=least_rows(),
    )
    first = padded_from(shard)
    if first is not None and weight is not None:
        # dz is 0 there, but 0 * NaN is not: in d hidden, and from a softcap's derivative.
        weight = zero_from(first, weight, 1 if options.transposed else 0)
        bias = None if bias is None else zero_from(first, bias, 0)
    rows = plan.chunk_tokens
    order_N = jnp.argsort(~valid_N, stable=True).astype(jnp.int32)
    # Where N is not known, a chunk more, so that there is one for certain.
    padding = -num_tokens % rows + (0 if isinstance(num_tokens, int) else rows)
    return Chunks(
        options,
        constants,
        hidden,
        None if weight is None else weight.astype(options.gemm_dtype),
        None if bias is None else bias.astype(options.compute_dtype),
        labels,
        targets_N,
        valid_N,
        bad_N,
        valid_N.sum(dtype=jnp.int32),
        jnp.pad(order_N, (0, padding)),
        owned_N,
        shard,
        same,
        plan,
        rows,
    )


# Of a program exported for any number of them: chunks of as many rows as there can be.
UNKNOWN_TOKENS = 2 * MAX_ROWS


def is_size(size: Any, number: int) -> bool:
    """False of a size that is not known: in a program exported for any number of tokens."""
    return isinstance(size, int) and size == number


def zero_from(first: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < first, x, 0)


def over_chunks(
    chunks: Chunks,
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
        carry = vary(carry, varying(chunks, used))
    if is_size(chunks.labels.size, 0):
        return carry
    if only is not None:
        return body(only, carry)
    trips: Any = (chunks.num_valid + chunks.chunk - 1) // chunks.chunk
    if exchange:
        trips = chunks.order.size // chunks.chunk
    result: T = lax.fori_loop(
        0, trips, lambda index, carry: body(_logits(chunks, index), carry), carry
    )
    return result


def only_chunk(chunks: Chunks) -> Chunk | None:
    """Logits of all tokens, where one chunk holds them: they need not be computed again."""
    whole = is_size(chunks.order.size, chunks.chunk) and not is_size(chunks.labels.size, 0)
    return _logits(chunks, jnp.zeros((), jnp.int32)) if whole else None


def all_stats(chunks: Chunks, asked: Asked, *, only: Chunk | None = None) -> TokenStats:
    """Steps 2 to 5 over all shards of a vocabulary: packed rows [M] of all tokens, on every
    device."""

    def body(chunk: Chunk, packed: jax.Array) -> jax.Array:
        z_y, target_TV, z_TV = take_target(chunk.z_TV, chunk.y_T1, chunks.padded_from)
        rest = rest_of(chunks, asked, z_TV, target_TV)
        values = jnp.stack([z_y, *(x for x in rest if x is not None)])
        return lax.dynamic_update_slice_in_dim(packed, values, chunk.start, axis=1)

    packed = jnp.zeros((4 + sum(asked), chunks.order.size), chunks.options.compute_dtype)
    z_y, m, ones, s, *more = over_chunks(chunks, body, packed, only=only)
    found = iter(more)
    rest = RestStats(m, ones, s, *(next(found) if wanted else None for wanted in asked))
    return stats_of(chunks, chunks.order, z_y, rest)


def rest_of(chunks: Chunks, asked: Asked, z_TV: jax.Array, target_TV: jax.Array) -> RestStats:
    """Step 4."""
    return rest_stats(z_TV, target_TV, **asked._asdict(), class_weights_V=own_weights(chunks))


def own_weights(chunks: Chunks) -> jax.Array | None:
    """Class weights of this device's columns, 0 where one is no class."""
    weights = chunks.constants.class_weights
    if weights is None:
        return None
    weights = weights.astype(chunks.options.compute_dtype)
    if chunks.shard is None:
        return weights
    padded = jnp.pad(weights, (0, chunks.columns))
    own: jax.Array = lax.dynamic_slice(padded, (chunks.shard.start,), (chunks.columns,))
    return jnp.where(jnp.arange(chunks.columns) < chunks.shard.size, own, 0.0)


def labelled_at(chunks: Chunks, rows: jax.Array | slice) -> Labelled:
    """Of some tokens."""
    target, weights = chunks.targets[rows], chunks.constants.class_weights
    if weights is None:
        return Labelled(target, 1.0, float(chunks.vocab_size))
    weights = weights.astype(chunks.options.compute_dtype)
    return Labelled(target, weights[target], weights.sum())


def stats_of(chunks: Chunks, rows: jax.Array, z_y: jax.Array, rest: RestStats) -> TokenStats:
    """Step 5 for some tokens, over all shards if there are several."""
    labelled = labelled_at(chunks, rows)
    if chunks.options.axis is not None:
        assert chunks.shard is not None
        assert chunks.owned is not None
        owned, shard, own = chunks.owned[rows], chunks.shard, own_weights(chunks)
        total = shard.size.astype(z_y.dtype) if own is None else own.sum()
        others = total - labelled.weight * owned.astype(z_y.dtype)
        z_y, rest = combine(
            chunks.options.axis, z_y, owned, shard.start, rest, others, chunks.alike
        )
    return token_stats(z_y, rest, chunks.vocab_size, labelled)


def _logits(chunks: Chunks, index: jax.Array) -> Chunk:
    """Step 2 for one chunk. Rows after the last valid token are 0."""
    options, constants, compute = chunks.options, chunks.constants, chunks.options.compute_dtype
    start = index * chunks.chunk
    in_chunk_T = start + jnp.arange(chunks.chunk, dtype=jnp.int32) < chunks.num_valid
    rows_T = lax.dynamic_slice(chunks.order, (start,), (chunks.chunk,))
    hidden = chunks.hidden
    if chunks.operand is None:
        # XLA on CPU gathers from a float32 copy of 16-bit floats. Outside the loop that is one of
        # all N rows (twice the logits' bytes); what depends on the chunk stays in the loop.
        hidden, rows_T = lax.optimization_barrier((hidden, rows_T))
    x_TH = jnp.where(in_chunk_T[:, None], hidden[rows_T], 0).astype(options.gemm_dtype)
    if chunks.operand is None:
        z_TV = x_TH.astype(compute)
    else:
        z_TV = contract(x_TH, chunks.operand, 1, chunks.axes[1], compute)
    temperature_T = None
    if constants.temperature is not None:
        temperature_T = jnp.broadcast_to(constants.temperature, chunks.labels.shape)[rows_T]
        temperature_T = temperature_T.astype(compute)
    z_TV, derivative_TV = shape_logits(
        z_TV, chunks.bias, constants.logit_scale, options.softcap, temperature_T
    )
    y_T1 = chunks.labels[rows_T][:, None]
    return Chunk(start, in_chunk_T, rows_T, x_TH, y_T1, z_TV, derivative_TV)


def shape_logits(
    z_TV: jax.Array,
    bias_V: jax.Array | None,
    logit_scale: jax.Array | None,
    softcap: float | jax.Array | None,
    temperature_T: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Bias, scale, softcap and temperature (step 2), and the softcap's derivative."""
    if bias_V is not None:
        z_TV = z_TV + bias_V[None, :]
    if logit_scale is not None:
        z_TV = z_TV * logit_scale.astype(z_TV.dtype)
    derivative = None
    if softcap is not None:
        capped_TV = z_TV / softcap
        # sech^2. 1 - tanh^2 cancels where the cap saturates: at a cap of 0.7 and logits of standard
        # deviation 32 it has no digit left.
        e_TV = exp(-2.0 * jnp.abs(capped_TV))
        derivative = 4.0 * e_TV / ((1.0 + e_TV) * (1.0 + e_TV))
        z_TV = jnp.tanh(capped_TV) * softcap
    if temperature_T is not None:
        z_TV = z_TV / temperature_T[:, None]
    return z_TV, derivative


def as_bits(x: jax.Array) -> jax.Array:
    """16-bit floats as integers on CPU, where XLA scatters floats of 16 bits in float32: two
    copies of all N rows, four times the bytes of their gradient, where integers take one."""
    low = x.dtype.itemsize == 2 and jax.default_backend() == "cpu"
    return lax.bitcast_convert_type(x, jnp.uint16) if low else x


def from_bits(x: jax.Array, like: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, like.dtype) if x.dtype == jnp.uint16 else x


def rows_of(chunks: Chunks, chunk: Chunk, packed: T) -> T:
    """Of arrays [M + 1], the rows of a chunk.

    One row more than the chunks have: a slice of all rows is no slice to XLA, which would then take
    what follows out of a loop of one chunk, to the products.
    """
    found: T = jax.tree.map(lambda x: lax.dynamic_slice(x, (chunk.start,), (chunks.chunk,)), packed)
    return found


def unpack(chunks: Chunks, rows_RM: jax.Array) -> jax.Array:
    """Packed rows of per-token values as [R, N]: 0 if not valid, NaN if not in the vocabulary."""
    num_tokens = chunks.labels.shape[0]
    values_RN = jnp.zeros((rows_RM.shape[0], num_tokens), rows_RM.dtype)
    values_RN = values_RN.at[:, chunks.order[:num_tokens]].set(rows_RM[:, :num_tokens])
    values_RN = jnp.where(chunks.bad[None, :], jnp.nan, values_RN)
    return jnp.where(chunks.valid[None, :], values_RN, 0.0)


def fp16_exponent(factor_N: jax.Array) -> jax.Array:
    """Of the power of two that dz carries under float16."""
    largest = jnp.abs(factor_N).max(initial=0.0)
    exponent: jax.Array = FP16_EXPONENT - jnp.frexp(largest)[1]
    return exponent


def without_power(gradients: Gradients, exponent: jax.Array, compute_dtype: str) -> Gradients:
    """Accumulators without the power of two that dz carried."""
    unscale = jnp.ldexp(jnp.ones((), compute_dtype), -exponent)
    return Gradients(*(x * unscale for x in gradients))


def scaled(chunks: Chunks, factor_N: jax.Array) -> jax.Array:
    """A token's factor through scale and temperature: what step 7 can do before there is a dz."""
    constants, dtype = chunks.constants, factor_N.dtype
    if constants.logit_scale is not None:
        factor_N = factor_N * constants.logit_scale.astype(dtype)
    if constants.temperature is not None:
        factor_N = factor_N / jnp.broadcast_to(constants.temperature, factor_N.shape).astype(dtype)
    return factor_N


def zero_gradients(chunks: Chunks, needs: Needs) -> Gradients:
    need_hidden, need_weight, need_bias = needs
    compute = chunks.options.compute_dtype
    num_tokens, hidden_size = chunks.hidden.shape
    assert chunks.operand is not None
    return Gradients(
        jnp.zeros((num_tokens if need_hidden else 0, hidden_size), compute),
        jnp.zeros(chunks.operand.shape if need_weight else (0, 0), compute),
        jnp.zeros((chunks.columns if need_bias else 0,), compute),
    )


def add_gradients(
    chunks: Chunks,
    chunk: Chunk,
    needs: Needs,
    gradients: Gradients,
    dz_TV: jax.Array,
    dz_y_T: jax.Array,
) -> Gradients:
    """Steps 7 and 8: dz of the rest (0 in the target column) and of the target into the sums."""
    options, compute = chunks.options, chunks.options.compute_dtype
    axis_v, _ = chunks.axes
    in_chunk_T, x_TH, y_T1 = chunk.in_chunk_T, chunk.x_TH, chunk.y_T1
    need_hidden, need_weight, need_bias = needs
    assert chunks.operand is not None
    if chunk.derivative_TV is not None:
        dz_TV = dz_TV * chunk.derivative_TV
        own_T1 = jnp.take_along_axis(chunk.derivative_TV, y_T1, axis=1, mode="clip")
        dz_y_T = dz_y_T * own_T1[:, 0]
    dz_TV = jnp.where(in_chunk_T[:, None], dz_TV, 0.0)
    here_T = in_chunk_T if chunks.owned is None else in_chunk_T & chunks.owned[chunk.rows_T]
    dz_y_T = jnp.where(here_T, dz_y_T, 0.0)
    y_T = y_T1[:, 0]
    if need_bias:
        # A chunk's sums first: one after the other, 6,250 terms of one label err by 30 u.
        part_V = column_sums(dz_TV, compute).at[y_T].add(dz_y_T)
        gradients = gradients._replace(bias=gradients.bias + part_V)
    dz_TV = round_to(dz_TV, options.gemm_dtype)
    dz_y_T1 = round_to(dz_y_T, options.gemm_dtype).astype(compute)[:, None]
    # 8. Gradient GEMMs of the rest, then the target's terms: they are most of both gradients, and
    # every small term that a GEMM adds after one is rounded at its size (tau of d hidden 4.8
    # against 1.5, of d weight on real text 9.6 against 1.5).
    if need_hidden:
        dx_TH = contract(dz_TV, chunks.operand, 1, axis_v, compute)
        w_y_TH = jnp.take(chunks.operand, y_T, axis=axis_v, mode="clip")
        w_y_TH = (w_y_TH.T if options.transposed else w_y_TH).astype(compute)
        dx_TH = dx_TH + dz_y_T1 * w_y_TH
        target_rows = jnp.where(in_chunk_T, chunk.rows_T, chunks.labels.shape[0])
        gradients = gradients._replace(
            hidden=gradients.hidden.at[target_rows].set(dx_TH, mode="drop")
        )
    if need_weight:
        left, right = (x_TH, dz_TV) if options.transposed else (dz_TV, x_TH)
        total = gradients.weight + contract(left, right, 0, 0, compute)
        own_TH = dz_y_T1 * x_TH.astype(compute)
        if options.transposed:
            total = total.at[:, y_T].add(own_TH.T)
        else:
            total = total.at[y_T].add(own_TH)
        gradients = gradients._replace(weight=total)
    return gradients


def round_gradients(
    gradients: Gradients,
    valid_N: jax.Array,
    primals: Sequence[jax.Array | None],
    spread: Spread | None,
) -> list[jax.Array | None]:
    """Each accumulator summed over the devices that share its primal, and rounded once to its
    dtype; None stands for a zero gradient. Of the primals only the types are used."""
    if spread is not None:
        gradients = gradients._replace(
            weight=own_piece(gradients.weight, spread.weight)
            if gradients.weight.size
            else gradients.weight,
            bias=own_piece(gradients.bias, spread.bias),
        )
    hidden_NH = gradients.hidden
    if hidden_NH.size:
        gradients = gradients._replace(hidden=jnp.where(valid_N[:, None], hidden_NH, 0.0))
    return [
        round_to(as_primal(accumulator, primal), primal.dtype.name)
        if accumulator.size and primal is not None
        else None
        for accumulator, primal in zip(gradients, primals, strict=True)
    ]
