"""A head as a module, the layer that `NLLHead` is made from and the options that it keeps or hands
on; and a head with a low-rank part, its matrices and what it is combined with."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, NoReturn

from xentlib.arguments import Arguments
from xentlib.checks.call import NLLProblem
from xentlib.checks.validators import ArraySpec, Refusals, check_device, check_floating
from xentlib.head import LowRankHead

# Layers of other packages, by package or by name: what is lost, and what to do with the head.
ELSEWHERE = {
    "peft": "whose adapters would be lost. Leave the head out of `target_modules`, merge them "
    "first (`merge_and_unload`), or call `chunked_nll` with this layer as its `weight`.",
    "ModulesToSaveWrapper": "which holds the head twice, frozen and trained. Convert the head to "
    "`NLLHead` before PEFT wraps the model.",
    "bitsandbytes": "whose weight is quantised. Leave the head out of the quantisation "
    "(`llm_int8_skip_modules` in transformers), or call `chunked_nll` with the weight that its own "
    "method dequantises it to.",
}
OTHERWISE = (
    "whose weight alone is not what it computes. Merge an adapter into its layer first, or call "
    "`chunked_nll` with the weight that it stands for: base + scale * B @ A for LoRA."
)
MODULES = Refusals(
    TypeError,
    # A hook of `distribute_module`, which hands on the first argument alone, so that labels
    # would be dropped and logits come back.
    parallel_style="`NLLHead` must be called with its labels; got a parallel style such as "
    "`ColwiseParallel`, which hands on the first argument alone. Leave the head out of the plan, "
    "or keep the `nn.Linear` in it and call `chunked_nll(hidden, head.weight, labels, "
    "bias=head.bias, vocab_parallel=mesh)`.",
    # A count that a wrapper has rounded on its way into a module.
    rounded="`denominator` must be a number, an integer or float32; got {dtype}, in which counts "
    "are rounded. FSDP2 casts floating tensors that a module is given (`cast_forward_inputs`): "
    "pass a Python number or an integer tensor.",
    hooks="`linear` must have no hooks, which would be lost; got a {kind} with some. Convert it to "
    "`NLLHead` first, then register hooks and apply wrappers such as `fully_shard`.",
    plain="`linear` must be a plain linear layer; got a {kind}, {why}",
    # A module that is no head, or more than one.
    head="`weight` must be a head, or a module that multiplies with one and does nothing else; got "
    "{came}. {way}",
    # A low-rank part beside a head that has one.
    low_rank="`weight` of `LowRankHead` must have no low-rank part of its own; got a {kind} with "
    "one. Concatenate A, and B, along the rank.",
)
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


def check_linear(kind: str, plain: bool, hooked: bool, package: str = "") -> None:
    """Refuse a head that is more than its weight and bias; `package` is where its class is from."""
    MODULES.require("hooks", not hooked, kind=kind)
    if not plain:
        known = ELSEWHERE.get(kind) or ELSEWHERE.get(package)
        kind = f"{kind} of {package}" if known else kind
        MODULES.refuse("plain", kind=kind, why=known or OTHERWISE)


def check_beside_module(kind: str, two_biases: bool, layout: str) -> None:
    """Refuse what a module that is given as the head has itself."""
    if two_biases:
        raise ValueError(
            f"`bias` must be None where `weight` is a module with one; got a {kind} and a bias. "
            f"Leave it out, or pass the module's weight."
        )
    if layout != "VH":
        raise ValueError(
            f"`weight_layout` must be left out where `weight` is a module, which knows its own; "
            f"got {layout!r} with a {kind}. Leave it out."
        )


def refuse_module(came: str, way: str) -> NoReturn:
    """Refuse a module that is no head, or more than one."""
    MODULES.refuse("head", came=came, way=way)


def check_head_options(options: Collection[str], known: Collection[str]) -> None:
    """Refuse keyword arguments that an `NLLHead` does not hand on."""
    for name in options:
        if name in known:
            continue
        if name in ("bias", "weight", "weight_layout"):
            way = "The module has them: leave it out."
        elif not known:
            way = "Without labels no option applies: pass `labels`, or leave it out."
        else:
            way = f"Pass any of {', '.join(known)}."
        raise TypeError(f"`{name}` is not an option of this call. {way}")


def check_kept_option(name: str, value: object) -> None:
    """Refuse what a Flax module cannot keep beside its parameters."""
    try:
        hash(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be a number, a string or a tuple to be kept by the head; got "
            f"{type(value).__name__}. Pass it with each call."
        ) from None


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
