"""Class probabilities as labels of heads that are sharded, on four gloo ranks along every route and
on four devices of JAX: values, gradients, and mistakes that some ranks make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures
from xentlib.labels import SoftLabels
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.problems import Case, build
from xentlib.tools.harness.ranks import ShardedCall, run_calls, run_ranks
from xentlib.tools.parity.rows import invariant
from xentlib.tools.parity.rows.head import same

pytestmark = pytest.mark.slow
OPTIONS = {"label_smoothing": 0.1, "reduction": "sum"}
CASE = Case("probs-shards", 129, 64, 981, std=3.0, soft="few", class_weights=True,
            token_temperature=True, options=OPTIONS)  # fmt: skip


@pytest.mark.torch
def test_every_route() -> None:
    """A9, as one process that has all; A18 of given logits."""
    pytest.importorskip("torch")
    from helpers import soft_ranks

    for rank, (by_route,) in enumerate(run_ranks("torch", soft_ranks.of_rank, [None], 4)):
        right = [x.numpy() for x in by_route.pop("whole")]
        assert len(by_route) == 6
        for route, got in by_route.items():
            for k, (ours, exact) in enumerate(zip(got, right, strict=True)):
                pair = ours.numpy(), exact.astype(np.float64)
                case = f"{route}, rank {rank}, {k}"
                assert not failures(check("A9", *pair, metrics=("rho / u",), case=case))


@pytest.mark.torch
def test_ranks_that_differ_are_all_refused() -> None:
    """Each on every rank, in one sentence."""
    pytest.importorskip("torch")
    from helpers import soft_ranks

    expected = {"probs": "`labels` must be the same", "label_smoothing": "`label_smoothing`"}
    expected |= {"no class": "`ids` must hold classes", "negative on one": "must be probabilities"}
    expected |= dict.fromkeys(("columns", "columns on all"), "must have the classes of the head")
    for texts in zip(*run_ranks("torch", soft_ranks.refused, [None], 2), strict=True):
        name = texts[0].partition(": ")[0]
        assert all(expected.get(name, "the ids of each token") in text for text in texts), texts


@pytest.mark.full(backend="jax")
def test_shards_do_not_show(backend: str) -> None:
    """A18, and A5, A6 over shards; each rank has its columns of an array of all classes."""
    problem, findings = build(CASE, 3), Findings((backend,))
    calls = [ShardedCall("chunked_nll", problem, cut) for cut in ((981,), invariant.even(981, 4))]
    if backend == "torch":
        calls.append(ShardedCall("chunked_nll", problem, (128, 0, 853)))
        dense = problem.changed(soft=problem.probs.astype(np.float32))
        calls += [ShardedCall("chunked_nll", dense, cut) for cut in ((981,), (128, 0, 853))]
    one, *others = run_calls(backend, calls)
    for call, got in zip(calls[1:], others, strict=True):
        assert not got.unequal
        of_shards = {"names": invariant.OF_SHARDS, "backend": backend, "case": str(call.sizes)}
        same(findings, "A18", got.outcome, one.outcome, **of_shards)
        findings.gradients({backend: got.outcome}, problem.soft_reference(), problem)
    assert len(findings.measurements) > 4
    assert not failures(findings.measurements)


@pytest.mark.jax
@pytest.mark.parametrize("way", ["tokens_parallel", "shards", "explicit", "hidden"])
def test_meshes(way: str) -> None:
    """A9: tokens and rows over one axis that a program names, columns of all classes, and whole
    arrays on a mesh."""
    jax = pytest.importorskip("jax")
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    from xentlib.jax import chunked_nll, vocab_parallel_logprobs

    p = build(Case("probs-mesh", 64, 16, 404, soft="few", bias=False), 2)
    of_all = way in ("shards", "explicit")
    ids = np.where(p.valid[:, None], p.soft.ids, -1).astype(np.int32)
    soft = (p.probs.astype(np.float32),) if of_all else (ids, p.soft.probs)

    def loss(hidden: Any, weight: Any, where: Any, *soft: Any, **how: Any) -> Any:
        labels = soft[0] if len(soft) == 1 else SoftLabels(*soft)
        out = chunked_nll(hidden, weight, labels, where=where, **OPTIONS, **how)
        if way != "shards":
            return out.loss
        logits = hidden @ weight.T
        of_logits = vocab_parallel_logprobs(logits, labels, where=where, entropy=True, **how)
        every = of_logits.entropy * 0.3 + of_logits.lse * 0.2 - of_logits.logprobs
        return out.loss + every.sum()  # minus: a gradient that cancels to a ninth has nine times A9

    arrays = (p.hidden, p.weight, p.where, *soft)
    right = jax.jit(jax.grad(loss, argnums=(0, 1)))(*arrays)
    axis = (AxisType.Auto,) if way in ("tokens_parallel", "shards") else (AxisType.Explicit,) * 2
    if way in ("tokens_parallel", "shards"):
        mesh = jax.make_mesh((4,), ("x",), axis_types=axis)
        specs = (P(), P("x"), P(), P(None, "x")) if way == "shards" else (P("x"),) * 5
        how: dict[str, Any] = {"vocab_parallel": "x"}
        how |= {"tokens_parallel": "x"} if way == "tokens_parallel" else {}

        def spread(*own: Any) -> Any:
            total = loss(*own, **how)
            return jax.lax.psum(total, "x") if way == "tokens_parallel" else total

        mapped = jax.shard_map(spread, mesh=mesh, in_specs=specs, out_specs=P())
        got = jax.jit(jax.grad(mapped, argnums=(0, 1)))(*arrays)
    else:
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axis)
        rows = P("data") if way == "hidden" else P("model")
        specs = (P("data"), rows, P("data"), *[P("data")] * len(soft))
        more = {"gather": "hidden"} if way == "hidden" else {}
        with jax.set_mesh(mesh):
            placed = [
                jax.device_put(x, NamedSharding(mesh, spec))
                for x, spec in zip(arrays, specs, strict=True)
            ]
            got = jax.jit(jax.grad(lambda *x: loss(*x, **more), argnums=(0, 1)))(*placed)
    for ours, exact in zip(got, right, strict=True):
        pair = np.asarray(ours), np.asarray(exact, np.float64)
        assert not failures(check("A9", *pair, metrics=("rho / u",)))
