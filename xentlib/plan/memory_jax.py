"""Memory of one call of a head in JAX, as its compiler counts it: what `peak_bytes` says of it."""

from __future__ import annotations

from xentlib.math.softmax import BLOCK_COLUMNS
from xentlib.options import ITEMSIZE, Divergence
from xentlib.plan.split import (
    CPU_COLUMN_MULTIPLE,
    GPU_COLUMN_MULTIPLE,
    MIB,
    TPU_ROW_MULTIPLE,
    XLA_BLOCK_CLASSES,
    ChunkPlan,
    is_in_blocks,
)

# Of a divergence, arrays of a chunk that stand at once, both chunks among them, with gradients and
# without. Counted.
JAX_ARRAYS: dict[Divergence, tuple[int, int]] = {
    "forward_kl": (15, 15),
    "reverse_kl": (16, 16),
    "jsd": (26, 23),
}
# Of cuBLAS, as XLA gives it to each product.
WORKSPACE = 32 * MIB


def jax_peak(
    plan: ChunkPlan,
    dtype: str,
    gradient: bool,
    recompute: bool,
    platform: str,
    kind: Divergence,
) -> int:
    """The arguments are those of `peak_bytes`."""
    if is_in_blocks(plan, gradient=gradient, recompute=recompute, most=XLA_BLOCK_CLASSES):
        return _in_blocks(plan, dtype, gradient, platform)
    if platform != "cpu":
        return _on_accelerator(plan, dtype, gradient, recompute, platform)
    size = plan.compute_itemsize
    tokens = plan.even_tokens
    more = -plan.vocab_size % CPU_COLUMN_MULTIPLE
    chunk = tokens * (plan.vocab_size + more) * size
    head, trunk = plan.vocab_size * plan.hidden_size, plan.num_tokens * plan.hidden_size
    rows = tokens * plan.hidden_size * size
    low = ITEMSIZE[dtype] < size
    copies = trunk * ITEMSIZE[dtype] if low else 0
    # Of a head that is filled up to whole tiles, and of its gradient.
    copies += (head + more * plan.hidden_size) * ITEMSIZE[dtype] if more else 0
    of_weight = head * size if more and not low else 0
    # A loop of one chunk keeps the mask of the target column as bytes.
    mask = chunk // size if plan.num_chunks == 1 else 0
    if plan.teacher_size:
        # Of what is filled up; where d weight will be is room for an array that fits.
        filled = (plan.vocab_size + more) * plan.teacher_size * ITEMSIZE[dtype] if more else 0
        copies += plan.num_tokens * plan.teacher_size * (size + ITEMSIZE[dtype]) if low else 0
        arrays = JAX_ARRAYS[kind][not gradient] * chunk
        if not gradient:
            return arrays + copies + filled
        shared = max((x for x in (chunk, filled) if x <= of_weight), default=0)
        sums = (head + trunk) * (size + (ITEMSIZE[dtype] if low else 0))
        return arrays + copies + filled + of_weight - shared + sums
    if not gradient:
        return chunk + mask + rows + copies + (rows * 3 // 2 if low else 0)
    # Beside a chunk: its dz, or the GEMM's addend to d weight, whichever is larger.
    dz = (chunk // 2 if low else 0) if recompute else chunk
    total = chunk + max(dz, head * size) + mask + 2 * rows + copies + (head + trunk) * size
    total += of_weight
    return total + (head * size + (head + trunk) * ITEMSIZE[dtype] if low else 0)


def _in_blocks(plan: ChunkPlan, dtype: str, gradient: bool, platform: str) -> int:
    """Of a call whose head is read in blocks: the larger of its forward and of its backward."""
    blocks, size, narrow = plan.in_blocks("jax"), plan.compute_itemsize, ITEMSIZE[dtype]
    columns, hidden_size, on_cpu = blocks.vocab_size, plan.hidden_size, platform == "cpu"
    tokens = blocks.even_tokens
    tokens += -tokens % TPU_ROW_MULTIPLE if platform == "tpu" else 0
    low, workspace = narrow < size, WORKSPACE if platform in ("gpu", "cuda") else 0
    # A CPU widens operands of 16 bits, and keeps bfloat16 beside integers of as many bits.
    operand = size if on_cpu and dtype != "bfloat16" else narrow
    integers = plan.vocab_size * hidden_size * narrow if on_cpu and dtype == "bfloat16" else 0
    widened = plan.num_tokens * hidden_size * size if integers else 0
    logits, rows = tokens * columns * size, tokens * hidden_size
    head = columns * hidden_size
    number = tokens * size * -(-plan.vocab_size // columns) * (columns // BLOCK_COLUMNS)
    numbers = number * (4 if workspace else 3)
    # A TPU copies a block of the head into its product, but for those of less than 16 MiB.
    copied = head * operand if platform != "tpu" or head * operand >= 16 * MIB else 0
    forward = logits + copied + rows * operand + numbers + workspace + integers + widened
    if not gradient:
        return forward
    d_weight, trunk = plan.vocab_size * hidden_size * narrow, plan.num_tokens * hidden_size
    d_hidden, dz = trunk * narrow if low else 0, tokens * columns * narrow
    total = d_weight + trunk * size + head * size + workspace
    if on_cpu:
        # A loop of one chunk keeps the mask of the target column as bytes.
        mask = logits // size if blocks.even_tokens >= plan.num_tokens else 0
        total += logits + d_hidden + mask + 2 * rows * size
        if not integers:
            return max(forward, total + 2 * head * size)
        # Where d weight will be is room for the sums of a block of two or more, and behind them for
        # one that is rounded; of fewer for the mask.
        fits = head * size <= d_weight
        room = d_weight - (head * size if fits else 0)
        last = head * narrow if fits else mask
        room -= last if last <= room else 0
        return max(forward, total + 2 * integers + dz + widened - (d_weight - room))
    total += dz + head * narrow + rows * narrow
    if platform == "tpu":  # where dz is made in the product, and d weight is there all along
        return max(forward - number + d_weight, total + d_hidden)
    # Where d hidden will be is room for an array of the loop: for the largest that fits.
    scratch = (logits, dz, rows * size, head * narrow)
    shared = max((x for x in scratch if x <= d_hidden), default=0)
    return max(forward, total + logits + d_hidden - shared)


def _on_accelerator(
    plan: ChunkPlan, dtype: str, gradient: bool, recompute: bool, platform: str
) -> int:
    size, narrow, on_tpu = plan.compute_itemsize, ITEMSIZE[dtype], platform == "tpu"
    more, tokens = -plan.vocab_size % GPU_COLUMN_MULTIPLE, plan.even_tokens
    tokens += -tokens % TPU_ROW_MULTIPLE if on_tpu else 0
    columns = plan.vocab_size + more
    head, trunk = columns * plan.hidden_size, plan.num_tokens * plan.hidden_size
    chunk, rows = tokens * columns, tokens * plan.hidden_size
    filled, workspace = 0 if on_tpu or not more else head * narrow, 0 if on_tpu else WORKSPACE
    alone = chunk * size + rows * narrow + filled + workspace
    if not gradient:
        return alone
    # On a TPU dz is stored beside the logits of a V that was filled up; computed again, in their
    # place, by the product that makes them.
    dz_alone = on_tpu and recompute
    stored = dz_alone or more or not on_tpu
    logits, dz = 0 if dz_alone else chunk * size, chunk * narrow if stored else 0
    d_weight = head * narrow if more or narrow < size else 0
    d_hidden = trunk * narrow if narrow < size else 0
    # Where d weight will be is room for an array of the loop: for the largest that fits.
    scratch = (logits, dz, rows * size)
    shared = max((x for x in scratch if x <= d_weight), default=0)
    total = logits + dz + rows * (narrow + 2 * size) + (head + trunk) * size
    alone += d_weight + d_hidden if on_tpu else 0  # which are counted all along there
    return max(alone, total + filled + d_weight + d_hidden - shared + workspace)
