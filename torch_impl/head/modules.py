"""A head that is a module, in PyTorch: the parameters that it multiplies with, and LoRA on them.

A module that computes more than a product with its weight, a bias and LoRA is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from xentlib.arguments import Arguments
from xentlib.checks.head import MODULES, check_beside_module, refuse_module
from xentlib.head import LowRankHead
from xentlib.torch.wrappers import is_a, is_loaded, keeps_forward, split_by_auto_tp

T = TypeVar("T", bound=tuple[Any, ...])
# Whose hooks on a head are not missed: what they gather and reduce, the call gathers and reduces.
KNOWN_HOOKS = ("torch.distributed", "deepspeed", "accelerate")


def resolve_head(call: Arguments, *, inner: bool = False) -> Arguments:
    """The call with a module's arrays in place of the module; `inner`: of a low-rank head."""
    plain, lora = split_lora(call)
    if lora is not None:
        base = resolve_head(plain, inner=True)
        single, kind = not isinstance(base.weight, LowRankHead), type(plain.weight).__name__
        MODULES.require("low_rank", single, kind=kind)
        return replaced(base, weight=replaced(lora, weight=base.weight))
    module = call.weight
    if not isinstance(module, nn.Module):
        refuse_quantised("a weight", module)
        if not inner and not torch.compiler.is_compiling() and is_loaded("peft"):
            from xentlib.torch.wrappers import peft

            peft.refuse_base(module)
        return call
    weight: Any = module._parameters.get("weight")
    bias: Any = module._parameters.get("bias")
    adapters = None
    if split_by_auto_tp(weight):
        refuse_hooks(module)
    else:
        weight, bias, adapters = parameters_of(module, call.gather)
    both = bias is not None and call.bias is not None
    check_beside_module(type(module).__name__, both, call.weight_layout)
    call = replaced(call, weight=weight, bias=call.bias if bias is None else bias)
    if adapters is None:
        return call
    from xentlib.torch.wrappers import peft

    refuse_hooks(*peft.adapters_of(adapters))
    return replaced(peft.with_adapters(call, adapters))


def parameters_of(module: nn.Module, gather: str = "head") -> tuple[Tensor, Tensor | None, Any]:
    """The weight and the bias of a head, and the layer of PEFT that adds adapters to them."""
    inner, lora = module, None
    if is_loaded("peft"):
        from xentlib.torch.wrappers import peft

        inner = peft.saved_of(module)
        lora = peft.lora_of(inner)
    base: Any = inner if lora is None else lora.base_layer
    if not (is_linear(base) or isinstance(base, nn.Embedding)):
        refuse(module if lora is None else base)
    if isinstance(base, nn.Linear):  # the hooks of an embedding are of the lookup
        refuse_hooks(module, inner, base)
    weight, bias = (parameter_of(base, name, gather) for name in ("weight", "bias"))
    refuse_quantised(f"the weight of a {type(base).__name__}", weight)
    return weight, bias, lora


def parameter_of(module: nn.Module, name: str, gather: str) -> Any:
    """A parameter; by another route than the gathered head's as the module keeps it, since in its
    engine's forward DeepSpeed gathers what is read by its name."""
    parameter = None if gather == "head" else module._parameters.get(name)
    return getattr(module, name, None) if parameter is None else parameter


def is_linear(module: nn.Module) -> bool:
    """Whether its weight and bias are all that it computes with: `nn.Linear`, and what of ours has
    a forward of its own and says so."""
    if not isinstance(module, nn.Linear):
        return False
    kind = type(module)
    replaced = "forward" in vars(module) and not keeps_forward(module)
    overridden = kind.forward is not nn.Linear.forward or kind.__call__ is not nn.Module.__call__
    return not (overridden or replaced) or getattr(kind, "multiplies", False)


def refuse_hooks(*modules: nn.Module) -> None:
    """Refuse hooks that would not run: `torch.nn.utils.weight_norm` makes the weight in one."""
    if torch.compiler.is_compiling():  # which does not trace the names of modules
        return
    for module in modules:
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            whose = getattr(hook, "func", hook)  # of a `functools.partial`
            origin = getattr(whose, "__module__", None) or type(whose).__module__
            if not origin.startswith(KNOWN_HOOKS):
                name = getattr(whose, "__qualname__", type(whose).__qualname__)
                refuse_module(
                    f"a {type(module).__name__} with the forward hook {origin}.{name}, which "
                    f"would not run",
                    "Remove the hook, or pass the weight [V, H] that it leads to.",
                )


def refuse_quantised(name: str, weight: object) -> None:
    """torchao's tensors say that they are of the dtype that they stand for."""
    if torch.compiler.is_compiling():
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
    if is_a("deepspeed.module_inject.layers", "TensorParallel_Layer", module):
        refuse_module(
            f"{kind}, which DeepSpeed AutoTP has split over ranks",
            "Call `chunked_nll(hidden, head, labels)` yourself, with the engine's layer as `head`.",
        )
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


def split_lora(call: Arguments) -> tuple[Arguments, LowRankHead[Tensor] | None]:
    """The call with the weight alone, and the head that it is of, if it has a low-rank part."""
    head = call.weight
    if not isinstance(head, LowRankHead):
        return call, None
    return replaced(call, weight=head.weight), head


def replaced(call: T, **fields: Any) -> T:
    """`_replace` of a NamedTuple: what that makes is empty where Dynamo of torch 2.11 has broken a
    graph behind it."""
    named: Any = call
    record: T = type(call)(**{**named._asdict(), **fields})
    return record
