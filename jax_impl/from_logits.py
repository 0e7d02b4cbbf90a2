"""Per-token log-probabilities of given logits, in JAX: the steps of `xentlib.logprobs`.

Shapes: N tokens, C columns of this device, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.arguments import LogitsArguments
from xentlib.jax.binding import bind_logits
from xentlib.jax.core.call import Arrays, Constants, Options, flat
from xentlib.jax.core.device import as_bits, from_bits
from xentlib.jax.core.gemm import round_to
from xentlib.jax.core.logits import Chunk, chunked_logits, scaled
from xentlib.jax.core.loop import at_rows, over_chunks
from xentlib.jax.core.vocab import as_primal
from xentlib.jax.derivatives import primal_values, wanted
from xentlib.jax.logprobs import (
    Residuals,
    Upstream,
    clean_upstream,
    coefficients,
    forward_of,
    shaped,
    terms_of,
    upstream_in,
)
from xentlib.logprobs import LogprobOutput


def given_forward(
    options: Options, logits: jax.Array, labels: jax.Array, constants: Constants
) -> tuple[LogprobOutput[Any], Residuals]:
    """Steps 3 to 5 for logits [N, C] that are there."""
    return forward_of(chunked_logits(options, Arrays(logits, labels, constants)))


def given_backward(
    options: Options,
    kept: Residuals,
    upstream: Upstream,
    logits: jax.Array,
    labels: jax.Array,
    constants: Constants,
) -> jax.Array:
    """Step 6, in the logits' dtype: every row is written once, its target's column with it."""
    chunked = chunked_logits(options, Arrays(logits, labels, constants))
    given = jax.tree.map(partial(scaled, chunked), clean_upstream(chunked, upstream))
    terms_N = terms_of(kept, given, options.scalars.label_smoothing, chunked.vocab_size)
    terms_M = jax.tree.map(lambda x: jnp.pad(x[chunked.order], (0, 1)), terms_N)

    def body(chunk: Chunk, d_logits: jax.Array) -> jax.Array:
        terms_T = at_rows(chunked, chunk, terms_M)
        dz = coefficients(terms_T)
        dz_TV, dz_y_T, _ = chunked.kernels.dz(chunk.block, terms_T.kept_lse, dz)
        own_TV = lax.broadcasted_iota(jnp.int32, dz_TV.shape, 1) == chunk.block.y_T1
        dz_TV = round_to(jnp.where(own_TV, dz_y_T[:, None], dz_TV), logits.dtype.name)
        return d_logits.at[chunk.own_T].set(as_bits(dz_TV), mode="drop")

    d_logits = over_chunks(chunked, body, as_bits(jnp.zeros_like(logits)), terms_M)
    return as_primal(from_bits(d_logits, logits), logits)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _given(
    options: Options, logits: jax.Array, labels: jax.Array, constants: Constants
) -> LogprobOutput[Any]:
    return given_forward(options, logits, labels, constants)[0]


def _given_fwd(
    options: Options, logits: Any, labels: Any, constants: Any
) -> tuple[LogprobOutput[Any], Any]:
    wanted(constants, logits)
    values = primal_values((logits, labels, constants))
    output, kept = given_forward(options, *values)
    return output, (values, kept)


def _given_bwd(options: Options, residuals: Any, cotangent: LogprobOutput[Any]) -> tuple[Any, ...]:
    values, kept = residuals
    upstream = upstream_in(options, cotangent)
    if upstream is None:
        return (None, None, None)
    return (given_backward(options, kept, upstream, *values), None, None)


_given.defvjp(_given_fwd, _given_bwd, symbolic_zeros=True)
_given_jit = jax.jit(_given, static_argnums=(0,))


def given_logprobs(given: LogitsArguments) -> LogprobOutput[Any]:
    """`vocab_parallel_logprobs` of its arguments."""
    problem, (options, arrays, _) = bind_logits(given)
    arrays = flat(arrays)
    result = _given_jit(options, arrays.hidden, arrays.labels, arrays.constants)
    return shaped(result, problem.leading)
