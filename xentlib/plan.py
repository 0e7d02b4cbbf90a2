"""How work is split: frozen integers that every backend reads and none computes again.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from xentlib.checks.operand import plain
from xentlib.checks.plan import check_plan_arguments
from xentlib.checks.shards import check_shards
from xentlib.dtypes import ITEMSIZE

__all__ = [
    "ChunkPlan",
    "PaddedVocab",
    "VocabShard",
    "default_chunk_bytes",
    "exchanges_per_chunk",
    "given_peak_bytes",
    "peak_bytes",
    "plan_chunks",
    "shard_of",
]

# A chunk's GEMM rows come out with the same bits in any chunk whose row count is a multiple of 8
# (contract row A10). MKL on AVX-512 takes another kernel for a single left-over row: 17-row chunks
# gave 3.5 % unequal logits at H=512, V=8192, multiples of 8 none.
ROW_MULTIPLE = 8
# A longer sum over the tokens of a chunk loses digits of d weight, and gains no speed: of 100,000
# tokens at H = 1, V = 100 XLA's product is off by 219 u of its norm, in chunks of 8192 by 22 u.
MAX_ROWS = 8192
# From here on a GEMM gains from whole register tiles; below, memory is what the user asked to save.
TILE_ROWS = 64

MIB = 1 << 20
# Elementwise passes go over a block of this many bytes while it is in cache: 4 MiB stays in the L3
# of a CPU at few calls a chunk, 64 MiB keeps a GPU's launches few.
CPU_BLOCK_BYTES = 4 * MIB
GPU_BLOCK_BYTES = 64 * MIB


def default_chunk_bytes(platform: str) -> int:
    """Bytes for the [T, V] logits of one chunk where the caller named none.

    CPU: 64 MiB is 512 tokens at V=32,000, where the chunk GEMMs run at the rate of the whole ones
    (256 tokens cost 15 % more in fp32 on two cores, 1024 gain nothing). Accelerators: 1 GiB is 2048
    tokens at V=128,256, where reading and writing the fp32 dW buffer once a chunk costs a tenth of
    its GEMM.
    """
    return 64 * MIB if platform == "cpu" else 1024 * MIB


def block_bytes(platform: str) -> int:
    return CPU_BLOCK_BYTES if platform == "cpu" else GPU_BLOCK_BYTES


def block_tokens(budget: int, columns: int, itemsize: int) -> int:
    """Rows that fit a budget, at least one."""
    return max(1, budget // max(1, columns * itemsize))


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Token chunks of one call: `num_chunks` of `chunk_tokens` rows, the last one ragged."""

    num_tokens: int
    vocab_size: int
    hidden_size: int
    chunk_tokens: int
    compute_itemsize: int

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tokens // self.chunk_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.vocab_size * self.compute_itemsize

    def bounds(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each chunk, ascending: the order in which dW is accumulated."""
        for start in range(0, self.num_tokens, self.chunk_tokens):
            yield start, min(start + self.chunk_tokens, self.num_tokens)

    def block_tokens(self, budget: int) -> int:
        """Rows of a chunk that fit `budget` bytes: what elementwise passes take while cached."""
        rows = block_tokens(budget, self.vocab_size, self.compute_itemsize)
        return min(rows, self.chunk_tokens)


# FLOP of a chunk's logits from which a second computation costs more than the two exchanges that
# spare it. Two of gloo between processes of one machine: 2 ms, 2e8 FLOP of a core; of NCCL: 50 us,
# 4e10 FLOP of an H100. Several times that, since ranks that meet more often wait more often.
EXCHANGE_FLOPS = {"cpu": 1e9, "accelerator": 2e11}


def exchanges_per_chunk(plan: ChunkPlan, platform: str) -> bool:
    """How `chunked_nll` over vocabulary shards learns each token's lse before it differentiates.

    True: ranks exchange statistics in every chunk, two collectives each, and the logits are
    computed once (three GEMMs). False: two collectives in all, whatever the number of chunks, and
    the logits are computed twice (four GEMMs). One chunk needs neither. In PyTorch a softcap makes
    it four GEMMs and two collectives always: its derivative is gone once it has been applied.

    Args:
        plan: of the call, from `plan_chunks` with this rank's rows of the head.
        platform: "cpu" or another.
    """
    flops = 2.0 * plan.chunk_tokens * plan.vocab_size * plan.hidden_size
    least = EXCHANGE_FLOPS["cpu" if platform == "cpu" else "accelerator"]
    return plan.num_chunks > 1 and flops >= least


@dataclass(frozen=True, slots=True)
class VocabShard:
    """One rank's part of a vocabulary: classes `start` to `stop` of `vocab_size`.

    `padding` more columns (rows of a head) follow them that are no classes. In JAX `start` and
    `stop` may be arrays, made from the axis index.
    """

    start: Any
    stop: Any
    vocab_size: int
    padding: Any = 0

    @property
    def size(self) -> Any:
        return self.stop - self.start


class PaddedVocab(NamedTuple):
    """For `vocab_parallel`: what it takes otherwise, and how many classes the shards hold in all.

    Rows of the head, or columns of the logits, beyond `vocab_size` in rank order are padding:
    whatever they hold, NaN included, they take no part in the softmax, label smoothing does not
    count them, their gradient is 0.
    """

    over: Any
    vocab_size: int


def shard_of(sizes: tuple[int, ...], rank: int, vocab_size: int | None = None) -> VocabShard:
    """The shard of `rank` from every rank's size, in rank order; a size may be 0.

    Offsets come from the sizes: rank times the local size is wrong wherever V is no multiple of P.
    What lies beyond `vocab_size` is padding.
    """
    if vocab_size is None:
        vocab_size = sum(sizes)
    check_shards(sizes, vocab_size)
    start = min(sum(sizes[:rank]), vocab_size)
    stop = min(start + sizes[rank], vocab_size)
    return VocabShard(start, stop, vocab_size, sizes[rank] - (stop - start))


def pad_rows(rows: int) -> int:
    """`rows` rounded up to the row multiple that keeps GEMM rows bit-equal (A10)."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def plan_chunks(
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    *,
    dtype: str = "float32",
    compute_dtype: str | None = None,
    max_chunk_bytes: int | None = None,
) -> ChunkPlan:
    """Split `num_tokens` rows of a [V, H] head into chunks whose logits fit a byte budget.

    T = max_chunk_bytes // (V * itemsize of the compute dtype), rounded down to a multiple of 64
    (of 8 below 64), at least 8, at most 8192. One chunk when one fits. T depends on the budget and
    on V alone, never on N nor on free memory, so a run can be repeated elsewhere.

    Args:
        num_tokens: N >= 0, rows of `hidden` with the leading dimensions flattened.
        vocab_size: V >= 1, rows of the head (of this rank's shard).
        hidden_size: H >= 1.
        dtype: name of the GEMM operands' dtype.
        compute_dtype: name of the logits' dtype; None is float32, float64 for float64 operands.
        max_chunk_bytes: budget of one [T, V] buffer in bytes; None is 64 MiB.

    Raises:
        ValueError: a size or budget out of range, or an unknown dtype name.
    """
    num_tokens, vocab_size, hidden_size, max_chunk_bytes = map(
        plain, (num_tokens, vocab_size, hidden_size, max_chunk_bytes)
    )
    check_plan_arguments(num_tokens, vocab_size, hidden_size, dtype, compute_dtype, max_chunk_bytes)
    compute = compute_dtype or ("float64" if dtype == "float64" else "float32")
    itemsize = ITEMSIZE[compute]
    budget = default_chunk_bytes("cpu") if max_chunk_bytes is None else max_chunk_bytes
    rows = min(budget // (vocab_size * itemsize), MAX_ROWS)
    multiple = TILE_ROWS if rows >= TILE_ROWS else ROW_MULTIPLE
    rows = max(rows // multiple * multiple, ROW_MULTIPLE)
    rows = min(rows, max(pad_rows(num_tokens), ROW_MULTIPLE))
    return ChunkPlan(num_tokens, vocab_size, hidden_size, rows, itemsize)


def peak_bytes(
    plan: ChunkPlan,
    *,
    backend: str,
    dtype: str = "float32",
    gradient: bool = True,
    recompute: bool = False,
) -> int:
    """Peak memory of one call beside its inputs, results included, on CPU.

    Within 5 % of the allocator's count in torch; of the compiler's in JAX where there are several
    chunks and one is no smaller than the float32 head. XLA needs less than this otherwise.

        torch: chunk + two blocks + rows of a chunk   (+ float32 head where the operands are 16-bit)
        JAX:   chunk + rows of a chunk                (a second chunk, dz, for gradients; with
                                                       recompute only in 16 bits)
        both:  + float32 d weight and d hidden        (+ their rounded copies, in JAX)

    Args:
        plan: of the call.
        backend: "torch" or "jax".
        dtype: name of the operands' dtype; `weight` and `hidden` alike.
        gradient: for `hidden` and `weight`, or the loss alone.
        recompute: `chunked_logprobs`, whose backward computes the logits again, and not
            `chunked_nll`.
    """
    size = plan.compute_itemsize
    chunk = plan.chunk_bytes
    head, trunk = plan.vocab_size * plan.hidden_size, plan.num_tokens * plan.hidden_size
    rows = plan.chunk_tokens * plan.hidden_size * size
    low = ITEMSIZE[dtype] < size
    if backend == "torch":
        block = plan.block_tokens(CPU_BLOCK_BYTES) * plan.vocab_size * size
        total = chunk + 2 * block + (rows + (head * size) if low else 0)
        return total + ((head + trunk) * size + rows if gradient else 0)
    copies = trunk * ITEMSIZE[dtype] if low else 0
    # A loop of one chunk keeps the mask of the target column as bytes.
    mask = chunk // size if plan.num_chunks == 1 else 0
    if not gradient:
        return chunk + mask + rows + copies + (rows // 2 if low else 0)
    # Beside a chunk: its dz, or the GEMM's addend to d weight, whichever is larger.
    dz = (chunk // 2 if low else 0) if recompute else chunk
    total = chunk + max(dz, head * size) + mask + 2 * rows + copies + (head + trunk) * size
    return total + (head * size + (head + trunk) * ITEMSIZE[dtype] if low else 0)


def given_peak_bytes(
    num_tokens: int,
    columns: int,
    *,
    backend: str,
    dtype: str = "float32",
    max_chunk_bytes: int | None = None,
    entropy: bool = False,
    gradient: bool = True,
) -> int:
    """Peak memory of `vocab_parallel_logprobs` beside its inputs, results included, on CPU.

    Scratch for a block of rows, some numbers a token, and the gradient of the logits. Keeping the
    softmax would need float32 [N, C] more and save nothing: p = exp(z - lse) needs lse first, so
    it costs the forward the pass that it saves the backward. Within 5 % of the allocator's count in
    torch, of the compiler's in JAX, but for one chunk of float16, which needs up to a third less.

        torch: three float32 blocks (two in float64); with entropy one more in the forward, without
               one fewer in the backward; a 16-bit one in the backward of 16-bit logits
        JAX:   two float32 chunks (one and a half for 16-bit logits without entropy); for 16-bit
               logits their gradient twice, once as the integers that XLA on CPU scatters; where
               one chunk is all, another one with entropy, and a mask of bytes

    Args:
        num_tokens: N, all valid.
        columns: C, all of the vocabulary's.
        backend: "torch" or "jax".
        dtype: of the logits.
        max_chunk_bytes: of the call.
        entropy: of the call.
        gradient: for the logits, or the values alone.
    """
    size = 8 if dtype == "float64" else 4
    budget = default_chunk_bytes("cpu") if max_chunk_bytes is None else max_chunk_bytes
    d_logits = num_tokens * columns * ITEMSIZE[dtype] if gradient else 0
    low_bits = ITEMSIZE[dtype] < size
    low = d_logits if low_bits else 0
    if backend == "jax":
        plan = plan_chunks(num_tokens, columns, 1, dtype=dtype, max_chunk_bytes=budget)
        rows = max(plan.chunk_tokens, TILE_ROWS)
        chunk, whole = rows * columns * size, rows >= num_tokens
        scratch = 2 * chunk - (chunk // 2 if low_bits and not entropy else 0)
        if whole:
            scratch += chunk // size + (chunk if entropy or low_bits else 0)
        backward = scratch + low - (0 if whole and entropy else chunk)
        return num_tokens * (10 * size + 20) + d_logits + max(scratch, backward)
    rows = min(block_tokens(min(budget, block_bytes("cpu")), columns, size), num_tokens)
    block, number = rows * columns * size, num_tokens * size
    scratch = (3 if size == 4 else 2) * block
    rounded = rows * columns * ITEMSIZE[dtype] if low_bits else 0
    more = block if entropy else 0
    forward = scratch + max((22 if entropy else 18) * number, more + 5 * number)
    backward = scratch - (0 if entropy else block) + rounded + d_logits + 9 * number
    # Labels as int64, and masks.
    return 12 * num_tokens + (max(forward, backward) if gradient else forward)
