"""`vocab_parallel_logprobs` of class probabilities, in JAX: the steps of `xentlib.soft_labels` on
precomputed logits.

    out = sum_v a_v (z_v - lse),   d out / dz_v = a_v - p_v sum(a)

Shapes: N tokens, C columns of this device, T tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xentlib.algebra import FLOOR, is_zero
from xentlib.arguments import LogitsArguments
from xentlib.checks.soft_labels import SOFT
from xentlib.jax.array_spec import only_arrays
from xentlib.jax.binding import bind_logits
from xentlib.jax.core.call import Arrays, Options, as_gradients
from xentlib.jax.core.layout import per_token
from xentlib.jax.core.logits import Chunk, scaled
from xentlib.jax.core.pairs import PairTerms
from xentlib.jax.core.soft_labels import beside_classes
from xentlib.jax.derivatives import Needs, differentiable, primal_values
from xentlib.jax.divergence import Residuals, d_given, divergence_forward, gathered_pair, pair_of
from xentlib.jax.head import unwrapped
from xentlib.jax.logprobs import upstream_in
from xentlib.jax.placement import run
from xentlib.jax.soft_labels import with_labels
from xentlib.jax.teacher import labels_for
from xentlib.logprobs import LogprobOutput
from xentlib.soft_labels import Largest


def soft_forward(
    options: Options, arrays: Arrays
) -> tuple[LogprobOutput[Any], tuple[Residuals, jax.Array]]:
    """The results; statistics of the logits and the sum of each token's probabilities."""
    how = options.divergence._replace(each=True)
    options = options._replace(divergence=how, output_dtype=options.compute_dtype)
    output, residuals, *_ = divergence_forward(options, Needs(), arrays)
    entropy = output.entropy if options.entropy else None
    # Of a token that is not valid +0.
    made = LogprobOutput(0.0 - output.loss, entropy, output.teacher_entropy, None)
    return made, (residuals, output.divergence)


def soft_backward(
    options: Options, kept: tuple[Residuals, jax.Array], upstream: Any, arrays: Arrays
) -> jax.Array:
    """Steps 6 and 7, in the dtype of the logits."""
    student, teacher = pair_of(options, arrays)
    both, _ = gathered_pair(student, teacher, ())
    residuals, total = kept

    def clean(g: jax.Array | None) -> jax.Array:
        zeros = jnp.zeros_like(total)
        return zeros if g is None else jnp.where(student.tokens.valid, g.astype(total.dtype), 0)

    def dz_of(chunk: Chunk, numbers: Any) -> tuple[PairTerms, jax.Array]:
        (g_logprobs, g_entropy, g_lse), stats, total_T = numbers
        of = Largest(*stats)
        terms = both.again(chunk, of, total_T)
        of = beside_classes(of)
        log_p_TV = jnp.maximum(both.kind.log_p(terms.student.z_TV, of), FLOOR)
        g_logprobs, g_entropy, g_lse = map(per_token, (g_logprobs, g_entropy, g_lse))
        slope_TV = g_lse - g_entropy * (log_p_TV + of.entropy)
        dz_TV = terms.p_TV * slope_TV + g_logprobs * terms.a_TV
        return terms, dz_TV

    upstream = [scaled(student, clean(g)) for g in upstream]
    return d_given(both, arrays.hidden, (upstream, residuals[:4], total), dz_of)


def _soft(options: Options, arrays: Arrays) -> LogprobOutput[Any]:
    return soft_forward(options, arrays)[0]


def _soft_fwd(options: Options, primals: Any) -> tuple[LogprobOutput[Any], Any]:
    arrays = primal_values(primals)
    output, kept = soft_forward(options, arrays)
    return output, (arrays, kept)


def _soft_bwd(options: Options, residuals: Any, cotangent: LogprobOutput[Any]) -> tuple[Any, ...]:
    arrays, kept = residuals
    upstream = upstream_in(options, cotangent)
    if upstream is None:
        return (None,)
    return (as_gradients({"hidden": soft_backward(options, kept, upstream, arrays)}),)


_soft_jit = jax.jit(differentiable(_soft, _soft_fwd, _soft_bwd), static_argnums=(0,))


def given_soft(given: LogitsArguments) -> LogprobOutput[Any]:
    """`vocab_parallel_logprobs` of arguments whose labels are class probabilities."""
    soft: Any = given.labels
    SOFT.require("kept", given.kept is None and given.ids is None and is_zero(given.top_k))
    only_arrays(logits=unwrapped(given.logits))
    given = given._replace(labels=labels_for(unwrapped(given.logits), None))
    options, arrays = bind_logits(given)
    options, arrays = with_labels(options, arrays, soft, given, "logits")
    outputs = LogprobOutput(True, True if options.entropy else None, True, None)
    result: LogprobOutput[Any] = run(_soft_jit, options, arrays, outputs)
    return result
