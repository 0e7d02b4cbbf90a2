"""Time of a call on a GPU, by a model of what it multiplies, moves and computes."""

from __future__ import annotations

from typing import NamedTuple

from xentlib.checks.validators import check_choice
from xentlib.plan.split import ChunkPlan


class Gpu(NamedTuple):
    """Rates of a card; those of an H100 (80 GB, SXM) under load, as `make gpu` has measured them.

    Attributes:
        flops: operations a second of products of 16-bit numbers with float32 results.
        bandwidth: bytes a second, read and written.
        multiprocessors: of the card.
        clock: of a multiprocessor under load, in Hz; it issues 128 instructions of a lane in each.
    """

    flops: float = 690e12
    bandwidth: float = 2.97e12
    multiprocessors: int = 132
    clock: float = 1.6e9


# Bytes of a logit with its gradient in 16 bits, and without one; instructions likewise. PyTorch's
# are of Triton's programs (docs/data/kernels.json), JAX's as `make hlo` counts them.
BYTES = {"torch": (10.25, 4.25), "jax": (14.0, 8.0)}
BYTES_OF_SOFTCAP = {"torch": (10.25, 4.25), "jax": (18.0, 12.0)}
INSTRUCTIONS, INSTRUCTIONS_OF_SOFTCAP = (51, 29), (141, 70)


def gpu_time(
    plan: ChunkPlan,
    *,
    backend: str = "torch",
    gradient: bool = True,
    recompute: bool = False,
    softcap: bool = False,
    frozen: bool = False,
    gpu: Gpu = Gpu(),  # noqa: B008 - a tuple of numbers
) -> float:
    """Seconds of the device for a loss, or for log-probabilities, of a head with 16-bit operands.

    The sum of, for N tokens, width H, vocabulary V and K chunks:

        products  2 N V H operations each: 3 with gradients, 4 with `recompute`, 1 without; or
                  three matrices of each chunk in 16 bits, read or written, where that is longer: of
                  126 columns it has 126 operations for each byte of its tokens, and could have 232
                  in the same time
        softmax   the longer of its bytes and its instructions, of N V logits
        d weight  8 V H bytes a chunk, read and written in float32, 4 in the first; half of that,
                  as its product hides the rest; then rounded, which is 6

    The model is within 9 % of what an H100 took for heads of H = 1024 to 4096, once 2 ms are added
    that the host takes for a call alone ([Performance](performance.md#h100)). It has no overlap,
    and products of few terms, H < 1024, are slower. Chunks are of tokens, also of a call that reads
    its head in blocks of classes: by the same terms that takes 2 % less at Qwen3 8B's head.

    Args:
        plan: of the call, from `plan_chunks`.
        backend: "torch" (Triton's programs) or "jax".
        gradient: with d hidden and d weight.
        recompute: of log-probabilities, and of a loss with `recompute`, whose logits are computed
            again in the backward.
        softcap: whether the logits have one.
        frozen: the head has no gradient: neither its product nor its sum.
        gpu: the card's rates.

    Raises:
        ValueError: another backend.
    """
    check_choice("backend", backend, ("torch", "jax"))
    logits = plan.num_tokens * plan.vocab_size
    head = plan.vocab_size * plan.hidden_size
    products = (4 if recompute else 3) - frozen if gradient else 1
    size = (BYTES_OF_SOFTCAP if softcap else BYTES)[backend]
    instructions = INSTRUCTIONS_OF_SOFTCAP if softcap else INSTRUCTIONS
    moved, issued = size[not gradient] * logits, float(instructions[not gradient] * logits)
    of_head = 0.0
    if gradient and not frozen:
        of_head = head * ((8.0 * plan.num_chunks - 4) / 2 + 6)
        if backend == "jax":
            of_head += 4 * head  # zeros, which the first product is added to
    softmax = max(moved / gpu.bandwidth, issued / (gpu.multiprocessors * 128 * gpu.clock))
    return product_time(plan, products, gpu) + softmax + of_head / gpu.bandwidth


def product_time(plan: ChunkPlan, products: int, gpu: Gpu) -> float:
    logits, width = plan.num_tokens * plan.vocab_size, plan.hidden_size
    entries = logits + (plan.num_tokens + plan.num_chunks * plan.vocab_size) * width
    return products * max(2.0 * logits * width / gpu.flops, 2.0 * entries / gpu.bandwidth)
