"""What a trace takes: options, arrays, and where these are on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from xentlib.arguments import Scalars
from xentlib.jax.core.vocab import Axis
from xentlib.jax.derivatives import Needs

T = TypeVar("T")
Axes = tuple[Any, ...]  # names of mesh axes, the slowest first
# Of a head's arrays, in the order of the gradients.
DIFFERENTIATED = Needs._fields
# Of these there is one for each token, or one for all.
PER_TOKEN = ("where", "token_weights", "temperature")


class Placement(NamedTuple):
    """Of a call on whole arrays: where each array's parts are on a mesh."""

    mesh: Any
    tokens: P  # of the leading dimensions
    weight: P
    bias: P
    low_out: P
    axis: Axis | None
    gathered: Axes  # of the axes that spread tokens, those whose devices send them each other
    over: Axes  # axes that spread tokens
    # Axes that shard each dimension of what a device needs of the head
    weight_cut: tuple[Axes, Axes]
    bias_cut: tuple[Axes]


class Options(NamedTuple):
    """What a trace depends on; hashable, until a trace puts arrays in place of numbers."""

    ignore_index: int
    gemm_dtype: str
    compute_dtype: str
    output_dtype: str
    chunk_bytes: int
    platform: str  # that the program is for
    scalars: Scalars = Scalars()  # at the default until the trace, where one is an array
    mean: bool = False
    entropy: bool = False
    predicted: bool = False
    recompute: bool = False  # gradients of a loss in its backward, from logits computed again
    kept: int = -1  # how many of further classes are of a kept set; -1: none is kept
    top_k: int = 0  # how many of the most probable classes the call finds
    transposed: bool = False
    axis: Axis | None = None
    place: Placement | None = None
    block_classes: int = 0  # at most, of a head that may be read in blocks; 0: rows are whole
    # Mesh axes whose devices have tokens of their own, all of which each device's rows multiply.
    gathered: tuple[Any, ...] = ()
    divergence: Any = None  # a `DivergenceOptions`, or a `TopKOptions`


class TopKOptions(NamedTuple):
    """What a divergence from a teacher's most probable classes adds."""

    kind: str
    tail: str
    squared: bool
    each: bool


class DivergenceOptions(NamedTuple):
    """What a divergence adds, and the options of its teacher's logits."""

    kind: str
    squared: bool
    each: bool
    teacher_entropy: bool
    teacher: Options | None  # None for `SoftLabels`


class Arrays(NamedTuple):
    """What a trace takes beside its options; None where absent."""

    hidden: jax.Array  # or logits
    labels: jax.Array
    # Of a token, and of the logits: without a gradient
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
    teacher: Any = None  # `Arrays` of a teacher's logits
    kept: jax.Array | None = None  # [N, any] classes of each token, as is the next
    ids: jax.Array | None = None  # of a trace: all whose logits are taken out
    log_q: jax.Array | None = None  # of a teacher, of these ids
    # What has gradients, with `hidden`
    weight: jax.Array | None = None
    bias: jax.Array | None = None
    low_in: jax.Array | None = None  # A [R, H] and B [V, R] of a `LowRankHead`
    low_out: jax.Array | None = None

    @property
    def leaves(self) -> tuple[jax.Array | None, ...]:
        """What has gradients."""
        return tuple(getattr(self, name) for name in DIFFERENTIATED)

    @property
    def constants(self) -> Arrays:
        """What has none, beside the labels."""
        others: Any = dict.fromkeys(("labels", *DIFFERENTIATED))
        return self._replace(**others)


def with_arrays(options: Options, scalars: Mapping[str, jax.Array]) -> Options:
    """Options of a trace, in the compute dtype."""
    arrays: Any = {name: x.astype(options.compute_dtype) for name, x in scalars.items()}
    return options._replace(scalars=options.scalars._replace(**arrays))


def as_gradients(gradients: dict[str, jax.Array | None]) -> Any:
    """By name, in the tree of the arrays; None is no gradient."""
    none: Any = dict.fromkeys(Arrays._fields)
    return Arrays(**(none | gradients))


def flat(arrays: Arrays) -> Arrays:
    """As a trace takes them: [N, H], and per token [N]."""
    shape = (arrays.labels.size, arrays.hidden.shape[-1])
    shapes = {**dict.fromkeys(PER_TOKEN, (-1,)), "hidden": shape, "labels": (-1,), "keep": shape}
    for name in ("kept", "ids", "log_q"):
        if getattr(arrays, name) is not None:
            shapes[name] = (arrays.labels.size, getattr(arrays, name).shape[-1])
    fields = ((name, getattr(arrays, name)) for name in shapes)
    reshaped: Any = {name: jnp.reshape(x, shapes[name]) for name, x in fields if x is not None}
    if arrays.teacher is not None:
        reshaped["teacher"] = flat(arrays.teacher)
    return arrays._replace(**reshaped)


def own_piece(gradient: jax.Array, cut: tuple[Axes, ...]) -> jax.Array:
    """Summed over the devices that have the other shards."""
    for dimension, names in enumerate(cut):
        if names:
            gradient = lax.psum_scatter(gradient, names, scatter_dimension=dimension, tiled=True)
    return gradient


def sum_over_devices(options: Options, x: T) -> T:
    """Sums over the tokens of this device, made those of all devices whose tokens are in a sum."""
    total: T = lax.psum(x, options.place.over) if options.place and options.place.over else x
    return total
