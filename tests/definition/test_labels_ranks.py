"""`next_token_labels` of a sequence that is spread over gloo ranks."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise, product

import numpy as np
import pytest

from helpers.labels import SHIFTS, calls, longer_calls, naive, zigzag
from helpers.ranks import launch
from xentlib.ulp import bits_unequal

CUTS = {
    1: [(8,), "zigzag"],
    2: [(4, 4), (5, 3), (0, 8), (8, 0), "zigzag"],
    3: [(3, 3, 2), (4, 0, 4), (0, 8, 0), (8, 0, 0)],
    4: [(2, 2, 2, 2), (1, 4, 0, 3), (4, 0, 0, 4), (0, 0, 5, 3), "zigzag"],
}


def part(x, cut, rank, world):
    if cut == "zigzag":
        return zigzag(x, rank, world)
    start, stop = list(pairwise(accumulate(cut, initial=0)))[rank]
    return x[..., start:stop]


@cache
def rows():
    """Of a cut by lengths, and of one in pairs of pieces."""
    short = (*calls(),)
    return {False: short, True: (*short, *longer_calls())}


def cut_calls(cuts):
    for cut, shift in product(cuts, SHIFTS):
        for number, (labels, options) in enumerate(rows()[cut == "zigzag"]):
            yield cut, shift, number, labels, options


@cache
def whole(shift, number):
    """What the loop makes of a row, which is the same however the row is cut."""
    labels, options = rows()[True][number]
    return naive(labels, shift=shift, **options)


def slices(rank, world, cuts):
    """Every call on this rank's slice, and whether its inputs are as they were."""
    import torch

    from xentlib.torch import next_token_labels

    found = []
    for cut, shift, _, labels, options in cut_calls(cuts):
        given = {k: torch.tensor(v) if np.ndim(v) else v for k, v in options.items()}
        for name in {"segment_ids", "position_ids", "where"} & given.keys():
            given[name] = part(given[name], cut, rank, world)
        local = part(torch.tensor(labels), cut, rank, world)
        before = local.clone()
        given["sequence_parallel"] = torch.distributed.group.WORLD
        given["layout"] = "zigzag" if cut == "zigzag" else "contiguous"
        out = next_token_labels(local, shift=shift, **given)
        found.append((out.numpy(), out.is_contiguous() and bool((local == before).all())))
    return found


@pytest.mark.torch
@pytest.mark.parametrize("world", CUTS)
def test_slices_of_ranks_are_slices_of_the_row(world):
    """A0: even, uneven, empty, zig-zag; targets are those of the next pieces that have them."""
    pytest.importorskip("torch")
    ranks = launch(world, slices, CUTS[world])
    items = cut_calls(CUTS[world])
    for (cut, shift, number, _, options), *results in zip(items, *ranks, strict=True):
        expected = whole(shift, number)
        for rank, (got, untouched) in enumerate(results):
            local = part(expected, cut, rank, world)
            assert got.dtype == local.dtype
            assert bits_unequal(got, local) == 0, (cut, shift, rank, options)
            assert untouched


def balanced(rank, world):
    """A rank's part of rows as PyTorch cuts them, of tokens and of labels made before."""
    import torch
    from torch.distributed.tensor.experimental import context_parallel

    from xentlib.torch import next_token_labels

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    row = torch.arange(2 * 24).reshape(2, 24)
    ids = row // 5 % 3
    buffers = [row.clone(), ids.clone(), next_token_labels(row, segment_ids=ids, shift=2)]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
        tokens, segments, labels = (x.clone() for x in buffers)
    options = {"segment_ids": segments, "shift": 2, "sequence_parallel": mesh}
    found = [next_token_labels(tokens, layout=x, **options) for x in ("zigzag", "contiguous")]
    return tokens.numpy(), labels.numpy(), *(x.numpy() for x in found)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("world", [2, 4])
def test_zigzag_is_the_order_of_pytorch_s_context_parallel(world):
    """A0: rows that its load balancer has cut."""
    pytest.importorskip("torch")
    row = np.arange(2 * 24).reshape(2, 24)
    for rank, (tokens, labels, found, other) in enumerate(launch(world, balanced)):
        assert bits_unequal(tokens, zigzag(row, rank, world)) == 0
        assert bits_unequal(found, labels) == 0
        assert bits_unequal(other, labels) > 0


def exchanges(rank, world):
    """Messages of two bad calls, the result over a submesh, the collectives of 17 calls; the
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
        y = y.repeat(2)
        zigzag = {"layout": "zigzag", "sequence_parallel": mesh["cp"]}
        pieces = [next_token_labels(y, shift=shift, **zigzag) for shift in (1, 4)]
        parts = [next_token_labels(y[:3], sequence_parallel=mesh["cp"], **o) for o in options]
        return parts + pieces

    compiled = torch.compile(several, fullgraph=True, backend="aot_eager")(labels)
    assert all(a.equal(b) for a, b in zip(compiled, several(labels), strict=True))
    names = []
    for local, shift in product((labels, labels[: 3 * rank]), (1, 4)):
        packings = ({}, {"segment_ids": local}, {"cu_seqlens": torch.tensor([0, 2])})
        for options in (*packings, {"position_ids": local}):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                next_token_labels(local, shift=shift, sequence_parallel=mesh["cp"], **options)
            events = [e for e in profiled.key_averages() if e.key.startswith("c10d::")]
            names.append([(e.key, e.count) for e in events])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        next_token_labels(labels[:2], layout="zigzag", sequence_parallel=mesh["cp"])
    events = [e for e in profiled.key_averages() if e.key.startswith("c10d::")]
    names.append([(e.key, e.count) for e in events])
    return said, shifted, names


def differing(rank, world):
    """What is said of pieces and offsets that ranks do not have alike, and what a compiler, which
    reads no number, makes of them."""
    import torch

    from xentlib.torch import next_token_labels

    def labels(tokens, **options):
        given = {"sequence_parallel": torch.distributed.group.WORLD, **options}
        return next_token_labels(tokens, **given)

    unlike = torch.arange(8 - 2 * rank)
    calls = [
        (unlike, {"layout": "zigzag"}),
        (unlike[: 3 + 2 * rank], {"layout": "zigzag"}),
        (unlike[: 4 + rank], {"layout": "zigzag"}),
        *(
            (unlike[:6], {"layout": layout, "cu_seqlens": torch.tensor([0, 3 + rank, 6])})
            for layout in ("zigzag", "contiguous")
        ),
        (unlike[:6], {"layout": ("zigzag", "contiguous")[rank]}),
    ]
    said = []
    for tokens, options in calls:
        with pytest.raises(ValueError, match="same on every rank") as caught:
            labels(tokens, **options)
        said.append(str(caught.value))
    kinds = ((torch.int64, -100), (torch.int16, -1), (torch.uint8, 0), (torch.int32, -1))

    def several():
        for (tokens, options), (dtype, ignored) in zip((calls[0], *calls[3:]), kinds, strict=True):
            yield labels(tokens.to(dtype), ignore_index=ignored, **options)
        yield labels(unlike[:6], layout="zigzag")

    compiled = torch.compile(lambda: list(several()), fullgraph=True, backend="aot_eager")
    *found, alike = compiled()
    return said, [x.unique().tolist() for x in found], alike.tolist()


def both(rank, world):
    return exchanges(rank, world), differing(rank, world)


@pytest.fixture(scope="module")
def on_two():
    """One start: a rank imports the compiler in 5 s."""
    pytest.importorskip("torch")
    return launch(2, both)


@pytest.mark.slow
@pytest.mark.torch
def test_ranks_that_differ_in_what_must_be_the_same(on_two):
    """M3, D12: all of them raise; where none may read a number no label is one of a vocabulary."""
    for rank, (_, (said, found, alike)) in enumerate(on_two):
        for sizes, text in zip(([8, 6], [3, 5], [4, 5]), said, strict=False):
            assert f"`layout='zigzag'`; got {sizes} tokens" in text
        assert all("`cu_seqlens` must be the offsets of the whole row" in x for x in said[3:5])
        assert "`layout` must be the same on every rank" in said[5]
        assert found == [[-1], [-2], [255], [-2]]
        assert alike == [[1, 2, 0, 4, 5, -100], [1, 2, 3, 4, 5, 3]][rank]


@pytest.mark.slow
@pytest.mark.torch
def test_ranks_exchange_their_columns_once(on_two):
    """M5: one collective whatever the content, so nothing can hang; bad groups are named."""
    for rank, (((mesh, name), shifted, collectives), _) in enumerate(on_two):
        assert "`sequence_parallel` must be a one-dimensional DeviceMesh; got 2" in mesh
        assert "`sequence_parallel` must be a ProcessGroup or a one-dimensional" in name
        assert shifted == [[1, 2, 10], [11, 12, -100]][rank]
        assert collectives == [[("c10d::allgather_", 1)]] * 17
