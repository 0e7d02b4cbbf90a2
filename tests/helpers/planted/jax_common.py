"""What several of JAX's steps begin with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

IGNORE = -100


def logits(head: Any, hidden: Any) -> Any:
    z = hidden @ head.weight.T
    return z if head.bias is None else z + head.bias


def nll(z: Any, y: Any) -> Any:
    """[B, L], 0 where there is no label."""
    each = optax.softmax_cross_entropy_with_integer_labels(z, jnp.maximum(y, 0))
    return jnp.where(y == IGNORE, 0.0, each)


def stacked(micro_batches: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *micro_batches)


def joined(micro_batches: Any) -> Any:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *micro_batches)
