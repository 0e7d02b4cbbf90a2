"""The mean loss of an evaluation in JAX: a pytree of two arrays, summed over devices at the end."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib import evaluation as spec
from xentlib.checks import check_axis, check_loss_sum, check_token_count, plain
from xentlib.jax.accumulate import known
from xentlib.jax.describe import describe
from xentlib.jax.head import vary, varying
from xentlib.jax.nll import NLLOutput

__all__ = ["Evaluation"]

ZEROS = np.zeros(2, np.float32)
ZEROS.flags.writeable = False


class Evaluation(NamedTuple):
    sums: Any = ZEROS  # [2] of losses and of tokens
    lost: Any = ZEROS  # [2] what adding them up has rounded away

    def add(self, loss: Any, num_tokens: Any = None) -> Evaluation:
        denominator = None
        if isinstance(loss, NLLOutput):
            num_tokens = loss.weight_sum if num_tokens is None else num_tokens
            loss, denominator = loss.loss, loss.denominator
        if isinstance(plain(loss), (int, float)):
            loss = np.asarray(loss, np.float64)
        if num_tokens is not None and not isinstance(num_tokens, jax.Array):
            num_tokens = np.asarray(num_tokens)
        check_loss_sum(describe(loss), denominator is not None, "Pass reduction='sum' to it.")
        value, count = known(loss), None if num_tokens is None else known(num_tokens)
        check_token_count("num_tokens", describe(num_tokens), count, True, value)
        pair = jnp.stack([jnp.asarray(x).astype(jnp.float32) for x in (loss, num_tokens)])
        sums = self.sums + pair
        # Exactly what that sum has lost (Knuth's two-sum).
        more = sums - self.sums
        lost = (self.sums - (sums - more)) + (pair - more)
        return Evaluation(sums, self.lost + lost)

    def mean_loss(self, data_parallel: Any = None) -> jax.Array:
        packed: jax.Array = jnp.stack([jnp.asarray(x) for x in self])
        axes = data_parallel
        if axes is None:
            axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        else:
            axes = axes if isinstance(axes, tuple) else (axes,)
            try:
                lax.axis_size(axes)
            except (NameError, TypeError, ValueError):
                check_axis(data_parallel, "data_parallel")
        if axes:
            packed = lax.psum(vary(packed, varying(lax.axis_index(axes))), axes)
        loss, num_tokens = packed.sum(0)
        mean: jax.Array = loss / num_tokens
        return mean


Evaluation.__doc__ = spec.Evaluation.__doc__
