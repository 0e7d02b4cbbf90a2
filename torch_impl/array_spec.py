"""What `xentlib.checks` may know of a torch tensor."""

from __future__ import annotations

from types import NoneType
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor

from xentlib.checks.validators import Args, ArraySpec, plain
from xentlib.options import RULES
from xentlib.torch.core.device import onto

# What has to be a tensor, and what it is.
REQUIRED = {
    "hidden": "the states that go into the head",
    "weight": "the weight of the head",
    "labels": "class indices, one for each token",
    "logits": "one row of logits for each token",
    "logprobs": "the log-probabilities of these classes",
    "values": "one number for each token",
}
OPTIONAL = frozenset(
    (
        "bias",
        "where",
        "token_weights",
        "class_weights",
        "kept",
        "ids",
        "segment_ids",
        "cu_seqlens",
        "position_ids",
    )
)
ARRAYS = ("numpy", "jax", "jaxlib")
# What may be a number too, and has checks of its own; they know of no array that is no tensor.
NUMBERS = tuple(name for name, rule in RULES.items() if rule.array)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def array_spec(x: Any) -> Any:
    """`ArraySpec` of a tensor; anything else as it is, for the check to accept or refuse."""
    if isinstance(x, Tensor):
        return ArraySpec(tuple(x.shape), dtype_name(x.dtype), str(x.device))
    return x


def array_specs(args: Args) -> Args:
    """The same of all arguments of a call."""
    specs: Args = args._make([array_spec(x) if isinstance(x, Tensor) else x for x in args])
    return specs


def only_tensors(**arguments: Any) -> None:
    """Refuse arrays of another framework, lists, and whatever else has to be a tensor."""
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            continue
        if name in REQUIRED or (value is not None and name in OPTIONAL):
            refuse_array(name, value)
        if name in NUMBERS and type(value) not in (int, float, NoneType):
            number = plain(value)
            # Numbers first: the compiler traces this, and knows no `__module__`.
            if not isinstance(number, (int, float, NoneType)) and framework_of(number) in ARRAYS:
                refuse_array(name, number)


def refuse_array(name: str, value: Any) -> NoReturn:
    framework = framework_of(value)
    came = type(value).__name__
    field = {"hidden": "last_hidden_state", "logits": "logits", "values": "logprobs"}.get(name, "")
    if framework == "numpy":
        came, way_out = f"numpy.{came}", f"Pass `torch.from_numpy({name})`."
    elif framework in ARRAYS:
        came, way_out = "jax.Array", f"Pass `xentlib.interop.to_torch({name})`."
    elif field and hasattr(value, field):
        way_out = f"Pass `{name}.{field}`."
    elif isinstance(value, (list, tuple)) and value and framework_of(value[0]) == "torch":
        came = f"a {came} of tensors"
        last = "`hidden[-1]` of all hidden states of a model, or " if name == "hidden" else ""
        way_out = f"Pass one tensor: {last}`torch.stack({name})`."
    elif isinstance(value, (list, tuple)):
        way_out = f"Pass `torch.tensor({name})`."
    elif name in REQUIRED:
        way_out = f"Pass {REQUIRED[name]}."
    else:
        way_out = "Pass a tensor, or leave it out."
    raise TypeError(f"`{name}` must be a torch.Tensor; got {came}. {way_out}")


def framework_of(value: object) -> str:
    return type(value).__module__.partition(".")[0]


def same_tokens(source: Tensor, *per_token: Any) -> None:
    """Under the compiler, sizes that it does not know are those of `source` [..., columns] where
    nothing says otherwise, and are compared when it runs; what differs, the checks refuse."""
    if not torch.compiler.is_compiling():
        return
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # loads sympy, 0.8 s

    for x in per_token:
        if isinstance(x, Tensor) and x.ndim == source.ndim - 1:
            for a, b in zip(x.shape, source.shape):
                if guard_or_true(a == b):
                    torch._check(a == b)


def autocast_dtype(x: Tensor) -> str | None:
    """Name of the dtype that an autocast region asks GEMMs of `x` to take, if one is active."""
    kind = x.device.type
    # `torch.amp.is_autocast_available` would say it of every device; torch 2.11 cannot compile it.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return dtype_name(torch.get_autocast_dtype(kind))


def as_tensor(value: Any, neutral: float | None, like: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A 0-d or per-token tensor for an operator; None where the value changes nothing.

    No device is waited for: `torch.tensor` would copy a number there from pageable memory and wait
    for the stream, and could not be captured in a CUDA graph.
    """
    if isinstance(value, Tensor):
        return onto(value, like.device)
    if value is None or value == neutral:
        return None
    return torch.full((), float(value), dtype=dtype, device=like.device)


def with_leading(x: Tensor, leading: tuple[int, ...]) -> Tensor:
    """Per token, [N] as [...]. A copy, no view: FSDP2 warns of views that a forward returns."""
    return x if x.shape == leading else x.reshape(leading).clone()


def is_dtensor(x: Any) -> TypeGuard[Any]:
    """Without importing DTensor if it is not loaded yet: that takes a second. What is loaded is an
    attribute of its package; of `sys.modules` a compiler traces each of its thousands of entries.
    """
    module = getattr(torch.distributed, "tensor", None)
    return module is not None and isinstance(x, module.DTensor)


def summed_over_copies(placements: Any) -> str:
    """As code, the `grad_placements` of a DTensor's local tensor by which its gradient is summed
    over ranks that have the same part."""
    parts = (f"Shard({p.dim})" if p.is_shard() else "Partial()" for p in placements)
    return f"[{', '.join(parts)}]"
