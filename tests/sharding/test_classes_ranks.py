"""Kept sets and several classes a token of heads that are sharded, on four gloo ranks along every
route and on four devices of JAX: values, gradients, and mistakes that some ranks make."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build, upstream_of
from xentlib.tools.harness.ranks import ShardedCall, run_calls, run_ranks
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.head import same

pytestmark = pytest.mark.slow
CASE = Case("classes-shards", 129, 64, 981, std=3.0, confident=0.3, kept=9, ids=5, where=True,
            token_temperature=True)  # fmt: skip


@pytest.mark.torch
def test_every_route() -> None:
    """A9, as one process that has all; each exchange is made by every rank."""
    pytest.importorskip("torch")
    from helpers import classes_ranks

    for rank, (by_route,) in enumerate(run_ranks("torch", classes_ranks.of_rank, [None], 4)):
        right = [x.numpy() for x in by_route.pop("whole")]
        assert len(by_route) == 6
        for route, got in by_route.items():
            assert len(got) == len(right)
            for k, (ours, exact) in enumerate(zip(got, right, strict=True)):
                pair = ours.numpy(), exact.astype(np.float64)
                measured = check(
                    *("A9", *pair), metrics=("rho / u",), case=f"{route}, rank {rank}, {k}"
                )
                assert not failures(measured)


@pytest.mark.torch
def test_ranks_that_differ_are_all_refused() -> None:
    """Each on every rank, in one sentence. Catches: the kept set of another rank."""
    pytest.importorskip("torch")
    from helpers import classes_ranks

    of_ranks = run_ranks("torch", classes_ranks.refused, [None], 2)
    for texts in zip(*of_ranks, strict=True):
        assert not any(text.endswith(": nothing") for text in texts), texts
        name = texts[0].partition(": ")[0]
        expected = {"no class": "must hold classes in", "not kept": "must be among the `kept`"}
        expected["denominator of 0 on one, stream"] = "`denominator` must be positive"
        expected["top_k for ids"] = "the ids of each token"
        same = ("beta", "nll_weight", "token_weights", "denominator")
        expected |= {f"{option} of few": f"`{option}` must be the same" for option in same}
        of_kind = ("kind of few", "tail", "squared", "of each")
        expected |= dict.fromkeys(of_kind, "the `tail` of a `TeacherTopK`")
        expected["the teacher's logprobs"] = "`teacher` must be the same"
        of = "top_k` must be " if "top_k" in name else "kept"
        assert all(expected.get(name, of) in text for text in texts), texts


# In JAX each call is a program.
GIVEN = pytest.param("vocab_parallel_logprobs", marks=pytest.mark.full(backend="jax"))


OF_HEAD = pytest.param("chunked_logprobs", marks=pytest.mark.full(backend="jax"))


@pytest.mark.parametrize("function", [OF_HEAD, GIVEN])
def test_shards_do_not_show(backend: str, function: str) -> None:
    """A18, and A5, A6 over shards."""
    problem, findings = build(CASE, 3), Findings((backend,))
    upstream = upstream_of(problem, 11)
    if function == "vocab_parallel_logprobs":
        given = invariant.given_problem(problem)
        problem = given.changed(kept=problem.kept, ids=problem.ids, d_ids=problem.d_ids)
    sizes: list[Any] = [(981,), invariant.even(981, 4)]
    sizes += [invariant.even(981, 2), (128, 0, 853)] if backend == "torch" else []
    calls = [ShardedCall(function, problem, cut, upstream) for cut in sizes]
    one, *others = run_calls(backend, calls)
    for call, got in zip(calls[1:], others, strict=True):
        assert not got.unequal
        of_shards = {"names": invariant.OF_SHARDS, "backend": backend, "case": str(call.sizes)}
        same(findings, "A18", got.outcome, one.outcome, **of_shards)
        if function == "chunked_logprobs":
            reference = problem.per_token_reference(upstream)
            findings.gradients({backend: got.outcome}, reference, problem)
    assert len(findings.measurements) > 4
    assert not failures(findings.measurements)


@pytest.mark.jax
def test_the_most_probable_of_all_shards() -> None:
    """A9: more than a device has, of integers with many that are equal, and padding in the last
    shard. Catches: columns counted from a shard's start; padding of 0 above negative logits."""
    jax = pytest.importorskip("jax")
    from jax.sharding import PartitionSpec as P

    from xentlib.jax import chunked_logprobs, vocab_parallel_logprobs
    from xentlib.shards import PaddedVocab

    rng, top_k = np.random.default_rng(3), 40
    hidden, weight = (np.rint(rng.standard_normal((n, 6))).astype(np.float32) for n in (21, 45))
    padded = np.concatenate((weight, np.zeros((3, 6), np.float32)))
    bias = np.where(np.arange(48) < 45, np.float32(-32), 0)
    labels = np.where(np.arange(21) % 5, np.arange(21), -100).astype(np.int32)
    g = rng.standard_normal((21, top_k)).astype(np.float32)

    def loss(hidden: Any, weight: Any, bias: Any, **how: Any) -> Any:
        out = chunked_logprobs(hidden, weight, labels, top_k=top_k, bias=bias, **how)
        return (out.top_logprobs * g).sum() + out.logprobs.sum(), out

    (_, one), right = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight, bias[:45])
    order = np.argsort(-(hidden @ weight.T), axis=1, kind="stable")[:, :top_k]
    assert np.array_equal(one.top_ids, np.where(labels[:, None] < 0, -1, order))
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def spread(*arrays: Any) -> Any:
        return loss(*arrays, vocab_parallel=PaddedVocab("x", 45))

    mapped = jax.shard_map(spread, mesh=mesh, in_specs=(P(), P("x"), P("x")), out_specs=P())
    step = jax.jit(jax.value_and_grad(mapped, (0, 1), has_aux=True))
    (_, out), (d_hidden, d_weight) = step(hidden, padded, bias)
    assert np.array_equal(out.top_ids, one.top_ids)
    got, exact = (out.top_logprobs, d_hidden, d_weight[:45]), (one.top_logprobs, *right)
    for ours, theirs in zip(got, exact, strict=True):
        pair = np.asarray(ours), np.asarray(theirs).astype(np.float64)
        assert not failures(check("A9", *pair, metrics=("rho / u",), backend="jax"))
    assert not np.asarray(d_weight[45:]).any()

    def of_given(logits: Any) -> Any:
        over = PaddedVocab("x", 45)
        return vocab_parallel_logprobs(logits, labels, top_k=top_k, vocab_parallel=over).top_ids

    mapped = jax.shard_map(of_given, mesh=mesh, in_specs=P(None, "x"), out_specs=P())
    assert np.array_equal(jax.jit(mapped)(hidden @ padded.T + bias), one.top_ids)


@pytest.mark.jax
@pytest.mark.parametrize("function", ["chunked_divergence", "chunked_logprobs"])
@pytest.mark.parametrize(
    "way", ["tokens_parallel", "hidden", pytest.param("explicit", marks=pytest.mark.full)]
)
def test_meshes(way: str, function: str) -> None:
    """A9: tokens and rows over one axis that a program names, and whole arrays on a mesh."""
    jax = pytest.importorskip("jax")
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from xentlib.jax import TeacherTopK, chunked_divergence, chunked_logprobs

    p = build(Case("classes-mesh", 64, 16, 512, ignored=0.1, kept=6, ids=4, bias=False), 2)

    def loss(hidden: Any, weight: Any, labels: Any, kept: Any, ids: Any, g: Any, **how: Any) -> Any:
        if function == "chunked_divergence":
            teacher = TeacherTopK(ids, jax.nn.log_softmax(g) - 0.3)
            how |= {"kind": "jsd", "beta": 0.3, "nll_weight": 0.5, "reduction": "sum"}
            return chunked_divergence(hidden, weight, teacher, labels=labels, **how).loss
        how |= {"kept": kept, "ids": ids, "entropy": True, "top_k": 4}
        out = chunked_logprobs(hidden, weight, labels, **how)
        there = jax.numpy.isfinite(out.ids_logprobs)
        of_ids = jax.numpy.where(there, out.ids_logprobs * g, 0).sum()
        there = jax.numpy.isfinite(out.top_logprobs)
        factor = g * out.top_ids.astype("float32")
        of_ids += jax.numpy.where(there, out.top_logprobs * factor, 0).sum()
        return of_ids + ((out.logprobs + out.entropy * 0.3) * g[:, 0]).sum()

    arrays = (p.hidden, p.weight, p.labels, p.kept, p.ids, p.d_ids)
    right = jax.jit(jax.grad(loss, argnums=(0, 1)))(*arrays)
    if way == "tokens_parallel":
        mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))

        def spread(*own: Any) -> Any:
            return jax.lax.psum(loss(*own, vocab_parallel="x", tokens_parallel="x"), "x")

        mapped = jax.shard_map(spread, mesh=mesh, in_specs=(P("x"),) * 6, out_specs=P())
        got = jax.jit(jax.grad(mapped, argnums=(0, 1)))(*arrays)
    else:
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
        rows = P("data") if way == "hidden" else P("model")
        specs = (P("data"), rows, *[P("data")] * 4)
        more = {"gather": "hidden"} if way == "hidden" else {}
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(arrays, specs, strict=True)
            ]
            step = jax.jit(jax.grad(lambda *x: loss(*x, **more), argnums=(0, 1)))
            got = jax.device_get(step(*placed))
    for ours, exact in zip(got, right, strict=True):
        pair = np.asarray(ours), np.asarray(exact).astype(np.float64)
        assert not failures(check("A9", *pair, metrics=("rho / u",), backend="jax", case=way))


@pytest.mark.jax
@pytest.mark.parametrize("edge", ["teacher", "set"])
def test_edges_over_devices(edge: str) -> None:
    """A9, rows of 11, logits 20 lower, as on one device: of a teacher a token of no class, one of
    no log-probabilities; a class 120 above those of a kept set."""
    jax = pytest.importorskip("jax")
    from jax.sharding import AxisType
    from jax.sharding import PartitionSpec as P

    import xentlib.jax as X

    rng, vocab = np.random.default_rng(0), 44
    hidden, weight = (rng.standard_normal(x).astype(np.float32) for x in ((6, 5), (vocab, 5)))
    ids = np.argsort(rng.random((6, vocab)), 1)[:, :3].astype(np.int32)
    log_q = np.log(rng.dirichlet(np.ones(4), 6)[:, :3]).astype(np.float32)
    if edge == "teacher":
        ids[2], log_q[4] = -1, 3.0
    bias = np.full(vocab, -20, np.float32)
    bias[-1] += 120 * (edge == "set")

    def each(hidden: Any, weight: Any, bias: Any, **how: Any) -> Any:
        head = {"hidden": hidden, "weight": weight, "bias": bias, **how}
        if edge == "set":
            return X.chunked_logprobs(labels=ids[:, 0], kept=ids, **head).logprobs
        teacher = X.TeacherTopK(ids, log_q)
        return X.chunked_divergence(teacher=teacher, reduction="none", **head).loss

    def both(hidden: Any, weight: Any, bias: Any, **how: Any) -> Any:
        def total(hidden: Any) -> Any:
            values = each(hidden, weight, bias, **how)
            return jax.numpy.nansum(values), values

        return jax.grad(total, has_aux=True)(hidden)

    mesh = jax.make_mesh((4,), ("x",), (AxisType.Auto,))
    over = jax.shard_map(
        partial(both, vocab_parallel="x"),
        mesh=mesh,
        in_specs=(P(), P("x"), P("x")),
        out_specs=P(),
    )
    right, found = (jax.jit(f)(hidden, weight, bias) for f in (both, over))
    wrong = np.arange(6) == 4 if edge == "teacher" else np.zeros(6, bool)
    for got, exact in zip(map(np.asarray, found), map(np.asarray, right), strict=True):
        assert np.isnan(got[wrong]).all()
        pair = got[~wrong], exact[~wrong].astype(np.float64)
        assert not failures(check("A9", *pair, metrics=("rho / u",)))
