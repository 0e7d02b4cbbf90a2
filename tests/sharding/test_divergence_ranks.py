"""Divergences whose heads are sharded, on four gloo ranks along every route and on four devices of
JAX: values, gradients, and mistakes that some ranks make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xentlib.budgets import check_budget
from xentlib.contract import check, failures
from xentlib.tools.harness.ranks import run_ranks

pytestmark = pytest.mark.slow
CASES: list[dict[str, Any]] = [
    {"reduction": "sum", "outputs": ("divergence",), "nll_weight": 0.5, "temperature": 2.0},
    {
        "reduction": "none",
        "outputs": ("divergence",),
        "nll_weight": 0.5,
        "kind": "jsd",
        "beta": 0.3,
    },
    {"reduction": "sum", "outputs": ("divergence",), "vocab": "intersect"},
]
ROUTES = ("tokens_parallel", "head", "hidden", "auto", "nodes")
WAYS = ("tokens_parallel", "shards", "shards of logits", "explicit", "hidden", "logits", "auto")
OF_LOGITS = ("logits", "shards of logits")


@pytest.mark.torch
def test_every_route_of_both_heads() -> None:
    """A9, A18: as one process that has all. A product of fewer columns has other bits on a CPU."""
    pytest.importorskip("torch")
    from helpers import diverging

    of_ranks = run_ranks("torch", diverging.of_rank, CASES, 4)
    for rank, results in enumerate(of_ranks):
        for case, by_route in zip(CASES, results, strict=True):
            right = [x.numpy() for x in by_route.pop("whole")]
            assert set(by_route) == set(ROUTES if "vocab" not in case else ("head", "auto"))
            for route, got in by_route.items():
                how = {"backend": "torch", "case": f"{route}, {case}, rank {rank}"}
                for ours, exact in zip(got, right, strict=True):
                    pair = ours.numpy(), exact.astype(np.float64)
                    measured = check("A9", *pair, metrics=("rho / u",), **how)
                    assert not failures(measured)


@pytest.mark.torch
def test_collectives() -> None:
    """A15, in two chunks: the teacher's head is gathered once."""
    pytest.importorskip("torch")
    from helpers import diverging

    cases: list[dict[str, Any]] = [{}, {"kind": "jsd", "beta": 0.3}]
    cases.append({**cases[1], "reduction": "none"})
    names = ("divergence", "JSD", "JSD, recompute")
    of_ranks = run_ranks("torch", diverging.counted, cases, 2)
    for k, name in enumerate(names):
        for route in of_ranks[0][k]:
            phases = zip(*(rank[k][route] for rank in of_ranks), strict=True)
            budget = "FSDP2, divergence" if route == "FSDP2" else f"{route}, {name}"
            rounds = 0 if route == "FSDP2" else 2
            assert not failures(check_budget(budget, *phases, rounds=rounds))


@pytest.mark.torch
def test_ranks_that_differ_are_all_refused() -> None:
    """Each on every rank, in one sentence."""
    pytest.importorskip("torch")
    from helpers import diverging

    of_ranks = run_ranks("torch", diverging.refused, [None], 2)
    first = of_ranks[0]
    for texts in zip(*of_ranks, strict=True):
        assert not any(text.endswith(": nothing") for text in texts), texts
    for name in ("kind", "beta", "nll_weight"):
        text = next(x for x in first if x.startswith(f"{name}: "))
        assert f"`{name}`" in text


@pytest.mark.jax
@pytest.mark.parametrize("way", WAYS)
def test_meshes(way: str) -> None:
    """A9: shards that a program names, and whole arrays on a mesh. Zeros fill a device's 101 or 202
    rows up, and logits stand 20 lower than where they were drawn: a class more than there are would
    have most of the probability."""
    jax = pytest.importorskip("jax")
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from xentlib.jax import TeacherHead, TeacherLogits, chunked_divergence

    tokens, size, width, vocab = 64, 16, 24, 404
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    hidden, weight = draw(tokens, size), draw(vocab, size) / 2
    others = draw(tokens, width), draw(vocab, width) / 2, draw(vocab) - 20
    own_bias = draw(vocab) - 20
    labels = rng.integers(0, vocab, tokens).astype(np.int32)
    each = {"kind": "jsd", "beta": 0.3, "reduction": "none"}
    mixed = {"nll_weight": 0.5, "temperature": 2.0, "reduction": "sum"}
    how: dict[str, Any] = each if way == "explicit" else mixed

    def loss(hidden, weight, own_bias, states, rows, bias, labels, **more):
        teacher = TeacherHead(states, rows, bias)
        if way in OF_LOGITS:
            teacher = TeacherLogits(states)
        more |= {"labels": labels, "bias": own_bias}
        return chunked_divergence(hidden, weight, teacher, **how, **more).loss.sum()

    if way in OF_LOGITS:
        others = (others[0] @ others[1].T + others[2], np.zeros(1), np.zeros(1))
    arrays = (hidden, weight, own_bias, *others, labels)
    right = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*arrays)
    kind = AxisType.Explicit if way in ("explicit", "hidden", "logits") else AxisType.Auto
    if way in ("tokens_parallel", "shards", "shards of logits"):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))

        def spread(*own):
            if way != "tokens_parallel":
                return loss(*own, vocab_parallel="x")
            own_loss = loss(*own, vocab_parallel="x", tokens_parallel="x")
            return jax.lax.psum(own_loss, "x")

        specs: Any = (P("x"),) * 7
        if way == "shards":
            specs = (P(), P("x"), P("x"), P(), P("x"), P("x"), P())
        if way == "shards of logits":
            specs = (P(), P("x"), P("x"), P(None, "x"), P(), P(), P())
        mapped = jax.shard_map(spread, mesh=mesh, in_specs=specs, out_specs=P())
        got = jax.jit(jax.value_and_grad(mapped, argnums=(0, 1)))(*arrays)
    else:
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
        rows = P("data") if way in ("hidden", "auto") else P("model")
        specs = (P("data"), rows, rows, P("data"), rows if way != "logits" else P(), P(), P("data"))
        more = {"gather": "hidden"} if way == "hidden" else {}
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(x, NamedSharding(mesh, s))
                for x, s in zip(arrays, specs, strict=True)
            ]
            step = jax.jit(jax.value_and_grad(lambda *x: loss(*x, **more), argnums=(0, 1)))
            got = jax.device_get(step(*placed))
    for ours, exact in zip(*map(jax.tree.leaves, (got, right)), strict=True):
        pair = np.asarray(ours), np.asarray(exact).astype(np.float64)
        assert not failures(check("A9", *pair, metrics=("rho / u",), backend="jax", case=way))
