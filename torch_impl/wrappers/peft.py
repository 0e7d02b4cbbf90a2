"""PEFT's layers around a head: what they stand for.

This file relies on attributes of PEFT 0.21 that are not public.
Shapes: V vocabulary, H hidden width, r rank of an adapter.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from xentlib.arguments import Arguments
from xentlib.checks.head import refuse_module
from xentlib.head import LowRankHead
from xentlib.torch.wrappers import is_a, kept_by_zero

LAYERS: Any = WeakIdKeyDictionary()  # of frozen parameters: the layer that `layer_of` found, if any


def saved_of(module: nn.Module) -> nn.Module:
    """The copy of a module that is trained whole (`modules_to_save`), else the module."""
    if not is_a("peft.utils.other", "ModulesToSaveWrapper", module):
        return module
    wrapper: Any = module
    kept = wrapper.disable_adapters or wrapper.active_adapter not in wrapper.modules_to_save
    saved: nn.Module = wrapper.original_module
    return saved if kept else wrapper.modules_to_save[wrapper.active_adapter]


def lora_of(module: nn.Module) -> Any:
    """The module, if it is LoRA on a linear layer and no more than two matrices, or None."""
    if not is_a("peft.tuners.lora.layer", "Linear", module):
        return None
    layer: Any = module
    for name, variant in () if layer.merged else layer.lora_variant.items():
        refuse_module(
            f"a {type(layer).__name__} of PEFT with the adapter {name!r} of kind "
            f"{type(variant).__name__}, which is more than two matrices",
            "Leave the head out of its `target_modules`, or merge the adapter.",
        )
    return layer


def refuse_base(weight: Any) -> None:
    """Refuse the weight of a linear layer to which PEFT adds adapters: the loss would be that of
    the base alone, and the adapters would get no gradient."""
    layer = layer_of(weight)
    if layer is None or layer.merged or layer.disable_adapters:
        return
    if layer._get_available_adapters().isdisjoint(layer.active_adapters):
        return
    base, kind = type(layer.get_base_layer()).__name__, type(layer).__name__
    refuse_module(
        f"the weight of a {base} inside a {kind} of PEFT, without the adapters that it adds",
        "Pass PEFT's layer, `chunked_nll(hidden, model.lm_head, labels)`, or for the base alone "
        "`weight.detach()`; `NLLHead` inside PEFT's layer cannot be called with labels.",
    )


def layer_of(weight: Any) -> Any:
    """The layer of PEFT around the linear layer that a parameter, frozen by PEFT, belongs to.

    PEFT keeps no list of its layers: all objects are searched, once for each parameter and again
    after a further layer was wrapped. Among 700,000 objects that took 0.4 s.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if isinstance(weight, Tensor) and weight._is_view():  # `weight.T`
        weight = weight._base
    if tuners is None or not isinstance(weight, nn.Parameter) or weight.requires_grad:
        return None
    forget_when_wrapped()
    if weight not in LAYERS:
        kinds = set(subclasses(tuners.BaseTunerLayer))
        layers = (x for x in gc.get_objects() if type(x) in kinds)
        LAYERS[weight] = next((ref(x) for x in layers if is_base(x, weight)), None)
    layer = LAYERS[weight]
    return None if layer is None else layer()


def is_base(layer: Any, weight: Any) -> bool:
    """Of an embedding the adapters are of the lookup: a head that is tied to it has none."""
    base = layer.get_base_layer()
    return isinstance(base, nn.Linear) and base._parameters.get("weight") is weight


@cache
def forget_when_wrapped() -> None:
    def forget(module: Any, name: str, inner: Any) -> None:
        if name == "base_layer":
            LAYERS.clear()

    register_module_module_registration_hook(forget)


def subclasses(kind: Any) -> Iterator[Any]:
    for more in kind.__subclasses__():
        yield more
        yield from subclasses(more)


def active(layer: Any) -> list[str]:
    """Adapters that add to the layer's own product."""
    if layer.merged or layer.disable_adapters:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


def adapters_of(layer: Any) -> list[nn.Module]:
    """The linear layers A and B of those adapters."""
    return [part[name] for name in active(layer) for part in (layer.lora_A, layer.lora_B)]


def with_adapters(args: Arguments, layer: Any) -> Arguments:
    """LoRA as the low-rank part of the head: no [V, H] sum, copy or gradient of its own.

        hidden @ W.T + s * drop(hidden) @ A.T @ B.T

    Several adapters are one, of the sum of their ranks.
    """
    if layer.merged and layer.disable_adapters:
        refuse_module(
            f"a {type(layer).__name__} of PEFT whose merged adapters are switched off",
            "Call `unmerge()` on it first.",
        )
    names = active(layer)
    if not names:
        return args
    weight, bias = args.weight, args.bias
    parts = []
    for name in names:
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        keep, times = kept_by(layer.lora_dropout[name], args.hidden, a)
        parts.append(LowRankHead(weight, a, b, times * float(layer.scaling[name]), keep))
    more = [layer.lora_B[name].bias for name in names]
    sharded = hasattr(weight, "placements") or bool(kept_by_zero(weight, bias))
    if sharded and (len(parts) > 1 or more[0] is not None):
        refuse_module(
            f"a {type(layer).__name__} of PEFT with several adapters or a `lora_bias`, whose base "
            f"a wrapper has sharded",
            "Keep the head out of `fully_shard` and of ZeRO-3, or out of `target_modules`.",
        )
    for name, b_bias in zip(names, more, strict=True):
        if b_bias is not None:  # `lora_bias`
            scaled = b_bias * layer.scaling[name]
            bias = scaled if bias is None else bias + scaled
    if len(parts) == 1:
        return args._replace(weight=parts[0], bias=bias)
    if any(part.keep is not None for part in parts):
        refuse_module(
            f"a {type(layer).__name__} of PEFT with several active adapters in training, each with "
            f"a dropout of its own",
            "Activate one of them, or set `lora_dropout=0`.",
        )
    a = torch.cat([part.a.float() * part.scale for part in parts])
    head = LowRankHead(weight, a, torch.cat([part.b for part in parts], 1))
    return args._replace(weight=head, bias=bias)


def kept_by(dropout: Any, hidden: Tensor, a: Any) -> tuple[Tensor | None, float]:
    """Which entries of the hidden states a dropout leaves, of the numbers that PEFT would draw, and
    what it multiplies them by."""
    if not isinstance(dropout, nn.Dropout) or not dropout.training or dropout.p == 0.0:
        return None, 1.0
    with torch.no_grad():
        keep = dropout(torch.ones_like(hidden, dtype=a.dtype)) != 0
    return keep, 0.0 if dropout.p == 1.0 else 1.0 / (1.0 - dropout.p)
