"""What a trace takes: options, arrays, and the axes of its mesh inside a `shard_map` of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from xentlib.arguments import Scalars
from xentlib.jax.core.vocab import Axis

T = TypeVar("T")
Axes = tuple[Any, ...]  # names of mesh axes, the slowest first
# Of a head's arrays, in the order of `Needs` and of the gradients.
DIFFERENTIATED = ("hidden", "weight", "bias", "low_in", "low_out")
# Of these there is one for each token, or one for all.
PER_TOKEN = ("where", "token_weights", "temperature")


class MeshAxes(NamedTuple):
    """Inside a `shard_map` of ours: axes that spread tokens, and those that shard each dimension of
    what this device needs of the head."""

    tokens: Axes
    weight: tuple[Axes, Axes]
    bias: tuple[Axes]


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
    mesh_axes: MeshAxes | None = None
    # Mesh axes whose devices have tokens of their own, all of which each device's rows multiply.
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


def with_arrays(options: Options, constants: Constants) -> Options:
    """Options of a trace, in the compute dtype."""
    arrays: Any = {k: x.astype(options.compute_dtype) for k, x in constants.scalars.items()}
    return options._replace(scalars=options.scalars._replace(**arrays))


def as_gradients(gradients: dict[str, jax.Array | None]) -> Any:
    """By name, in the tree of the arrays; None is no gradient."""
    none: Any = dict.fromkeys(Arrays._fields)
    return Arrays(**(none | gradients))


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


def own_piece(gradient: jax.Array, cut: tuple[Axes, ...]) -> jax.Array:
    """Summed over the devices that have the other shards."""
    for dimension, names in enumerate(cut):
        if names:
            gradient = lax.psum_scatter(gradient, names, scatter_dimension=dimension, tiled=True)
    return gradient


def of_all_tokens(mesh_axes: MeshAxes | None, x: T) -> T:
    """Sums over the tokens of this device, made those of all."""
    total: T = lax.psum(x, mesh_axes.tokens) if mesh_axes and mesh_axes.tokens else x
    return total
