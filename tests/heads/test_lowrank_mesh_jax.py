"""A head with a low-rank part over devices in JAX: vocabulary shards inside `shard_map`, whole
arrays on Explicit meshes, and devices that disagree.

Shapes: N tokens, V vocabulary, H hidden width, R rank.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from helpers.lowrank import LowProblem, given_to, held_to, hold, low_problem, oracle, rejected
from xentlib import PaddedVocab
from xentlib.tools.harness.problems import Case, upstream_of

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import padded, whole  # noqa: E402
from xentlib.jax import LowRankHead, chunked_logprobs, chunked_nll, count_collectives  # noqa: E402

N, H, V, R = 156, 22, 157, 3
FUNCTIONS = pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])


def of_functions(names: Any) -> Any:
    """A loss of each name, log-probabilities of every second: a program each, of three seconds."""
    logprobs = [
        pytest.param(chunked_logprobs, name, marks=pytest.mark.full if k % 2 else ())
        for k, name in enumerate(names)
    ]
    both = [*((chunked_nll, name) for name in names), *logprobs]
    return pytest.mark.parametrize(("function", "name"), both)


PLAIN = Case("low mesh", N, H, V, confident=0.3)
OPTIONS = Case(
    "low mesh options", N, H, V, where=True, layout="HV",
    options={"softcap": 8.0, "label_smoothing": 0.1, "logit_scale": 1.3, "denominator": 97.0},
)  # fmt: skip
EVEN = replace(OPTIONS, vocab=156, options=OPTIONS.options | {"weight_layout": "HV"})
LOW = Case("low mesh bf16", N, H, V, dtype="bfloat16")
NAMES = ("hidden", "a", "b", "weight")


def turned(p: LowProblem) -> bool:
    return p.base.options.get("weight_layout") == "HV"


def arrays_of(p: LowProblem, function: Any, rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leaves and the rest by name; of the head `rows`, those beyond the vocabulary NaN and inf."""
    fill, given = (np.nan, np.inf), given_to(p, function.__name__)
    leaves = {"hidden": p.base.hidden, "a": p.a, "b": padded(p.b, 0, rows, fill)}
    leaves["weight"] = padded(p.base.weight, int(turned(p)), rows, fill)
    rest = {name: x for name, x in given.items() if isinstance(x, np.ndarray)} | {
        "labels": p.base.labels
    }
    rest["bias"] = padded(p.base.bias, 0, rows, fill)
    if p.keep is not None:
        rest["keep"] = p.keep
    per_token = np.stack(upstream_of(p.base, 5))
    rest["upstream"] = np.float32(p.base.upstream) if function is chunked_nll else per_token
    return leaves, rest


def specs_of(p: LowProblem, names: Any, data: Any, rows: Any) -> dict[str, P]:
    """By name: where tokens and the head's rows are spread."""
    head = {"weight": P(None, rows) if turned(p) else P(rows), "b": P(rows), "bias": P(rows)}
    alone = {"a": P(), "upstream": P()}
    return {name: (head | alone).get(name, P(data)) for name in names}


def value(p: LowProblem, function: Any, more: dict[str, Any], leaves: Any, rest: Any) -> Any:
    """A loss whose gradients of the outputs are the upstream ones."""
    options = given_to(p, function.__name__)
    options = {name: x for name, x in options.items() if not isinstance(x, np.ndarray)}
    rest = dict(rest)
    labels, upstream, keep = rest.pop("labels"), rest.pop("upstream"), rest.pop("keep", None)
    head = LowRankHead(leaves["weight"], leaves["a"], leaves["b"], p.scale, keep)
    if function is chunked_nll:
        out = function(leaves["hidden"], head, labels, **rest, **options, **more)
        return upstream * out.loss
    out = function(leaves["hidden"], head, labels, entropy=True, **rest, **options, **more)
    outputs = (out.logprobs, out.entropy, out.lse)
    return sum((g.astype(x.dtype) * x).sum() for g, x in zip(upstream, outputs, strict=True))


def over_data(p: LowProblem, function: Any, more: dict[str, Any], leaves: Any, rest: Any) -> Any:
    return lax.psum(value(p, function, more, leaves, rest), "data")


def sharded(
    p: LowProblem,
    function: Any,
    mesh: Any,
    rows: int,
    *,
    data: str | None = None,
    wrap: Any = lambda f: f,
    inside: bool = False,
    **how: Any,
) -> dict[str, Any]:
    """Gradients by name, through `rows` of the head on each device and several chunks."""
    over = PaddedVocab("tp", len(p.b))
    inputs = arrays_of(p, function, rows * mesh.shape["tp"])
    specs = tuple(specs_of(p, x, data, "tp") for x in inputs)
    inputs = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), inputs, specs)
    more = {"vocab_parallel": over, "max_chunk_bytes": 64 * rows * 4}
    body = wrap(partial(over_data if data else value, p, function, more))
    spread = partial(jax.shard_map, mesh=mesh, in_specs=specs, **how)
    step = jax.grad(spread(body, out_specs=P()))
    if inside:
        step = spread(jax.grad(body), out_specs=specs[0])
    found = {name: whole(x) for name, x in jax.jit(step)(*inputs).items()}
    for name, axis in (("b", 0), ("weight", int(turned(p)))):
        found[name], beyond = np.split(found[name], [len(p.b)], axis=axis)
        assert not beyond.any(), name
    return found


def upstream_for(p: LowProblem, function: Any) -> Any:
    return None if function is chunked_nll else upstream_of(p.base, 5)


GRID = {
    "two": (PLAIN, {"tp": 2}, 79, {}),
    "options": (OPTIONS, {"tp": 2}, 79, {}),
    "padding alone": (OPTIONS, {"tp": 4}, 53, {}),
    "no types": (OPTIONS, {"tp": 4}, 40, {"check_vma": False}),
    "gradient inside": (OPTIONS, {"tp": 4}, 40, {"inside": True}),
    "remat": (PLAIN, {"tp": 2}, 79, {"wrap": jax.checkpoint}),
    "bf16": (LOW, {"tp": 2}, 79, {}),
}


@pytest.mark.slow
@of_functions(GRID)
def test_shards_give_the_dense_answer(function: Any, name: str) -> None:
    """A5, A6, A7, A13: d A and d hidden are summed over the shards once, the same bits on every
    device. Catches: a device's part of d A; NaN of rows of B that are no classes."""
    case, axes, rows, how = GRID[name]
    p, low = low_problem(case, R, dropped=0.3), case is LOW
    reference = oracle(p, upstream_for(p, function), "bfloat16" if low else "float64")
    got = sharded(p, function, mesh_of(AxisType.Auto, **axes), rows, **how)
    hold(reference, got, "A7" if low else None)
    if not low:
        assert rejected(reference, {"a": got["a"] / axes["tp"]})


@pytest.mark.parametrize("how", [{}, {"inside": True}, {"check_vma": False}], ids=str)
def test_tokens_over_a_second_axis(how: dict[str, Any]) -> None:
    """A5, A6. Catches: d A or d B not summed over the data, or twice."""
    p = low_problem(replace(OPTIONS, tokens=160), R, dropped=0.3)
    got = sharded(p, chunked_nll, mesh_of(AxisType.Auto, data=2, tp=2), 79, data="data", **how)
    hold(oracle(p), got)


# Where tokens, the head's rows and A's are on an Explicit mesh, and gathers beside that of B.
PLACES = {
    "tokens": ({"data": 4}, "data", None, None),
    "rows over tokens": ({"data": 4}, "data", "data", None),
    "vocabulary parallel": ({"data": 2, "tp": 2}, "data", "tp", None),
    "both on the vocabulary": ({"data": 2, "tp": 2}, "data", ("tp", "data"), None),
    "A too": ({"data": 2, "tp": 2}, "data", "tp", "data"),
    "the adapters alone": ({"tp": 2}, None, "alone", "tp"),
}


@pytest.mark.slow
@of_functions(PLACES)
def test_where_types_say_so(function: Any, name: str) -> None:
    """A5, A6, D7: whole arrays on Explicit axes; gradients come back where the arrays were, and
    nothing is sent in the loop over chunks."""
    axes, data, rows, columns = PLACES[name]
    p, mesh = low_problem(EVEN, R, dropped=0.3), mesh_of(**axes)
    inputs = arrays_of(p, function, 156)
    alone = rows == "alone"
    specs = tuple(specs_of(p, x, data, None if alone else rows) for x in inputs)
    specs[0]["a"] = P(None, columns)
    if alone:
        specs[0]["b"] = P("tp")
    if function is chunked_logprobs:
        specs[1]["upstream"] = P(None, data)
    inputs = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), inputs, specs)
    body = partial(value, p, function, {"max_chunk_bytes": 64 * 156})
    with count_collectives() as count:
        found = jax.jit(jax.grad(body))(*inputs)
    assert not count.looped()
    for key, x in found.items():
        assert x.sharding.is_equivalent_to(inputs[0][key].sharding, x.ndim), key
    hold(oracle(p, upstream_for(p, function)), {key: whole(x) for key, x in found.items()})


@cache
def audited(devices: int) -> dict[str, Any]:
    p = low_problem(PLAIN, R)
    with jax.enable_x64(True):
        case = p._replace(base=p.base.changed(options={"compute_dtype": "float64"}))
        return sharded(case, chunked_nll, mesh_of(AxisType.Auto, tp=devices), -(-V // devices))


@pytest.mark.optimized
@pytest.mark.parametrize("devices", [2, 4])
def test_one_device_s_bits(devices: int) -> None:
    """A1: audit mode over shards, where `a` is summed, as on one device."""
    one, other = audited(1), audited(devices)
    for name in NAMES:
        held_to("A1", other[name], one[name], quantity=name)


# What device 1 of two has other than device 0.
DIFFERENT = ("a", "a's shard", "scale", "keep")


def differing(low: Any, which: Any) -> Any:
    """By an array, one program for all of DIFFERENT; by a name, which alone varies by its type."""
    rank = lax.axis_index("tp")
    named = [rank if name == which else 0 for name in DIFFERENT]
    a, shard, scale, keep = named if isinstance(which, str) else which * rank
    a, scale = jnp.asarray(a, jnp.float32), jnp.asarray(scale, jnp.float32)
    return low._replace(
        a=jnp.roll(low.a * (1 + 1e-3 * a), shard, 0),
        scale=1.0 + 1e-3 * scale,
        keep=jnp.roll(low.keep, keep, 0),
    )


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
@FUNCTIONS
def test_what_differs_between_devices_is_nan(function: Any, check_vma: bool) -> None:
    """A13. Catches: a dropout that each device draws for itself, adapters that drifted apart, a
    shard of A."""
    keys = jax.random.split(jax.random.key(0), 5)
    x, w = jax.random.normal(keys[0], (64, 16)), jax.random.normal(keys[1], (20, 16))
    a, b = jax.random.normal(keys[2], (3, 16)), jax.random.normal(keys[3], (20, 3))
    keep, y = jax.random.uniform(keys[4], (64, 16)) < 0.7, jnp.arange(64) % 20
    mesh = mesh_of(AxisType.Auto, tp=2)

    def stepped(which: Any) -> Any:
        def body(w: Any, b: Any, array: Any) -> Any:
            low = differing(LowRankHead(w, a, b, 1.0, keep), which if check_vma else array)
            out = function(x, low, y, vocab_parallel="tp")
            found = out.loss[None] if function is chunked_nll else out.logprobs
            return lax.psum(found, "tp") if check_vma else found

        more = {"in_specs": (P("tp"), P("tp"), P()), "out_specs": P(), "check_vma": check_vma}
        return jax.jit(jax.shard_map(body, mesh=mesh, **more))

    one = stepped("")
    for k, name in enumerate((*DIFFERENT, "nothing")):
        step = stepped(name) if check_vma else one
        found = np.isnan(np.asarray(step(w, b, np.int32(np.arange(4) == k))))
        assert found.all() if name in DIFFERENT else not found.any(), name


def test_b_s_rows_must_be_this_device_s() -> None:
    mesh = mesh_of(AxisType.Auto, tp=2)

    def body(x: Any, w: Any, b: Any, y: Any) -> Any:
        return chunked_nll(x, LowRankHead(w, jnp.ones((2, 4)), b), y, vocab_parallel="tp").loss

    arrays = jnp.ones((8, 4)), jnp.ones((20, 4)), jnp.ones((10, 2)), jnp.zeros(8, jnp.int32)
    specs = P(), P("tp"), P(), P()
    with pytest.raises(ValueError, match="`b` must be spread over mesh axis 'tp'"):
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())(*arrays)


def test_tokens_of_one_s_own_are_refused() -> None:
    mesh = mesh_of(AxisType.Auto, tp=2)

    def body(x: Any, w: Any, b: Any, y: Any) -> Any:
        low, more = LowRankHead(w, jnp.ones((2, 4)), b), {"tokens_parallel": "tp"}
        return chunked_nll(x, low, y, vocab_parallel="tp", **more).loss

    arrays = jnp.ones((8, 4)), jnp.ones((20, 4)), jnp.ones((20, 2)), jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match=r"`weight` must be one array here.*`tokens_parallel`"):
        jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())(*arrays)


def test_rows_that_stay_are_refused_on_a_mesh() -> None:
    mesh = mesh_of(data=2)
    arrays = jnp.ones((8, 4)), jnp.ones((20, 4)), jnp.ones((20, 2)), jnp.zeros(8, jnp.int32)
    x, w, b, y = (jax.device_put(x, NamedSharding(mesh, P("data"))) for x in arrays)
    with pytest.raises(ValueError, match=r"`weight` must be one array here.*gather='hidden'"):
        chunked_nll(x, LowRankHead(w, jnp.ones((2, 4)), b), y, gather="hidden")


@pytest.mark.parametrize(
    ("compiled", "dtype", "low", "function"),
    [
        pytest.param(
            compiled, dtype, low, function, id=f"{ways}-{dtype}-{heads}-{function.__name__}"
        )
        for compiled, ways in enumerate(("eager", "jit"))
        for k, dtype in enumerate(("float32", "float16"))
        for low, heads in enumerate(("one array", "low rank"))
        for i, function in enumerate((chunked_nll, chunked_logprobs))
        if (compiled + k + low + i) % 2 == 0  # each three of the choices meet
    ],
)
def test_no_token_at_all(function: Any, low: bool, dtype: str, compiled: bool) -> None:
    """A0: +0. XLA refused float16 in a `shard_map` that is not in `jit`, "'func.call' op expected
    at least one operand": the power of two of no upstream gradient is a function of constants."""
    leaves = [jnp.ones(shape, dtype) for shape in ((0, 8), (32, 8), (2, 8), (32, 2))]

    def loss(hidden: Any, weight: Any, a: Any, b: Any) -> Any:
        head = LowRankHead(weight, a, b) if low else weight
        how = {"entropy": True} if function is chunked_logprobs else {}
        out = function(hidden, head, jnp.zeros(0, jnp.int32), vocab_parallel="tp", **how)
        return out.loss if not how else out.logprobs.sum() + out.entropy.sum()

    specs = (P(), P("tp"), P(), P("tp"))
    step = jax.shard_map(
        jax.grad(loss, argnums=(0, 1, 2, 3)),
        mesh=mesh_of(AxisType.Auto, tp=4),
        in_specs=specs,
        out_specs=specs,
    )
    found = (jax.jit(step) if compiled else step)(*leaves)
    assert [x.shape for x in found] == [x.shape for x in leaves]
    assert not any(np.asarray(x).view(f"u{x.dtype.itemsize}").any() for x in found)
