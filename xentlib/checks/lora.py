"""A head with a low-rank part: its matrices against the head, and what it is combined with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NoReturn

from xentlib.arguments import Arguments
from xentlib.checks.call import NLLProblem
from xentlib.checks.validators import ArraySpec, check_device, check_floating
from xentlib.lora import LowRankHead


def check_base(kind: str, single: bool) -> None:
    """Refuse a low-rank part beside a head that has one."""
    if not single:
        raise TypeError(
            f"`weight` of `LowRankHead` must have no low-rank part of its own; got a {kind} with "
            f"one. Concatenate A, and B, along the rank."
        )


def check_low_rank(low: LowRankHead[ArraySpec], hidden: ArraySpec, problem: NLLProblem) -> None:
    """Validate A, B, scale and mask, given as `ArraySpec`, beside a head that has been."""
    rows, width = problem.vocab_size, problem.hidden_size
    for name, x in (("a", low.a), ("b", low.b)):
        if not isinstance(x, ArraySpec):
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
    if low.b.shape != (rank, rows)[::-1]:
        raise ValueError(
            f"`b` must have shape ({rows}, {rank}), a row for each row of the head; got "
            f"{low.b.shape}. Pass LoRA's B, and of a vocabulary shard its rows."
        )
    scale: Any = low.scale
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not math.isfinite(scale):
        came = repr(scale)
        if isinstance(scale, ArraySpec):
            came = f"an array {list(scale.shape)} of {scale.dtype}"
        raise ValueError(
            f"`scale` must be a finite number; got {came}. Pass alpha / r, and multiply `a` by "
            f"what is trained."
        )
    if low.keep is None:
        return
    if not isinstance(low.keep, ArraySpec) or low.keep.dtype != "bool":
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
    """Refuse routes of PyTorch's that have no room for A and B."""
    if call.gather == "head":
        return
    if zero:
        _refuse(f"gather={call.gather!r} under ZeRO-3")
    if call.gather == "stream":
        _refuse("gather='stream'")
    if call.tokens_parallel is not None:
        _refuse(f"gather={call.gather!r} and `tokens_parallel`")


def check_low_rank_here(call: Arguments) -> None:
    """Refuse those of JAX's."""
    if call.gather != "head":
        _refuse(f"gather={call.gather!r}")
    if call.tokens_parallel is not None:
        _refuse("`tokens_parallel`")


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"`weight` must be one array here; got a `LowRankHead` with {what}. Leave that out, or "
        f"merge the low-rank part into the weight."
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
