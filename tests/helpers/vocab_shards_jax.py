"""`vocab_parallel=` in JAX for tests: one problem inside `jax.shard_map`, NumPy in and out, and how
it is held to the dense answer.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from helpers.vocab_shards import CASES, held, same_on_all_ranks, vocab_axis
from xentlib import PaddedVocab
from xentlib.contract import check, failures
from xentlib.jax import chunked_logprobs, chunked_nll
from xentlib.nll import OUTPUTS
from xentlib.tools.harness.backends import GRADIENTS, run, run_logprobs
from xentlib.tools.harness.problems import Case, Problem, upstream_of

# In rows that are no classes, in turn: whatever they reach shows.
PADDING = (np.nan, np.inf)
N, H = 221, 24  # as CASES have it
PLAIN, OPTIONS, KERNEL, LOW, NOTHING, WEIGHTS = (replace(case, tokens=N) for case in CASES)
EVEN = replace(PLAIN, id="even", vocab=156)
AUDIT = replace(OPTIONS, id="options-bf16", dtype="bfloat16")
KINDS = pytest.mark.parametrize("kind", ["nll", "logprobs"])


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
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Outputs and gradients by name, `rows` of the head on each device, several chunks; `more`
    options."""
    size = p.weight.shape[vocab_axis(p.options)]
    ranks = math.prod(mesh.shape[name] for name in ((over,) if isinstance(over, str) else over))
    parallel = over if ranks * rows == size else PaddedVocab(over, size)
    with jax.enable_x64(audit):
        inputs, specs = arguments(p, kind, mesh, over, ranks * rows, data, fill)
        body = value_over_data if data else value
        given = keywords(p, kind, rows, chunks, audit) | dict(more)
        body = wrap(partial(body, kind, parallel, given))
        spread = partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
        out_specs = (P(), P(data) if data else P())
        if inside:
            step = spread(jax.value_and_grad(body, has_aux=True), out_specs=(out_specs, specs[0]))
        else:
            step = jax.value_and_grad(spread(body, out_specs=out_specs), has_aux=True)
        (_, out), gradients = (jax.jit(step) if jit else step)(*inputs)
    results = out | dict(zip(GRADIENTS, gradients))
    found = {name: whole(x) for name, x in results.items() if x is not None}
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


DENSE: dict[tuple, Any] = {}


def dense_of(p: Problem, kind: str, backend: str, *, audit: bool = False) -> Any:
    key = (p.text, kind, backend, audit)
    if key not in DENSE and kind == "nll":
        DENSE[key] = run(backend, p, audit=audit)
    elif key not in DENSE:
        DENSE[key] = run_logprobs(backend, p, upstream_of(p, 5), audit=audit)
    return DENSE[key]


def oracle_of(p: Problem, kind: str) -> Any:
    rounding = {"dz_dtype": "bfloat16" if p.hidden.dtype.itemsize == 2 else "float64"}
    if kind == "nll":
        return p.reference(**rounding)
    return p.per_token_reference(upstream_of(p, 5), **rounding)


def hold_shards(p: Problem, kind: str, got: dict[str, Any], world: int = 0) -> None:
    """A0, A2, A5, A6, A7 for what one call gave; on one device the dense values to the bit."""
    low, oracle = p.hidden.dtype.itemsize == 2, oracle_of(p, kind)
    dense = dense_of(p, kind, "jax") if world == 1 else oracle
    for name, x in got.items():
        want = np.asarray(getattr(dense, name))
        if name == "weight_sum" and world != 1:
            assert not failures(check("A2", x, want, quantity=name))
        else:
            want = want.astype(x.dtype) if name in ("num_tokens", "correct", "predicted") else want
            held(name, x, want, oracle, low=low, world=world)


def called(x: Any) -> str | None:
    return x.id if isinstance(x, Case) else None
