"""The one door from a public call to a trace: place, describe, check, make arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xentlib.arguments import Arguments, LogitsArguments, Scalars
from xentlib.checks.call import LogitsProblem, check_head, check_logits, check_reduced
from xentlib.checks.lora import check_low_rank, check_low_rank_here
from xentlib.checks.route import check_own_tokens, check_route_here
from xentlib.checks.validators import plain
from xentlib.dtypes import ITEMSIZE
from xentlib.jax.array_spec import array, array_spec, as_array, is_array, need_x64, only_arrays
from xentlib.jax.core.tokens import check_labels, check_values
from xentlib.jax.core.vocab import Axis, axis_for, axis_of, varies_over
from xentlib.jax.head import Placement, Spread, alone, axes_of, placed
from xentlib.jax.heads import head_of, unwrapped
from xentlib.jax.lora import described, unpacked
from xentlib.plan import default_chunk_bytes


class Options(NamedTuple):
    """What a trace depends on; hashable, until a trace puts arrays in place of numbers."""

    ignore_index: int
    gemm_dtype: str
    compute_dtype: str
    output_dtype: str
    chunk_bytes: int
    scalars: Scalars = Scalars()  # at the default until the trace, where one is an array
    mean: bool = False
    entropy: bool = False
    predicted: bool = False
    transposed: bool = False
    axis: Axis | None = None
    spread: Spread | None = None
    # Mesh axes whose devices have tokens of their own, all of which meet each device's rows.
    gathered: tuple[Any, ...] = ()


class Constants(NamedTuple):
    """Arrays without a gradient, flat; None where absent."""

    where: jax.Array | None = None
    token_weights: jax.Array | None = None
    logit_scale: jax.Array | None = None
    temperature: jax.Array | None = None
    denominator: jax.Array | None = None
    shard: jax.Array | None = None  # [2] start and stop of this device's classes, if given
    # Of those that are arrays, so that no program is compiled for each number
    scalars: Mapping[str, jax.Array] = {}
    class_weights: jax.Array | None = None  # [V]
    keep: jax.Array | None = None  # [N, H], of a `LowRankHead`, as is the next
    scale: jax.Array | None = None


# Of a head's arrays, in the order of `Needs` and of the gradients.
DIFFERENTIATED = ("hidden", "weight", "bias", "low_in", "low_out")
# Of these there is one for each token, or one for all.
PER_TOKEN = ("where", "token_weights", "temperature")


class Arrays(NamedTuple):
    """What a trace takes beside its options."""

    hidden: jax.Array  # or logits
    labels: jax.Array
    constants: Constants
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    low_in: jax.Array | None = None  # A [R, H] and B [V, R] of a `LowRankHead`
    low_out: jax.Array | None = None

    @property
    def leaves(self) -> tuple[jax.Array | None, ...]:
        """What has gradients."""
        return tuple(getattr(self, name) for name in DIFFERENTIATED)


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
    check_reduced(given.reduce_hidden_grad)
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
    check_route_here(
        given, placed=place is not None, alone=given.gather != "auto" or alone(hidden, weight)
    )
    if given.tokens_parallel is not None:
        check_own_tokens(varies_over(hidden, given.tokens_parallel), given.tokens_parallel)
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
        spread=place.spread if place else None,
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


def with_arrays(options: Options, constants: Constants) -> Options:
    """Options of a trace, in the compute dtype."""
    arrays: Any = {k: x.astype(options.compute_dtype) for k, x in constants.scalars.items()}
    return options._replace(scalars=options.scalars._replace(**arrays))


def as_gradients(found: dict[str, jax.Array | None]) -> Any:
    """By name, in the tree of the arrays; None is no gradient."""
    none: Any = dict.fromkeys(Arrays._fields)
    return Arrays(**(none | found))


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


def flat(arrays: Arrays) -> Arrays:
    """As a trace takes them: [N, H], and per token [N]."""

    def one(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.reshape(x, (-1,))

    hidden, labels, constants = arrays.hidden, arrays.labels, arrays.constants
    shape, keep = (labels.size, hidden.shape[-1]), constants.keep
    per_token: dict[str, Any] = {n: one(getattr(constants, n)) for n in PER_TOKEN}
    return arrays._replace(
        hidden=jnp.reshape(hidden, shape),
        labels=jnp.reshape(labels, (-1,)),
        constants=constants._replace(
            keep=None if keep is None else jnp.reshape(keep, shape), **per_token
        ),
    )
