"""PEFT's layers around a head: what they stand for.

This file relies on attributes of PEFT 0.21 that are not public.
Shapes: V vocabulary, H hidden width, r rank of an adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from xentlib.call import Arguments
from xentlib.checks.module import refuse_module
from xentlib.torch.wrappers import deepspeed
from xentlib.torch.wrappers.loaded import is_a

__all__ = ["is_adapter", "lora_of", "saved_of", "with_adapters"]


def saved_of(module: nn.Module) -> nn.Module:
    """The copy of a module that is trained whole (`modules_to_save`), else the module."""
    if not is_a("peft.utils.other", "ModulesToSaveWrapper", module):
        return module
    wrapper: Any = module
    kept = wrapper.disable_adapters or wrapper.active_adapter not in wrapper.modules_to_save
    found: nn.Module = wrapper.original_module
    return found if kept else wrapper.modules_to_save[wrapper.active_adapter]


def is_adapter(module: nn.Module) -> bool:
    return is_a("peft.tuners.tuners_utils", "BaseTunerLayer", module)


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


def with_adapters(given: Arguments, layer: Any) -> Arguments:
    """LoRA as columns of the hidden states and of the head.

        hidden @ W.T + s * drop(hidden) @ A.T @ B.T = [hidden, s * drop(hidden) @ A.T] @ [W, B].T

    One product with float32 results, and every gradient, those of the adapters too.
    """
    if layer.merged and layer.disable_adapters:
        refuse_module(
            f"a {type(layer).__name__} of PEFT whose merged adapters are switched off",
            "Call `unmerge()` on it first.",
        )
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.merged or layer.disable_adapters or not names:
        return given
    hidden, weight, bias = given.hidden, given.weight, given.bias
    if hasattr(weight, "placements") or deepspeed.sharded(weight, bias):
        refuse_module(
            f"a {type(layer).__name__} of PEFT whose base a wrapper has sharded",
            "Keep the head out of `fully_shard` and of ZeRO-3, or out of `target_modules`.",
        )
    columns, rows = [hidden], [weight]
    for name in names:
        a, b, scale = layer.lora_A[name], layer.lora_B[name], layer.scaling[name]
        low = a(layer.lora_dropout[name](hidden.to(a.weight.dtype)))
        columns.append((low * scale).to(hidden.dtype))
        rows.append(b.weight.to(weight.dtype))
        if b.bias is not None:  # `lora_bias`
            more = b.bias * scale
            bias = more if bias is None else bias + more
    return given._replace(hidden=torch.cat(columns, -1), weight=torch.cat(rows, 1), bias=bias)
