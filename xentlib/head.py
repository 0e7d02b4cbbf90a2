"""How the head is placed: the definition of `NLLHead` and `gather_head`.

A head's gradient is the one that its wrapper would have produced had the head's own forward been
called: the same mean over ranks, the same divide factor. What a call may send is row A15 of the
contract.
"""

from __future__ import annotations

from typing import Any

__all__ = ["gather_head"]


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
