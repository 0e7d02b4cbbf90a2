"""Log-probabilities over a kept set and of several classes of each token, in JAX: what the traces
give `xentlib.math.classes`.

Shapes: N tokens, K further classes, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.call import CALLS, check_top_k
from xentlib.checks.classes import KEPT, check_classes
from xentlib.jax.array_spec import array, array_spec, concrete_on_cpu
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.core.algebra import ALGEBRA
from xentlib.jax.core.call import Arrays, Options, Placement, as_gradients
from xentlib.jax.core.device import device_info
from xentlib.jax.core.gradients import Gradients, add_gradients, power_of_two
from xentlib.jax.core.logits import Chunk, ChunkedLogits, chunked_logits, scaled
from xentlib.jax.core.loop import gather_tokens, over_chunks, unpack
from xentlib.jax.core.stats import (
    all_columns,
    axes_of_stats,
    chunk_columns,
    class_stats,
    put_rows,
)
from xentlib.jax.core.tokens import on_host
from xentlib.jax.core.vocab import upstream_of, vary, varying
from xentlib.jax.derivatives import Needs, differentiable, primal_values, wanted
from xentlib.jax.losses.loss import dz_with_target, head_gradients, in_chunks, logits_gradient
from xentlib.jax.placement import run, whole_rows
from xentlib.logprobs import LogprobOutput
from xentlib.math.classes import Classes, Residuals, Upstream, Wanted
from xentlib.math.softmax import Coefficients, NonTargetStats, WantedStats


def row_sums(x: jax.Array) -> jax.Array:
    """Column after column: the order of a CPU's own sum follows the number of rows (row A17)."""
    if x.shape[1] < 2:
        return x.sum(axis=1)
    columns = x.T
    sums, _ = lax.scan(lambda total, column: (total + column, None), columns[0], columns[1:])
    result: jax.Array = sums
    return result


CLASSES = Classes(
    xp=jnp,
    algebra=ALGEBRA,
    positions=lambda x: jnp.arange(x.shape[1], dtype=jnp.int32),
    argsort=lambda x: jnp.argsort(x, axis=1, stable=True).astype(jnp.int32),
    search=jax.vmap(jnp.searchsorted),
    take=partial(jnp.take_along_axis, axis=1),
    sum=row_sums,
)


def want_of(logits: ChunkedLogits, arrays: Arrays) -> Wanted:
    """Of this device's tokens, filled up."""
    tokens, ids = logits.tokens, arrays.ids
    assert ids is not None
    valid = filled(tokens.valid & ~tokens.bad)
    return Wanted(filled(tokens.targets), valid, filled(ids, 0), logits.options.kept)


def filled(x: jax.Array, axis: int = -1) -> jax.Array:
    """With zeros after its tokens: of three a CPU's exp and log had other bits than of many, whose
    last ones alone do not fill a vector (row A17)."""
    axis = axis % x.ndim
    more = -x.shape[axis] % device_info().least_rows
    return jnp.pad(x, [(0, more if k == axis else 0) for k in range(x.ndim)])


class ClassOutput(NamedTuple):
    """What a trace returns."""

    logprobs: LogprobOutput[Any]
    tail: jax.Array  # log-probability of all classes but `ids`


def classes_forward(
    options: Options, arrays: Arrays
) -> tuple[ClassOutput, tuple[Arrays, Residuals]]:
    """Steps 2 to 5 of `xentlib.nll`, with further classes out of the rest. For a backward, which
    has no `top_k`, the arrays have the candidates among their ids."""
    logits = chunked_logits(options, arrays, in_blocks=not options.top_k)
    options, stats_wanted = logits.options, WantedStats(options.entropy)
    local, (logits, _) = logits, gather_tokens(logits, ())
    assert arrays.ids is not None

    def body(chunk: Chunk, packed_RM: jax.Array) -> jax.Array:
        columns = chunk_columns(logits, chunk, stats_wanted)
        values = class_stats(logits, chunk.rows_T, *columns)
        return put_rows(logits, chunk, packed_RM, values)

    known, top_k = arrays.ids.shape[1], options.top_k
    if options.axis is None or options.gathered:
        shards = 1 if options.axis is None else lax.axis_size(options.axis.name)
        count = known + 2 * shards * top_k + 5
        packed_RM = jnp.zeros((count, local.order.size), options.compute_dtype)
        if options.gathered:
            packed_RM = vary(packed_RM, axes_of_stats(logits, varying(logits)))
        packed_RM = over_chunks(logits, body, packed_RM, exchange=bool(options.gathered))
    else:
        packed_RM = class_stats(logits, logits.order, *all_columns(logits, stats_wanted))
    rows, (count,) = filled(unpack(local, packed_RM)), local.tokens.valid.shape
    z, candidates, (m, ones, s, sum_ed) = rows[: 1 + known], rows[1 + known : -4], rows[-4:]
    candidates = candidates.reshape(2, candidates.shape[0] // 2, candidates.shape[1])
    rest = NonTargetStats(m, ones, s, sum_ed if options.entropy else None, None, None)
    values, kept, top = CLASSES.values_and_top(z, rest, want_of(local, arrays), candidates, top_k)

    def clean(x: jax.Array) -> jax.Array:
        bad = local.tokens.bad[:, None] if x.ndim > 1 else local.tokens.bad
        return jnp.where(bad, jnp.nan, x[:count]).astype(options.output_dtype)

    logprob, entropy, lse, correct, ids_logprobs, tail = values
    entropy = clean(entropy) if options.entropy else None
    ids_out = clean(ids_logprobs) if ids_logprobs.shape[1] else None
    correct = correct[:count] & ~local.tokens.bad
    top_ids, top_out = (top.ids[:count], clean(top.logprobs)) if top_k else (None, None)
    per_token = (clean(logprob), entropy, clean(lse), correct, ids_out, top_ids, top_out)
    arrays = arrays._replace(ids=jnp.concatenate((arrays.ids, top.ids[:count]), axis=1))
    return ClassOutput(LogprobOutput(*per_token), clean(tail)), (arrays, kept)


def upstream_rows(
    logits: ChunkedLogits, kept: Residuals, cotangent: ClassOutput, arrays: Arrays
) -> jax.Array:
    """[1 + K + 3, N] in the compute dtype: gradients of the logits, alpha and beta of the rest, and
    lse."""
    compute, want = logits.options.compute_dtype, want_of(logits, arrays)
    upstream, d_tail = cotangent
    number = want.ids.shape[1] - max(0, want.kept)
    zeros = jnp.zeros(want.labels.shape, compute)
    none = jnp.zeros((*want.labels.shape, 0), compute)

    def wide(g: jax.Array | None, none: jax.Array) -> jax.Array:
        return none if g is None else filled(g.astype(compute), 0)

    d_further, d_top = wide(upstream.ids_logprobs, none), wide(upstream.top_logprobs, none)
    unused = number - d_further.shape[1] - d_top.shape[1]
    d_further = jnp.concatenate((jnp.pad(d_further, ((0, 0), (0, unused))), d_top), axis=1)
    g = Upstream(
        wide(upstream.logprobs, zeros),
        None if upstream.entropy is None else wide(upstream.entropy, zeros),
        wide(upstream.lse, zeros),
        d_further,
        None if d_tail is None else wide(d_tail, zeros),
    )
    dz, lse = CLASSES.gradients(g, kept, want), CLASSES.lse_of_rest(kept, want)
    beta = zeros if dz.beta is None else dz.beta
    rows = jnp.concatenate((dz.z, jnp.stack((dz.alpha, beta, lse))))
    return rows[:, : logits.tokens.valid.shape[0]]


def coefficients(g_RT: jax.Array, *, entropy: bool) -> Coefficients:
    """Of dz, from rows of `upstream_rows`."""
    return Coefficients(g_RT[-3], g_RT[-2] if entropy else None, None, g_RT[0], g_RT[1:-3].T)


def classes_backward(
    options: Options, needs: Needs, kept: Residuals, upstream: Any, arrays: Arrays
) -> dict[str, jax.Array | None]:
    """Gradients by name, from logits that are computed again."""
    logits = chunked_logits(options, arrays, in_blocks=True)
    has_head = arrays.weight is not None
    entropy = upstream.logprobs.entropy is not None
    rows_RN = upstream_rows(logits, kept, upstream, arrays)
    g_RN, lse_1N = rows_RN[:-1], rows_RN[-1:]
    exponent = power_of_two(options, jnp.abs(g_RN).sum(axis=0)) if has_head else None
    if exponent is not None:
        g_RN = jnp.ldexp(g_RN, exponent)
    local, rows_RN = logits, jnp.concatenate((scaled(logits, g_RN), lse_1N))
    if has_head:
        logits, rows = gather_tokens(logits, list(rows_RN))
        rows_RN = jnp.stack(rows)

    def step(part: ChunkedLogits, chunk: Chunk, rows_RT: jax.Array, sums: Gradients) -> Gradients:
        dz = coefficients(rows_RT, entropy=entropy)
        return add_gradients(part, chunk, needs, sums, rows_RT[-1], dz)

    def dz_of(chunk: Chunk, rows_RT: jax.Array) -> jax.Array:
        return dz_with_target(logits, chunk, rows_RT[-1], coefficients(rows_RT, entropy=entropy))

    rows_RM = in_chunks(logits, rows_RN)
    if not has_head:
        return logits_gradient(logits, rows_RM, dz_of)
    return head_gradients(local, logits, needs, rows_RM, step, exponent)


def _classes(options: Options, arrays: Arrays) -> ClassOutput:
    return classes_forward(options, whole_rows(options, in_order(arrays)))[0]


def in_order(arrays: Arrays) -> Arrays:
    """With all further classes in one: those kept, ascending, and then the others."""
    parts = [jnp.zeros((arrays.labels.size, 0), jnp.int32)]
    parts += [] if arrays.kept is None else [jnp.sort(arrays.kept.astype(jnp.int32), axis=1)]
    parts += [] if arrays.ids is None else [arrays.ids.astype(jnp.int32)]
    return arrays._replace(kept=None, ids=jnp.concatenate(parts, axis=1))


def _classes_fwd(options: Options, primals: Any) -> tuple[ClassOutput, Any]:
    needs = wanted(primals.constants, *primals.leaves)
    # The backward reads the gathered head again: it is kept rather than gathered twice.
    arrays = whole_rows(options, in_order(primal_values(primals)))
    output, (arrays, kept) = classes_forward(options, arrays)
    # A residual must be an array, their tree the same whatever is wanted: the sizes say what is.
    markers = () if arrays.weight is None else tuple(jnp.zeros((int(need),)) for need in needs)
    return output, (arrays, kept, markers)


def _classes_bwd(options: Options, residuals: Any, cotangent: ClassOutput) -> tuple[Any, ...]:
    arrays, kept, markers = residuals
    unused = jax.custom_derivatives.SymbolicZero
    of_logprobs = [None if isinstance(g, unused) else g for g in cotangent.logprobs]
    d_tail: Any = None if isinstance(cotangent.tail, unused) else cotangent.tail
    without = LogprobOutput(*of_logprobs)._replace(correct=None, top_ids=None)
    upstream = ClassOutput(without, d_tail)
    if not jax.tree.leaves(upstream):
        return (None,)
    upstream = upstream_of(upstream, None if options.gathered else options.axis)
    options = options._replace(top_k=0)  # the arrays have them
    needs = Needs(*(marker.size > 0 for marker in markers))
    return (as_gradients(classes_backward(options, needs, kept, upstream, arrays)),)


_classes_vjp = differentiable(_classes, _classes_fwd, _classes_bwd)


def class_logprobs(options: Options, arrays: Arrays) -> LogprobOutput[Any]:
    """Without the tail."""
    return _classes_vjp(options, arrays).logprobs


_classes_jit = jax.jit(class_logprobs, static_argnums=(0,))


def check_values(args: Any, vocab_size: int) -> None:
    """Refuse what is no class, and a label that was not kept, where values can be read."""
    if not concrete_on_cpu(args.labels, args.where, args.kept, args.ids):
        return
    labels, valid = on_host(args.labels, args.where, args.ignore_index)
    for x in (args.kept, args.ids):
        if x is not None:
            classes = np.asarray(x)[valid]
            wrong = classes[(classes < -1) | (classes >= vocab_size)]
            if wrong.size:
                CALLS.refuse("ids", offender=int(wrong[0]), vocab_size=vocab_size)
    if args.kept is not None:
        kept, labels = np.asarray(args.kept)[valid], labels[valid]
        outside = labels[(kept >= 0).any(-1) & ~(kept == labels[:, None]).any(-1)]
        if outside.size:
            KEPT.refuse("outside", label=int(outside[0]))


def run_classes(args: Any, options: Options, arrays: Arrays, source: str) -> LogprobOutput[Any]:
    tokens = args.hidden if source == "hidden" else args.logits
    check_classes(*map(array_spec, (args.kept, args.ids, tokens)), source=source)
    columns = arrays.hidden.shape[-1]
    if arrays.weight is not None:
        columns = arrays.weight.shape[int(options.transposed)]
    vocab_size = options.axis.vocab_size if options.axis else columns
    check_top_k(args.top_k, vocab_size)
    check_values(args, vocab_size)
    kept = -1 if args.kept is None else args.kept.shape[-1]
    options = options._replace(kept=kept, top_k=args.top_k)
    arrays = arrays._replace(kept=array(args.kept), ids=array(args.ids))
    per_token = True, True if options.entropy else None, True, True
    further = (args.ids is not None, args.top_k > 0, args.top_k > 0)
    outputs = LogprobOutput(*per_token, *(True if there else None for there in further))
    return run(_classes_jit, options, arrays, outputs)


def head_classes(args: Arguments, place: Placement | None = None) -> LogprobOutput[Any]:
    """`chunked_logprobs` with `kept`, `ids` or `top_k`."""
    options, arrays = bind(args._replace(reduction="sum"), place, recompute=True)
    return run_classes(args, options, arrays, "hidden")


def logits_classes(args: LogitsArguments) -> LogprobOutput[Any]:
    """`vocab_parallel_logprobs` with `kept`, `ids` or `top_k`."""
    options, arrays = bind_logits(args)
    KEPT.require("smoothing", not args.label_smoothing, eps=args.label_smoothing)
    return run_classes(args, options, arrays, "logits")
