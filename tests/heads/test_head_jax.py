"""Sharded heads in JAX: gathered by the user inside `shard_map`, placed by the compiler, and
placed by us where types say where arrays are. What each sends, and that it gives the dense answer.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from xentlib.budgets import check_budget
from xentlib.contract import failures
from xentlib.tools.harness.backends import GRADIENTS
from xentlib.tools.harness.problems import build

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import xentlib.jax as ours  # noqa: E402
from helpers.heads_jax import (  # noqa: E402
    KERNEL,
    LOW,
    ONE,
    OPTIONS,
    TWO,
    H,
    N,
    budget,
    inputs_of,
    on,
    run_step,
    spent,
)
from helpers.hlo import entries  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.pairs import every_pair, parameters  # noqa: E402
from helpers.vocab_shards_jax import KINDS, hold_shards, value, whole  # noqa: E402
from xentlib.jax import chunked_nll  # noqa: E402
from xentlib.jax.collectives import operations  # noqa: E402

# ---------------------------------------------------------------------------------
# Placed by us: Explicit axes

# axes, tokens, weight [V, H], bias, all-gathers and reduce-scatters of it and of its bias
PLACES = {
    "width": (ONE, "data", P(None, "data"), P(), 1, 1),
    "vocabulary": (ONE, "data", P("data", None), P(), 1, 1),
    "bias too": (ONE, "data", P("data", None), P("data"), 2, 2),
    "whole": (ONE, "data", P(), P(), 0, 0),
    "two axes of tokens": (TWO, ("data", "tp"), P(None, ("data", "tp")), P(), 1, 1),
    "replicas": (TWO, ("data", "tp"), P(None, "tp"), P(), 1, 1),
    "vocabulary parallel": (TWO, "data", P("tp", "data"), P("tp"), 1, 1),
    "both on the vocabulary": (TWO, "data", P(("tp", "data"), None), P(("tp", "data")), 2, 2),
    "no tokens over it": (TWO, "data", P(None, "tp"), P(), 1, 0),
    "tokens everywhere": (TWO, None, P("tp", None), P("tp"), 0, 0),
}


# Both functions place a head by the same code: the second one on the plainest and the richest.
PLACED = [
    *(("nll", name) for name in PLACES),
    *(("logprobs", name) for name in ("width", "bias too", "vocabulary parallel")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), PLACED)
def test_where_types_say_so(kind, name):
    """A0, A2, A5, A6, A15: Explicit axes. Gradients come back where the head is. Catches: a gather
    or a reduction left out or made twice, pieces in the wrong order, a mean over one device."""
    axes, tokens, weight, bias, gathers, scatters = PLACES[name]
    p = build(OPTIONS, 7)
    inputs, options = inputs_of(p, kind, mesh_of(**axes), tokens, weight, bias)
    body = partial(value, kind, None, options | {"max_chunk_bytes": budget(N // 4, 4)})
    got, count = run_step(jax.value_and_grad(body, has_aux=True), inputs)
    hold_shards(p, kind, got)
    assert spent(count, "all_gather", "reduce_scatter") == [gathers, scatters]
    assert not spent(count, "permute")[0]  # pieces in another order than they are in


@KINDS
def test_a_kernel(kind):
    """A5, A6, A15: [H, V], as Flax has it."""
    p = build(KERNEL, 7)
    p = p.changed(hidden=p.hidden[:36], labels=p.labels[:36]) if len(p.labels) % 4 else p
    inputs, options = inputs_of(p, kind, mesh_of(**TWO), "data", P("data", "tp"), P("tp"))
    got, count = run_step(
        jax.value_and_grad(partial(value, kind, None, options), has_aux=True), inputs
    )
    hold_shards(p, kind, got)
    assert spent(count, "all_gather", "reduce_scatter") == [1, 1]


@KINDS
def test_bf16_is_rounded_after_the_sum(kind):
    """A7: the reduce-scatter adds float32. Catches: parts rounded to bf16 before it."""
    p = build(LOW, 7)
    inputs, options = inputs_of(p, kind, mesh_of(**ONE), "data", P(None, "data"))
    got, _ = run_step(jax.value_and_grad(partial(value, kind, None, options), has_aux=True), inputs)
    hold_shards(p, kind, got)


COUNTED = [*product(("nll", "logprobs"), (1, 7, 64), ("none", "one", "one device", "all"))]


@pytest.mark.parametrize("call", parameters(COUNTED, every_pair(COUNTED)))
def test_the_budget_holds_whatever_is_valid(call):
    """A15, A0, A2: 0, 1 and N valid tokens, on one device or on all, in 1, 7 and 64 chunks: the
    same collectives, of the same bytes, and the mean is over all of them."""
    kind, chunks, valid = call
    tokens = 4 * 64 * chunks
    case = replace(OPTIONS, options={}, tokens=tokens, ignored=0.0, where=False, hidden=8, vocab=32)
    p = build(replace(case, token_weights=False, token_temperature=False), 7)
    row = np.arange(tokens)
    keep = {"none": row < 0, "one": row == 5, "one device": row < tokens // 4, "all": row >= 0}
    p = p.changed(labels=np.where(keep[valid], p.labels, -100).astype(np.int32))
    inputs, options = inputs_of(p, kind, mesh_of(**ONE), "data", P(None, "data"))
    body = partial(value, kind, None, options | {"max_chunk_bytes": 64 * 32 * 4})
    got, count = run_step(jax.value_and_grad(body, has_aux=True), inputs)
    if valid == "none":
        assert not any(got[name].view(np.uint32).any() for name in GRADIENTS)
        assert kind != "nll" or got["loss"] == 0
    else:
        hold_shards(p, kind, got)
    head = 8 * 32 * 4
    assert count.bytes("all_gather") == count.bytes("reduce_scatter") == head
    # d bias; and the number of tokens, loss and z-loss, or our own sums of three outputs.
    assert count.bytes("all_reduce") == 4 * (32 + 3)
    assert not count.looped()
    assert not failures(check_budget("JAX, data axis", [{}], [count.counts()]))


@KINDS
def test_no_logits_of_all_tokens(kind):
    """D7, M16: in the program no [N, V] on a device, no collective of [chunk, V]."""
    tokens, width, vocab, chunk = 4096, 24, 2048, 128
    mesh = mesh_of(**ONE)

    def abstract(spec, *shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    leaves = (
        abstract(P("data"), tokens, width), abstract(P(None, "data"), vocab, width),
        abstract(P(), vocab),
    )  # fmt: skip
    rest = {
        "labels": abstract(P("data"), tokens, dtype="int32"),
        "upstream": abstract(P()) if kind == "nll" else abstract(P(None, "data"), 3, tokens),
    }
    body = partial(value, kind, None, {"max_chunk_bytes": chunk * vocab * 4})
    step = jax.jit(jax.value_and_grad(body, has_aux=True))
    text = step.lower(leaves, rest).compile().as_text()
    assert max(entries(text)) == chunk * vocab
    sent = operations(text)
    assert not any(x.looped for x in sent)
    assert max(size for x in sent for size in entries(x.types)) == vocab * width


def test_leading_dimensions():
    """D6: [B, L, H], each dimension over an axis of its own, and what is per token with it."""
    p = build(OPTIONS, 7)
    mesh, shape = mesh_of(data=2, seq=2), (10, 22)
    spec = P("data", "seq")
    names = ("labels", "where", "token_weights")
    rest = {name: on(mesh, spec, getattr(p, name).reshape(shape)) for name in names}
    rest["temperature"] = on(mesh, spec, p.options["temperature"].reshape(shape))
    options = {k: v for k, v in p.options.items() if k != "temperature"}
    leaves = (
        on(mesh, spec, p.hidden.reshape(*shape, H)),
        on(mesh, P(("data", "seq"), None), p.weight), on(mesh, P(), p.bias),
    )  # fmt: skip

    def loss(leaves, rest):
        out = chunked_nll(*leaves[:2], bias=leaves[2], outputs=("lse",), **rest, **options)
        return p.upstream * out.loss, {"lse": out.lse, "loss": out.loss}

    got, count = run_step(jax.value_and_grad(loss, has_aux=True), (leaves, rest))
    got["d_hidden"], got["lse"] = got["d_hidden"].reshape(N, H), got["lse"].reshape(N)
    hold_shards(p, "nll", got)
    assert spent(count, "all_gather", "reduce_scatter") == [1, 1]


def test_weights_that_cancel():
    """A0: over all devices they sum to 0, on no device: the mean is the sum, as on one device."""
    p = build(replace(OPTIONS, options={}, where=False, ignored=0.0), 7)
    p = p.changed(token_weights=np.where(np.arange(N) < N // 2, 1, -1).astype(np.float32))
    p = p.changed(options={"reduction": "mean"})
    inputs, _ = inputs_of(p, "nll", mesh_of(**ONE), "data", P(None, "data"))
    got, _ = run_step(jax.value_and_grad(partial(value, "nll", None, {}), has_aux=True), inputs)
    assert got["weight_sum"] == 0
    gradients = {name: got[name] for name in GRADIENTS}
    hold_shards(p.changed(options={"reduction": "sum"}, text="cancel"), "nll", gradients)


ROADS = ("remat", "scan", "eager", "vmap", "inside")


@pytest.mark.parametrize(
    ("road", "gather"),
    [*((road, "head") for road in ROADS), *((x, "hidden") for x in ("scan", "vmap", "inside"))],
)
def test_each_road_to_the_gradients(road, gather):
    """A5, A6, D6: what JAX does around the call."""
    p = build(replace(OPTIONS, options={"denominator": 97.0}), 7)
    mesh = mesh_of(**TWO)
    spec = P("tp", "data") if gather == "head" else P(("tp", "data"), None)
    (leaves, rest), options = inputs_of(p, "nll", mesh, "data", spec, P("tp"))
    options |= {"max_chunk_bytes": budget(N // 4, 4), "gather": gather}
    body = partial(value, "nll", None, options)
    wrap = jax.jit
    if road == "remat":
        body = jax.checkpoint(body)
    elif road == "scan":
        halves = lambda x: jnp.reshape(x, (2, N // 2, *x.shape[1:]), out_sharding=P(None, "data"))  # noqa: E731
        plain = body

        def body(leaves, rest):
            def one(carry, batch):
                hidden, rest = batch
                total, _ = plain((hidden, *leaves[1:]), rest | {"upstream": upstream})
                return carry + total, None

            upstream = rest["upstream"]
            per_token = {k: halves(x) for k, x in rest.items() if x.ndim}
            batches = (halves(leaves[0]), per_token)
            return lax.scan(jax.checkpoint(one), jnp.float32(0), batches)[0], {}

    elif road == "eager":
        wrap = lambda f: f  # noqa: E731
    elif road == "vmap":
        plain = body

        def body(leaves, rest):
            each = jax.vmap(lambda u: plain(leaves, rest | {"upstream": u})[0])
            return each(rest["upstream"] * jnp.array([0.25, 0.75], jnp.float32)).sum(), {}

    elif road == "inside":  # a pipeline's axis is the user's own
        mesh = jax.make_mesh((1, 2, 2), ("pipe", *TWO), devices=jax.devices())
        (leaves, rest), _ = inputs_of(p, "nll", mesh, "data", spec, P("tp"))
        plain = body

        def body(leaves, rest):
            stage = jax.shard_map(
                lambda *x: lax.psum(plain(*x)[0], "pipe"), axis_names={"pipe"}, mesh=mesh,
                in_specs=P(), out_specs=P(),
            )  # fmt: skip
            return stage(leaves, rest), {}

    with jax.set_mesh(mesh):
        _, gradients = wrap(jax.value_and_grad(body, has_aux=True))(leaves, rest)
    hold_shards(p, "nll", {name: whole(g) for name, g in zip(GRADIENTS, gradients)})


# --- whole arrays on a mesh with Explicit axes, which is not set ---------------------------------

FEW = np.arange(6, dtype=np.int32) % 5
WHOLE = {
    "nll": lambda h, w: ours.chunked_nll(h, w, FEW).loss,
    "class probabilities": lambda h, w: ours.chunked_nll(h, w, np.eye(9)[FEW].astype("f")).loss,
    "logprobs": lambda h, w: ours.chunked_logprobs(h, w, FEW, entropy=True).entropy.sum(),
    "kept": lambda h, w: ours.chunked_logprobs(h, w, FEW, kept=FEW[:, None]).logprobs.sum(),
    "divergence": lambda h, w: (
        ours.chunked_divergence(h, w, ours.TeacherHead(*lax.stop_gradient((2 * h, w)))).loss
    ),
    "logits": lambda h, w: ours.vocab_parallel_logprobs(h @ w.T, FEW).logprobs.sum(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_arrays_on_explicit_axes(name):
    """As without a mesh. Catches: a loop whose carry has no mesh in its type, where what is added
    to it has. Outside `jit` JAX wants the mesh to be set, and says so."""
    rng = np.random.default_rng(2)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (9, 4))]
    step = jax.jit(jax.value_and_grad(WHOLE[name], (0, 1)))
    right = step(*arrays)
    got = step(*jax.device_put(arrays, NamedSharding(mesh_of(data=2), P())))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(right), strict=True):
        assert np.array_equal(one, other)
