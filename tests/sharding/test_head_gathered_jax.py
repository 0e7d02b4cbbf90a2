"""Sharded heads in JAX that we do not place: gathered by the user inside `shard_map`, or left to
the compiler. And what a wrong way of doing it looks like to the checks.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from xentlib.contract import check, failures
from xentlib.tools.harness.backends import GRADIENTS
from xentlib.tools.harness.problems import build

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.heads_jax import KERNEL, ONE, OPTIONS, TWO, H, N, V, budget, inputs_of, spent  # noqa: E402
from helpers.hlo import entries  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import KINDS, hold_shards, value, value_over_data, whole  # noqa: E402
from xentlib.jax import chunked_nll, count_collectives, placement  # noqa: E402
from xentlib.jax.collectives import operations  # noqa: E402

# case, axes, the weight's pieces, the dimension they are gathered in, bias
GATHERED = {
    "rows": (OPTIONS, ONE, P("data", None), 0, P()),
    "columns": (OPTIONS, ONE, P(None, "data"), 1, P()),
    "kernel": (KERNEL, ONE, P(None, "data"), 1, P()),
    "kernel's width": (KERNEL, ONE, P("data", None), 0, P()),
    "vocabulary parallel": (OPTIONS, TWO, P("tp", "data"), 1, P("tp")),
}
HOW = {"types": (True, False), "no types": (False, False), "inside": (True, True)}
# Each way with the plainest head and the one of two axes; a program takes two seconds to compile.
PAIRS = [
    *((name, "types") for name in GATHERED),
    *((name, how) for name in ("rows", "vocabulary parallel") for how in ("no types", "inside")),
]


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [
        *(("nll", *pair) for pair in PAIRS),
        *(("logprobs", *pair) for pair in PAIRS if pair[0] in ("rows", "vocabulary parallel")),
    ],
)
def test_a_gather_inside_shard_map(kind, name, how):
    """A5, A6, A15: `lax.all_gather` before the call is undone by one `psum_scatter` after the loop.
    Catches: a gradient reduced twice or not at all, a collective in the loop or of its logits."""
    case, axes, weight, dimension, bias = GATHERED[name]
    check_vma, inside = HOW[how]
    p = build(case, 7)
    p = p.changed(options=p.options | ({"denominator": 97.0} if kind == "nll" else {}))
    mesh = mesh_of(**axes)
    inputs, options = inputs_of(p, kind, mesh, "data", weight, bias)
    options |= {"max_chunk_bytes": budget(N // 4, 4)}
    local = partial(value_over_data, kind, "tp" if "tp" in axes else None, options)

    def body(leaves, rest):
        gathered = lax.all_gather(leaves[1], "data", axis=dimension, tiled=True)
        return local((leaves[0], gathered, leaves[2]), rest)

    specs = jax.tree.map(lambda x: x.sharding.spec, inputs)
    spread = partial(jax.shard_map, mesh=mesh, in_specs=specs, check_vma=check_vma)
    outs = (P(), {"logprobs": P("data")})
    if inside:
        step = spread(jax.value_and_grad(body, has_aux=True), out_specs=(outs, specs[0]))
    else:
        step = jax.value_and_grad(spread(body, out_specs=outs), has_aux=True)
    with count_collectives() as count:
        _, gradients = jax.jit(step)(*inputs)
    hold_shards(p, kind, {name: whole(g) for name, g in zip(GRADIENTS, gradients)})
    assert spent(count, "all_gather", "reduce_scatter") == [1, 1]
    assert max(one.bytes for one in count.found) <= 4 * V * H  # a chunk's logits: 64 V


# ---------------------------------------------------------------------------------
# Left to the compiler: Auto axes

# Whole blocks of columns on a device: with others neighbours' columns are sent.
BLOCKS = replace(OPTIONS, vocab=1024)
# case, axes, hidden's width over, weight's pieces, entries of the gathers of both
LEFT = {
    "width": (OPTIONS, ONE, None, P(None, "data"), [V * H]),
    "kernel": (KERNEL, ONE, None, P("data", None), [V * H]),
    "vocabulary": (BLOCKS, ONE, None, P("data", None), []),
    "both": (OPTIONS, TWO, None, P("tp", "data"), [V * H // 2]),
    "hidden too": (OPTIONS, TWO, "tp", P(None, "tp"), [N // 2 * H, V * H]),
}


def left(kind: str, name: str, jit: bool = True) -> tuple[Any, Any, list]:
    """The problem, outputs and gradients, and what the program sends."""
    case, axes, width, weight, _ = LEFT[name]
    p, mesh = build(case, 7), mesh_of(AxisType.Auto, **axes)
    (leaves, rest), options = inputs_of(p, kind, mesh, "data", weight)
    hidden = jax.device_put(leaves[0], jax.sharding.NamedSharding(mesh, P("data", width)))
    leaves = (hidden, *leaves[1:])
    body = partial(value, kind, None, options | {"max_chunk_bytes": budget(N, 4)})
    step = jax.value_and_grad(body, has_aux=True)
    if not jit:
        (_, out), gradients = step(leaves, rest)
        return p, out | dict(zip(GRADIENTS, gradients)), []
    compiled = jax.jit(step).lower(leaves, rest).compile()
    (_, out), gradients = compiled(leaves, rest)
    return p, out | dict(zip(GRADIENTS, gradients)), operations(compiled.as_text())


@KINDS
@pytest.mark.parametrize("name", LEFT)
def test_the_compiler_never_sums_logits(kind, name):
    """A2, A5, A6, D7: one gather of the head, outside of the loop; in it nothing of [64, V]."""
    p, got, sent = left(kind, name)
    hold_shards(p, kind, {name: whole(x) for name, x in got.items() if x is not None})
    vocab = LEFT[name][0].vocab
    assert looped_entries(sent) < 64 * vocab // 2
    heads = [entries(x.types)[0] for x in sent if x.opcode == "all-gather"]
    assert [n for n in heads if n >= vocab * H // 4] == LEFT[name][-1]


def looped_entries(sent: list) -> int:
    return max((n for x in sent if x.looped for n in entries(x.types)), default=0)


def test_eager_arrays_on_a_mesh():
    p, got, _ = left("nll", "width", jit=False)
    hold_shards(p, "nll", {name: whole(x) for name, x in got.items()})


@pytest.mark.slow
def test_a_mesh_that_is_the_user_s_in_part():
    """A5, A6: `shard_map` over the vocabulary's axis alone, the other left to the compiler."""
    p, mesh = build(OPTIONS, 7), mesh_of(AxisType.Auto, **TWO)
    inputs, options = inputs_of(p, "nll", mesh, "data", P("tp", "data"), P("tp"))
    body = partial(value, "nll", "tp", options | {"max_chunk_bytes": budget(N, 4)})
    spread = jax.shard_map(
        body, mesh=mesh, axis_names={"tp"}, out_specs=P(),
        in_specs=((P(), P("tp"), P("tp")), P()),
    )  # fmt: skip
    (_, out), gradients = jax.jit(jax.value_and_grad(spread, has_aux=True))(*inputs)
    hold_shards(p, "nll", {n: whole(x) for n, x in (out | dict(zip(GRADIENTS, gradients))).items()})


def test_nothing_is_constrained_without_a_mesh():
    x = jnp.ones((8, 4))
    labels = jnp.zeros(8, jnp.int32)
    assert "sharding_constraint" not in str(jax.make_jaxpr(chunked_nll)(x, x, labels))
    mesh = mesh_of(AxisType.Auto, **ONE)
    spread = jax.shard_map(
        lambda *a: lax.psum(chunked_nll(*a).loss, "data"), mesh=mesh,
        in_specs=(P("data"), P(), P("data")), out_specs=P(),
    )  # fmt: skip
    assert "sharding_constraint" not in str(jax.make_jaxpr(spread)(x, x, labels))


# ---------------------------------------------------------------------------------
# Teeth


def test_left_alone_the_compiler_sums_logits(monkeypatch):
    """A14: without our constraint the check above fails."""
    monkeypatch.setattr(placement, "uncut", lambda x, dimension: x)
    jax.clear_caches()
    _, _, sent = left("nll", "width")
    jax.clear_caches()
    assert looped_entries(sent) >= 64 * V


def regressed(gather: Any, per_chunk: bool) -> tuple[Any, dict, Any]:
    """A head gathered by `gather`, before the loss or for every fourth of the tokens."""
    p = build(OPTIONS, 7).changed(options={"denominator": 97.0}, token_weights=None, where=None)
    mesh = mesh_of(**ONE)
    inputs, options = inputs_of(p, "nll", mesh, "data", P(None, "data"))
    size = N // 4 // 5

    def body(leaves, rest):
        hidden, piece, bias = leaves

        def one(index, total):
            rows = lax.dynamic_slice_in_dim(hidden, index * size, size)
            labels = lax.dynamic_slice_in_dim(rest["labels"], index * size, size)
            # Depends on the index, so that the compiler cannot take it out.
            own = piece + 0 * index.astype(piece.dtype)
            return total + chunked_nll(rows, gather(own), labels, bias=bias, **options).loss

        if per_chunk:
            zero = lax.pcast(jnp.float32(0), "data", to="varying")
            total, _ = lax.scan(lambda c, i: (one(i, c), None), zero, jnp.arange(5))
        else:
            total = chunked_nll(hidden, gather(piece), rest["labels"], bias=bias, **options).loss
        return rest["upstream"] * lax.psum(total, "data")

    specs = jax.tree.map(lambda x: x.sharding.spec, inputs)
    spread = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    with count_collectives() as count:
        gradients = jax.jit(jax.grad(spread))(*inputs)
    return p, dict(zip(GRADIENTS, map(whole, gradients))), count


def right(piece):
    return lax.all_gather(piece, "data", axis=1, tiled=True)


@jax.custom_vjp
def unreduced(piece):
    return right(piece)


def cut(_, gradient):
    width = gradient.shape[1] // lax.axis_size("data")
    start = lax.axis_index("data") * width
    return (lax.dynamic_slice_in_dim(gradient, start, width, axis=1),)


unreduced.defvjp(lambda piece: (right(piece), None), cut)


@jax.custom_vjp
def reduced_twice(piece):
    return right(piece)


def twice(_, gradient):
    total = lax.psum(gradient, "data")
    return (
        lax.psum_scatter(
            lax.pcast(total, "data", to="varying"), "data", scatter_dimension=1, tiled=True
        ),
    )


reduced_twice.defvjp(lambda piece: (right(piece), None), twice)


def wrong(p: Any, got: dict) -> list[str]:
    o = p.reference()
    return failures(check("A6", got["d_weight"], o.d_weight, o.bound_weight))


@pytest.mark.slow
def test_the_checks_have_teeth():
    """A14, A15: one gather and one reduction pass; a gather in the loop is off the budget, with
    right gradients; a gradient that is not reduced, or twice, is off row A6."""
    p, got, count = regressed(right, False)
    assert not wrong(p, got)
    assert spent(count, "all_gather", "reduce_scatter") == [1, 1]
    p, got, count = regressed(right, True)
    assert not wrong(p, got)
    assert [x.kind for x in count.looped()].count("all_gather") >= 1
    with pytest.raises(AssertionError):
        spent(count, "all_gather")
    for gather in (unreduced, reduced_twice):
        p, got, _ = regressed(gather, False)
        assert len(wrong(p, got)) == 2, gather.__name__
