"""How the head is placed, in JAX: whole arrays on a mesh, of which each device takes a part, and
shards over the axes that spread tokens, gathered once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib.arguments import Arguments
from xentlib.checks.shards import check_route, check_rows_stay
from xentlib.checks.validators import check_floating, check_shards, plain
from xentlib.head import LowRankHead
from xentlib.jax.array_spec import array_spec
from xentlib.jax.core.call import Arrays, Axes, Options, Placement, flat
from xentlib.jax.core.device import target_of
from xentlib.jax.core.logits import is_size
from xentlib.jax.core.vocab import Axis
from xentlib.shards import PaddedVocab

T = TypeVar("T")
Function = Callable[[Options, Arrays], T]


def axes_of(entry: Any) -> Axes:
    """Of one dimension in a PartitionSpec."""
    return () if entry is None else tuple(entry) if isinstance(entry, tuple) else (entry,)


def placed(args: Arguments, low: LowRankHead[Any] | None, *, recompute: bool) -> Placement | None:
    """By the arrays' types, on a mesh with Explicit axes."""
    hidden, weight = args.hidden, args.weight
    shardings = [explicit(x) for x in (hidden, weight, args.bias)]
    meshes = [sharding[0] for sharding in (*shardings, *map(explicit, low or ())) if sharding]
    if not meshes or jnp.ndim(weight) != 2:  # the latter is refused where shapes are checked
        return None
    tokens, head, bias_spec = (sharding[1] if sharding else P() for sharding in shardings)
    tokens = P(*tokens[: jnp.ndim(hidden) - 1])
    return place(meshes[0], tokens, head, bias_spec, args, recompute=recompute)


def explicit(x: Any) -> tuple[Any, P] | None:
    """Mesh and spec of an array whose type says how it is sharded."""
    if not isinstance(x, jax.Array):
        return None
    sharding = jax.typeof(x).sharding
    named = {name for entry in sharding.spec for name in axes_of(entry)}
    return (sharding.mesh, sharding.spec) if named else None


def alone(*arrays: Any) -> bool:
    """Whether no mesh is known of whose axes the compiler places arrays: a device has all of them,
    or inside `shard_map` what is its own."""
    meshes = [jax.typeof(x).sharding.mesh for x in arrays]
    return not any(
        kind is AxisType.Auto and mesh.shape[name] > 1
        for mesh in (*meshes, jax.sharding.get_abstract_mesh())
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
    )


def configured(args: Arguments, mesh: Any, tokens: Any, weight: Any) -> Placement | None:
    """By a trainer's own configuration: `tokens` and `weight` say which axes of its mesh spread the
    leading dimensions of the hidden states and the head.

    Axes that the mesh does not have, or that have one device, spread nothing. Explicit axes are
    read from the arrays' types, and inside `shard_map` arrays are this device's own.
    """
    types = [] if mesh is None or mesh.size == 1 else list(mesh.axis_types)
    if not types or any(kind is not AxisType.Auto for kind in types):
        return None

    def on_mesh(spec: Any) -> P:
        spread = ([one for one in axes_of(entry) if mesh.shape.get(one, 1) > 1] for entry in spec)
        return P(*(tuple(names) or None for names in spread))

    return place(mesh, on_mesh(tokens), on_mesh(weight), P(), args)


def place(
    mesh: Any, tokens: P, weight: P, bias: P, args: Arguments, *, recompute: bool = False
) -> Placement:
    """Axes of the vocabulary that spread no tokens, the leading ones, stay spread; shards over
    token axes are gathered by us, over others by the compiler before the call. With
    `gather="hidden"` all axes of the vocabulary stay spread, and tokens are gathered over theirs.

    `vocab_parallel` names the axes that stay spread, or None. `recompute`: the function's backward
    reads the head's values again, which is for `gather="auto"`.
    """
    layout, parallel, stay = args.weight_layout, args.vocab_parallel, args.gather == "hidden"
    shape = jnp.shape(args.weight)
    name, classes = parallel if isinstance(parallel, PaddedVocab) else (parallel, None)
    over = tuple(one for entry in tokens for one in axes_of(entry))
    entries = (*weight, None, None)[:2]
    v, h = map(axes_of, entries if layout == "VH" else entries[::-1])
    leading = [i for i, one in enumerate(v) if one in over]
    of_others = v[: min(leading, default=len(v))] if name is None else axes_of(name)
    of_rows = v if v[: len(axes_of(name))] == axes_of(name) else of_others
    if args.gather == "auto":
        sizes = {True: 1, False: 1}  # of the axes that spread tokens, and of the others
        for one in of_rows:
            sizes[one in over] *= mesh.shape[one]
        there = any(one in over for one in of_rows) and not any(one in over for one in h)
        stay = there and travels(args, sizes[False], sizes[True], recompute=recompute)
    kept = of_rows if stay else of_others

    def pieces(axes: Axes, kept: Axes = ()) -> Axes:
        rest = axes[len(kept) :] if axes[: len(kept)] == kept else ()
        return tuple(one for one in rest if one in over)

    cut = (pieces(v, kept), pieces(h))
    bias_axes = pieces(axes_of((*bias, None)[0]), kept)
    gathered = tuple(one for one in kept if one in over) if stay else ()
    if stay:
        check_rows_stay(over, kept, h)
    columns = shape[0 if layout == "VH" else 1]
    axis = None
    if kept:
        ranks = math.prod(mesh.shape[one] for one in kept)
        classes = columns if classes is None else classes
        check_shards((columns // ranks,) * ranks, classes)
        axis = Axis(kept if len(kept) > 1 else kept[0], classes)
    specs = ((*kept, *cut[0]) or None, cut[1] or None)
    if layout == "HV":
        cut, specs = cut[::-1], specs[::-1]
    return Placement(
        mesh=mesh,
        tokens=tokens,
        weight=P(*specs),
        bias=P((*kept, *bias_axes) or None),
        # The axes that spread tokens are gathered, and d B is summed over them, by the compiler: R
        # columns, where the weight has H.
        low_out=P(kept or None, None),
        axis=axis,
        gathered=gathered,
        over=over,
        weight_cut=cut,
        bias_cut=(bias_axes,),
    )


def travels(args: Arguments, shards: int, ranks: int, *, recompute: bool) -> bool:
    """Whether `gather="auto"` stands for "hidden", of a vocabulary in `shards` that are spread over
    `ranks` with tokens of their own."""
    count = plain(args.tokens_per_rank)
    told = args._replace(vocab_parallel=None, tokens_parallel=None, tokens_per_rank=count)
    check_route(told)
    hidden, weight = args.hidden, args.weight
    for name, x in (("hidden", hidden), ("weight", weight)):
        check_floating(name, array_spec(x))
    dtypes = [str(x.dtype) for x in (hidden, weight)]
    columns, width = weight.shape if args.weight_layout == "VH" else weight.shape[::-1]
    from xentlib.plan.routes import choose_gather

    chosen = choose_gather(
        count,
        columns // shards,
        width,
        ranks,
        overlapped=False,
        dtype=dtypes[0],
        head_dtype=dtypes[1],
        reduce_dtype="float64" if "float64" in dtypes else "float32",
        param_dtype=dtypes[1],
        recompute=recompute,
        kept=True,  # what is gathered is there until the backward
        max_chunk_bytes=args.max_chunk_bytes,
        platform="cpu" if target_of(hidden, weight).platform == "cpu" else "gpu",
    )
    return chosen == "hidden"  # without a limit of memory it never is "stream"


def run(function: Function[T], options: Options, arrays: Arrays, outputs: T) -> T:
    """`function(options, arrays)` of flat arrays, on each device's part of those that are on a
    mesh; `outputs` is like its result and true where there is one entry per token.

    Gradients come back where the arrays were.
    """
    place = options.place
    how: tuple[Any, ...] = (function, options) if place is None else (function, options, place)
    local: Any = of_flat if place is None else over_mesh
    on_devices: Any = partial(local, *how, outputs)
    if is_size(arrays.labels.size, 0):
        # Of no token every result is 0 or empty, and XLA ends the process, or refuses a `shard_map`
        # of nothing but empty arrays. Traced all the same, for what a call is refused for.
        none: T = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(on_devices, arrays)
        )
        return none
    result: T = on_devices(arrays)
    return result


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def over_mesh(
    function: Function[T], options: Options, place: Placement, outputs: T, arrays: Arrays
) -> T:
    specs = specs_of(place, arrays)
    if arrays.teacher is not None:
        of_teacher = options.divergence.teacher.place
        specs = specs._replace(teacher=specs_of(of_teacher, arrays.teacher))
    types = dict(zip(place.mesh.axis_names, place.mesh.axis_types))
    names = {name for name, kind in types.items() if kind is not AxisType.Manual}
    if AxisType.Explicit in types.values():
        arrays = jax.tree.map(
            lambda x, spec: jax.sharding.reshard(x, NamedSharding(place.mesh, spec)), arrays, specs
        )
    result: T = jax.shard_map(
        partial(of_flat, function, options, outputs),
        mesh=place.mesh,
        in_specs=(specs,),
        out_specs=jax.tree.map(lambda per_token: place.tokens if per_token else P(), outputs),
        axis_names=names,
    )(arrays)
    return result


def specs_of(place: Placement, arrays: Arrays) -> Arrays:
    """Of each array, but for those of a teacher."""
    leading, rows = arrays.labels.ndim, place.tokens
    states = P(*(*rows, *(None,) * leading)[:leading], None)
    hidden = states if arrays.weight is not None else P(*states[:-1], place.low_out[0])
    known = {"class_weights": P(), "hidden": hidden, "weight": place.weight}
    known |= dict.fromkeys(("keep", "kept", "ids", "log_q"), states)
    known |= {"labels": rows, "bias": place.bias, "low_in": P(), "low_out": place.low_out}
    specs = jax.tree.map(lambda x: rows if x.ndim == leading else P(), arrays)
    filled: Arrays = specs._replace(
        **{name: spec for name, spec in known.items() if getattr(arrays, name) is not None}
    )
    return filled


def of_flat(function: Function[T], options: Options, outputs: T, arrays: Arrays) -> T:
    """Of arrays with any leading dimensions, or this device's part of them."""
    shape = arrays.labels.shape
    result: T = jax.tree.map(
        lambda per_token, x: x.reshape(*shape, *x.shape[1:]) if per_token else x,
        outputs,
        function(options, flat(arrays)),
    )
    return result


def whole_rows(options: Options, arrays: Arrays) -> Arrays:
    """With the head that this device multiplies, if any, gathered once, before the loop."""
    place = options.place
    if arrays.weight is None:
        return arrays
    if place is None:
        width = 0 if options.transposed else 1
        dimensions = {"hidden": 1, "weight": width, "low_in": 1, "low_out": 1}
        fields = {name: (getattr(arrays, name), k) for name, k in dimensions.items()}
        whole: Any = {name: uncut(x, k) for name, (x, k) in fields.items() if x is not None}
        return arrays._replace(**whole)

    def gather(x: jax.Array, cut: tuple[Axes, ...]) -> jax.Array:
        for dimension, names in enumerate(cut):
            x = lax.all_gather(x, names, axis=dimension, tiled=True) if names else x
        return x

    bias = None if arrays.bias is None else gather(arrays.bias, place.bias_cut)
    return arrays._replace(weight=gather(arrays.weight, place.weight_cut), bias=bias)


def uncut(x: jax.Array, dimension: int) -> jax.Array:
    """Not sharded in `dimension`, where the compiler places arrays: sharded there, it would
    multiply shards and sum [chunk, V] logits over devices in each iteration."""
    mesh = jax.typeof(x).sharding.mesh
    if mesh.empty or mesh.size == 1 or AxisType.Auto not in mesh.axis_types:
        return x
    spec = P(*(None if i == dimension else P.UNCONSTRAINED for i in range(x.ndim)))
    whole: jax.Array = lax.with_sharding_constraint(x, NamedSharding(mesh, spec))
    return whole
