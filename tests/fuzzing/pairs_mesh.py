"""A call of `pairs.py` in `shard_map` over host devices: shards that are padded, tokens of each
device, or both."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fuzzing.draw import PERIOD
from fuzzing.pairs import OF_LOGITS, Edge, Pair, draw
from fuzzing.pairs_spread import (
    axis_of,
    dense,
    each_of_tokens,
    flat,
    of_sums,
    vocab_of,
    with_keywords,
)
from xentlib.labels import SoftLabels
from xentlib.shards import PaddedVocab
from xentlib.teacher import TeacherHead, TeacherLogits
from xentlib.tools.harness.backends import Outcome

TOKENS = {"shards": None, "tokens": "vocab", "data": "data"}  # the axis that they are sharded over


class Meshed(NamedTuple):
    pair: Pair
    way: str  # of `TOKENS`
    shape: tuple[int, int]  # devices for tokens, and for the vocabulary
    program: Any  # what calls that are compiled once have in common


def meshed(seed: int, number: int, edge: Edge | None = None) -> Meshed:
    """Call `number` of a seed, an even one, or of an edge by its options, and how it is spread."""
    pair = flat(draw(seed, number, edge))
    rng = np.random.default_rng([seed, 8, number // PERIOD])
    teacher = pair.call.keywords.get("teacher")
    ways = ["shards", "data", "tokens"]
    of_logits = pair.call.function in OF_LOGITS
    if of_logits or isinstance(teacher, TeacherLogits) or dense(pair.call.labels):
        ways.remove("tokens")
    way = str(rng.choice(ways))
    shape = (2, 2) if way == "data" else (1, int(rng.integers(2, 5)))
    count = len(next(iter(pair.call.leaves.values())))
    if way != "shards":
        pair = of_sums(pair)
    if (way != "shards" or not count) and "where" not in pair.call.keywords:
        pair = with_keywords(pair, where=np.ones(count, bool))
    return Meshed(pair, way, shape, (seed, number // PERIOD, edge))


def padded(x: Any, dimension: int, parts: int) -> Any:
    """Of as many columns on each device. What is there must not show, and would."""
    shape = list(x.shape)
    shape[dimension] = -shape[dimension] % parts
    return np.concatenate([x, np.full(shape, np.nan, x.dtype)], axis=dimension)


_STEPS: dict[Any, Any] = {}


def run_mesh(case: Meshed) -> Outcome:
    import jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from xentlib import jax as ours

    vocab, count = vocab_of(case.pair), len(next(iter(case.pair.call.leaves.values())))
    axis, parts = TOKENS[case.way], case.shape[1]
    rows = {None: 1, "vocab": parts, "data": case.shape[0]}[axis]

    # Tokens that `where` leaves out; and one where there is none, as XLA compiles no `shard_map` of
    # plain JAX either whose arguments are all empty.
    more = -count % rows if count else rows

    def more_tokens(x: Any) -> Any:
        return np.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)])

    pair = each_of_tokens(case.pair, more_tokens)
    call, of_vocab = pair.call, axis_of(pair)
    tokens, columns = P(axis), P(None if axis == "vocab" else axis, "vocab")

    leaves, of_leaves = dict(call.leaves), {"hidden": tokens, "logits": columns, "bias": P("vocab")}
    of_leaves["weight"] = P(*[None] * of_vocab, "vocab")
    for name, dimension in {"weight": of_vocab, "bias": 0, "logits": 1}.items():
        if name in leaves:
            leaves[name] = padded(leaves[name], dimension, parts)
    arrays: dict[str, Any] = {"labels": call.labels, **call.keywords}
    specs: dict[str, Any] = dict.fromkeys(
        ("labels", "where", "token_weights", "kept", "ids"), tokens
    )
    specs |= {"temperature": tokens, "class_weights": P()}
    if dense(call.labels):
        arrays["labels"], specs["labels"] = padded(call.labels, 1, parts), columns
    elif isinstance(call.labels, SoftLabels):
        specs["labels"] = SoftLabels(tokens, tokens)
    teacher = call.keywords.get("teacher")
    of_teacher = {} if teacher is None else teacher._asdict()
    spec_of = dict.fromkeys(("hidden", "ids", "logprobs"), tokens) | {"logits": columns}
    if isinstance(teacher, TeacherHead):
        by_column = int(teacher.weight_layout == "HV")
        spec_of |= {"weight": P(*[None] * by_column, "vocab"), "bias": P("vocab")}
        for name, dimension in {"weight": by_column, "bias": 0}.items():
            if of_teacher[name] is not None:
                of_teacher[name] = padded(of_teacher[name], dimension, parts)
    if isinstance(teacher, TeacherLogits):
        of_teacher["logits"] = padded(of_teacher["logits"], 1, parts)
    moving = {n: x for n, x in of_teacher.items() if isinstance(x, np.ndarray)}
    still = {n: x for n, x in of_teacher.items() if n not in moving}
    arrays.pop("teacher", None)
    rest = {n: x for n, x in arrays.items() if not isinstance(x, (np.ndarray, SoftLabels))}
    rest.pop("labels", None)
    arrays = {n: x for n, x in arrays.items() if isinstance(x, (np.ndarray, SoftLabels))}
    rest["vocab_parallel"] = PaddedVocab("vocab", vocab) if vocab % parts else "vocab"
    rest |= {"tokens_parallel": "vocab"} if case.way == "tokens" else {}
    leaf = next(iter(leaves.values()))
    upstream = {n: np.asarray(g) for n, g in pair.upstream.items()}

    def value(leaves: Any, arrays: Any, moving: Any, upstream: Any) -> Any:
        keywords = {**rest, **arrays}
        labels = keywords.pop("labels", None)
        if teacher is not None:
            keywords["teacher"] = type(teacher)(**still, **moving)
        out = call.of(ours, leaves, labels, keywords)
        values = [(getattr(out, name), g) for name, g in upstream.items()]
        total = sum(
            (jax.numpy.where(jax.numpy.isfinite(x), x, 0) * g.astype(x.dtype))
            .sum()
            .astype(leaf.dtype)
            for x, g in values
        )
        found = {n: x for n, x in out._asdict().items() if x is not None and n in Outcome._fields}
        of_tokens = {n: x for n, x in found.items() if x.ndim}
        sums = {n: x for n, x in found.items() if not x.ndim}
        if axis is not None:
            total, sums = jax.lax.psum((total, sums), axis)
        return total, (of_tokens, sums)

    in_specs = (
        {name: of_leaves[name] for name in leaves},
        {n: specs[n] if np.ndim(x) or isinstance(x, tuple) else P() for n, x in arrays.items()},
        {name: spec_of[name] for name in moving},
        {name: tokens if g.ndim else P() for name, g in upstream.items()},
    )
    x64 = "float64" in (call.keywords.get("compute_dtype"), leaf.dtype.name)
    with jax.enable_x64(x64):
        if case.program not in _STEPS:
            if len(_STEPS) > 8:  # a program has mappings, which a process has no end of
                _STEPS.clear()
                jax.clear_caches()
            devices = np.array(jax.devices()[: case.shape[0] * parts]).reshape(case.shape)
            mesh, out_specs = Mesh(devices, ("data", "vocab")), (P(), (tokens, P()))
            spread = jax.shard_map(value, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
            _STEPS[case.program] = jax.jit(jax.value_and_grad(spread, has_aux=True))
        (_, found), gradients = _STEPS[case.program](leaves, arrays, moving, upstream)
        (of_tokens, sums), gradients = jax.device_get((found, gradients))
    values = {name: np.array(x)[:count] for name, x in of_tokens.items()}
    values |= {name: np.array(x) for name, x in sums.items()}
    for name, g in gradients.items():
        if name == "hidden":
            cut = g[:count]
        elif name == "logits":
            cut = g[:count, :vocab]
        else:
            cut = np.take(g, range(vocab), of_vocab if name == "weight" else 0)
        values[f"d_{name}"] = np.array(cut)
    return Outcome(**values)
