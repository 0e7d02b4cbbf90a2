"""A head as it is given, in JAX, module or LoRA: the arrays that it multiplies with.

Flax and Equinox are never imported here: what is not loaded has no modules to pass.
Shapes: V vocabulary, H hidden width.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from xentlib.arguments import Arguments
from xentlib.checks.head import MODULES, check_beside_module, refuse_module
from xentlib.checks.validators import Args, ArraySpec, plain
from xentlib.head import LowRankHead
from xentlib.jax.array_spec import (
    ARRAYS,
    array_spec,
    concrete_on_cpu,
    framework_of,
    is_array,
    refuse_array,
)
from xentlib.options import WeightLayout

OURS = ("xentlib.jax.module", "NLLHead", "LinenNLLHead")
ADAPTERS = ("flax.nnx", "LoRA", "LoRALinear")
BOXES = (("flax.nnx", "Variable", "get_value"), ("flax.core.meta", "AxisMetadata", "unbox"))
PLAIN = (type(None), bool, int, float, str, tuple)
ARRAY = "the array that it multiplies with, [V, H], or [H, V] with `weight_layout='HV'`"


class Layer(NamedTuple):
    """A class whose weight and bias are all that it computes with."""

    package: str
    name: str
    weight: str
    layout: WeightLayout
    methods: tuple[str, ...] = ("__call__",)  # one of them multiplies


LAYERS = (
    Layer("flax.nnx", "Linear", "kernel", "HV"),
    Layer("flax.nnx", "Embed", "embedding", "VH", ("__call__", "attend")),
    Layer("flax.linen", "Dense", "kernel", "HV"),
    Layer("flax.linen", "Embed", "embedding", "VH", ("__call__", "attend")),
    Layer("equinox.nn", "Linear", "weight", "VH"),
    Layer("equinox.nn", "Embedding", "weight", "VH"),
)


def head_of(args: Arguments) -> tuple[Arguments, LowRankHead[jax.Array] | None]:
    """The call with a module's arrays in place of the module, in the dtypes that it casts to, and
    the head that its weight is of, if it has a low-rank part."""
    module = args.weight
    if isinstance(module, LowRankHead):
        low = LowRankHead(*map(unwrapped, map(plain, module)))
        single = not isinstance(low.weight, LowRankHead)
        MODULES.require("low_rank", single, kind=type(low.weight).__name__)
        args, _ = head_of(args._replace(weight=low.weight))
        return args, low._replace(weight=args.weight)
    if is_array(module):
        return args, None
    layer = next((x for x in LAYERS if isinstance(module, loaded(x.package, x.name))), None)
    if layer is None or not is_plain(module, layer):
        refuse(module)
    kind = type(module).__name__
    options = ("options", "tokens", "vocab_parallel") if isinstance(module, loaded(*OURS)) else ()
    if any(getattr(module, x) for x in options):
        refuse_module(
            f"a {kind} with options of its own, which would be lost",
            "Call it with the labels, `head(hidden, labels)`.",
        )
    product = getattr(module, "dot_general", None)
    if product not in (None, jax.lax.dot_general) or getattr(module, "dot_general_cls", None):
        refuse_module(
            f"a {kind} with a `dot_general` of its own, which may quantise",
            f"Leave that out, or pass {ARRAY}.",
        )
    weight, bias = parameters(module, layer, args.hidden)
    if not is_array(weight):
        came = "nothing yet" if weight is None else f"a {type(weight).__name__}, no array"
        refuse_module(
            f"a {kind} whose `{layer.weight}` is {came}",
            f"Pass {ARRAY}; of a quantised layer what its own method dequantises it to.",
        )
    layout: WeightLayout = getattr(module, "weight_layout", layer.layout)
    agreed = args.weight_layout == layout
    two = bias is not None and args.bias is not None
    check_beside_module(kind, two, "VH" if agreed else args.weight_layout)
    hidden, weight, bias = cast(module, layer, args.hidden, weight, bias)
    bias = args.bias if bias is None else bias
    args = args._replace(hidden=hidden, weight=weight, bias=bias, weight_layout=layout)
    return args, None


def parameters(module: Any, layer: Layer, hidden: Any) -> tuple[Any, Any]:
    """Weight and bias, or None."""
    if layer.package != "flax.linen":
        return tuple(unwrapped(getattr(module, x, None)) for x in (layer.weight, "bias"))
    kind = type(module).__name__
    if module.scope is None:
        refuse_module(
            f"an unbound {kind}, which has no parameters",
            "Pass `model.bind(variables).head`, or the array, "
            "`variables['params']['head']['kernel']` with `weight_layout='HV'`.",
        )
    if layer.weight == "embedding":
        return unwrapped(module.embedding), None
    if module.is_initializing() and not module.has_variable("params", "kernel"):
        module(jnp.zeros((1, hidden.shape[-1]), hidden.dtype))  # its own forward makes them
    names = ("kernel", "bias") if module.use_bias else ("kernel",)
    weight, *bias = (unwrapped(module.get_variable("params", name)) for name in names)
    return weight, (bias[0] if bias else None)


def cast(module: Any, layer: Layer, *arrays: Any) -> tuple[Any, Any, Any]:
    """Hidden states, weight and bias in the layer's own `dtype`, by its own function. Without one
    a layer takes their common dtype, as the call itself does."""
    promote = getattr(module, "promote_dtype", None)
    if promote is None or (module.dtype is None and framework_of(promote) == "flax"):
        return arrays
    operands = arrays if layer.weight == "kernel" else arrays[:2]
    operands = operands if layer.package == "flax.linen" else (operands,)
    hidden, weight, *bias = promote(*operands, dtype=module.dtype)
    return hidden, weight, (bias[0] if bias else None)


def unwrapped(x: Any) -> Any:
    """The array in an NNX variable, or in a box of Linen's that says how it is sharded."""
    if type(x) in PLAIN:  # most arguments of a call, whose 22 would take 50 us
        return x
    for package, name, method in BOXES:
        if isinstance(x, loaded(package, name)):
            return getattr(x, method)()
    return x


def unwrapped_args(args: Args) -> Args:
    """The same of all arguments of a call."""
    known = [type(x) in PLAIN or isinstance(x, ARRAYS) for x in args]
    arrays: Args = args._make([x if y else unwrapped(x) for x, y in zip(args, known)])
    return arrays


def is_plain(module: Any, layer: Layer) -> bool:
    """Whether its class multiplies as the layer does, or is ours."""
    kinds = (*loaded(layer.package, layer.name), *loaded(*OURS))
    return any(
        all(getattr(type(module), x) is getattr(kind, x, None) for x in layer.methods)
        for kind in kinds
    )


def loaded(package: str, *names: str) -> tuple[type, ...]:
    """Classes of a package, if that is loaded."""
    module = sys.modules.get(package)
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def refuse(weight: Any) -> NoReturn:
    """In the words for what it is: an array of another kind, parameters by name, or a module."""
    package, kind = framework_of(type(weight)), type(weight).__name__
    plain = isinstance(weight, (list, tuple, int, float, type(None)))
    if plain or kind in ("Tensor", "Parameter"):
        refuse_array("weight", weight)
    if isinstance(weight, loaded(*ADAPTERS)):
        refuse_module(
            f"a {kind} of NNX, whose adapters would be lost",
            "Pass `LowRankHead(kernel[...], lora_a[...].T, lora_b[...].T)` of its arrays, with "
            "`weight_layout='HV'`.",
        )
    if hasattr(weight, "keys"):
        refuse_module(
            f"a {kind}",
            "Pass an array of it, such as `weight['kernel']` with `weight_layout='HV'`, and "
            "`bias=weight['bias']`.",
        )
    if package == "torch":
        refuse_module(f"torch's {kind}", "Pass `xentlib.interop.to_jax(weight.weight.detach())`.")
    refuse_module(
        f"{package}'s {kind}, whose forward is its own",
        f"Pass a linear or an embedding layer of NNX, Linen (bound) or Equinox, or {ARRAY}.",
    )


def described(low: LowRankHead[Any]) -> LowRankHead[ArraySpec]:
    """As it is checked. A head that goes through `jit` or a transformation with its arrays has an
    array for its scale: that of a trace is some number."""
    scale: Any = low.scale
    real = (jnp.floating, jnp.integer)
    if is_array(scale) and not scale.ndim and any(jnp.issubdtype(scale.dtype, x) for x in real):
        scale = scale.item() if concrete_on_cpu(scale) else 1.0
    return LowRankHead(*map(array_spec, low._replace(scale=scale)))
