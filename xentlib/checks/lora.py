"""A head with a low-rank part: its matrices against the head, and what it is combined with."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from xentlib.arguments import Arguments
from xentlib.checks.call import NLLProblem
from xentlib.checks.validators import ArraySpec, Refusals, check_device, check_floating
from xentlib.lora import LowRankHead

LOW_RANK = Refusals(
    ValueError,
    a="`a` must have shape (rank, {width}) to match `hidden` {hidden}; got {shape}. Pass LoRA's A "
    "as it multiplies hidden states, `hidden @ a.T`.",
    b="`b` must have shape ({rows}, {rank}), a row for each row of the head; got {shape}. Pass "
    "LoRA's B, and of a vocabulary shard its rows.",
    scale="`scale` must be a finite number; got {came}. Pass alpha / r, and multiply `a` by what "
    "is trained.",
    keep="`keep` must have the shape of `hidden`, {hidden}; got {shape}. Pass one entry for each "
    "of its entries.",
    # A and B whose rows a wrapper does not keep as it keeps those of the head.
    together="`a` and `b` must be sharded over their rows by the `fully_shard` of `weight`, with "
    "`gather='hidden'`; got others. Keep the three in one module, or leave `gather` out.",
)
LOW_RANK_TYPES = Refusals(
    TypeError,
    array="`{name}` of `LowRankHead` must be an array of the backend; got {kind}. Pass the "
    "parameter of the adapter.",
    wide="`{name}` must be float32 or below beside a head that is computed in float32; got "
    "float64. Cast it, or pass `compute_dtype='float64'`.",
    keep="`keep` must be bool or None; got {keep}. Pass the mask of a dropout alone, and 1 / (1 - "
    "p) as part of `scale`.",
)


def check_low_rank(low: LowRankHead[ArraySpec], hidden: ArraySpec, problem: NLLProblem) -> None:
    """Validate A, B, scale and mask, given as `ArraySpec`, beside a head that has been."""
    rows, width = problem.vocab_size, problem.hidden_size
    for name, x in (("a", low.a), ("b", low.b)):
        LOW_RANK_TYPES.require("array", isinstance(x, ArraySpec), name=name, kind=type(x).__name__)
        check_floating(name, x)
        check_device(name, x, hidden)
        wide = x.dtype == "float64" and problem.compute_dtype != "float64"
        LOW_RANK_TYPES.require("wide", not wide, name=name)
    a, b = low.a.shape, low.b.shape
    rank = a[0] if len(a) == 2 else 0
    fits = rank >= 1 and a[1] == width
    LOW_RANK.require("a", fits, width=width, hidden=hidden.shape, shape=a)
    LOW_RANK.require("b", b == (rows, rank), rows=rows, rank=rank, shape=b)
    scale: Any = low.scale
    number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not number or not -math.inf < scale < math.inf:  # no `isfinite`, as in `check_rule`
        of_array = isinstance(scale, ArraySpec)
        came = f"an array {list(scale.shape)} of {scale.dtype}" if of_array else repr(scale)
        LOW_RANK.refuse("scale", came=came)
    if low.keep is None:
        return
    dtype, shape = getattr(low.keep, "dtype", low.keep), hidden.shape
    LOW_RANK_TYPES.require("keep", isinstance(low.keep, ArraySpec) and dtype == "bool", keep=dtype)
    LOW_RANK.require("keep", low.keep.shape == shape, hidden=shape, shape=low.keep.shape)
    check_device("keep", low.keep, hidden)


def check_low_rank_route(call: Arguments, zero: bool) -> None:
    """Refuse routes of PyTorch's that have no room for A and B."""
    if call.gather == "head":
        return
    if zero:
        _refuse(f"gather={call.gather!r} under ZeRO-3")
    if call.gather == "stream":
        _refuse("gather='stream'")
    for name in ("tokens_parallel", "vocab_parallel"):
        if getattr(call, name) is not None:
            _refuse(f"gather={call.gather!r} and `{name}`")


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
