"""The planned memory of a sharded head against the pages of a process: the resident peak of a call
on the fullest of four gloo ranks, within 10 %. `test_plan_ranks.py` has the allocator's count, in
which what a thread of gloo keeps has been let go."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.collected import collected
from helpers.pairs import parameters
from helpers.ranks import launch
from xentlib.plan import Route, head_routes

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="pages are counted by Linux"),
]

from helpers.routed import nodes_of  # noqa: E402

WORLD, V, H, N, BUDGET, ROUNDS = 4, 16_003, 512, 256, 16 << 20, 2
NEAR = 0.1
MMAP_THRESHOLD = -3  # of mallopt: from here on a block has pages of its own, which go with it


class Held(NamedTuple):
    gather: str
    nodes: int = 1
    low: bool = False  # bfloat16, but for the parameter and the reduction

    def planned(self) -> Route:
        dtype = "bfloat16" if self.low else "float32"
        more: dict[str, Any] = {"dtype": dtype, "head_dtype": dtype, "nodes": self.nodes}
        more |= {"platform": "cpu", "max_chunk_bytes": BUDGET}
        routes = head_routes(N, V, H, WORLD, **more)
        return routes["hybrid" if self.nodes > 1 else self.gather]


HELD = {
    "head": Held("head"),
    "hidden": Held("hidden"),
    "stream": Held("stream"),
    "hybrid": Held("hidden", nodes=2),
    "hybrid, bf16": Held("hidden", nodes=2, low=True),
}
KEPT = ("stream", "hybrid")  # of which gloo keeps something


def resident(name: str) -> int:
    """VmRSS, or VmHWM, the most of it since `clear_refs`."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise AssertionError(name)


def peaks(rank: int, world: int, cases: list[Held]) -> list[int]:
    """Of each case the least of some rounds."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from xentlib.torch import chunked_nll

    libc = ctypes.CDLL(None)
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    torch.set_num_threads(1)
    found = []
    for case in cases:
        low = torch.bfloat16 if case.low else None
        policy = MixedPrecisionPolicy(low, torch.float32)
        head = fully_shard(
            torch.nn.Linear(H, V, bias=False),
            mesh=torch.distributed.init_device_mesh("cpu", (world,)),
            mp_policy=policy,
        )
        more: dict[str, Any] = {"gather": case.gather, "max_chunk_bytes": BUDGET}
        if case.nodes > 1:
            more["tokens_parallel"] = nodes_of(case.nodes)

        def call(tokens: int, head: Any = head, more: Any = more, low: Any = low) -> int:
            hidden = torch.randn(tokens, H, dtype=low).requires_grad_()
            labels = torch.randint(V, (tokens,))
            head.weight.grad = None
            gc.collect()
            libc.malloc_trim(0)
            for group in torch.distributed.distributed_c10d._world.pg_map:
                for _ in range(8):  # what its threads keep of the last call
                    torch.distributed.all_reduce(torch.zeros(1), group=group)
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
            before = resident("VmRSS")
            chunked_nll(hidden, head.weight, labels, **more).loss.backward()
            return resident("VmHWM") - before

        call(8)
        call(N)
        found.append(min(call(N) for _ in range(ROUNDS)))
        del head
    return found


@pytest.fixture(scope="module")
def fullest(request: Any) -> dict[str, int]:
    names = collected(request, HELD)
    every = launch(WORLD, peaks, [HELD[name] for name in names], seconds=600)
    return dict(zip(names, (max(ranks) for ranks in zip(*every, strict=True)), strict=True))


@pytest.mark.parametrize("name", parameters(HELD, KEPT))
def test_the_fullest_rank_is_as_full_as_planned(fullest: Any, name: str) -> None:
    """D5, both ways."""
    planned, found = HELD[name].planned(), fullest[name]
    assert abs(found / planned.peak_bytes - 1) <= NEAR, (found, planned.moments)
