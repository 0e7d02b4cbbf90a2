"""A head with a low-rank part: its matrices against the head, and what it is combined with."""

from __future__ import annotations

import math
from collections.abc import Sequence

from xentlib.call import Arguments
from xentlib.checks.call import NLLProblem
from xentlib.checks.operand import Operand
from xentlib.checks.words import check_device, check_floating
from xentlib.lowrank import LowRankHead

__all__ = ["check_base", "check_low_rank", "check_low_rank_route", "check_low_rank_rows"]


def check_base(kind: str, single: bool) -> None:
    """Refuse a low-rank part beside a head that has one."""
    if not single:
        raise TypeError(
            f"`weight` of `LowRankHead` must have no low-rank part of its own; got a {kind} with "
            f"one. Concatenate A, and B, along the rank."
        )


def check_low_rank(low: LowRankHead[Operand], hidden: Operand, problem: NLLProblem) -> None:
    """Validate A, B, scale and mask, given as `Operand`, beside a head that has been."""
    rows, width = problem.vocab_size, problem.hidden_size
    for name, x in (("a", low.a), ("b", low.b)):
        if not isinstance(x, Operand):
            raise TypeError(
                f"`{name}` of `LowRankHead` must be an array of the backend; got "
                f"{type(x).__name__}. Pass the parameter of the adapter."
            )
        check_floating(name, x)
        check_device(name, x, hidden)
        if x.dtype == "float64" and problem.compute_dtype != "float64":
            raise TypeError(
                f"`{name}` must be float32 or below beside a head that is computed in float32; got "
                f"float64. Cast it, or pass `compute_dtype='float64'`."
            )
    rank = low.a.shape[0] if len(low.a.shape) == 2 else 0
    if rank < 1 or low.a.shape[1] != width:
        raise ValueError(
            f"`a` must have shape (rank, {width}) to match `hidden` {hidden.shape}; got "
            f"{low.a.shape}. Pass LoRA's A as it multiplies hidden states, `hidden @ a.T`."
        )
    check_b(low.b.shape, rows, rank)
    number = isinstance(low.scale, (int, float)) and not isinstance(low.scale, bool)
    if not number or not math.isfinite(low.scale):
        came = repr(low.scale)
        if isinstance(low.scale, Operand):
            came = f"an array {list(low.scale.shape)} of {low.scale.dtype}"
        raise ValueError(
            f"`scale` must be a finite number; got {came}. Pass alpha / r, and multiply `a` by "
            f"what is trained."
        )
    if low.keep is None:
        return
    if not isinstance(low.keep, Operand) or low.keep.dtype != "bool":
        raise TypeError(
            f"`keep` must be bool or None; got {getattr(low.keep, 'dtype', low.keep)}. Pass the "
            f"mask of a dropout alone, and 1 / (1 - p) as part of `scale`."
        )
    if low.keep.shape != hidden.shape:
        raise ValueError(
            f"`keep` must have the shape of `hidden`, {hidden.shape}; got {low.keep.shape}. Pass "
            f"one entry for each of its entries."
        )
    check_device("keep", low.keep, hidden)


def check_low_rank_route(call: Arguments, zero: bool) -> None:
    """Refuse routes that have no room for A and B."""
    nodes = call.gather != "head" and call.tokens_parallel is not None
    if call.gather == "stream" or nodes or (zero and call.gather != "head"):
        under = " under ZeRO-3" if zero else " and `tokens_parallel`" if nodes else ""
        raise ValueError(
            f"`weight` must be one array here; got a `LowRankHead` with gather={call.gather!r}"
            f"{under}. Leave that out, or merge the low-rank part into the weight."
        )


def check_low_rank_rows(together: bool, shape: Sequence[int], rows: int) -> None:
    """Refuse A and B whose rows a wrapper does not keep as it keeps those of the head."""
    if not together:
        raise ValueError(
            "`a` and `b` must be sharded over their rows by the `fully_shard` of `weight`, with "
            "`gather='hidden'`; got others. Keep the three in one module, or leave `gather` out."
        )
    check_b(shape, rows, shape[-1])


def check_b(shape: Sequence[int], rows: int, rank: int) -> None:
    if tuple(shape) != (rows, rank):
        raise ValueError(
            f"`b` must have shape ({rows}, {rank}), a row for each row of the head; got "
            f"{tuple(shape)}. Pass LoRA's B, and of a vocabulary shard its rows."
        )
