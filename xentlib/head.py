"""The head: with a low-rank part beside its weight, and gathered where a wrapper has sharded it.

A head's gradient is the one that its wrapper would have produced had the head's own forward been
called: the same mean over ranks, the same divide factor. What a call may send is row A15 of the
contract.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ["LowRankHead", "gather_head"]

A = TypeVar("A")  # a tensor or an array of the backend


class LowRankHead(NamedTuple, Generic[A]):
    """A head with a low-rank part, to be passed as `weight`: LoRA with `weight` frozen.

        logits = hidden @ weight.T + scale * (hidden @ a.T) @ b.T + bias

        chunked_nll(hidden, LowRankHead(head.weight, a, b, scale=alpha / r), labels)

    Both products are made in every chunk: there is no sum and no gradient of [V, H], unless
    `weight` requires one. With u = scale * hidden @ a.T and r' = scale * dz @ b,

        d b = dz.T @ u,   d a = r'.T @ hidden,   d hidden = dz @ weight + r' @ a.

    Options, per-token outputs and vocabulary shards are those of the function. Over vocabulary
    shards `b` is this rank's rows, like `weight`, and `a` the same on every rank, as its gradient
    is: one SUM of [r, H] more, where it is wanted. With `gather="hidden"`, in PyTorch, one
    `fully_shard` must keep all three, and A is gathered. Refused are "stream", "hidden" under
    ZeRO-3 or over nodes, and in JAX `gather=` and `tokens_parallel`.

    Attributes:
        weight: [V, H], or [H, V] with `weight_layout="HV"`; or the module that it is the weight of.
        a: [r, H], floating point; its dtype may differ from that of `weight`.
        b: [V, r] in either layout, likewise.
        scale: number, in JAX also an array []; a constant. LoRA's alpha / r.
        keep: [..., H] bool or None, of the hidden states: what the low-rank part sees of them is 0
            elsewhere. That is a dropout's mask; 1 / (1 - p) is then part of `scale`.

    Raises:
        ValueError: shapes or devices that do not belong together, a scale that is not finite, or
            that is differentiated; what it cannot be combined with.
        TypeError: a dtype that cannot be used, float64 beside a head in float32.

    Numerics: `a` and `b` are multiplied as they are, whatever autocast says; u and r' are float32
    sums of exact products, times `scale`, and never rounded below float32, as are their products
    with `b` and `a`. So values are those of a dense head weight + scale * b @ a within rows A2, A3,
    A8 and A10 of the contract, d hidden in A5, d a and d b in A6, with the running error bound
    of [hidden, u] against [weight, b]: a bound of the dense head would be too small where its terms
    cancel. In 16 bits dz is rounded once, as for every head, and each gradient once at the end:
    all three hold A7 and A16. `a` or `b` in float32 beside a head in 16 bits have gradients in
    float32, for which those rows say nothing but the distance that the rounding of dz makes.

    Source: LoRA (arXiv 2106.09685).
    """

    weight: A | Any
    a: A
    b: A
    scale: float = 1.0
    keep: A | None = None


def gather_head(weight: Any, bias: Any = None) -> Any:
    """Gather a head that a wrapper has sharded, for the length of a block. PyTorch only.

        with gather_head(model.head.weight, model.head.bias) as (weight, bias):
            logits = F.linear(hidden, weight, bias)

    For code of one's own: `chunked_nll` and `chunked_logprobs` do as much themselves, without the
    copy. The block is given whole copies of sharded parameters, which are sharded again before it
    begins; a copy lives for as long as there is a reference to it, a backward after the block
    included. The gradient of a copy is reduced by the wrapper, as that of the parameter would be.
    Every rank must enter. One gather is all that is sent, apart from the wrapper's own reduction.

    Args:
        weight: [V, H] or [H, V], a parameter: plain, under DDP, sharded by FSDP2's `fully_shard` or
            by DeepSpeed ZeRO-3; a vocabulary shard that FSDP2 shards further is gathered to that
            vocabulary shard.
        bias: [V] or None; the parameter beside the weight.

    Yields:
        (weight, bias), whole, in the dtype that the wrapper computes in; unchanged if no wrapper
        has sharded them.

    Raises:
        ValueError: a DTensor that `fully_shard` has not made.

    Numerics: values are gathered as they are, or cast once where the wrapper has a policy that
    says so. Row A15 of the contract; D7 of the design.
    """
    raise NotImplementedError("call xentlib.torch.gather_head; in JAX use jax.lax.all_gather")
