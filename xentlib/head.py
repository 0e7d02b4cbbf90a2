"""Where the head lives: the definition of `NLLHead` and `gather_head`.

A head's gradient is the one that its wrapper would have produced had the head's own forward been
called: the same mean over ranks, the same divide factor. What a call may send is row A15 of the
contract.
"""

from __future__ import annotations

from typing import Any

__all__ = ["gather_head"]


def gather_head(weight: Any, bias: Any = None) -> Any:
    """A head that a wrapper keeps in pieces, whole for the length of a block. PyTorch only.

        with gather_head(model.head.weight, model.head.bias) as (weight, bias):
            logits = F.linear(hidden, weight, bias)

    For code of one's own: `chunked_nll` and `chunked_logprobs` do as much themselves, without the
    copy. The block is given whole copies of what a wrapper keeps in pieces, which are in pieces
    again before it begins; a copy lives for as long as somebody refers to it, a backward after the
    block included. Gradients that reach a copy go home as the wrapper sends them. Every rank must
    enter, and one gather is all that is sent, but for the wrapper's own reduction.

    Args:
        weight: [V, H] or [H, V], a parameter: plain, under DDP, kept by FSDP2's `fully_shard` or by
            DeepSpeed ZeRO-3; a vocabulary shard that FSDP2 cuts further comes out as the shard.
        bias: [V] or None; the parameter that is kept beside the weight.

    Yields:
        (weight, bias), whole, in the dtype that the wrapper computes in; as they are where nobody
        keeps them in pieces.

    Raises:
        ValueError: a DTensor that no `fully_shard` keeps.

    Numerics: values are gathered as they are, or cast once where the wrapper has a policy that
    says so. Row A15 of the contract; D7 of the design.
    """
    raise NotImplementedError("call xentlib.torch.gather_head; in JAX use jax.lax.all_gather")
