"""A15: what a call sends, wherever its head lives, counted on real ranks under real wrappers."""

from __future__ import annotations

import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xentlib.budgets import BUDGETS, budget_entries, check_budget
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.ranks import WORLD, run_ranks
from xentlib.tools.parity.collective_cases import Count, N, jax_rank, torch_rank, zero_rank

CHUNKS = (1, 7, 64)
FEW_CHUNKS = (1, 7)
# Heads, and the valid tokens of each rank: ranks that share a vocabulary share their tokens.
UNEVEN = ((0, 1, N, N),)
PAIRS = ((0, 0, N, N), (1, 1, N, N))
SHARED = ((0,) * WORLD, (1,) * WORLD, (N,) * WORLD)
NODES = ((0, N, N, 1),)  # which have as many chunks as each other
LOW_RANK = ("low rank", "low rank, mask", "low rank, recompute", "low rank, mask, recompute")
HEADS: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "torch": {
        "plain": UNEVEN,
        "DDP": UNEVEN,
        "FSDP2": UNEVEN,
        "FSDP2, recompute": UNEVEN,
        "FSDP2, NLLHead": UNEVEN,
        "FSDP2, prefetched": UNEVEN,
        "FSDP2, replicas": UNEVEN,
        "FSDP2, vocabulary shard": PAIRS,
        "vocabulary shard": SHARED,
        "vocabulary shard, recompute": SHARED,
        "tokens over the ranks": UNEVEN,
        "tokens over the ranks, recompute": UNEVEN,
        **{f"tokens over the ranks, {name}": UNEVEN for name in LOW_RANK},
        "rows over nodes": NODES,
        "rows over nodes, recompute": NODES,
        "stream": UNEVEN,
        "stream, recompute": UNEVEN,
    },
    "zero": {"ZeRO-3": UNEVEN, "ZeRO-3, recompute": UNEVEN},
    "jax": {
        "JAX, data axis": UNEVEN,
        "JAX, data axis, recompute": UNEVEN,
        "JAX, hidden route": UNEVEN,
        "JAX, hidden route, recompute": UNEVEN,
    },
}


RANKS = {"torch": torch_rank, "zero": zero_rank, "jax": jax_rank}


def collectives(findings: Findings, suite: str) -> None:
    """Every head, in 1 and 7 chunks; in the full suite in 64 too, and under ZeRO-3 where DeepSpeed
    is installed, which compiles an operator the first time."""
    chunks = CHUNKS if suite == "full" else FEW_CHUNKS
    for backend in findings.backends:
        _measure(findings, backend, backend, chunks)
    if "torch" in findings.backends and suite == "full" and find_spec("deepspeed"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # DeepSpeed looks for ninja, which is beside the interpreter.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
        _measure(findings, "torch", "zero", chunks, PATH=path, **where)


def _measure(
    findings: Findings, backend: str, kept: str, chunks: tuple[int, ...], **environment: str
) -> None:
    counts = [
        Count(budget, number, valid)
        for number in chunks
        for budget, tokens in HEADS[kept].items()
        for valid in tokens
    ]
    world = 1 if kept == "jax" else WORLD
    of_ranks = run_ranks(kept, RANKS[kept], counts, world, findings.slowness, **environment)
    for k, count in enumerate(counts):
        forward, backward = ([rank[k][phase] for rank in of_ranks] for phase in (0, 1))
        findings.measurements += check_budget(
            count.budget,
            forward,
            backward,
            rounds=count.rounds,
            backend=backend,
            case=count.text,
        )
        if count.chunks == 7:
            _reject(findings, backend, count, forward, backward)


def _reject(
    findings: Findings, backend: str, count: Count, forward: list[Any], backward: list[Any]
) -> None:
    """A14: what regressed heads would have sent."""

    def more(counted: dict[str, int], kind: str, n: int = 1) -> dict[str, int]:
        return {**counted, kind: counted.get(kind, 0) + n}

    allowed = BUDGETS[count.budget]
    reduced = [kind for kind in allowed.backward if kind != "all_gather"]
    wrong = {
        "a gather in each chunk": ([more(x, "all_gather", 6) for x in forward], backward),
        "a gather more": (forward, [more(x, "all_gather") for x in backward]),
        "a rank of its own": ([*forward[:-1], more(forward[-1], "all_reduce")], backward),
    }
    if reduced:
        gathers = [{k: n for k, n in x.items() if k not in reduced} for x in backward]
        wrong["no reduction"] = (forward, gathers)
        wrong["a second reduction"] = (forward, [more(x, reduced[0]) for x in backward])
    if count.rounds:
        rounds = [
            [{k: n - each.get(k, 0) for k, n in x.items()} for x in counted]
            for counted, each in ((forward, allowed.each), (backward, allowed.each_backward))
        ]
        wrong["a round less"] = (rounds[0], rounds[1])
        unsent = [
            [{k: n for k, n in x.items() if k != "reduce_scatter"} for x in counted]
            for counted in (forward, backward)
        ]
        wrong["nothing sent back"] = (unsent[0], unsent[1])
    entries = {
        name: budget_entries(count.budget, *counted, rounds=count.rounds)
        for name, counted in wrong.items()
    }
    want = next(iter(entries.values()))[1]
    got = {name: pair[0] for name, pair in entries.items()}
    findings.reject("A15", got, want, backend=backend, quantity=f"collectives, {count.budget}")
