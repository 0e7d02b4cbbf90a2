"""`next_token_labels` of a sequence that is spread over gloo ranks."""

from __future__ import annotations

from itertools import accumulate, pairwise, product

import numpy as np
import pytest

from helpers.labels import SHIFTS, calls, naive
from helpers.ranks import launch
from xentlib.ulp import bits_unequal

CUTS = {
    1: [(8,)],
    2: [(4, 4), (5, 3), (0, 8), (8, 0)],
    3: [(3, 3, 2), (4, 0, 4), (0, 8, 0), (8, 0, 0)],
    4: [(2, 2, 2, 2), (1, 4, 0, 3), (4, 0, 0, 4), (0, 0, 5, 3)],
}


def part(x, sizes, rank):
    start, stop = list(pairwise(accumulate(sizes, initial=0)))[rank]
    return x[..., start:stop]


def slices(rank, world, cuts):
    """Every call on this rank's slice, and whether its inputs are as they were."""
    import torch

    from xentlib.torch import next_token_labels

    found = []
    for sizes, shift in product(cuts, SHIFTS):
        for labels, options in calls():
            given = {k: torch.tensor(v) if np.ndim(v) else v for k, v in options.items()}
            for name in {"segment_ids", "position_ids", "where"} & given.keys():
                given[name] = part(given[name], sizes, rank)
            mine = part(torch.tensor(labels), sizes, rank)
            before = mine.clone()
            over = torch.distributed.group.WORLD
            out = next_token_labels(mine, shift=shift, sequence_parallel=over, **given)
            found.append((out.numpy(), out.is_contiguous() and bool((mine == before).all())))
    return found


@pytest.mark.torch
@pytest.mark.parametrize("world", CUTS)
def test_slices_of_ranks_are_slices_of_the_row(world):
    """A0: even, uneven, empty; targets are those of the next slices that have them."""
    pytest.importorskip("torch")
    ranks = launch(world, slices, CUTS[world])
    items = [(*both, *call) for both in product(CUTS[world], SHIFTS) for call in calls()]
    for (sizes, shift, labels, options), *results in zip(items, *ranks, strict=True):
        expected = naive(labels, shift=shift, **options)
        for rank, (got, untouched) in enumerate(results):
            mine = part(expected, sizes, rank)
            assert got.dtype == mine.dtype
            assert bits_unequal(got, mine) == 0, (sizes, shift, rank, options)
            assert untouched


def exchanges(rank, world):
    """Messages of two bad calls, the result over a submesh, the collectives of 16 calls; the
    same in one graph of the compiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import next_token_labels

    mesh = torch.distributed.init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    labels = torch.arange(3) + 10 * rank
    said = []
    for parallel in (mesh, "cp"):
        with pytest.raises((ValueError, TypeError)) as caught:
            next_token_labels(labels, sequence_parallel=parallel)
        said.append(str(caught.value))
    shifted = next_token_labels(labels, sequence_parallel=mesh["cp"]).tolist()

    def several(y):
        places = {"position_ids": torch.arange(3) + 3 * rank}
        options = [{"shift": shift, **more} for shift in (1, 4) for more in ({}, places)]
        options.append({"shift": 2, "cu_seqlens": torch.tensor([0, 5, 6])})
        return [next_token_labels(y, sequence_parallel=mesh["cp"], **o) for o in options]

    compiled = torch.compile(several, fullgraph=True, backend="aot_eager")(labels)
    assert all(a.equal(b) for a, b in zip(compiled, several(labels), strict=True))
    names = []
    for mine, shift in product((labels, labels[: 3 * rank]), (1, 4)):
        packings = ({}, {"segment_ids": mine}, {"cu_seqlens": torch.tensor([0, 2])})
        for options in (*packings, {"position_ids": mine}):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                next_token_labels(mine, shift=shift, sequence_parallel=mesh["cp"], **options)
            events = [e for e in profiled.key_averages() if e.key.startswith("c10d::")]
            names.append([(e.key, e.count) for e in events])
    return said, shifted, names


@pytest.mark.slow
@pytest.mark.torch
def test_ranks_exchange_their_columns_once():
    """M5: one collective whatever the content, so nothing can hang; bad groups are named."""
    pytest.importorskip("torch")
    for rank, ((mesh, name), shifted, collectives) in enumerate(launch(2, exchanges)):
        assert "`sequence_parallel` must be a one-dimensional DeviceMesh; got 2" in mesh
        assert "`sequence_parallel` must be a ProcessGroup or a one-dimensional" in name
        assert shifted == [[1, 2, 10], [11, 12, -100]][rank]
        assert collectives == [[("c10d::allgather_", 1)]] * 16
