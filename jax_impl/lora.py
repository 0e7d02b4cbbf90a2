"""A head with a low-rank part, in JAX: on its way from a call to a trace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xentlib.arguments import Arguments
from xentlib.checks.validators import ArraySpec
from xentlib.jax.array_spec import array_spec, concrete_on_cpu, is_array
from xentlib.lora import LowRankHead


def low_rank_of(head: Any) -> LowRankHead[jax.Array] | None:
    return head if isinstance(head, LowRankHead) else None


def unpacked(given: Arguments) -> tuple[Arguments, LowRankHead[jax.Array] | None]:
    """The call with the weight alone, and the head that it is of, if it has a low-rank part."""
    low = low_rank_of(given.weight)
    return (given, None) if low is None else (given._replace(weight=low.weight), low)


def described(low: LowRankHead[Any]) -> LowRankHead[ArraySpec]:
    """As it is checked. A head that goes through `jit` or a transformation with its arrays has an
    array for its scale: that of a trace is some number."""
    scale: Any = low.scale
    if is_array(scale) and not jnp.ndim(scale) and is_real(scale):
        scale = scale.item() if concrete_on_cpu(scale) else 1.0
    return LowRankHead(*map(array_spec, low._replace(scale=scale)))


def is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)
