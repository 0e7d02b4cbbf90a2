"""A head with a low-rank part, in PyTorch: on its way from a call to an operator.

Shapes: V vocabulary, H hidden width, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.arguments import Arguments
from xentlib.lora import LowRankHead
from xentlib.torch.core.groups import gather_into


def low_rank_of(head: Any) -> LowRankHead[Tensor] | None:
    return head if isinstance(head, LowRankHead) else None


def unpacked(given: Arguments) -> tuple[Arguments, LowRankHead[Tensor] | None]:
    """The call with the weight alone, and the head that it is of, if it has a low-rank part."""
    low = low_rank_of(given.weight)
    return (given, None) if low is None else (given._replace(weight=low.weight), low)


def with_weight(head: Any, weight: Tensor, whole: Callable[[Any], Any]) -> Any:
    """The head with another weight in place of its own; A and B as `whole` has them."""
    low = low_rank_of(head)
    if low is None:
        return weight
    return low._replace(weight=weight, a=whole(low.a), b=whole(low.b))


def fake_low_rank(call: Any, needs: list[bool], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Of A and B, shapes and dtypes of their gradients for a compiler; empty if not needed."""
    found = []
    for x, need in zip((call.low_in, call.low_out), needs, strict=True):
        like = call.hidden if x is None else x
        found.append(like.new_empty(like.shape if need else (0, 0), dtype=dtype or like.dtype))
    return found


def all_gather_rows(rows: Tensor, count: int, over: dist.ProcessGroup) -> Tensor:
    """All `count` rows of a parameter [r, H], of which each rank has as torch.chunk cuts."""
    found: Tensor = AllGatherRows.apply(rows, count, over)  # type: ignore[no-untyped-call]
    return found


class AllGatherRows(torch.autograd.Function):
    """All ranks' rows of a parameter, whose gradient each rank has of all of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int, over: Any) -> Tensor:
        ranks = dist.get_world_size(over)
        each = -(-count // ranks)
        ctx.start, ctx.stop = (min(k * each, count) for k in (over.rank(), over.rank() + 1))
        sent = rows.new_zeros(each, *rows.shape[1:])
        sent[: rows.shape[0]] = rows
        found = rows.new_empty(ranks * each, *rows.shape[1:])
        gather_into(found, sent, group=over)
        return found[:count]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient[ctx.start : ctx.stop].clone(), None, None
