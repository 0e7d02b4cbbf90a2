"""`chunked_nll` and `vocab_parallel_logprobs` of class probabilities, in JAX: the steps of
`xentlib.soft_labels` in the traces of divergences.

Shapes: N tokens, V vocabulary, K classes of each.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.algebra import is_zero
from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.soft_labels import SOFT, check_none, check_read, check_soft, check_soft_options
from xentlib.divergence import DivergenceOutput
from xentlib.jax.array_spec import array, array_spec, concrete_on_cpu, only_arrays
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.classes import check_values
from xentlib.jax.core.call import Arrays, DivergenceOptions, Options, Placement
from xentlib.jax.derivatives import named
from xentlib.jax.divergence import placed_divergence
from xentlib.jax.head import unwrapped
from xentlib.jax.micro_batch import labelled
from xentlib.jax.teacher import classes_of, labels_for
from xentlib.nll import OUTPUTS, NLLOutput
from xentlib.soft_labels import SOFT_LABELS, SoftLabels


def soft_nll(given: Arguments, place: Placement | None = None) -> NLLOutput[Any]:
    """`chunked_nll` of arguments whose labels are class probabilities."""
    soft: Any = given.labels
    check_soft_options(given.outputs, given.gather)
    only_arrays(hidden=unwrapped(given.hidden))
    given = given._replace(labels=labels_for(unwrapped(given.hidden), None))
    options, arrays = bind(given, place)
    options, arrays = with_labels(options, arrays, soft, given, "hidden")
    result: DivergenceOutput[Any] = placed_divergence(options, arrays, False)
    _, count, weight_sum, z_loss, _, logprobs, entropy, lse, _ = result
    divisor = arrays.denominator
    if divisor is None and options.mean:
        divisor = weight_sum
    per_token: dict[str, Any] = dict.fromkeys(OUTPUTS)
    made = {"logprobs": logprobs, "entropy": entropy, "lse": lse}
    per_token |= {name: x for name, x in made.items() if name in given.outputs}
    dependent = {name: x for name, x in per_token.items() if x is not None}
    if not is_zero(given.z_loss):
        dependent["z_loss"] = z_loss
    out = NLLOutput(result.loss, count, weight_sum, z_loss, **per_token, denominator=divisor)
    constant: NLLOutput[Any] = jax.tree.map(lax.stop_gradient, out)
    return labelled(constant._replace(loss=result.loss, **named(dependent)), arrays.denominator)


def with_labels(
    options: Options, arrays: Arrays, soft: Any, given: Any, name: str
) -> tuple[Options, Arrays]:
    """With class probabilities: of all classes, or of some."""
    source, ignore_index = array_spec(unwrapped(getattr(given, name))), given.ignore_index
    check_read(given)
    columns = classes_of(options, arrays) if name == "hidden" else arrays.hidden.shape[-1]
    if isinstance(soft, SoftLabels):
        ids, probs = map(unwrapped, soft)
        only_arrays(ids=ids, labels=probs)
        of_few = SoftLabels(array_spec(ids), array_spec(probs))
        check_soft(of_few, source, name, columns, ignore_index)
        classes = options.axis.vocab_size if options.axis else columns
        check_values(Arguments(None, None, given.labels, where=given.where, ids=ids), classes)
        check_negative(probs, given.where, ids)
        ids, probs = array(ids), array(probs)
        labels = jnp.where((ids >= 0).any(-1), arrays.labels, ignore_index)  # no class, no token
        probs = jnp.where(ids >= 0, probs, jnp.zeros_like(probs))
        arrays = arrays._replace(labels=labels, ids=ids, log_q=lax.stop_gradient(probs))
        how = DivergenceOptions(SOFT_LABELS, False, False, False, None)
        return options._replace(divergence=how), arrays
    probs = unwrapped(soft)
    SOFT.require("stay", not options.gathered, route="hidden")
    check_soft(array_spec(probs), source, name, columns, ignore_index)
    check_negative(probs, given.where)
    own, teacher = bind_logits(
        LogitsArguments(
            lax.stop_gradient(array(probs)),
            given.labels,
            vocab_parallel=given.vocab_parallel,
            where=given.where,
            max_chunk_bytes=given.max_chunk_bytes,
            shard=getattr(given, "shard", None),
        )
    )
    axis = options.axis if options.place else own.axis
    own = own._replace(compute_dtype=options.compute_dtype, axis=axis, place=options.place)
    how = DivergenceOptions(SOFT_LABELS, False, False, False, own)
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
