"""Divergences from a teacher's most probable classes in JAX: `xentlib.math.top_k` between the
traces of `xentlib.math.classes` and of divergences of precomputed logits.

Shapes: N tokens, K classes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.arguments import SCALARS, Arguments, DivergenceArguments, Scalars
from xentlib.checks.classes import check_classes
from xentlib.checks.divergence import (
    check_logprobs,
    check_mass,
    check_stored,
    of_teacher,
)
from xentlib.checks.soft_labels import check_none
from xentlib.divergence import DivergenceOutput
from xentlib.jax.array_spec import array, array_spec, concrete_on_cpu, only_arrays
from xentlib.jax.binding import bind
from xentlib.jax.core.algebra import exp
from xentlib.jax.core.call import (
    Arrays,
    DivergenceOptions,
    Options,
    TopKOptions,
    sum_over_devices,
)
from xentlib.jax.core.tokens import valid_tokens, widen_labels
from xentlib.jax.head import unwrapped
from xentlib.jax.losses.classes import CLASSES, _classes_vjp, check_values, row_sums
from xentlib.jax.losses.divergence import OF_STUDENT, _divergence_vjp, output_of
from xentlib.jax.losses.loss import reduced, token_weights
from xentlib.jax.losses.teacher import labels_for
from xentlib.jax.placement import run
from xentlib.math.top_k import TopK
from xentlib.teacher import TeacherTopK


def divergence_of_few(
    options: Options, student: jax.Array, teacher_logits: jax.Array, valid: jax.Array
) -> jax.Array:
    """`vocab_parallel_divergence` of the classes that are told apart."""
    how, dtype = options.divergence, options.compute_dtype
    plain = Options(-1, dtype, dtype, dtype, options.chunk_bytes, options.platform)
    labels = jnp.zeros(valid.shape, jnp.int32)
    of_pair = DivergenceOptions(how.kind, False, True, False, plain)
    names = SCALARS["vocab_parallel_divergence"]
    scalars = Scalars(**{name: getattr(options.scalars, name) for name in names})
    inner = plain._replace(divergence=of_pair, scalars=scalars)
    teacher = Arrays(hidden=lax.stop_gradient(teacher_logits), labels=labels, where=valid)
    result: jax.Array = _divergence_vjp(
        inner, Arrays(student, labels, where=valid, teacher=teacher)
    ).loss
    return result


# exp of -k / STEPS in two float32 numbers: a multiple of 2^-22, of which sums below 4 are exact,
# and what that lacks. Beyond DEPTH it is 4e-11.
STEPS, DEPTH = 64, 24
EXP = np.exp(-np.arange(STEPS * DEPTH + 1) / STEPS)
COARSE = (np.round(EXP * 2.0**22) / 2.0**22).astype(np.float32)
FINE = (EXP - COARSE).astype(np.float32)


def left_over(log_q: jax.Array) -> jax.Array:
    """[N] 1 less the probabilities, in float32 to 2^-30 without any float64: the difference of 1
    and a rounded sum has 2^-24, an eighth of a tail of 5e-7."""
    if log_q.dtype == jnp.float64:
        return 1.0 - row_sums(exp(log_q))
    log_q = jnp.clip(log_q, min=-float(DEPTH), max=0.0)
    steps = jnp.round(-log_q * STEPS)
    index = jnp.where(jnp.isnan(steps), 0.0, steps).astype(jnp.int32)
    coarse, fine = (jnp.asarray(x)[index] for x in (COARSE, FINE))
    more = fine + (coarse + fine) * jnp.expm1(log_q + steps / STEPS)
    return (1.0 - row_sums(coarse)) - row_sums(more)


def top_k_flat(options: Options, arrays: Arrays) -> DivergenceOutput[Any]:
    """Of flat arrays."""
    how, ids, log_q, compute = options.divergence, arrays.ids, arrays.log_q, options.compute_dtype
    assert ids is not None
    assert log_q is not None
    inner = options._replace(output_dtype=compute, divergence=None)
    outputs, tail = _classes_vjp(inner, arrays._replace(log_q=None))
    labels = widen_labels(arrays.labels)
    valid = valid_tokens(labels, arrays.where, options.ignore_index) & (ids >= 0).any(axis=1)
    counts = (ids >= 0) & CLASSES.first(ids.astype(jnp.int32)) & valid[:, None]
    log_q, top_k = log_q.astype(compute), TopK(jnp, exp, row_sums, left_over, how.tail)
    log_p = outputs.ids_logprobs
    if how.tail == "drop":
        value = top_k.dropped(how.kind, counts, log_p, log_q)
    else:
        value = divergence_of_few(options, *top_k.logits(counts, log_p, tail, log_q), valid)
    value = jnp.where(valid, value * top_k.checked(counts, log_q), 0.0)
    squared = value
    if how.squared and arrays.temperature is not None:
        squared = value * jnp.square(arrays.temperature.astype(compute))
    nll = jnp.zeros_like(value)
    if options.scalars.nll_weight:
        nll = -options.scalars.nll_weight * outputs.logprobs
    count = sum_over_devices(options, valid.sum(dtype=jnp.int32))
    weights, weight_sum, divisor = token_weights(options, arrays, valid, count)
    loss, nll_sum = reduced(options, weights, divisor, squared + nll, nll)
    if how.each:
        loss = (squared + nll) * (weights * (1.0 / divisor))
    dtype = options.output_dtype
    entropy = outputs.entropy
    return DivergenceOutput(
        loss.astype(dtype),
        count,
        weight_sum.astype(dtype),
        nll_sum.astype(dtype),
        value.astype(dtype),
        jnp.where(valid, outputs.logprobs, 0.0).astype(dtype),
        None if entropy is None else jnp.where(valid, entropy, 0.0).astype(dtype),
    )


_top_k_jit = jax.jit(top_k_flat, static_argnums=(0,))


def top_k_divergence(args: DivergenceArguments) -> DivergenceOutput[Any]:
    """`chunked_divergence` of arguments with a `TeacherTopK`."""
    teacher = args.teacher
    assert isinstance(teacher, TeacherTopK)
    ids, logprobs = map(unwrapped, (teacher.ids, teacher.logprobs))
    with of_teacher():
        only_arrays(labels=ids, logits=logprobs)
        check_classes(None, array_spec(ids), array_spec(unwrapped(args.hidden)), source="hidden")
        check_logprobs(array_spec(ids), array_spec(logprobs))
        check_temperatures(args.temperature, teacher.temperature)
    fields = {name: getattr(args, name) for name in OF_STUDENT}
    each, names = args.reduction == "none", args.outputs
    fields |= {"reduction": "sum" if each else args.reduction, "entropy": "entropy" in names}
    student = Arguments(labels=labels_for(args.hidden, args.labels), **fields)
    options, arrays = bind(student, recompute=True, caller=args)
    assert arrays.weight is not None
    columns = arrays.weight.shape[int(options.transposed)]
    classes = options.axis.vocab_size if options.axis else columns
    check_values(student._replace(ids=ids), classes)
    check_total(student, ids, logprobs)
    how = TopKOptions(args.kind, teacher.tail, args.temperature_squared, each)
    options = options._replace(divergence=how)
    arrays = arrays._replace(ids=array(ids), log_q=lax.stop_gradient(array(logprobs)))
    entropy = True if options.entropy else None
    outputs = DivergenceOutput(each, False, False, False, True, True, entropy)
    result: DivergenceOutput[Any] = run(_top_k_jit, options, arrays, outputs)
    return output_of(args, result, arrays.denominator)


def check_temperatures(call: Any, stored: Any) -> None:
    """Of which one at least is an array; numbers have been compared."""
    arrays = any(np.ndim(x) or isinstance(x, jax.Array) for x in (call, stored))
    if stored is not None and arrays and concrete_on_cpu(call, stored):
        one, other = (np.asarray(x, np.float32) for x in (call, stored))
        check_stored(call, stored, same=bool((one == other).all()))


def check_total(student: Arguments, ids: Any, logprobs: Any) -> None:
    """Refuse tokens without any class, and logits in place of log-probabilities, where they can be
    read."""
    if concrete_on_cpu(student.labels, student.where, ids, logprobs) and np.size(logprobs):
        order = np.argsort(np.asarray(ids), axis=-1, kind="stable")
        ascending = np.take_along_axis(np.asarray(ids), order, -1)
        log_q = np.take_along_axis(np.asarray(logprobs, np.float64), order, -1)
        repeated = ascending[..., 1:] == ascending[..., :-1]
        new = np.concatenate((ascending[..., :1] >= 0, ~repeated), -1)
        log_q = np.where(new & (ascending >= 0), log_q, -np.inf)
        labels, where = np.asarray(student.labels), student.where
        valid = np.asarray(valid_tokens(widen_labels(labels), where, student.ignore_index))
        totals = np.where(valid, np.exp(log_q).sum(-1), 0.0)
        with of_teacher():
            check_none(int((valid & (np.asarray(ids) < 0).all(-1)).sum()))
            check_mass(float(totals.max(initial=0.0)))
