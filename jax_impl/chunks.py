"""What the heads share: tokens packed and cut into chunks, and steps 1, 2, 7 and 8 of `xentlib.nll`
for one chunk; how `jax.custom_vjp` and a public function hand over their arguments.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, M = N filled up to chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xentlib.checks import NLLProblem, check_label_range
from xentlib.jax.describe import as_array, concrete_on_cpu, need_x64
from xentlib.jax.gemm import column_sums, contract, least_rows, round_to
from xentlib.plan import plan_chunks

__all__ = [
    "Chunk",
    "Chunks",
    "Constants",
    "Gradients",
    "Needs",
    "Options",
    "add_gradients",
    "cut",
    "fp16_exponent",
    "over_chunks",
    "prepare",
    "round_gradients",
    "scaled",
    "unpack",
    "values_of",
    "wanted",
    "without_power",
    "zero_gradients",
]

# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11

Needs = tuple[bool, bool, bool]  # gradients of hidden, weight, bias
T = TypeVar("T")


class Options(NamedTuple):
    """What a trace depends on; hashable."""

    ignore_index: int
    softcap: float | None
    label_smoothing: float
    z_loss: float
    mean: bool
    entropy: bool
    gemm_dtype: str
    compute_dtype: str
    output_dtype: str
    chunk_bytes: int
    transposed: bool


class Constants(NamedTuple):
    """Arrays without a gradient, flat; None where absent."""

    where: jax.Array | None
    token_weights: jax.Array | None
    logit_scale: jax.Array | None
    temperature: jax.Array | None
    denominator: jax.Array | None


class Gradients(NamedTuple):
    """Accumulators in the compute dtype, empty where not wanted.

    Never None: JAX keeps the residual tree of the last trace of a function beside a cached earlier
    one, and fails where their numbers of leaves differ.
    """

    hidden: jax.Array
    weight: jax.Array
    bias: jax.Array


class Chunks(NamedTuple):
    """A call, its valid tokens packed to the front (step 1)."""

    options: Options
    constants: Constants
    hidden: jax.Array  # [N, H]
    operand: jax.Array  # the head in the GEMM dtype
    bias: jax.Array | None  # [V], compute dtype
    labels: jax.Array  # [N] int32; 0 of tokens that are not valid or not in the vocabulary
    valid: jax.Array  # [N]
    bad: jax.Array  # [N] valid, and the label lies outside the vocabulary
    num_valid: jax.Array  # []
    order: jax.Array  # [M] the token of each packed row
    chunk: int

    @property
    def axes(self) -> tuple[int, int]:
        """Of the head: V, H."""
        return (1, 0) if self.options.transposed else (0, 1)

    @property
    def vocab_size(self) -> int:
        return int(self.operand.shape[self.axes[0]])


class Chunk(NamedTuple):
    """Rows of a chunk, its logits, and the softcap's derivative."""

    start: jax.Array
    in_chunk_T: jax.Array
    rows_T: jax.Array  # which token
    x_TH: jax.Array
    y_T1: jax.Array
    z_TV: jax.Array
    derivative_TV: jax.Array | None


def widen_labels(labels: Any) -> Any:
    """Labels in a dtype that holds `ignore_index` and V, so that 156 in uint8 is never -100."""
    return labels.astype(np.int32) if labels.dtype.itemsize < 4 else labels


def valid_tokens(labels: Any, where: Any, ignore_index: int) -> Any:
    unsigned = labels.dtype.kind == "u" and ignore_index < 0
    mask = labels == labels if unsigned else labels != ignore_index
    return mask if where is None else mask & where


def cut(
    options: Options,
    hidden: jax.Array,
    weight: jax.Array,
    labels: jax.Array,
    bias: jax.Array | None,
    constants: Constants,
) -> Chunks:
    """Step 1: valid tokens first; their number bounds the loop, chunks without any cost nothing.

    `hidden` is [N, H], everything else flat.
    """
    num_tokens, hidden_size = hidden.shape
    vocab_size = weight.shape[1 if options.transposed else 0]
    labels = widen_labels(labels)
    valid_N = valid_tokens(labels, constants.where, options.ignore_index)
    in_range_N = (labels >= 0) & (labels < vocab_size)
    plan = plan_chunks(
        num_tokens,
        vocab_size,
        hidden_size,
        dtype=options.gemm_dtype,
        compute_dtype=options.compute_dtype,
        max_chunk_bytes=options.chunk_bytes,
    )
    rows = max(plan.chunk_tokens, least_rows())
    order_M = jnp.argsort(~valid_N, stable=True).astype(jnp.int32)
    return Chunks(
        options,
        constants,
        hidden,
        weight.astype(options.gemm_dtype),
        None if bias is None else bias.astype(options.compute_dtype),
        jnp.where(valid_N & in_range_N, labels, 0).astype(jnp.int32),
        valid_N,
        valid_N & ~in_range_N,
        valid_N.sum(dtype=jnp.int32),
        jnp.pad(order_M, (0, -num_tokens % rows)),
        rows,
    )


def over_chunks(chunks: Chunks, body: Callable[[Chunk, T], T], carry: T) -> T:
    """`body(chunk, carry)` for every chunk that holds a valid token, ascending."""
    if not chunks.labels.size:
        return carry
    trips = (chunks.num_valid + chunks.chunk - 1) // chunks.chunk
    result: T = lax.fori_loop(
        0, trips, lambda index, carry: body(_logits(chunks, index), carry), carry
    )
    return result


def _logits(chunks: Chunks, index: jax.Array) -> Chunk:
    """Step 2 for one chunk. Rows after the last valid token are 0."""
    options, constants, compute = chunks.options, chunks.constants, chunks.options.compute_dtype
    start = index * chunks.chunk
    in_chunk_T = start + jnp.arange(chunks.chunk, dtype=jnp.int32) < chunks.num_valid
    rows_T = lax.dynamic_slice(chunks.order, (start,), (chunks.chunk,))
    x_TH = jnp.where(in_chunk_T[:, None], chunks.hidden[rows_T], 0).astype(options.gemm_dtype)
    z_TV = contract(x_TH, chunks.operand, 1, chunks.axes[1], compute)
    temperature_T = None
    if constants.temperature is not None:
        temperature_T = jnp.broadcast_to(constants.temperature, chunks.labels.shape)[rows_T]
        temperature_T = temperature_T.astype(compute)
    z_TV, derivative_TV = shape_logits(
        z_TV, chunks.bias, constants.logit_scale, options.softcap, temperature_T
    )
    y_T1 = chunks.labels[rows_T][:, None]
    return Chunk(start, in_chunk_T, rows_T, x_TH, y_T1, z_TV, derivative_TV)


def shape_logits(
    z_TV: jax.Array,
    bias_V: jax.Array | None,
    logit_scale: jax.Array | None,
    softcap: float | None,
    temperature_T: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Bias, scale, softcap and temperature (step 2), and the softcap's derivative."""
    if bias_V is not None:
        z_TV = z_TV + bias_V[None, :]
    if logit_scale is not None:
        z_TV = z_TV * logit_scale.astype(z_TV.dtype)
    derivative = None
    if softcap is not None:
        tanh_TV = jnp.tanh(z_TV / softcap)
        derivative = 1.0 - tanh_TV * tanh_TV
        z_TV = tanh_TV * softcap
    if temperature_T is not None:
        z_TV = z_TV / temperature_T[:, None]
    return z_TV, derivative


def unpack(chunks: Chunks, rows_RM: jax.Array) -> jax.Array:
    """Packed rows of per-token values as [R, N]: 0 if not valid, NaN if not in the vocabulary."""
    num_tokens = chunks.labels.shape[0]
    values_RN = jnp.zeros((rows_RM.shape[0], num_tokens), rows_RM.dtype)
    values_RN = values_RN.at[:, chunks.order[:num_tokens]].set(rows_RM[:, :num_tokens])
    values_RN = jnp.where(chunks.bad[None, :], jnp.nan, values_RN)
    return jnp.where(chunks.valid[None, :], values_RN, 0.0)


def fp16_exponent(factor_N: jax.Array) -> jax.Array:
    """Of the power of two that dz carries under float16."""
    largest = jnp.abs(factor_N).max(initial=0.0)
    exponent: jax.Array = FP16_EXPONENT - jnp.frexp(largest)[1]
    return exponent


def without_power(gradients: Gradients, exponent: jax.Array, compute_dtype: str) -> Gradients:
    """Accumulators without the power of two that dz carried."""
    unscale = jnp.ldexp(jnp.ones((), compute_dtype), -exponent)
    return Gradients(*(x * unscale for x in gradients))


def scaled(chunks: Chunks, factor_N: jax.Array) -> jax.Array:
    """A token's factor through scale and temperature: what step 7 can do before there is a dz."""
    constants, dtype = chunks.constants, factor_N.dtype
    if constants.logit_scale is not None:
        factor_N = factor_N * constants.logit_scale.astype(dtype)
    if constants.temperature is not None:
        factor_N = factor_N / jnp.broadcast_to(constants.temperature, factor_N.shape).astype(dtype)
    return factor_N


def zero_gradients(chunks: Chunks, needs: Needs) -> Gradients:
    need_hidden, need_weight, need_bias = needs
    compute = chunks.options.compute_dtype
    num_tokens, hidden_size = chunks.hidden.shape
    return Gradients(
        jnp.zeros((num_tokens if need_hidden else 0, hidden_size), compute),
        jnp.zeros(chunks.operand.shape if need_weight else (0, 0), compute),
        jnp.zeros((chunks.vocab_size if need_bias else 0,), compute),
    )


def add_gradients(
    chunks: Chunks,
    chunk: Chunk,
    needs: Needs,
    gradients: Gradients,
    dz_TV: jax.Array,
    dz_y_T: jax.Array,
) -> Gradients:
    """Steps 7 and 8: dz of the rest (0 in the target column) and of the target into the sums."""
    options, compute = chunks.options, chunks.options.compute_dtype
    axis_v, _ = chunks.axes
    in_chunk_T, x_TH, y_T1 = chunk.in_chunk_T, chunk.x_TH, chunk.y_T1
    need_hidden, need_weight, need_bias = needs
    if chunk.derivative_TV is not None:
        dz_TV = dz_TV * chunk.derivative_TV
        dz_y_T = dz_y_T * jnp.take_along_axis(chunk.derivative_TV, y_T1, axis=1)[:, 0]
    dz_TV = jnp.where(in_chunk_T[:, None], dz_TV, 0.0)
    dz_y_T = jnp.where(in_chunk_T, dz_y_T, 0.0)
    y_T = y_T1[:, 0]
    if need_bias:
        total_V = gradients.bias + column_sums(dz_TV, compute)
        gradients = gradients._replace(bias=total_V.at[y_T].add(dz_y_T))
    dz_TV = round_to(dz_TV, options.gemm_dtype)
    dz_y_T1 = round_to(dz_y_T, options.gemm_dtype).astype(compute)[:, None]
    # 8. Gradient GEMMs of the rest, then the target's terms: they are most of both gradients, and
    # every small term that a GEMM adds after one is rounded at its size (tau of d hidden 4.8
    # against 1.5, of d weight on real text 9.6 against 1.5).
    if need_hidden:
        dx_TH = contract(dz_TV, chunks.operand, 1, axis_v, compute)
        w_y_TH = jnp.take(chunks.operand, y_T, axis=axis_v)
        w_y_TH = (w_y_TH.T if options.transposed else w_y_TH).astype(compute)
        dx_TH = dx_TH + dz_y_T1 * w_y_TH
        target_rows = jnp.where(in_chunk_T, chunk.rows_T, chunks.labels.shape[0])
        gradients = gradients._replace(
            hidden=gradients.hidden.at[target_rows].set(dx_TH, mode="drop")
        )
    if need_weight:
        left, right = (x_TH, dz_TV) if options.transposed else (dz_TV, x_TH)
        total = gradients.weight + contract(left, right, 0, 0, compute)
        own_TH = dz_y_T1 * x_TH.astype(compute)
        if options.transposed:
            total = total.at[:, y_T].add(own_TH.T)
        else:
            total = total.at[y_T].add(own_TH)
        gradients = gradients._replace(weight=total)
    return gradients


def round_gradients(
    gradients: Gradients, valid_N: jax.Array, dtypes: Sequence[str | None]
) -> list[jax.Array | None]:
    """Each accumulator rounded once to its input's dtype; None stands for a zero gradient."""
    hidden_NH = gradients.hidden
    if hidden_NH.size:
        gradients = gradients._replace(hidden=jnp.where(valid_N[:, None], hidden_NH, 0.0))
    return [
        round_to(accumulator, dtype) if accumulator.size and dtype is not None else None
        for accumulator, dtype in zip(gradients, dtypes, strict=True)
    ]


def wanted(constants: Any, *primals: Any) -> Needs:
    """Which gradients a `custom_vjp` is asked for: a frozen head or trunk costs no GEMM.

    With symbolic zeros its arguments come with `.perturbed`.
    """
    for name, primal in constants._asdict().items():
        if primal is not None and primal.perturbed:
            raise ValueError(
                f"`{name}` must be a constant; got an array that is differentiated, whose gradient "
                f"is not computed. Pass `jax.lax.stop_gradient({name})`."
            )
    hidden, weight, bias = (p is not None and bool(p.perturbed) for p in primals)
    return hidden, weight, bias


def values_of(primals: Any) -> Any:
    """The arrays of arguments that come with `.perturbed`."""
    return jax.tree.map(lambda p: p.value, primals, is_leaf=lambda p: hasattr(p, "perturbed"))


def prepare(
    problem: NLLProblem,
    hidden: Any,
    weight: Any,
    labels: Any,
    bias: Any,
    *,
    where: Any,
    ignore_index: int,
    logit_scale: Any,
    temperature: Any,
    token_weights: Any = None,
    denominator: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, Constants]:
    """A public call's arrays as a trace takes them: flat. Labels that can be read are checked."""
    need_x64(problem.compute_dtype)
    if concrete_on_cpu(labels, where):
        _check_labels(np.asarray(labels), where, ignore_index, problem.vocab_size)

    def flat(x: Any) -> Any:
        return None if x is None else jnp.reshape(jnp.asarray(x), (-1,))

    return (
        jnp.reshape(jnp.asarray(hidden), (problem.num_tokens, problem.hidden_size)),
        jnp.asarray(weight),
        flat(labels),
        None if bias is None else jnp.asarray(bias),
        Constants(
            flat(where),
            flat(token_weights),
            as_array(logit_scale, 1.0, problem.compute_dtype),
            flat(as_array(temperature, 1.0, problem.compute_dtype)),
            as_array(denominator, None, problem.compute_dtype),
        ),
    )


def _check_labels(labels: np.ndarray, where: Any, ignore_index: int, vocab_size: int) -> None:
    labels = widen_labels(labels)
    valid = valid_tokens(labels, None if where is None else np.asarray(where), ignore_index)
    offenders = labels[valid & ((labels < 0) | (labels >= vocab_size))]
    if offenders.size:
        check_label_range(int(offenders[0]), vocab_size, ignore_index)
