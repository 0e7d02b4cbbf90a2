"""Memory that a call needs, from its plan alone.

Shapes: N tokens, V vocabulary, H hidden width, Ht the teacher's, T tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from xentlib.checks.validators import check_choice
from xentlib.math.softmax import BLOCK_COLUMNS
from xentlib.options import DIVERGENCES, ITEMSIZE, Divergence
from xentlib.plan.memory_jax import jax_peak
from xentlib.plan.split import (
    BLOCK_CLASSES,
    GROUP_TOKENS,
    TILE_ROWS,
    ChunkPlan,
    block_bytes,
    block_tokens,
    default_chunk_bytes,
    is_in_blocks,
    pad_columns,
    pad_rows,
    plan_chunks,
)

# What memory is for, as plans name it.
LOGITS, SCRATCH, ROWS = "logits of a chunk", "scratch of the softmax", "rows of a chunk"
OF_COLUMNS = "statistics of blocks of columns"
WIDENED, D_WEIGHT, D_HIDDEN = "copy of the head", "sum of d weight", "sum of d hidden"

# Of a divergence, arrays of a quarter of a block that stand at once beside both chunks, two more on
# a CPU. Counted, as the bytes of a class are.
TORCH_ARRAYS: dict[Divergence, int] = {"forward_kl": 15, "reverse_kl": 16, "jsd": 34}
# By Triton's programs, times the statistics of one head: those, and what their exact sums need.
PROGRAM_ARRAYS: dict[Divergence, int] = {"forward_kl": 6, "reverse_kl": 8, "jsd": 6}


def peak_bytes(
    plan: ChunkPlan,
    *,
    backend: Literal["torch", "jax"],
    dtype: str = "float32",
    gradient: bool = True,
    recompute: bool = False,
    platform: Literal["cpu", "gpu", "cuda", "tpu"] = "cpu",
    kernels: bool = True,
    kind: Divergence = "forward_kl",
    kept: int = 0,
    ids: int = 0,
) -> int:
    """Peak memory of one call beside its inputs, results included.

    Within 5 % of the allocator's count in torch; of the compiler's in JAX where there are several
    chunks and one is no smaller than the float32 head. XLA needs less than this otherwise.

        torch: chunk + two blocks + rows of a chunk   (+ float32 head where the operands are 16-bit)
        JAX:   chunk + rows of a chunk                (a second chunk, dz, for gradients; with
                                                       recompute only in 16 bits)
        both:  + float32 d weight and d hidden        (+ their rounded copies, in JAX)

    Whole heads of more than 8,192 classes, in JAX 8,064, are read in blocks (`plan.in_blocks()`)
    with `recompute` or without a gradient: chunk, scratch and copy of the head are those of a
    block, d weight has the dtype of the head beside one block in float32, and 12 bytes of
    statistics, 16 of Triton's programs, are kept for 128 classes of each token, of up to 4,096
    tokens. In JAX on a CPU products of a block widen operands of 16 bits, and bfloat16 stands
    beside integers of as many bits, of the head and of d weight; the compiler's count is then
    within 7 %.

    On a CPU with AMX the second computation of bfloat16 needs up to 8 % less, as products have no
    scratch there; on one without AVX-512 so does that of float32, up to a block in all.

    On a GPU, PyTorch, with V rounded up to a multiple of 64 in the chunk; dz of 16 bits takes the
    place of the logits. The larger of what stands at once, where all tokens are valid, within 5 %,
    of Triton's programs within 1 %:

        in the walk: chunk + rows of a chunk + scratch + float32 d weight and d hidden
        at the end:  float32 d weight and d hidden + their rounded copies, of 16 bits

    On a GPU, in JAX within 7 % of the compiler's count for an H200: a chunk, its dz in the dtype of
    the operands, float32 d weight and d hidden, their rounded copies less what of the chunk fits
    into that of d weight, rows of a chunk, and cuBLAS's workspace; a copy of the head where V is no
    multiple of 8. Of one chunk alone XLA needs up to a quarter less.

    On a TPU, in JAX within 3 % of the compiler's count for a v5p, inputs included: the same
    without cuBLAS, of chunks of a multiple of 128 tokens, with a dz only where V is no multiple of
    128. A softcap has a dz too, and a head laid out [H, V] is copied, which this does not count.

    Of a plan with a `teacher_size`, `chunked_divergence` with a `TeacherHead`, on a GPU for PyTorch
    alone. No gradient of the teacher is made. With `recompute`, of a loss of each token, the
    backward of PyTorch is in blocks of classes as above, two of them side by side.

        torch: two chunks + scratch: 15 to 34 arrays of a quarter of a block (two more on a CPU),
               of Triton's programs 6 to 8 times the statistics
               + rows of a chunk of both   (+ both heads in float32 where operands are 16-bit)
        JAX:   15 to 26 chunks, which XLA on a CPU keeps of a divergence
        both:  + float32 d weight and d hidden   (+ their rounded copies)

    Of `kept` and `ids`, in PyTorch on a CPU, bytes of each token and class, whatever the chunk: 55
    and 60 beside a chunk before the loop, in which there are 24 and 28. Of `ids` of more than an
    eighth of the classes a backward needs up to 7 % more.

    Args:
        plan: of the call, with the teacher's width if there is one.
        backend: "torch" or "jax".
        dtype: name of the operands' dtype; `weight` and `hidden` alike.
        gradient: for `hidden` and `weight`, or the loss alone.
        recompute: of `chunked_logprobs`, of `chunked_nll` with `recompute`, and of
            `chunked_divergence` with `reduction="none"`, whose backward computes the logits again.
        platform: "cpu", or "gpu", which "cuda" is as well, or in JAX "tpu".
        kernels: on a GPU in PyTorch, Triton's programs, whose scratch is four numbers a token and
            block of 128 columns, and not eager.
        kind: of the divergence.
        kept: classes of each token's `kept` of `chunked_logprobs`.
        ids: classes of each token's `ids`, whose log-probabilities have a gradient.

    Raises:
        ValueError: another backend, platform or kind, or one that there is no formula for.
    """
    check_choice("backend", backend, ("torch",) if kept or ids else ("torch", "jax"))
    check_choice("kind", kind, DIVERGENCES)
    only_cpu = kept or ids or (plan.teacher_size and backend == "jax")
    accelerators = ("gpu", "cuda", "tpu") if backend == "jax" else ("gpu", "cuda")
    check_choice("platform", platform, ("cpu",) if only_cpu else ("cpu", *accelerators))
    if kept or ids:
        return _with_classes(plan, dtype, gradient, kept, ids)
    if backend == "torch":
        how = dtype, gradient, recompute, platform, kernels
        if plan.teacher_size:
            walks = _walks_beside_teacher(plan, *how, kind)
        elif is_in_blocks(plan, gradient=gradient, recompute=recompute):
            walks = walk_of_blocks(plan, plan.in_blocks(), *how)
        else:
            walks = iter([torch_walk(plan, *how)])
        peak = max(sum(walk.values()) for walk in walks)
        if recompute and plan.vocab_size > BLOCK_CLASSES:  # whose gradients are rounded on the way
            return peak
        size, narrow = plan.compute_itemsize, ITEMSIZE[dtype]
        entries = (plan.vocab_size + plan.num_tokens) * plan.hidden_size
        rounded = platform != "cpu" and gradient and narrow < size
        return max(peak, entries * (size + narrow) if rounded else 0)
    return jax_peak(plan, dtype, gradient, recompute, platform, kind)


def torch_walk(
    plan: ChunkPlan, dtype: str, gradient: bool, recompute: bool, platform: str, kernels: bool
) -> dict[str, int]:
    """What stands at once while PyTorch walks over the chunks of a call, in bytes, by name; the
    arguments are those of `peak_bytes`."""
    size, narrow = plan.compute_itemsize, ITEMSIZE[dtype]
    low, on_cpu = narrow < size, platform == "cpu"
    head, trunk = plan.vocab_size * plan.hidden_size, plan.num_tokens * plan.hidden_size
    rows = plan.chunk_tokens * plan.hidden_size
    columns = plan.vocab_size if on_cpu else pad_columns(plan.vocab_size)
    block = plan.block_tokens(block_bytes(platform)) * plan.vocab_size * size
    if on_cpu:
        # dz of 16 bits, a block of it, which a second computation has room for.
        scratch = 2 * block + (block // 2 if low and gradient and not recompute else 0)
        of_rows = rows * size * (low + gradient)
    else:
        # Of statistics, which a backward has, and dz of 16 bits; or of the rows that targets add.
        softmax = (0 if recompute else block) + (block // 2 if low else 0)
        eager = max(softmax, rows * size * (2 if low else 1)) if gradient else block
        blocks = 0 if recompute else plan.chunk_tokens * -(-plan.vocab_size // BLOCK_COLUMNS)
        scratch, of_rows = 4 * blocks * size if kernels else eager, rows * narrow
    return {
        LOGITS: plan.chunk_tokens * columns * size,
        SCRATCH: scratch,
        ROWS: of_rows,
        WIDENED: head * size if low and on_cpu else 0,
        D_WEIGHT: head * size if gradient else 0,
        D_HIDDEN: trunk * size if gradient else 0,
    }


def walk_of_blocks(
    plan: ChunkPlan,
    blocks: ChunkPlan,
    dtype: str,
    gradient: bool,
    recompute: bool,
    platform: str,
    kernels: bool,
    head_size: int = 0,
    sharded: bool = False,
) -> Iterator[dict[str, int]]:
    """What stands at once in the forward of such a call and in its backward, as `torch_walk` has
    it; `blocks` is the plan of one of them, `head_size` that of an entry of d weight, if not the
    dtype's. Of a shard the statistics of all tokens stand at once."""
    size, narrow = plan.compute_itemsize, ITEMSIZE[dtype]
    head_size = head_size or narrow
    spare = size * (platform == "cpu" or not kernels)
    if platform != "cpu":
        spare *= pad_columns(1)  # a line
    group = blocks if sharded else replace(blocks, num_tokens=min(plan.num_tokens, GROUP_TOKENS))
    group = replace(group, chunk_tokens=min(blocks.chunk_tokens, pad_rows(group.num_tokens)))
    walk = torch_walk(group, dtype, False, recompute, platform, kernels)
    walk[LOGITS] += spare * group.chunk_tokens
    numbers = 3
    if kernels and platform != "cpu":  # four, written where they stay
        numbers, walk[SCRATCH] = 4, 0
    numbers *= group.num_tokens * -(-plan.vocab_size // BLOCK_COLUMNS)
    yield walk | {OF_COLUMNS: numbers * size}
    if gradient:
        walk = torch_walk(blocks, dtype, True, recompute, platform, kernels)
        walk[LOGITS] += spare * blocks.chunk_tokens
        walk[ROWS] += rows_of_next(blocks, platform) * plan.hidden_size * narrow
        if platform == "cpu":
            # exp needs no second block, dz of 16 bits half of one; or what a product for d weight
            # has, which comes in pieces with a copy of their part of dz.
            elementwise = walk[SCRATCH] * (3 if narrow < size else 2) // 4
            piece = blocks.vocab_size * (blocks.hidden_size + blocks.chunk_tokens) * size
            walk[SCRATCH] = max(elementwise, min(2 * block_bytes(platform), piece))
        d_weight = plan.vocab_size * plan.hidden_size * head_size
        yield walk | {D_WEIGHT: d_weight + (walk[D_WEIGHT] if head_size < size else 0)}


def rows_of_next(blocks: ChunkPlan, platform: str) -> int:
    """Of the second chunk of a block, whose operand is made while that of the first is there; on a
    CPU something else needs more."""
    rows = min(blocks.chunk_tokens, blocks.num_tokens - blocks.chunk_tokens)
    return 0 if platform == "cpu" else max(0, rows)


def _walks_beside_teacher(
    plan: ChunkPlan,
    dtype: str,
    gradient: bool,
    recompute: bool,
    platform: str,
    kernels: bool,
    kind: Divergence,
) -> Iterator[dict[str, int]]:
    """What stands at once in PyTorch's walks where a teacher's chunk is beside each of a student's:
    of `recompute` in the forward, and in the backward, which may be in blocks of classes."""
    how = platform, kernels
    first = torch_walk(plan, dtype, gradient and not recompute, False, *how)
    in_programs = kernels and platform != "cpu"
    arrays = (PROGRAM_ARRAYS if in_programs else TORCH_ARRAYS)[kind]
    yield first | _beside_teacher(first, plan, dtype, *how, arrays)
    if gradient and recompute:
        part, next_rows, walk = plan, 0, torch_walk(plan, dtype, True, True, *how)
        if plan.vocab_size > BLOCK_CLASSES:
            part = plan.in_blocks()
            *_, walk = walk_of_blocks(plan, part, dtype, True, True, *how)
            next_rows = rows_of_next(part, platform)
        # Nothing is summed: two arrays less, and no statistics
        walk |= _beside_teacher(walk, part, dtype, *how, arrays - 2)
        walk[ROWS] += next_rows * plan.teacher_size * ITEMSIZE[dtype]
        yield walk


def _beside_teacher(
    walk: dict[str, int], plan: ChunkPlan, dtype: str, platform: str, kernels: bool, arrays: int
) -> dict[str, int]:
    """What a walk has otherwise; at once there are `arrays` of a quarter of a block, or of
    statistics."""
    size, on_cpu = plan.compute_itemsize, platform == "cpu"
    low, narrow = ITEMSIZE[dtype] < size, ITEMSIZE[dtype]
    block = -(-plan.block_tokens(block_bytes(platform)) // 4) * plan.vocab_size * size
    rows = plan.chunk_tokens * plan.teacher_size * (size * low if on_cpu else narrow)
    head = plan.vocab_size * plan.teacher_size * size
    in_programs = kernels and not on_cpu
    return {
        LOGITS: 2 * walk[LOGITS],
        SCRATCH: arrays * walk[SCRATCH] if in_programs else (arrays + 2 * on_cpu) * block,
        ROWS: walk[ROWS] + rows,
        WIDENED: walk[WIDENED] + (head if walk[WIDENED] else 0),
    }


def _with_classes(plan: ChunkPlan, dtype: str, gradient: bool, kept: int, ids: int) -> int:
    """Of `chunked_logprobs` with further classes, in PyTorch on a CPU: the larger of what stands
    before the loop over chunks, and in it."""
    n = plan.num_tokens
    walk = torch_walk(plan, dtype, gradient, True, "cpu", True)
    if plan.vocab_size > BLOCK_CLASSES:
        *_, walk = walk_of_blocks(plan, plan.in_blocks(), dtype, gradient, True, "cpu", True)
    before = walk[LOGITS] + walk[WIDENED] + n * (55 * kept + 60 * ids)
    during = sum(walk.values()) + n * (24 * kept + 28 * ids)
    return max(before, during)


def given_peak_bytes(
    num_tokens: int,
    columns: int,
    *,
    backend: Literal["torch", "jax"],
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
        plan = plan_chunks(
            num_tokens, columns, 1, dtype=dtype, max_chunk_bytes=budget, least=TILE_ROWS
        )
        rows = plan.chunk_tokens
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
    forward = max(scratch + more + 7 * number, (22 if entropy else 18) * number)
    backward = scratch - (0 if entropy else block) + rounded + d_logits + 9 * number
    # Labels as int64, and masks.
    return 12 * num_tokens + (max(forward, backward) if gradient else forward)
