"""What `xentlib.checks` may know of a JAX array."""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from xentlib.checks.validators import Args, ArraySpec

ARRAYS = (jax.Array, np.ndarray)
# Arguments that must be arrays, and those that may also be None.
REQUIRED = ("hidden", "logits", "labels", "values")
PACKING = ("segment_ids", "cu_seqlens", "position_ids")
OPTIONAL = ("bias", "where", "token_weights", "class_weights", "kept", "ids", *PACKING)


def array_spec(x: Any) -> Any:
    """`ArraySpec` of an array; anything else as it is, for the check to accept or refuse."""
    if not isinstance(x, ARRAYS):
        return x
    device = None
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
        devices = x.devices()
        device = str(next(iter(devices))) if len(devices) == 1 else None
    return ArraySpec(tuple(x.shape), str(x.dtype), device)


def array_specs(args: Args) -> Args:
    """The same of all arguments of a call."""
    specs: Args = args._make([array_spec(x) if isinstance(x, ARRAYS) else x for x in args])
    return specs


def array(x: Any) -> Any:
    """In JAX; None is none. `jnp.asarray` of what a gradient is taken for is a conversion even to
    its own dtype, and outside of `jit` a program that copies it: the whole head in each step."""
    if x is None or (isinstance(x, jax.Array) and not jax.typeof(x).weak_type):
        return x
    return jnp.asarray(x)


def as_array(value: Any, neutral: float | None, dtype: str) -> jax.Array | None:
    """A 0-d or per-token array; None where the value changes nothing."""
    if is_array(value):
        converted: jax.Array = array(value)
        return converted
    return None if value is None or value == neutral else jnp.asarray(value, dtype=dtype)


def concrete_on_cpu(*arrays: Any) -> bool:
    """Whether values can be read here and now without waiting for an accelerator."""
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        return False
    concrete = [x for x in arrays if isinstance(x, jax.Array)]
    return all(
        x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices()) for x in concrete
    )


def need_x64(compute_dtype: str) -> None:
    """Refuse float64 where JAX would narrow it to float32 without a word."""
    if compute_dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            "`compute_dtype='float64'` must run with 64-bit types; got a JAX that narrows them to "
            "32 bits. Wrap the call in `with jax.enable_x64(True):`."
        )


def is_array(x: Any) -> bool:
    return isinstance(x, ARRAYS)


def only_arrays(**arguments: Any) -> None:
    """Refuse tensors of PyTorch, lists, and whatever else is no array."""
    for name, value in arguments.items():
        checked = name in REQUIRED or (name in OPTIONAL and value is not None)
        if checked and not is_array(value):
            refuse_array(name, value)


def refuse_array(name: str, value: Any) -> NoReturn:
    came = type(value).__name__
    if framework_of(type(value)) == "torch":
        came, way_out = f"torch.{came}", f"Pass `xentlib.interop.to_jax({name})`."
    elif name == "values" and hasattr(value, "logprobs"):
        way_out = "Pass `values.logprobs`."
    elif isinstance(value, (list, tuple)):
        join = "stack" if value and is_array(value[0]) else "asarray"
        way_out = f"Pass `jnp.{join}({name})`."
    else:
        way_out = "Pass an array of numbers."
    raise TypeError(f"`{name}` must be a JAX or NumPy array; got {came}. {way_out}")


def framework_of(x: Any) -> str:
    """The package that a class or a function is from."""
    package: str = x.__module__.partition(".")[0]
    return package
