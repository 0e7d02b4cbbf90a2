"""Log-probabilities over a kept set and of several classes of each token, in JAX: what the traces
give `xentlib.classes`.

Shapes: N tokens, K further classes, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.algebra import Coefficients, WantedStats
from xentlib.arguments import Arguments, LogitsArguments
from xentlib.checks.call import CALLS
from xentlib.checks.classes import KEPT, check_classes
from xentlib.classes import Classes, ClassLogits, Wanted
from xentlib.jax.array_spec import array, array_spec, concrete_on_cpu
from xentlib.jax.binding import bind, bind_logits
from xentlib.jax.core.algebra import exp
from xentlib.jax.core.call import Arrays, Options, Placement, as_gradients
from xentlib.jax.core.device import as_bits, from_bits
from xentlib.jax.core.gemm import round_to
from xentlib.jax.core.gradients import Gradients, add_gradients, power_of_two
from xentlib.jax.core.logits import Chunk, ChunkedLogits, chunked_logits, scaled
from xentlib.jax.core.loop import at_rows, gather_tokens, over_chunks, unpack
from xentlib.jax.core.stats import all_columns, axes_of_stats, class_stats, put_rows
from xentlib.jax.core.tokens import on_host, valid_tokens, widen_labels
from xentlib.jax.core.vocab import as_primal, upstream_of, vary, varying
from xentlib.jax.derivatives import Needs, primal_values, wanted
from xentlib.jax.logprobs import _logprobs
from xentlib.jax.placement import run, whole_rows
from xentlib.logprobs import LogprobOutput


def classes_forward(options: Options, arrays: Arrays) -> ClassLogits:
    """Steps 2 to 5 of `xentlib.nll`, with further classes out of the rest."""
    logits = chunked_logits(options, arrays)
    options, stats_wanted = logits.options, WantedStats(options.entropy)
    own, (logits, _) = logits, gather_tokens(logits, ())
    assert own.tokens.more is not None

    def body(chunk: Chunk, packed_RM: jax.Array) -> jax.Array:
        z_y, blocks, left = logits.kernels.stats(chunk.block, stats_wanted)
        assert left.z_more_TK is not None
        values = class_stats(logits, chunk.rows_T, z_y, blocks, left.z_more_TK.T)
        return put_rows(logits, chunk, packed_RM, values)

    if options.axis is None or options.gathered:
        rows = own.tokens.more.ids.shape[1] + 4
        packed_RM = jnp.zeros((rows, own.order.size), options.compute_dtype)
        if options.gathered:
            packed_RM = vary(packed_RM, axes_of_stats(logits, varying(logits)))
        packed_RM = over_chunks(logits, body, packed_RM, exchange=bool(options.gathered))
    else:
        packed_RM = class_stats(logits, logits.order, *all_columns(logits, stats_wanted))
    values = unpack(own, packed_RM)
    return ClassLogits(values[:-3], *values[-3:])


def upstream_rows(logits: ChunkedLogits, rest_entropy: jax.Array, upstream: Any) -> jax.Array:
    """[1 + K + 3, N] in the compute dtype: gradients of the logits, of lse and entropy of the rest,
    and the latter times that entropy; 0 where there is none, or no token."""
    compute, valid = logits.options.compute_dtype, logits.tokens.valid
    assert logits.tokens.more is not None
    like = jnp.zeros((logits.tokens.more.ids.shape[1] + 1, valid.size), compute)
    of_rest = (upstream.rest_lse, upstream.rest_entropy)
    rows = [like if upstream.z is None else upstream.z.astype(compute)]
    rows += [like[:1] if g is None else g.astype(compute)[None] for g in of_rest]
    g_RN = jnp.where(valid, jnp.concatenate(rows), 0)
    return jnp.concatenate((g_RN, g_RN[-1:] * rest_entropy))


def coefficients(g_RT: jax.Array, *, entropy: bool) -> Coefficients:
    """Of dz, from rows of `upstream_rows`."""
    alpha, beta = g_RT[-3], None
    if entropy:
        alpha, beta = alpha - g_RT[-1], -g_RT[-2]
    return Coefficients(alpha, beta, None, g_RT[0], g_RT[1:-3].T)


def in_chunks(logits: ChunkedLogits, rows_RN: jax.Array) -> jax.Array:
    """[R, M + 1], in the order of the chunks' rows."""
    return jnp.pad(rows_RN[:, logits.order], ((0, 0), (0, 1)))


def with_lse(g_RN: jax.Array, rest_lse: jax.Array) -> jax.Array:
    """And the lse of the rest: where none is left, anything, as its columns are at -inf."""
    return jnp.concatenate((g_RN, jnp.where(rest_lse == -jnp.inf, 0.0, rest_lse)[None]))


def head_backward(
    options: Options, needs: Needs, of: ClassLogits, upstream: Any, arrays: Arrays
) -> dict[str, jax.Array | None]:
    """Gradients by name, from logits that are computed again."""
    logits, entropy = chunked_logits(options, arrays), upstream.rest_entropy is not None
    g_RN = upstream_rows(logits, of.rest_entropy, upstream)
    exponent = power_of_two(options, jnp.abs(g_RN).sum(axis=0))
    if exponent is not None:
        g_RN = jnp.ldexp(g_RN, exponent)
    rows = list(with_lse(scaled(logits, g_RN), of.rest_lse))
    own, (logits, rows) = logits, gather_tokens(logits, rows)
    rows_RM = in_chunks(logits, jnp.stack(rows))

    def body(chunk: Chunk, gradients: Gradients) -> Gradients:
        rows_RT = at_rows(logits, chunk, rows_RM)
        dz = coefficients(rows_RT[:-1], entropy=entropy)
        return add_gradients(logits, chunk, needs, gradients, rows_RT[-1], dz)

    sums = vary(Gradients.zeros(logits, needs), varying(logits, rows_RM))
    gradients = over_chunks(logits, body, sums, rows_RM, exchange=bool(options.gathered))
    gradients = gradients.finished(logits, exponent)
    return gradients.rounded(options, own.tokens.valid, arrays.leaves)


def given_backward(options: Options, of: ClassLogits, upstream: Any, arrays: Arrays) -> jax.Array:
    """Step 6 of given logits, in their dtype."""
    logits, given = chunked_logits(options, arrays), arrays.hidden
    g_RN = scaled(logits, upstream_rows(logits, of.rest_entropy, upstream))
    rows_RM = in_chunks(logits, with_lse(g_RN, of.rest_lse))
    entropy = upstream.rest_entropy is not None

    def body(chunk: Chunk, d_logits: jax.Array) -> jax.Array:
        rows_RT = at_rows(logits, chunk, rows_RM)
        dz = coefficients(rows_RT[:-1], entropy=entropy)
        dz_TV, dz_y_T, _ = logits.kernels.dz(chunk.block, rows_RT[-1], dz)
        own_TV = lax.broadcasted_iota(jnp.int32, dz_TV.shape, 1) == chunk.block.y_T1
        dz_TV = round_to(jnp.where(own_TV, dz_y_T[:, None], dz_TV), given.dtype.name)
        return d_logits.at[chunk.own_T].set(as_bits(dz_TV), mode="drop")

    d_logits = over_chunks(logits, body, as_bits(jnp.zeros_like(given)), rows_RM)
    return as_primal(from_bits(d_logits, given), given)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _classes(options: Options, arrays: Arrays) -> ClassLogits:
    return classes_forward(options, whole_rows(options, arrays))


def _classes_fwd(options: Options, primals: Any) -> tuple[ClassLogits, Any]:
    needs = wanted(primals.constants, *primals.leaves)
    # The backward reads the gathered head again: it is kept rather than gathered twice.
    arrays = whole_rows(options, primal_values(primals))
    of = classes_forward(options, arrays)
    # A residual must be an array, their tree the same whatever is wanted: the sizes say what is.
    markers = () if arrays.weight is None else tuple(jnp.zeros((int(need),)) for need in needs)
    return of, (arrays, of, markers)


def _classes_bwd(options: Options, residuals: Any, cotangent: ClassLogits) -> tuple[Any, ...]:
    arrays, of, markers = residuals
    unused = jax.custom_derivatives.SymbolicZero
    upstream = ClassLogits(*(None if isinstance(g, unused) else g for g in cotangent))
    upstream = upstream._replace(rest_largest=None)
    if not jax.tree.leaves(upstream):
        return (None,)
    upstream = upstream_of(upstream, None if options.gathered else options.axis)
    if not options.entropy:
        upstream = upstream._replace(rest_entropy=None)
    if arrays.weight is None:
        return (as_gradients({"hidden": given_backward(options, of, upstream, arrays)}),)
    needs = Needs(*(marker.size > 0 for marker in markers))
    return (as_gradients(head_backward(options, needs, of, upstream, arrays)),)


_classes.defvjp(_classes_fwd, _classes_bwd, symbolic_zeros=True)


def of_few(dtype: str, chunk_bytes: int) -> Any:
    """`vocab_parallel_logprobs` of the classes that are told apart."""

    def logprobs(
        logits: jax.Array, labels: jax.Array, valid: jax.Array, *, entropy: bool
    ) -> LogprobOutput[Any]:
        options = Options(-1, dtype, dtype, dtype, chunk_bytes, entropy=entropy)
        return _logprobs(options, Arrays(hidden=logits, labels=labels, where=valid))

    return logprobs


CLASSES = Classes(
    xp=jnp,
    exp=exp,
    places=lambda ids: jnp.arange(ids.shape[1], dtype=jnp.int32),
    argsort=partial(jnp.argsort, axis=1, stable=True),
    search=jax.vmap(jnp.searchsorted),
    take=partial(jnp.take_along_axis, axis=1),
    constant=lax.stop_gradient,
    logprobs=None,
)


def class_logprobs(options: Options, arrays: Arrays) -> LogprobOutput[Any]:
    """Of flat arrays."""
    labels = widen_labels(arrays.labels)
    valid = valid_tokens(labels, arrays.where, options.ignore_index)
    labels = jnp.where(valid, labels, 0).astype(jnp.int32)
    kept = None if arrays.kept is None else jnp.sort(arrays.kept.astype(jnp.int32), axis=1)
    ids = None if arrays.ids is None else arrays.ids.astype(jnp.int32)
    want = Wanted(labels, valid, kept, ids, options.entropy)
    of = _classes(options, arrays._replace(kept=None, ids=jnp.concatenate(want.further, 1)))
    classes = CLASSES._replace(logprobs=of_few(options.compute_dtype, options.chunk_bytes))
    output = classes.output(of, want)
    as_asked = {
        name: x.astype(options.output_dtype)
        for name, x in output._asdict().items()
        if x is not None and name != "correct"
    }
    return output._replace(**as_asked)


_class_logprobs_jit = jax.jit(class_logprobs, static_argnums=(0,))


def check_values(given: Any, vocab_size: int) -> None:
    """Refuse what is no class, and a label that was not kept, where values can be read."""
    if not concrete_on_cpu(given.labels, given.where, given.kept, given.ids):
        return
    labels, valid = on_host(given.labels, given.where, given.ignore_index)
    for x in (given.kept, given.ids):
        if x is not None:
            classes = np.asarray(x)[valid]
            wrong = classes[(classes < -1) | (classes >= vocab_size)]
            if wrong.size:
                CALLS.refuse("ids", offender=int(wrong[0]), vocab_size=vocab_size)
    if given.kept is not None:
        kept, labels = np.asarray(given.kept)[valid], labels[valid]
        outside = labels[(kept >= 0).any(-1) & ~(kept == labels[:, None]).any(-1)]
        if outside.size:
            KEPT.refuse("outside", label=int(outside[0]))


def run_classes(given: Any, options: Options, arrays: Arrays, source: str) -> LogprobOutput[Any]:
    tokens = given.hidden if source == "hidden" else given.logits
    check_classes(*map(array_spec, (given.kept, given.ids, tokens)), source=source)
    columns = arrays.hidden.shape[-1]
    if arrays.weight is not None:
        columns = arrays.weight.shape[int(options.transposed)]
    check_values(given, options.axis.vocab_size if options.axis else columns)
    arrays = arrays._replace(kept=array(given.kept), ids=array(given.ids))
    per_token = True, True if options.entropy else None, True, True
    outputs = LogprobOutput(*per_token, None if given.ids is None else True)
    return run(_class_logprobs_jit, options, arrays, outputs)


def head_classes(given: Arguments, place: Placement | None = None) -> LogprobOutput[Any]:
    """`chunked_logprobs` with `kept` or `ids`."""
    options, arrays = bind(given, place, recompute=True)
    return run_classes(given, options, arrays, "hidden")


def given_classes(given: LogitsArguments) -> LogprobOutput[Any]:
    """`vocab_parallel_logprobs` with `kept` or `ids`."""
    options, arrays = bind_logits(given)
    KEPT.require("smoothing", not given.label_smoothing, eps=given.label_smoothing)
    return run_classes(given, options, arrays, "logits")
