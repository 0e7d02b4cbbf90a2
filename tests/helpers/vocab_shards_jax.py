"""`vocab_parallel=` in JAX for tests: one problem inside `jax.shard_map`, NumPy in and out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.vocab_shards import same_on_all_ranks, vocab_axis
from xentlib import PaddedVocab
from xentlib.jax import chunked_logprobs, chunked_nll
from xentlib.nll import OUTPUTS
from xentlib.parity.backends import GRADIENTS
from xentlib.parity.problem import Problem, upstream_of

# In rows that are no classes, in turn: whatever they reach shows.
PADDING = (np.nan, np.inf)


def mesh_of(types: Any = None, **axes: int) -> Any:
    """Over the first devices; Explicit axes unless told otherwise."""
    count = math.prod(axes.values())
    types = None if types is None else (types,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=jax.devices()[:count])


def padded(x: Any, axis: int, rows: int, fill: tuple[float, ...]) -> Any:
    extra = np.resize(np.array(fill, x.dtype), rows - x.shape[axis])
    shape = [len(extra) if i == axis else n for i, n in enumerate(x.shape)]
    column = np.expand_dims(extra, [i for i in range(x.ndim) if i != axis])
    return np.concatenate([x, np.broadcast_to(column, shape)], axis)


def arguments(
    p: Problem, kind: str, mesh: Any, over: Any, rows: int, data: Any = None, fill: Any = PADDING
) -> tuple:
    """Leaves (hidden, weight, bias) and the rest by name, all on the mesh; and their specs."""
    axis = vocab_axis(p.options)
    leaves = (p.hidden, padded(p.weight, axis, rows, fill), padded(p.bias, 0, rows, fill))
    leaf_specs = (P(data), P(None, over) if axis else P(over), P(over))
    rest = {
        "labels": p.labels,
        "where": p.where,
        "temperature": p.options.get("temperature"),
        "token_weights": p.token_weights if kind == "nll" else None,
        "class_weights": p.class_weights if kind == "nll" else None,
        "upstream": np.float32(p.upstream) if kind == "nll" else np.stack(upstream_of(p, 5)),
    }
    rest = {name: x for name, x in rest.items() if x is not None}
    specs = {name: P(*(None,) * (x.ndim - 1), data) if x.ndim else P() for name, x in rest.items()}
    specs |= {"class_weights": P()} if "class_weights" in rest else {}
    trees = ((leaves, rest), (leaf_specs, specs))
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), *trees), trees[1]


def value(kind: str, parallel: Any, options: dict, leaves: tuple, rest: dict) -> tuple:
    """A loss whose gradients of the outputs are the upstream ones, and the outputs."""
    rest = {"bias": leaves[2], "vocab_parallel": parallel, **rest}
    inputs, upstream = (*leaves[:2], rest.pop("labels")), rest.pop("upstream")
    if kind == "nll":
        out = chunked_nll(*inputs, outputs=OUTPUTS, **rest, **options)
        values = out._asdict()
        del values["denominator"]  # the weights' sum once more
        return upstream * out.loss, values
    out = chunked_logprobs(*inputs, entropy=True, **rest, **options)
    return sum((g.astype(x.dtype) * x).sum() for g, x in zip(upstream, out)), out._asdict()


def value_over_data(*given: Any) -> tuple:
    """The same on a part of the tokens, the loss being that of all."""
    total, out = value(*given)
    return jax.lax.psum(total, "data"), {"logprobs": out["logprobs"]}


def keywords(p: Problem, kind: str, columns: int, chunks: bool, audit: bool = False) -> dict:
    found = dict(p.options if kind == "nll" else p.per_token_options)
    found.pop("temperature", None)
    found |= {"compute_dtype": "float64"} if audit else {}
    return found | ({"max_chunk_bytes": 64 * columns * (8 if audit else 4)} if chunks else {})


def sharded(
    p: Problem,
    kind: str,
    mesh: Any,
    rows: int,
    *,
    over: Any = "tp",
    data: str | None = None,
    chunks: bool = True,
    audit: bool = False,
    check_vma: bool = True,
    inside: bool = False,
    jit: bool = True,
    fill: tuple[float, ...] = PADDING,
    wrap: Any = lambda f: f,
) -> dict[str, Any]:
    """Outputs and gradients by name, `rows` of the head on each device, several chunks."""
    size = p.weight.shape[vocab_axis(p.options)]
    ranks = math.prod(mesh.shape[name] for name in ((over,) if isinstance(over, str) else over))
    parallel = over if ranks * rows == size else PaddedVocab(over, size)
    with jax.enable_x64(audit):
        inputs, specs = arguments(p, kind, mesh, over, ranks * rows, data, fill)
        body = value_over_data if data else value
        body = wrap(partial(body, kind, parallel, keywords(p, kind, rows, chunks, audit)))
        spread = partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
        out_specs = (P(), P(data) if data else P())
        if inside:
            step = spread(jax.value_and_grad(body, has_aux=True), out_specs=(out_specs, specs[0]))
        else:
            step = jax.value_and_grad(spread(body, out_specs=out_specs), has_aux=True)
        (_, out), gradients = (jax.jit(step) if jit else step)(*inputs)
    found = {name: whole(x) for name, x in (out | dict(zip(GRADIENTS, gradients))).items()}
    for name, axis in (("d_weight", vocab_axis(p.options)), ("d_bias", 0)):
        found[name], beyond = np.split(found[name], [size], axis=axis)
        # No class, no gradient, unless a label that is none made its token NaN.
        assert np.isnan(found["logprobs"]).any() or not beyond.any(), name
    return found


def whole(x: Any) -> Any:
    """A result as NumPy, of the same bits wherever it is held twice (A13)."""
    held_by: dict[str, list] = {}
    for part in x.addressable_shards:
        held_by.setdefault(str(part.index), []).append(np.asarray(part.data))
    for copies in held_by.values():
        same_on_all_ranks(copies)
    if x.is_fully_addressable:
        return np.array(x)
    from jax.experimental.multihost_utils import process_allgather

    return np.array(process_allgather(x, tiled=True))
