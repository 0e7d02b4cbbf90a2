"""`chunked_nll` and `vocab_parallel_logprobs` of class probabilities, in JAX: the steps of
`xentlib.math.soft_labels` in the traces of divergences.

Shapes: N tokens, V vocabulary, K classes of each, T tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.soft_labels import SOFT, check_none, check_read, check_soft, check_soft_options
from xentlib.divergence import DivergenceOutput
from xentlib.jax.array_spec import array, array_spec, concrete_on_cpu, only_arrays
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.core.call import Arrays, DivergenceOptions, Options, Placement, as_gradients
from xentlib.jax.core.layout import per_token
from xentlib.jax.core.logits import Chunk, scaled
from xentlib.jax.derivatives import Needs, differentiable, named, primal_values
from xentlib.jax.head import unwrapped
from xentlib.jax.losses.classes import check_values
from xentlib.jax.losses.divergence import (
    Residuals,
    chained,
    divergence_forward,
    gathered_pair,
    pair_of,
    placed_divergence,
)
from xentlib.jax.losses.logprobs import upstream_in
from xentlib.jax.losses.loss import in_chunks, logits_gradient
from xentlib.jax.losses.soft_logits import beside_classes
from xentlib.jax.losses.teacher import classes_of, labels_for
from xentlib.jax.micro_batch import labelled
from xentlib.jax.placement import run
from xentlib.labels import SoftLabels
from xentlib.logprobs import LogprobOutput
from xentlib.math.soft_labels import SOFT_LABELS, Largest
from xentlib.math.softmax import FLOOR, is_zero
from xentlib.nll import OUTPUTS, NLLOutput


def soft_nll(args: Arguments, place: Placement | None = None) -> NLLOutput[Any]:
    """`chunked_nll` of arguments whose labels are class probabilities."""
    soft: Any = args.labels
    check_soft_options(args)
    only_arrays(hidden=unwrapped(args.hidden))
    args = args._replace(labels=labels_for(unwrapped(args.hidden), None))
    options, arrays = bind(args, place)
    options, arrays = with_labels(options, arrays, soft, args, "hidden")
    result: DivergenceOutput[Any] = placed_divergence(options, arrays, False)
    _, count, weight_sum, z_loss, _, logprobs, entropy, lse, _ = result
    divisor = arrays.denominator
    if divisor is None and options.mean:
        divisor = weight_sum
    per_token: dict[str, Any] = dict.fromkeys(OUTPUTS)
    values = {"logprobs": logprobs, "entropy": entropy, "lse": lse}
    per_token |= {name: x for name, x in values.items() if name in args.outputs}
    dependent = {name: x for name, x in per_token.items() if x is not None}
    if not is_zero(args.z_loss):
        dependent["z_loss"] = z_loss
    out = NLLOutput(result.loss, count, weight_sum, z_loss, **per_token, denominator=divisor)
    constant: NLLOutput[Any] = jax.tree.map(lax.stop_gradient, out)
    return labelled(constant._replace(loss=result.loss, **named(dependent)), arrays.denominator)


def with_labels(
    options: Options, arrays: Arrays, soft: Any, args: Any, name: str
) -> tuple[Options, Arrays]:
    """With class probabilities: of all classes, or of some."""
    source, ignore_index = array_spec(unwrapped(getattr(args, name))), args.ignore_index
    check_read(args)
    columns = classes_of(options, arrays) if name == "hidden" else arrays.hidden.shape[-1]
    if isinstance(soft, SoftLabels):
        ids, probs = map(unwrapped, soft)
        only_arrays(ids=ids, labels=probs)
        soft_spec = SoftLabels(array_spec(ids), array_spec(probs))
        check_soft(soft_spec, source, name, columns, ignore_index)
        classes = options.axis.vocab_size if options.axis else columns
        check_values(Arguments(None, None, args.labels, where=args.where, ids=ids), classes)
        check_negative(probs, args.where, ids)
        ids, probs = array(ids), array(probs)
        labels = jnp.where((ids >= 0).any(-1), arrays.labels, ignore_index)  # no class, no token
        probs = jnp.where(ids >= 0, probs, jnp.zeros_like(probs))
        arrays = arrays._replace(labels=labels, ids=ids, log_q=lax.stop_gradient(probs))
        how = DivergenceOptions(SOFT_LABELS, False, False, False, None)
        return options._replace(divergence=how), arrays
    probs = unwrapped(soft)
    SOFT.require("stay", not options.gathered, route="hidden")
    check_soft(array_spec(probs), source, name, columns, ignore_index)
    check_negative(probs, args.where)
    of_labels, teacher = bind_logits(
        LogitsArguments(
            lax.stop_gradient(array(probs)),
            args.labels,
            vocab_parallel=args.vocab_parallel,
            where=args.where,
            max_chunk_bytes=args.max_chunk_bytes,
            shard=getattr(args, "shard", None),
        )
    )
    axis = options.axis if options.place else of_labels.axis
    of_labels = of_labels._replace(
        compute_dtype=options.compute_dtype, axis=axis, place=options.place
    )
    how = DivergenceOptions(SOFT_LABELS, False, False, False, of_labels)
    return options._replace(divergence=how), arrays._replace(teacher=teacher)


def check_negative(probs: Any, where: Any, ids: Any = None) -> None:
    """Refuse a valid token without a class, and a negative probability of one, where they can be
    read; elsewhere it does not count, and the loss is NaN."""
    if not concrete_on_cpu(probs, where, ids):
        return
    valid = np.asarray(True if where is None else where)
    right = np.asarray(probs) >= 0
    if ids is not None:
        none = np.asarray(ids) < 0
        check_none(int((valid & none.all(-1)).sum()))
        right |= none
    if not (right | ~valid[..., None]).all():
        SOFT.refuse("negative")


def soft_forward(
    options: Options, arrays: Arrays
) -> tuple[LogprobOutput[Any], tuple[Residuals, jax.Array]]:
    """Of precomputed logits: sum_v a_v (z_v - lse), entropy and lse; statistics of the logits and
    the sum of each token's probabilities."""
    how = options.divergence._replace(each=True)
    options = options._replace(divergence=how, output_dtype=options.compute_dtype)
    output, residuals, *_ = divergence_forward(options, Needs(), arrays)
    entropy = output.entropy if options.entropy else None
    # Of a token that is not valid +0.
    output_of_logits = LogprobOutput(0.0 - output.loss, entropy, output.teacher_entropy, None)
    return output_of_logits, (residuals, output.divergence)


def soft_backward(
    options: Options, kept: tuple[Residuals, jax.Array], upstream: Any, arrays: Arrays
) -> dict[str, jax.Array | None]:
    """Steps 6 and 7, in the dtype of the logits: d out / dz_v = a_v - p_v sum(a), and those of
    entropy and lse."""
    student, teacher = pair_of(options, arrays)
    both, _ = gathered_pair(student, teacher, ())
    residuals, total = kept

    def clean(g: jax.Array | None) -> jax.Array:
        zeros = jnp.zeros_like(total)
        return zeros if g is None else jnp.where(student.tokens.valid, g.astype(total.dtype), 0)

    def dz_of(chunk: Chunk, numbers: Any) -> jax.Array:
        (g_logprobs, g_entropy, g_lse), stats, total_T = numbers
        of = Largest(*stats)
        terms = both.recompute(chunk, of, total_T)
        of = beside_classes(of)
        log_p_TV = jnp.maximum(both.kind.log_p(terms.student.z_TV, of), FLOOR)
        g_logprobs, g_entropy, g_lse = map(per_token, (g_logprobs, g_entropy, g_lse))
        slope_TV = g_lse - g_entropy * (log_p_TV + of.entropy)
        dz_TV = terms.p_TV * slope_TV + g_logprobs * terms.a_TV
        return chained(both, chunk, terms, dz_TV)

    upstream = [scaled(student, clean(g)) for g in upstream]
    numbers = in_chunks(both.student, (upstream, residuals[:4], total))
    return logits_gradient(both.student, numbers, dz_of, both)


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
    return (as_gradients(soft_backward(options, kept, upstream, arrays)),)


_soft_jit = jax.jit(differentiable(_soft, _soft_fwd, _soft_bwd), static_argnums=(0,))


def logits_soft(args: LogitsArguments) -> LogprobOutput[Any]:
    """`vocab_parallel_logprobs` of arguments whose labels are class probabilities."""
    soft: Any = args.labels
    SOFT.require("kept", args.kept is None and args.ids is None and is_zero(args.top_k))
    only_arrays(logits=unwrapped(args.logits))
    args = args._replace(labels=labels_for(unwrapped(args.logits), None))
    options, arrays = bind_logits(args)
    options, arrays = with_labels(options, arrays, soft, args, "logits")
    outputs = LogprobOutput(True, True if options.entropy else None, True, None)
    result: LogprobOutput[Any] = run(_soft_jit, options, arrays, outputs)
    return result
