"""The one door from a public call to a trace: place, describe, check, make arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xentlib.arguments import Arguments, LogitsArguments, Scalars
from xentlib.checks.call import CALLS, LogitsProblem, check_head, check_logits
from xentlib.checks.lora import check_low_rank, check_low_rank_here
from xentlib.checks.shards import SHARDS, check_route, check_route_here
from xentlib.checks.validators import plain
from xentlib.dtypes import ITEMSIZE
from xentlib.jax.array_spec import array, array_spec, as_array, is_array, need_x64, only_arrays
from xentlib.jax.core.call import Arrays, Constants, Options
from xentlib.jax.core.tokens import check_labels, check_values
from xentlib.jax.core.vocab import axis_for, axis_of, varies_over
from xentlib.jax.head import described, head_of, unpacked, unwrapped
from xentlib.jax.placement import Placement, alone, axes_of, placed
from xentlib.plan import default_chunk_bytes


class Bound(NamedTuple):
    """A call as a trace takes it, and where its whole arrays are on a mesh."""

    options: Options
    arrays: Arrays
    place: Placement | None


def bind(given: Arguments, place: Placement | None = None, *, recompute: bool = False) -> Bound:
    """A call of a head's function; of `NLLHead`, which knows where its arrays are. `recompute`: its
    backward reads the head's values again."""
    given = Arguments(*map(unwrapped, map(plain, given)))
    only_arrays(
        {"hidden": given.hidden, "labels": given.labels},
        bias=given.bias,
        where=given.where,
        token_weights=given.token_weights,
        class_weights=given.class_weights,
    )
    given, low = unpacked(head_of(given))
    hidden, weight, labels, bias = given.hidden, given.weight, given.labels, given.bias
    if low is not None:
        check_low_rank_here(given)
    CALLS.require("reduced_in_jax", given.reduce_hidden_grad is not False)
    if place is None:
        place = placed(given, low, recompute=recompute)
    axis = place.axis if place else axis_of(given, None if low is None else low.b)
    problem = check_head(
        Arguments(*map(array_spec, given)),
        sharded=axis is not None and place is None,
        classes=None if axis is None else axis.vocab_size,
    )
    if low is not None:
        check_low_rank(described(low), array_spec(hidden), problem)
    vocab_size = problem.vocab_size if axis is None else axis.vocab_size
    gathered = place.gathered if place else axes_of(given.tokens_parallel)
    if (given.gather, given.tokens_parallel, given.tokens_per_rank) != ("head", None, None):
        check_route(given)
        check_route_here(
            given, placed=place is not None, alone=given.gather != "auto" or alone(hidden, weight)
        )
    if given.tokens_parallel is not None:
        varies = varies_over(hidden, given.tokens_parallel)
        SHARDS.require("own_tokens", varies, axis=given.tokens_parallel)
    check_values(given, vocab_size)
    need_x64(problem.compute_dtype)
    compute = problem.compute_dtype
    # Over shards a second chunk may cost an exchange or a GEMM.
    row_bytes = 0 if axis is not None else problem.vocab_size * ITEMSIZE[compute]
    chunk_bytes = default_chunk_bytes(jax.default_backend(), row_bytes=row_bytes)
    constants = Constants(
        where=array(given.where),
        token_weights=array(given.token_weights),
        logit_scale=as_array(given.logit_scale, 1.0, compute),
        temperature=as_array(given.temperature, 1.0, compute),
        denominator=as_array(given.denominator, None, compute),
        scalars=arrays_of(given),
        class_weights=array(given.class_weights),
        keep=None if low is None else array(low.keep),
        scale=None if low is None else as_array(low.scale, None, compute),
    )
    options = Options(
        ignore_index=given.ignore_index,
        scalars=numbers_of(given),
        mean=given.reduction == "mean",
        entropy=given.entropy or "entropy" in given.outputs,
        predicted="predicted" in given.outputs,
        gemm_dtype=problem.gemm_dtype,
        compute_dtype=compute,
        output_dtype=problem.output_dtype,
        chunk_bytes=given.max_chunk_bytes or chunk_bytes,
        transposed=given.weight_layout == "HV",
        axis=axis,
        mesh_axes=place.mesh_axes if place else None,
        gathered=gathered,
    )
    arrays = Arrays(
        hidden=array(hidden),
        labels=array(labels),
        constants=constants,
        weight=array(weight),
        bias=array(bias),
        low_in=None if low is None else array(low.a),
        low_out=None if low is None else array(low.b),
    )
    return Bound(options, arrays, place)


def bind_logits(given: LogitsArguments) -> tuple[LogitsProblem, Bound]:
    """The same of a function of given logits, and its sizes."""
    given = LogitsArguments(*map(unwrapped, map(plain, given)))
    only_arrays({"logits": given.logits, "labels": given.labels}, where=given.where)
    logits, labels, shard = given.logits, given.labels, given.shard
    problem = check_logits(LogitsArguments(*map(array_spec, given)))
    axis = None
    if given.vocab_parallel is not None:
        axis = axis_for(given.vocab_parallel, problem.columns, shard=shard, logits=logits)
    vocab_size = axis.vocab_size if axis else problem.columns
    check_labels(labels, given.where, given.ignore_index, vocab_size)
    need_x64(problem.compute_dtype)
    ends = None if shard is None else [jnp.int32(shard.start), jnp.int32(shard.stop)]
    constants = Constants(
        where=array(given.where),
        temperature=as_array(given.temperature, 1.0, problem.compute_dtype),
        shard=None if ends is None else jnp.stack(ends),
    )
    options = Options(
        ignore_index=given.ignore_index,
        scalars=numbers_of(given),
        entropy=given.entropy,
        gemm_dtype=str(logits.dtype),
        compute_dtype=problem.compute_dtype,
        output_dtype=problem.output_dtype,
        chunk_bytes=given.max_chunk_bytes or default_chunk_bytes(jax.default_backend()),
        axis=axis,
    )
    arrays = Arrays(array(logits), array(labels), constants)
    return problem, Bound(options, arrays, None)


def numbers_of(given: Arguments | LogitsArguments) -> Scalars:
    """What a trace may depend on; an array, and what the function does not have, at its default."""
    numbers: dict[str, Any] = Scalars()._asdict()
    for name in Scalars._fields:
        value = getattr(given, name, None)
        if value is not None and not is_array(value):
            numbers[name] = float(value)
    return Scalars(**numbers)


def arrays_of(given: Arguments) -> dict[str, Any]:
    """Those that are arrays."""
    return {x: array(y) for x in Scalars._fields if is_array(y := getattr(given, x))}
