"""Tokens in chunks, a vocabulary in shards: frozen integers that every backend reads and none
computes again.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, P ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from xentlib.arguments import Scalars
from xentlib.checks.validators import check_choice, check_plan_arguments, plain
from xentlib.math.softmax import BLOCK_COLUMNS, WORD_BITS
from xentlib.options import ITEMSIZE

# A chunk's GEMM rows come out with the same bits in any chunk whose row count is a multiple of 8
# (contract row A10). MKL on AVX-512 takes another kernel for a single left-over row: 17-row chunks
# gave 3.5 % unequal logits at H=512, V=8192, multiples of 8 none.
ROW_MULTIPLE = 8
# A longer sum over the tokens of a chunk loses digits of d weight, and gains no speed: of 100,000
# tokens at H = 1, V = 100 XLA's product is off by 219 u of its norm, in chunks of 8192 by 22 u.
MAX_ROWS = 8192
# From here on a GEMM gains from whole register tiles; below, memory is what the user asked to save.
TILE_ROWS = 64

# Classes of a block of a head, in PyTorch, where logits are computed twice or have no gradient. The
# logits of 8,192 tokens are 256 MiB then, and d hidden is read and written once for a product of
# 8,192 terms: 8 bytes of it for 16,384 operations.
BLOCK_CLASSES = 8192
# The same in JAX, at most, and an odd number of 128 columns: where rows of logits begin 8,192
# numbers of 4 bytes after each other, XLA's product of them with the hidden states takes a CPU 1.9
# times as long as at 8,064 or 8,320.
XLA_BLOCK_CLASSES = 63 * BLOCK_COLUMNS
# Tokens whose statistics of all these blocks are made before those of others, of a vocabulary that
# is not sharded: three numbers of a token and 128 classes. The head is read once for each group, 2
# bytes an entry for 8,192 operations.
GROUP_TOKENS = 4096
COLUMN_MULTIPLE = 64

# Rows of a default chunk on a CPU. At 512 the GEMMs run at their rate; more only makes XLA touch
# more new memory in every call: loss and gradients of 2048 tokens, H = 512, over their GEMMs, at
# V = 4,000 1.09 in chunks of 512 rows, 1.40 in one of all; at V = 8,000 0.99 and 1.20. 8 MiB at
# least: 64 chunks of 512 rows at H = 1, V = 101 took d weight to 99 u of its norm (row A6).
CPU_ROWS = 512

MIB = 1 << 20
# Memory of an accelerator from which a chunk has these bytes: cards of 80 GB, of 40 GB.
MEMORY_CLASSES = ((72 * 1024 * MIB, 2048 * MIB), (36 * 1024 * MIB, 1024 * MIB))
# Of heads from this width on, whose products hide most of the sum of d weight, a chunk on the
# largest cards has so many rows, or 1 GiB. Of Llama-3 8B's, loss and gradients of 2048 rows took an
# H100 0.4 to 2.7 % more time than of 4096, and 1.1 GB less memory; products of 1024 rows of Gemma 2
# 2B's took 13 % more than of 2048.
WIDE, WIDE_ROWS = 2048, 2048
# Kinds of TPUs, as JAX names them, whose devices have 32 GiB at most: a program that is compiled
# ahead of time knows its devices by their kind alone.
SMALL_TPUS: tuple[str, ...] = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
SMALL_TPUS += ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
SMALL_TPU_BYTES = 32 * 1024 * MIB
# Elementwise passes go over a block of this many bytes while it is in cache: 4 MiB stays in the L3
# of a CPU at few calls a chunk. A GPU needs few launches, and eager operators make 60 for a block:
# loss and gradients of 8,192 tokens of Llama-3 8B took 150 ms on an H200 in blocks of 64 MiB, 75 in
# blocks of 256 and 72 in blocks of 1,024 (docs/data/h200.json).
CPU_BLOCK_BYTES = 4 * MIB
GPU_BLOCK_BYTES = 256 * MIB
# Columns that JAX fills a head up to on a GPU, once a call: whole blocks of the softmax's sums,
# which each chunk would fill up otherwise, for 8 bytes a logit; and whole lines for its products.
GPU_COLUMN_MULTIPLE = BLOCK_COLUMNS
# Of JAX on a CPU, whose compiler multiplies heads that do not fill a tile by another kernel.
CPU_COLUMN_MULTIPLE = 64
# Rows of a chunk on a TPU, where they lie along lanes: of 960 rows of Gemma 3 27B's head the
# compiler copied the whole chunk to another order, 24 bytes a logit for 16 and a GiB.
TPU_ROW_MULTIPLE = 128


def default_chunk_bytes(
    platform: str, *, memory: int = 0, row_bytes: int = 0, hidden_size: int = 0
) -> int:
    """Bytes for the [T, V] logits of one chunk where the caller named none.

    CPU: 64 MiB is 512 tokens at V=32,000, where the chunk GEMMs run at the rate of the whole ones
    (256 tokens cost 15 % more in fp32 on two cores, 1024 gain nothing); no more than 512 rows, or
    8 MiB, where the bytes of a row are given, of a head that one process holds whole.

    Accelerators: by the class of their memory, not by what is free, so that a run can be repeated
    on any card of the class: 2 GiB from 72 GiB on, 1 GiB from 36 GiB on and where the memory is not
    known, 512 MiB below. At V=128,256 1 GiB is 2048 tokens. The float32 sum of d weight is read and
    written once a chunk: a tenth of the GEMMs then, half of that at 2 GiB (a model: 790 TFLOP/s,
    4.3 TB/s). From 72 GiB on no more than 2048 rows, or 1 GiB, where the bytes of a row are given
    and H is at least 2048. On a TPU 1 GiB at most: of Llama-3's head, compiled for a v5p, 4.2 GiB
    in all are live then, where full float32 logits have 6.0 (docs/data/tpu.json).
    """
    if platform == "cpu":
        return 64 * MIB if not row_bytes else min(64 * MIB, max(8 * MIB, CPU_ROWS * row_bytes))
    for least, budget in MEMORY_CLASSES:
        if memory >= least:
            wide = row_bytes and hidden_size >= WIDE and platform != "tpu"
            most = max(1024 * MIB, WIDE_ROWS * row_bytes) if wide else budget
            return min(budget, 1024 * MIB if platform == "tpu" else most)
    return 1024 * MIB if memory == 0 else 512 * MIB


def block_bytes(platform: str) -> int:
    return CPU_BLOCK_BYTES if platform == "cpu" else GPU_BLOCK_BYTES


def block_tokens(budget: int, columns: int, itemsize: int) -> int:
    """Rows that fit a budget, at least one."""
    return max(1, budget // max(1, columns * itemsize))


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Token chunks of one call: `num_chunks` of `chunk_tokens` rows, the last one ragged; of a
    divergence two side by side, the other one's head `teacher_size` wide."""

    num_tokens: int
    vocab_size: int
    hidden_size: int
    chunk_tokens: int
    compute_itemsize: int
    teacher_size: int = 0
    max_chunk_bytes: int | None = None  # as asked for

    @property
    def num_chunks(self) -> int:
        return -(-self.num_tokens // self.chunk_tokens)

    @property
    def even_tokens(self) -> int:
        """Rows of a chunk where a program computes all of its chunks whole, as XLA's loops do: no
        more than `chunk_tokens`, in as many chunks. 1024 tokens in chunks of 832 are 1664 rows, in
        two of 512 they are 1024."""
        rows = -(-self.num_tokens // max(1, self.num_chunks))
        multiple = TILE_ROWS if self.chunk_tokens >= TILE_ROWS else ROW_MULTIPLE
        return min(self.chunk_tokens, max(-(-rows // multiple), 1) * multiple)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.vocab_size * self.compute_itemsize

    def in_blocks(self, backend: Literal["torch", "jax"] = "torch") -> ChunkPlan:
        """Of one block of classes, which all tokens pass before the next one: the plan of calls
        whose logits are computed twice or have no gradient, and whose heads are larger.

        Raises:
            ValueError: another backend.
        """
        check_choice("backend", backend, ("torch", "jax"))
        columns, budget, most = min(self.vocab_size, BLOCK_CLASSES), self.max_chunk_bytes, MAX_ROWS
        heads = 2 if self.teacher_size else 1
        if backend == "jax" or self.teacher_size:  # whose budget is that of whole rows
            row_bytes = self.vocab_size * self.compute_itemsize
            budget = budget or default_chunk_bytes("cpu", row_bytes=row_bytes)
        if backend == "jax":  # whose chunks are groups
            columns, most = even_classes(self.vocab_size), GROUP_TOKENS
        row_bytes = columns * self.compute_itemsize
        rows = min(chunk_rows(self.num_tokens, row_bytes, budget, heads=heads), most)
        return replace(self, vocab_size=columns, chunk_tokens=rows)

    def bounds(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each chunk, ascending: the order in which dW is accumulated."""
        for start in range(0, self.num_tokens, self.chunk_tokens):
            yield start, min(start + self.chunk_tokens, self.num_tokens)

    def block_tokens(self, budget: int) -> int:
        """Rows of a chunk that fit `budget` bytes: what elementwise passes take while cached."""
        rows = block_tokens(budget, self.vocab_size, self.compute_itemsize)
        return min(rows, self.chunk_tokens)


def even_classes(vocab_size: int, most: int = XLA_BLOCK_CLASSES) -> int:
    """Classes of a block of a head, at most so many, where a program computes all blocks whole: an
    odd number of 128 columns, in as many blocks."""
    blocks = -(-vocab_size // max(1, most))
    columns = -(-vocab_size // BLOCK_COLUMNS)
    return (-(-columns // max(1, blocks)) | 1) * BLOCK_COLUMNS


def is_in_blocks(
    plan: ChunkPlan, *, gradient: bool, recompute: bool, most: int = BLOCK_CLASSES
) -> bool:
    """Whether blocks of classes are computed one after the other, of a head of one process, with
    `most` of them in a block."""
    whole = plan.teacher_size or plan.vocab_size <= most
    return (recompute or not gradient) and not whole


def pad_rows(rows: int) -> int:
    """`rows` rounded up to the row multiple that keeps GEMM rows bit-equal (A10)."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def pad_columns(columns: int) -> int:
    """`columns` of float32 or float64 rounded up to whole lines of 128 bytes, also of 16-bit values
    that take their place: at V = 50,257 rows would begin where no bulk copy of a GPU may."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def plan_chunks(
    num_tokens: int,
    vocab_size: int,
    hidden_size: int,
    *,
    dtype: str = "float32",
    compute_dtype: str | None = None,
    max_chunk_bytes: int | None = None,
    least: int = 1,
    teacher_size: int = 0,
) -> ChunkPlan:
    """Split `num_tokens` rows of a [V, H] head into chunks whose logits fit a byte budget.

    T = max_chunk_bytes // (V * itemsize of the compute dtype), rounded down to a multiple of 64
    (of 8 below 64), at least 8, at most 8192. One chunk when one fits. T depends on the budget and
    on V alone, never on N nor on free memory, so a run can be repeated elsewhere. JAX's loops,
    which compute every chunk whole, take `even_tokens` where N is known.

    Args:
        num_tokens: N >= 0, rows of `hidden` with the leading dimensions flattened.
        vocab_size: V >= 1, rows of the head (of this rank's shard).
        hidden_size: H >= 1.
        dtype: name of the GEMM operands' dtype.
        compute_dtype: name of the logits' dtype; None is float32, float64 for float64 operands.
        max_chunk_bytes: budget of one [T, V] buffer in bytes; None is the default on a CPU: 512
            rows, within 8 and 64 MiB.
        least: rows that a backend's chunk has to have whatever the budget.
        teacher_size: of a `chunked_divergence`, hidden width of its `TeacherHead`, whose logits
            have half of the budget; 0 for other calls.

    Raises:
        ValueError: a size or budget out of range, or an unknown dtype name.
    """
    num_tokens, vocab_size, hidden_size, max_chunk_bytes, teacher_size = map(
        plain, (num_tokens, vocab_size, hidden_size, max_chunk_bytes, teacher_size)
    )
    sizes = {"num_tokens": num_tokens, "vocab_size": vocab_size, "hidden_size": hidden_size}
    sizes["teacher_size"] = teacher_size
    check_plan_arguments(sizes, dtype, compute_dtype, max_chunk_bytes)
    compute = compute_dtype or ("float64" if dtype == "float64" else "float32")
    itemsize = ITEMSIZE[compute]
    rows = chunk_rows(
        num_tokens, vocab_size * itemsize, max_chunk_bytes, heads=2 if teacher_size else 1
    )
    rows = max(rows, least)
    return ChunkPlan(
        num_tokens, vocab_size, hidden_size, rows, itemsize, teacher_size, max_chunk_bytes
    )


def chunk_rows(num_tokens: int, row_bytes: int, budget: int | None, *, heads: int = 1) -> int:
    """T of a chunk whose rows have so many bytes, as `plan_chunks` has it."""
    budget = budget or default_chunk_bytes("cpu", row_bytes=row_bytes)
    rows = min(max(1, budget // heads) // row_bytes, MAX_ROWS)
    multiple = TILE_ROWS if rows >= TILE_ROWS else ROW_MULTIPLE
    rows = max(rows // multiple * multiple, ROW_MULTIPLE)
    return min(rows, max(pad_rows(num_tokens), ROW_MULTIPLE))


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


def schedule(
    plan: ChunkPlan, platform: str, *, sharded: bool, gathered: bool = False, once: bool = True
) -> str:
    """When the gradients of a chunk may begin: "fused", with its statistics; "each chunk", once
    ranks have exchanged those of the chunk; "two passes", once all statistics are known, for which
    the logits are computed again.

    Args:
        plan: of the call, as for `exchanges_per_chunk`.
        platform: "cpu" or another.
        sharded: whether statistics are sums over ranks.
        gathered: whether a chunk holds tokens of several ranks, which meet for it in any case.
        once: whether a chunk's gradients can be made of the logits that its statistics leave.
    """
    if not sharded:
        return "fused"
    each = once and (gathered or exchanges_per_chunk(plan, platform))
    return "each chunk" if each else "two passes"


# What ranks of a vocabulary must have the same travels with the first MAX of a call, which in
# PyTorch has room for so many numbers whatever the function and its options: ranks whose calls
# differ then learn it from a MAX of one size. Most are a divergence's from `TeacherLogits`, 41
# beside the scalar options.
ROOM = 42 + len(Scalars._fields)


def sum_rows(itemsize: int, *, entropy: bool, more: int = 0) -> int:
    """Numbers that the SUM over shards has of a token, in a compute dtype of that size: its
    target's logit, a count, the words of each sum over columns, and `more`."""
    return 2 + len(WORD_BITS[itemsize]) * (1 + entropy) + more


def spread_tokens(chunk_tokens: int, ranks: int, longest: int) -> tuple[int, int]:
    """Tokens of each rank in a chunk, the last one ragged, and of each rank in all: as many as the
    longest has, in whole rows of a GEMM's tile (row A10).

    Args:
        chunk_tokens: of a chunk that does not know of ranks.
        ranks: whose tokens meet.
        longest: tokens of the rank with most.
    """
    most = max(ROW_MULTIPLE, chunk_tokens // ranks // ROW_MULTIPLE * ROW_MULTIPLE)
    length = pad_rows(longest)
    return max(ROW_MULTIPLE, min(most, length)), length


def stream_rows(rows: int, hidden_size: int, ranks: int, budget: int) -> int:
    """Rows of each rank in a block of a head that passes by; blocks are of one size, or nearly so.

    Beside a chunk of logits there are up to eight arrays of a block: two that travel, one that is
    multiplied, the sum of its d weight, one that leaves, and copies. Together they fit the budget.
    Of ranks whose rows are whole blocks of the softmax's sums, these are too if they fit (row A18).

    Args:
        rows: of every rank, ceil(V / ranks).
        hidden_size: H.
        ranks: that share the head.
        budget: bytes of a chunk's logits.
    """
    most = max(1, min(rows, budget // (8 * 4 * max(1, ranks * hidden_size))))
    multiple = BLOCK_COLUMNS if most >= BLOCK_COLUMNS and rows % BLOCK_COLUMNS == 0 else 1
    blocks = max(1, -(-rows // (most // multiple * multiple)))
    return max(1, -(-rows // (blocks * multiple)) * multiple)
