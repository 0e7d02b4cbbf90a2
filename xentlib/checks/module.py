"""`NLLHead`: the layer it is made from, and the options that it keeps or hands on."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from xentlib.checks.validators import Refusals

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
