"""Row A15 in a parity run: which heads are counted, in how many chunks, and what is told apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from xentlib.budgets import BUDGETS
from xentlib.plan import head_routes, plan_chunks
from xentlib.tools.harness.cases import Extent
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.ranks import WORLD, run_ranks
from xentlib.tools.parity.rows import collectives
from xentlib.tools.parity.rows.collectives import CHUNKS, FEW_CHUNKS, HEADS, Count, H, N, V


def test_every_budget_is_counted() -> None:
    """A15: a head that gets a budget gets a row in the report."""
    counted = [name for heads in HEADS.values() for name in heads]
    assert sorted(counted) == sorted(BUDGETS)


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("name", BUDGETS)
def test_there_are_as_many_chunks_as_are_named(name: str, chunks: int) -> None:
    """A15. Catches: a plan that rounds 7 tokens up to 8, which makes 56 chunks of 64."""
    count = Count(name, chunks, (N,) * WORLD)
    budget = {"max_chunk_bytes": count.chunk_bytes}
    kind = count.head.split(", low rank")[0]
    if kind in ("stream", "tokens over the ranks", "rows over nodes"):
        routes = head_routes(
            N,
            V,
            H,
            WORLD,
            dtype="float32",
            head_dtype="float32",
            platform="cpu",
            max_chunk_bytes=count.chunk_bytes,
            nodes=2,
        )
        blocks = -(-V // WORLD) / routes["stream"].block_rows
        route = routes["hybrid" if kind == "rows over nodes" else "hidden"]
        found = blocks if count.head == "stream" else route.num_chunks
    elif count.head == "JAX, hidden route":
        found = plan_chunks(WORLD * N, 256 // WORLD, H, **budget).num_chunks
    else:
        columns = {"vocabulary shard": 65, "FSDP2, vocabulary shard": 129}.get(count.head, V)
        found = plan_chunks(N, columns, H, **budget).num_chunks
    assert -(-found // 1) == chunks


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunks", [FEW_CHUNKS, pytest.param(CHUNKS, marks=pytest.mark.full)], ids=str
)
@pytest.mark.parametrize(
    ("backend", "heads"),
    [("torch", slice(k, None, 4)) for k in range(4)] + [("jax", slice(k, None, 2)) for k in (0, 1)],
    ids=[*(f"torch-{k}" for k in range(4)), "jax-0", "jax-1"],
)
def test_heads_that_stay_where_they_are(
    backend: str, heads: slice, chunks: tuple[int, ...], monkeypatch: Any
) -> None:
    """A15, A14: on real ranks with 0, 1 and N tokens, in 1, 7 and 64 chunks or blocks; what is off
    by a round, or sends nothing back, is rejected."""
    pytest.importorskip(backend)
    stay = {name: tokens for name, tokens in HEADS[backend].items() if has_rounds(name)}
    assert len(stay) == (11 if backend == "torch" else 2)
    stay = dict([*stay.items()][heads])
    monkeypatch.setitem(HEADS, backend, stay)
    findings = Findings((backend,), 1.0)
    extent = Extent(suite="full" if chunks == CHUNKS else "standard")
    rank, world = getattr(collectives, f"{backend}_rank"), WORLD if backend == "torch" else 1
    of_ranks = run_ranks(backend, rank, collectives.counts_of(backend, extent.suite), world)
    collectives.measure(findings, extent, {backend: {backend: of_ranks}})
    found = findings.measurements
    assert [m for m in found if not m.passed] == []
    assert sum(m.row == "A15" for m in found) == len(chunks) * len(stay)
    rejected = [m for m in found if m.row == "A14"]
    assert len(rejected) == len(stay)
    # Two more where the backward of a head reduces once beside its rounds, as that of d A.
    twice = sum(set(BUDGETS[name].backward) > {"all_gather"} for name in stay)
    assert sum("7 mutants" in m.case for m in rejected) == twice
    assert sum("5 mutants" in m.case for m in rejected) == len(stay) - twice


def has_rounds(name: str) -> bool:
    budget = BUDGETS[name]
    return budget != replace(budget, each={}, each_backward={})
