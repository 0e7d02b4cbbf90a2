"""`xentlib.torch.count_collectives`: on gloo ranks, against the profiler's own count."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from helpers.ranks import Hang, launch

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

N, V, H = 12, 101, 16
# What the c10d profiler calls them.
NAMES = {
    "all_gather": ("c10d::_allgather_base_", "c10d::allgather_"),
    "reduce_scatter": ("c10d::_reduce_scatter_base_",),
    "all_reduce": ("c10d::allreduce_",),
    "broadcast": ("c10d::broadcast_",),
    "all_to_all": ("c10d::alltoall_base_",),
    "permute": ("c10d::send", "c10d::recv_"),
    "other": ("c10d::barrier", "c10d::reduce_", "c10d::gather_", "c10d::scatter_"),
}


def steps_of(rank: int, world: int, rows: int) -> dict[str, Any]:
    """What is counted: c10d calls, functional ones, DDP, FSDP2, shards of so many rows each."""
    from torch import distributed as dist
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.fsdp import fully_shard

    from xentlib import VocabShard
    from xentlib.torch import chunked_logprobs, chunked_nll

    group = dist.group.WORLD
    one, both = torch.ones(3), [torch.zeros(3) for _ in range(world)]

    def plain() -> None:
        dist.all_reduce(one)
        dist.all_gather(both, one)
        dist.all_gather_into_tensor(torch.zeros(3 * world), one)
        dist.reduce_scatter_tensor(torch.zeros(3), torch.ones(3 * world))
        dist.broadcast(one, 0)
        dist.all_to_all_single(torch.zeros(4), torch.ones(4))
        dist.barrier()
        dist.reduce(one, 0)
        if rank == 0:
            dist.send(one, 1)
        else:
            dist.recv(one, 0)

    # torch 2.11 has the other name alone, of which later versions warn.
    scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)

    def compiled() -> None:  # what a compiled program calls
        functional.all_reduce(one, "sum", group) + 1
        scatter(torch.ones(3 * world), "sum", 0, group) + 1

    replica = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(H, V))
    pieces = torch.nn.Linear(H, V)
    mesh = dist.init_device_mesh("cpu", (world,))
    fully_shard(pieces, mesh=mesh, reshard_after_forward=True)
    shard = torch.randn(rows, H, requires_grad=True)
    y, budget = torch.arange(N), 4 * V * 4

    def hidden() -> Any:
        return torch.randn(N, H, requires_grad=True)

    def per_token() -> None:
        out = chunked_logprobs(
            hidden(), pieces.weight, y, bias=pieces.bias, max_chunk_bytes=budget, entropy=True
        )
        (out.logprobs.sum() + out.entropy.sum()).backward()

    same = torch.randn(N, H, generator=torch.Generator().manual_seed(0)).requires_grad_()

    declared = VocabShard.of_ranks(rows, group)

    def shards() -> None:  # what ranks must have the same travels with the statistics
        chunked_nll(same, shard, y, vocab_parallel=declared, max_chunk_bytes=budget).loss.backward()

    return {
        "c10d": plain,
        "functional": compiled,
        "DDP": lambda: replica(hidden()).sum().backward(),
        "FSDP2": per_token,
        "shards": shards,
    }


def on_rank(rank: int, world: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import count_collectives

    found = {}
    for name, step in steps_of(rank, world, 50 + rank).items():
        with count_collectives() as count:
            step()
        found[name] = count.counts(), count.bytes()
    for name, step in steps_of(rank, world, 60 + rank).items():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        events = {event.key: event.count for event in profiler.key_averages()}
        said = {kind: sum(events.get(key, 0) for key in keys) for kind, keys in NAMES.items()}
        found[f"{name}, profiler"] = {kind: n for kind, n in said.items() if n}
    return found


EXPECTED = {
    "c10d": {
        "all_gather": 2,
        "reduce_scatter": 1,
        "all_reduce": 1,
        "all_to_all": 1,
        "broadcast": 1,
        "permute": 1,
        "other": 2,
    },
    "functional": {"all_reduce": 1, "reduce_scatter": 1},
    "DDP": {"all_reduce": 1},
    "FSDP2": {"all_gather": 2, "reduce_scatter": 1},
    # Uneven shards: the first statistics say whose they are, and are exchanged once more.
    "shards": {"all_reduce": 3},
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return launch(2, on_rank, seconds=120)


@pytest.mark.parametrize("name", EXPECTED)
def test_counts(found: Any, name: str) -> None:
    """A15: collectives of every kind, of hooks and of the backward, those inside of our operators
    too; and what the profiler says of the same step."""
    for rank in found:
        assert rank[name][0] == EXPECTED[name]
        # Functional collectives have names of their own there.
        if name != "functional":
            assert rank[f"{name}, profiler"] == EXPECTED[name]


def test_bytes(found: Any) -> None:
    """Whole tensors: of an all-gather what comes out, of a reduce-scatter what goes in."""
    # Rows of the head are padded to a multiple of the ranks.
    padded = (V + 1) * (H + 1) * 4
    for rank in found:
        assert rank["FSDP2"][1] == 3 * padded
        assert rank["DDP"][1] == V * (H + 1) * 4


def uneven(rank: int, world: int, folder: Path) -> int:
    (folder / str(rank)).touch()
    if rank == 0:
        torch.distributed.all_reduce(torch.ones(1))
    else:
        time.sleep(3600)
    return rank


@pytest.mark.slow
def test_a_collective_that_one_rank_does_not_enter_is_seen(tmp_path: Path) -> None:
    """M5: our own tests must not wait for ever."""
    with pytest.raises(Hang, match="2 of 2 ranks made no progress for 12 s"):
        launch(2, uneven, tmp_path, seconds=12)
    assert len(list(tmp_path.iterdir())) == 2  # both were there
