"""Divergences in JAX, of a head or of given logits: the steps of `xentlib.divergence`, under their
numbers.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.arguments import (
    Arguments,
    DivergenceArguments,
    LogitsArguments,
    LogitsDivergenceArguments,
)
from xentlib.checks.divergence import (
    DIVERGING,
    check_divergence,
    check_kind,
    check_only_logits,
    of_teacher,
)
from xentlib.checks.validators import plain_args
from xentlib.divergence import DivergenceOutput
from xentlib.jax.array_spec import only_arrays
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.core.call import Arrays, DivergenceOptions, Options, as_gradients, sum_over_devices
from xentlib.jax.core.gradients import Gradients, add_products, power_of_two
from xentlib.jax.core.logits import Chunk, ChunkedLogits, chunked_logits, scaled
from xentlib.jax.core.loop import at_rows, gather_tokens, over_chunks, unpack
from xentlib.jax.core.stats import axes_of_stats, put_rows
from xentlib.jax.core.vocab import upstream_of, vary, varying
from xentlib.jax.derivatives import Needs, differentiable, named, primal_values, refused, wanted
from xentlib.jax.losses.loss import (
    head_gradients,
    in_chunks,
    logits_gradient,
    reduced,
    scale_gradients,
    token_weights,
)
from xentlib.jax.losses.pairs import PairedLogits, PairTerms
from xentlib.jax.losses.soft_logits import SoftLogits
from xentlib.jax.losses.teacher import bind_teacher, labels_for, logits_teacher, of_both
from xentlib.jax.micro_batch import labelled
from xentlib.jax.placement import run, whole_rows
from xentlib.math.divergence import DzTerms
from xentlib.math.soft_labels import SOFT_LABELS
from xentlib.math.softmax import WantedStats
from xentlib.options import DIVERGENCE_OUTPUTS
from xentlib.teacher import TeacherTopK

FUNCTION = "chunked_divergence"
REFUSED = ("nll", *DIVERGENCE_OUTPUTS)  # results without a derivative
VALUES = ("loss", "nll", "divergence", "logprobs", "entropy", "teacher_entropy")


class Residuals(NamedTuple):
    """What a backward that makes the logits again needs beside its inputs: [N] each."""

    lse: jax.Array
    teacher_lse: jax.Array
    delta: jax.Array
    labels_lse: jax.Array  # of the student's logits at temperature 1, for the NLL term
    gain: jax.Array  # of dz, with the token's weight
    shift: jax.Array
    target: jax.Array  # of the labels' loss, what is added in the target's column


def pair_of(
    options: Options, arrays: Arrays, *, in_blocks: bool = False
) -> tuple[ChunkedLogits, ChunkedLogits | None]:
    """The logits of the student and of the teacher, if it has all classes, before tokens are
    gathered; half of the budget for each. `in_blocks`: of classes, where both are heads that may be
    read so."""
    teacher_options = options.divergence.teacher
    options = options._replace(chunk_bytes=max(1, options.chunk_bytes // 2))
    if arrays.teacher is None:
        return chunked_logits(options, arrays), None
    in_blocks = in_blocks and options.block_classes == teacher_options.block_classes
    student = chunked_logits(options, arrays, in_blocks=in_blocks)
    return student, chunked_logits(
        teacher_options, arrays.teacher, paired_with=student, in_blocks=in_blocks
    )


def gathered_pair(
    student: ChunkedLogits, teacher: ChunkedLogits | None, numbers: Any
) -> tuple[Any, Any]:
    """With the tokens of all devices that share the rows, and numbers [N] of the student's."""
    kind, probs = student.options.divergence.kind, student.arrays.log_q
    rows = () if probs is None else tuple(probs.T.astype(student.options.compute_dtype))
    of_student, (numbers, rows) = gather_tokens(student, (numbers, rows))
    of_teacher = None if teacher is None else gather_tokens(teacher, ())[0]
    if kind == SOFT_LABELS:
        of_few = jnp.stack(in_chunks(of_student, rows)) if rows else None
        return SoftLogits.of(of_student, of_teacher, of_few), numbers
    assert of_teacher is not None
    return PairedLogits.of(of_student, of_teacher, kind), numbers


def both_whole(options: Options, arrays: Arrays) -> Arrays:
    """With the heads that this device multiplies, gathered once."""
    whole = whole_rows(options, arrays)
    if arrays.teacher is None:
        return whole
    return whole._replace(teacher=whole_rows(options.divergence.teacher, arrays.teacher))


def divergence_forward(
    options: Options, needs: Needs, arrays: Arrays
) -> tuple[DivergenceOutput[Any], Residuals, Gradients, jax.Array]:
    """Loss and per-token values, what a backward may need, gradient accumulators, and the mask of
    valid tokens [N]. The arrays are flat, their heads whole."""
    how, compute = options.divergence, options.compute_dtype
    local, teacher = pair_of(options, arrays)
    options, scalars = local.options, local.options.scalars
    count, valid_N = sum_over_devices(options, local.num_valid), local.tokens.valid
    weights_N, weight_sum, divisor = token_weights(options, arrays, valid_N, count)
    own_factor_N, squared_N = weights_N * (1.0 / divisor), jnp.ones_like(weights_N)
    if how.squared and arrays.temperature is not None:
        squared_N = squared_N * jnp.square(arrays.temperature.astype(compute))
    factor_N = jnp.where(local.tokens.bad, jnp.nan, own_factor_N)
    exponent = power_of_two(options, factor_N * squared_N) if any(needs) else None
    scaled_N = factor_N if exponent is None else jnp.ldexp(factor_N, exponent)
    numbers = (scaled(local, scaled_N), factor_N, squared_N)
    both, numbers = gathered_pair(local, teacher, numbers)
    logits, nll_weight = both.student, scalars.nll_weight
    numbers = in_chunks(logits, numbers)
    want = WantedStats(options.entropy), WantedStats(how.teacher_entropy)
    rows = len(VALUES) + (len(Residuals._fields) if how.each else 0)

    def body(chunk: Chunk, carry: tuple[jax.Array, Gradients]) -> tuple[jax.Array, Gradients]:
        values_RM, sums = carry
        factor_T, weight_T, squared_T = at_rows(logits, chunk, numbers)
        chunk_values = both.values(chunk, want)
        value = chunk_values.loss * squared_T
        more = chunk_values.z_term
        if nll_weight:
            more = -nll_weight * chunk_values.labels
            value = value + more
        values = [value, more, *chunk_values.per_token]
        dz = DzTerms(*(x * squared_T for x in chunk_values.dz))
        if nll_weight and not both.tempered_nll:
            dz = both.kind.with_nll(dz, chunk_values.total, nll_weight)
        if how.each:
            weighted = (*(weight_T * x for x in dz), -nll_weight * weight_T)
            values += [*chunk_values.known, *weighted]
        if any(needs):
            own_T = jnp.full_like(factor_T, -nll_weight) if nll_weight else None
            sums = add_dz(both, chunk, needs, sums, chunk_values.terms, dz, own_T, factor_T)
        return put_rows(logits, chunk, values_RM, jnp.stack(values)), sums

    per_token, sums = jnp.zeros((rows, local.order.size), compute), Gradients.zeros(logits, needs)
    if options.axis is not None:
        axes = varying(both, numbers)
        per_token, sums = vary(per_token, axes_of_stats(logits, axes)), vary(sums, axes)
    used = (both, numbers)
    exchange = options.axis is not None
    per_token, sums = over_chunks(logits, body, (per_token, sums), used, exchange=exchange)
    gradients = sums.finished(logits, exponent)

    values_RN = unpack(local, per_token)
    loss_N, nll_N, *token_values = values_RN[: len(VALUES)]
    loss, nll = reduced(options, weights_N, divisor, loss_N, nll_N)
    if how.each:
        loss = loss_N * own_factor_N
    dtype = options.output_dtype
    output = DivergenceOutput(
        loss.astype(dtype),
        count,
        weight_sum.astype(dtype),
        nll.astype(dtype),
        *(x.astype(dtype) for x in token_values),
    )
    residuals_N = (
        values_RN[len(VALUES) :] if how.each else jnp.zeros((len(Residuals._fields), 0), compute)
    )
    return output, Residuals(*residuals_N), gradients, valid_N


def add_dz(
    both: Any,  # `PairedLogits`, or `SoftLogits`
    chunk: Chunk,
    needs: Needs,
    sums: Gradients,
    terms: PairTerms,
    dz: DzTerms,
    own_T: jax.Array | None,
    factor_T: jax.Array,
) -> Gradients:
    """Steps 6 to 8 of a chunk; `factor_T` of all of it."""
    logits, tempered = both.student, chunk.block.temperature_T
    if own_T is not None:
        own_T = own_T * factor_T * (1.0 if tempered is None else tempered)
    dz_TV = both.dz(chunk, terms, DzTerms(*(factor_T * x for x in dz)), own_T)
    dz_TV, part_V = logits.kernels.chained(
        chunk.block,
        terms.student,
        dz_TV,
        round_to=logits.options.gemm_dtype,
        column_sums=needs.bias,
    )
    return add_products(logits, chunk, needs, sums, dz_TV, part_V)


def each_backward(
    options: Options, needs: Needs, residuals: Residuals, gradient: jax.Array, arrays: Arrays
) -> dict[str, jax.Array | None]:
    """Gradients by name of a loss of each token, from logits that are made again."""
    # dz of a class needs lse of both, and delta, which are known: no other class's logits.
    local, teacher = pair_of(options, arrays, in_blocks=True)
    g_N = jnp.where(local.tokens.valid, gradient.astype(options.compute_dtype), 0)
    exponent = None if arrays.weight is None else power_of_two(options, g_N)
    if exponent is not None:
        g_N = jnp.ldexp(g_N, exponent)
    both, numbers = gathered_pair(local, teacher, (scaled(local, g_N), residuals))
    logits, nll_weight = both.student, local.options.scalars.nll_weight
    if logits.block_classes:
        logits = logits._replace(paired=both.teacher)

    def step(part: ChunkedLogits, chunk: Chunk, numbers_T: Any, sums: Gradients) -> Gradients:
        factor_T, known = numbers_T
        pair = both
        if part.paired is not None:
            pair = both._replace(student=part, teacher=part.paired)
        terms = pair.recompute(chunk, list(known[:4]))
        dz, own_T = (
            DzTerms(known.gain, known.shift),
            known.target if nll_weight else None,
        )
        return add_dz(pair, chunk, needs, sums, terms, dz, own_T, factor_T)

    def dz_of(chunk: Chunk, numbers_T: Any) -> jax.Array:
        factor_T, known = numbers_T
        terms = both.recompute(chunk, list(known[:4]))
        dz = DzTerms(factor_T * known.gain, factor_T * known.shift)
        return chained(both, chunk, terms, both.dz(chunk, terms, dz))

    numbers = in_chunks(logits, numbers)
    if arrays.weight is None:
        return logits_gradient(logits, numbers, dz_of, both)
    return head_gradients(local, logits, needs, numbers, step, exponent, both)


def chained(both: Any, chunk: Chunk, terms: PairTerms, dz_TV: jax.Array) -> jax.Array:
    """Step 7 of precomputed logits; `both` are `PairedLogits` or `SoftLogits`."""
    dz_TV, _ = both.student.kernels.chained(chunk.block, terms.student, dz_TV)
    return dz_TV


def _divergence(options: Options, arrays: Arrays) -> DivergenceOutput[Any]:
    return divergence_forward(options, Needs(), both_whole(options, arrays))[0]


def _divergence_fwd(options: Options, primals: Any) -> tuple[DivergenceOutput[Any], Any]:
    needs, each = wanted(primals.constants, *primals.leaves), options.divergence.each
    values = primal_values(primals)
    arrays = both_whole(options, values)
    made_at_once = Needs() if each else needs
    output, known, gradients, valid_N = divergence_forward(options, made_at_once, arrays)
    # A residual must be an array: empty ones carry the types of the inputs to the backward, and
    # the sizes of others (1 or 0) which gradients are wanted.
    types = tuple(None if x is None else jnp.ravel(x)[:0] for x in values.leaves)
    markers = tuple(jnp.zeros((int(need),)) for need in needs)
    return output, (gradients, valid_N, types, (known, arrays, markers) if each else ())


def _divergence_bwd(
    options: Options, residuals: Any, cotangent: DivergenceOutput[Any]
) -> tuple[Any, ...]:
    gradients, valid_N, types, residuals_of_each = residuals
    upstream = refused(cotangent, REFUSED)
    if upstream is None:
        return (None,)
    upstream = upstream_of(upstream, None if options.gathered else options.axis)
    if not residuals_of_each:
        return (as_gradients(scale_gradients(options, upstream, gradients, valid_N, types)),)
    known, arrays, markers = residuals_of_each
    needs = Needs(*(marker.size > 0 for marker in markers))
    return (as_gradients(each_backward(options, needs, known, upstream, arrays)),)


_divergence_vjp = differentiable(_divergence, _divergence_fwd, _divergence_bwd)
_divergence_jit = jax.jit(_divergence_vjp, static_argnums=(0,))

# Of a divergence's arguments, what its student is called with.
OF_STUDENT = tuple(
    x
    for x in Arguments._fields
    if x in DivergenceArguments._fields and x not in ("labels", "outputs")
)


def head_divergence(args: DivergenceArguments) -> DivergenceOutput[Any]:
    """`chunked_divergence` of its arguments."""
    args = plain_args(args)
    only_arrays(hidden=args.hidden)
    check_divergence(args)
    if isinstance(args.teacher, TeacherTopK):
        from xentlib.jax.losses.top_k import top_k_divergence

        return top_k_divergence(args)
    DIVERGING.require("stream", args.gather != "stream")
    args = args._replace(labels=labels_for(args.hidden, args.labels))
    fields = {name: getattr(args, name) for name in OF_STUDENT}
    each = args.reduction == "none"
    fields["reduction"] = "sum" if each else args.reduction
    student = Arguments(labels=args.labels, **fields)
    options, arrays = bind(student, recompute=each, caller=args)
    with of_teacher():
        teacher_options, teacher = bind_teacher(args, options, arrays)
    if args.vocab == "intersect":
        arrays, teacher_options, teacher = of_both(options, arrays, teacher_options, teacher)
    names = args.outputs
    how = DivergenceOptions(
        args.kind, args.temperature_squared, each, "teacher_entropy" in names, teacher_options
    )
    options = options._replace(entropy="entropy" in names, divergence=how)
    result = placed_divergence(options, arrays._replace(teacher=teacher), each)
    return output_of(args, result, arrays.denominator)


def output_of(
    args: DivergenceArguments, result: DivergenceOutput[Any], denominator: jax.Array | None
) -> DivergenceOutput[Any]:
    """What a call returns: the outputs that it asks for, of which the loss alone has a derivative,
    and what the loss was divided by."""
    names, divisor = args.outputs, denominator
    absent: dict[str, Any] = {name: None for name in DIVERGENCE_OUTPUTS if name not in names}
    if divisor is None and args.reduction == "mean":
        divisor = result.weight_sum
    result = result._replace(**absent, denominator=divisor)
    constant: DivergenceOutput[Any] = jax.tree.map(lax.stop_gradient, result)
    dependent = {x: y for x in REFUSED if (y := getattr(result, x)) is not None}
    if not args.nll_weight:
        del dependent["nll"]
    out = constant._replace(loss=result.loss, **named(dependent, FUNCTION))
    return out if args.reduction == "none" else labelled(out, denominator)


def placed_divergence(options: Options, arrays: Arrays, each: bool) -> DivergenceOutput[Any]:
    """On the devices of the call, whichever of its results vary over them."""
    token_values: dict[str, Any] = dict.fromkeys(DIVERGENCE_OUTPUTS, True)
    outputs = DivergenceOutput(each, False, False, False, **token_values)
    result: DivergenceOutput[Any] = run(_divergence_jit, options, arrays, outputs)
    return result


def logits_divergence(args: LogitsDivergenceArguments) -> DivergenceOutput[jax.Array]:
    """`vocab_parallel_divergence` of its arguments."""
    args = plain_args(args)
    only_arrays(logits=args.logits)
    check_kind(args)
    check_only_logits(args)
    names = [x for x in LogitsArguments._fields if x in LogitsDivergenceArguments._fields]
    fields = {name: getattr(args, name) for name in names}
    logits_args = LogitsArguments(labels=labels_for(args.logits, None), **fields)
    options, arrays = bind_logits(logits_args, args)
    with of_teacher():
        columns = args.logits.shape[-1]
        teacher_options, teacher = logits_teacher(
            args.teacher, logits_args, "logits", options, columns
        )
    how = DivergenceOptions(args.kind, False, True, False, teacher_options)
    options = options._replace(divergence=how)
    result = placed_divergence(options, arrays._replace(teacher=teacher), True)
    constant = jax.tree.map(lax.stop_gradient, (result.num_tokens, result.weight_sum, result.nll))
    return DivergenceOutput(result.loss, *constant)
