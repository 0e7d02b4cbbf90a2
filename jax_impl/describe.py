"""What `xentlib.checks` may know of a JAX array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xentlib.checks.operand import Operand

__all__ = ["as_array", "concrete_on_cpu", "describe", "is_array", "need_x64"]


def describe(x: Any) -> Any:
    """`Operand` of an array; anything else as it is, for the check to accept or refuse."""
    if not is_array(x):
        return x
    device = None
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
        devices = x.devices()
        device = str(next(iter(devices))) if len(devices) == 1 else None
    return Operand(tuple(x.shape), str(x.dtype), device)


def as_array(value: Any, neutral: float | None, dtype: str) -> jax.Array | None:
    """A 0-d or per-token array; None where the value changes nothing."""
    if is_array(value):
        return jnp.asarray(value)
    return None if value is None or value == neutral else jnp.asarray(value, dtype=dtype)


def concrete_on_cpu(*arrays: Any) -> bool:
    """Whether values can be read here and now without waiting for an accelerator."""
    for x in arrays:
        if isinstance(x, jax.core.Tracer):
            return False
        if isinstance(x, jax.Array) and not (
            x.is_fully_addressable and all(d.platform == "cpu" for d in x.devices())
        ):
            return False
    return True


def need_x64(compute_dtype: str) -> None:
    """Refuse float64 where JAX would narrow it to float32 without a word."""
    if compute_dtype == "float64" and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        raise ValueError(
            "`compute_dtype='float64'` must run with 64-bit types; got a JAX that narrows them to "
            "32 bits. Wrap the call in `with jax.enable_x64(True):`."
        )


def is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))
