"""A head that is given as a module, in PyTorch: the parameters that it stands for.

Shapes: V vocabulary, H hidden width, r rank of an adapter.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from xentlib.call import Arguments
from xentlib.checks.module import check_beside_module, refuse_module
from xentlib.torch.wrappers import deepspeed

__all__ = ["parameters_of", "with_parameters"]


def with_parameters(given: Arguments) -> Arguments:
    """The call with arrays in place of a module."""
    module = given.weight
    if not isinstance(module, nn.Module):
        refuse_quantised("a weight", module)
        return given
    weight, bias, layer = parameters_of(module)
    both = bias is not None and given.bias is not None
    check_beside_module(type(module).__name__, both, given.weight_layout)
    given = given._replace(weight=weight, bias=given.bias if bias is None else bias)
    return given if layer is None else with_adapters(given, layer)


def parameters_of(module: nn.Module) -> tuple[Tensor, Tensor | None, Any]:
    """The weight and the bias of a head, and the layer of PEFT that adds adapters to them."""
    inner = saved_of(module)
    adapted = is_a("peft.tuners.lora.layer", "Linear", inner)
    base: Any = inner.base_layer if adapted else inner
    if not (is_linear(base) or isinstance(base, nn.Embedding)):
        refuse(base if adapted else module)
    refuse_quantised(f"the weight of a {type(base).__name__}", base.weight)
    whole: Any = inner
    variants = whole.lora_variant.items() if adapted and not whole.merged else ()
    for name, variant in variants:
        refuse_module(
            f"a {type(inner).__name__} of PEFT with the adapter {name!r} of kind "
            f"{type(variant).__name__}, which is more than two matrices",
            "Leave the head out of its `target_modules`, or merge the adapter.",
        )
    return base.weight, getattr(base, "bias", None), inner if adapted else None


def is_linear(module: nn.Module) -> bool:
    """Whether its weight and bias are all that it computes with: `nn.Linear`, and what of ours has
    a forward of its own and says so."""
    if not isinstance(module, nn.Linear):
        return False
    # Accelerate puts a forward of its own on an instance, and keeps the one that it calls.
    hooked = "forward" in vars(module) and not hasattr(module, "_hf_hook")
    plain = type(module).forward is nn.Linear.forward and not hooked
    return plain or getattr(type(module), "multiplies", False)


def is_a(module: str, name: str, x: object) -> bool:
    """Without importing a module that is not loaded yet."""
    found = getattr(sys.modules.get(module), name, None)
    return found is not None and isinstance(x, found)


def saved_of(module: nn.Module) -> nn.Module:
    """PEFT's copy of a module that is trained whole (`modules_to_save`)."""
    if not is_a("peft.utils.other", "ModulesToSaveWrapper", module):
        return module
    wrapper: Any = module
    if wrapper.disable_adapters or wrapper.active_adapter not in wrapper.modules_to_save:
        found: nn.Module = wrapper.original_module
    else:
        found = wrapper.modules_to_save[wrapper.active_adapter]
    return found


def with_adapters(given: Arguments, layer: Any) -> Arguments:
    """LoRA as columns of the hidden states and of the head.

        hidden @ W.T + s * drop(hidden) @ A.T @ B.T = [hidden, s * drop(hidden) @ A.T] @ [W, B].T

    One product with float32 results, and every gradient, those of the adapters too.
    """
    if layer.merged or layer.disable_adapters:
        if layer.merged and layer.disable_adapters:
            refuse_module(
                f"a {type(layer).__name__} of PEFT whose merged adapters are switched off",
                "Call `unmerge()` on it first.",
            )
        return given
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if not names:
        return given
    weight = given.weight
    if hasattr(weight, "placements") or deepspeed.sharded(weight, given.bias):
        refuse_module(
            f"a {type(layer).__name__} of PEFT whose base a wrapper has sharded",
            "Keep the head out of `fully_shard` and of ZeRO-3, or out of `target_modules`.",
        )
    hidden, bias = given.hidden, given.bias
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


def refuse_quantised(name: str, weight: object) -> None:
    """torchao's tensors say that they are of the dtype that they stand for."""
    if torch.compiler.is_compiling():  # which does not trace the names of modules
        return
    kind = type(weight)
    if isinstance(weight, Tensor) and kind.__module__.partition(".")[0] == "torchao":
        raise TypeError(
            f"`weight` must be a head in floating point; got {name} as a {kind.__name__} of "
            f"torchao, which is quantised. Leave the head out of the quantisation, or pass "
            f"`weight.dequantize()`."
        )


def refuse(module: nn.Module) -> NoReturn:
    kind = f"{type(module).__module__.partition('.')[0]}'s {type(module).__name__}"
    if is_a("peft.tuners.tuners_utils", "BaseTunerLayer", module):
        refuse_module(
            f"{kind}, an adapter that is not LoRA on a linear layer",
            "Leave the head out of its `target_modules`, or merge the adapter.",
        )
    refuse_module(
        f"{kind}, whose forward is its own",
        "Pass an `nn.Linear`, an `nn.Embedding`, or the weight [V, H] that it multiplies with; of "
        "a quantised layer the weight that its own method dequantises.",
    )
