"""`next_token_labels` of both backends against a loop that anyone can read."""

from __future__ import annotations

import re
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import launch
from xentlib.interop import to_jax, to_numpy, to_torch
from xentlib.ulp import bits_unequal


def shifted(backend: str, labels: np.ndarray, **options) -> np.ndarray:
    """Through one backend, NumPy in and out; 64-bit integers need JAX's x64."""

    def call(cross, function):
        given = {k: cross(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        return np.array(to_numpy(function(cross(labels), **given)))

    if backend == "torch":
        from xentlib.torch import next_token_labels

        return call(lambda x: to_torch(x, copy=True), next_token_labels)
    import jax

    from xentlib.jax import next_token_labels

    with jax.enable_x64(True):
        return call(lambda x: to_jax(x, copy=True), next_token_labels)


def naive(labels, *, segment_ids=None, cu_seqlens=None, ignore_index=-100) -> np.ndarray:
    """The definition, one token at a time."""
    out = np.full_like(labels, ignore_index)
    for row in np.ndindex(labels.shape[:-1]):
        for t in range(labels.shape[-1] - 1):
            together = True
            if segment_ids is not None:
                together = segment_ids[(*row, t)] == segment_ids[(*row, t + 1)]
            if cu_seqlens is not None:
                together = t + 1 not in cu_seqlens.tolist()
            if together:
                out[(*row, t)] = labels[(*row, t + 1)]
    return out


def agree(backend: str, labels: np.ndarray, **options) -> None:
    before = labels.copy()
    got = shifted(backend, labels, **options)
    assert got.dtype == labels.dtype
    assert bits_unequal(got, naive(labels, **options)) == 0
    assert bits_unequal(labels, before) == 0


def test_the_shift_by_hand(backend):
    """A0: position t predicts the token at t + 1, the last one nothing."""
    got = shifted(backend, np.array([5, 6, 7, 8], np.int32))
    assert got.tolist() == [6, 7, 8, -100]


def test_documents_do_not_leak(backend):
    """A0: a document of n tokens has n - 1 targets, whichever way the packing is told."""
    labels = np.arange(10, 17, dtype=np.int32)
    expected = [11, 12, -100, 14, -100, 16, -100]
    segments = np.array([0, 0, 0, 4, 4, 1, 1], np.int32)
    offsets = np.array([0, 3, 5, 7], np.int32)
    assert shifted(backend, labels, segment_ids=segments).tolist() == expected
    assert shifted(backend, labels, cu_seqlens=offsets).tolist() == expected
    assert shifted(backend, labels[None], cu_seqlens=offsets).tolist() == [expected]


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 7],
        [0, 0, 3, 3, 3, 5, 7],  # empty documents, one in front
        [0, 3, 5, 7, 7, 7],  # and at the end
        [0, 3, 5],  # trailing padding past the last offset
        [0],
        [0, 1, 2, 3, 4, 5, 6, 7],  # nothing but documents of one token
    ],
    ids=str,
)
def test_offsets(backend, offsets):
    """A0: empty documents and trailing padding move no boundary."""
    labels = np.arange(10, 17, dtype=np.int32)
    agree(backend, labels, cu_seqlens=np.array(offsets, np.int32))
    agree(backend, labels, cu_seqlens=np.array(offsets, np.int64))


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3, 0), (3, 1), (2, 3, 5), (0, 4)], ids=str)
def test_shapes(backend, shape):
    """ANCHORS 4.17: L = 0, L = 1, batch dimensions, none of them a special case for the caller."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 50, shape).astype(np.int32)
    agree(backend, labels)
    agree(backend, labels, segment_ids=rng.integers(0, 2, shape).astype(np.int32))
    if labels.ndim == 1:
        agree(backend, labels, cu_seqlens=np.array([0, labels.size], np.int32))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_dtypes_are_kept(backend, dtype):
    """ANCHORS 4.11: the labels' own width comes back, ids and -100 alike."""
    agree(backend, np.array([1, 2, -100, 4], dtype))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_unsigned_labels_of_packed_rows(backend, dtype):
    """ANCHORS 4.11: PyTorch fills and scatters no uint16 or uint32, but it selects."""
    labels = np.array([1, 2, 3, 4], dtype)
    agree(backend, labels, ignore_index=9, segment_ids=np.array([0, 0, 1, 1], dtype))
    agree(backend, labels, ignore_index=9, cu_seqlens=np.array([0, 2, 4], dtype))


def test_unsigned_labels_cannot_hold_minus_100(backend):
    """ANCHORS 4.11: -100 in uint8 would be the plausible token 156."""
    labels = np.array([1, 156, 3], np.uint8)
    with pytest.raises(TypeError, match=r"can hold `ignore_index` \(-100\); got uint8"):
        shifted(backend, labels)
    assert shifted(backend, labels, ignore_index=255).tolist() == [156, 3, 255]


def test_masked_labels_stay_masked(backend):
    """A0: a target that was already ignored is not revived."""
    labels = np.array([5, -100, 7, 8], np.int32)
    assert shifted(backend, labels).tolist() == [-100, 7, 8, -100]


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, {"segment_ids": np.zeros(4, np.float32)}, "`segment_ids` must be integers"),
        (ValueError, {"segment_ids": np.zeros(3, np.int32)}, "must have the shape of `labels`"),
        (ValueError, {"cu_seqlens": np.zeros((1, 2), np.int32)}, r"shape \(documents \+ 1,\)"),
        (TypeError, {"cu_seqlens": np.zeros(2, np.float32)}, "`cu_seqlens` must be integers"),
        (TypeError, {"ignore_index": 1.5}, "`ignore_index` must be an integer; got 1.5"),
        (
            ValueError,
            {"segment_ids": np.zeros(4, np.int32), "cu_seqlens": np.array([0, 4], np.int32)},
            "say the same thing; got both",
        ),
    ],
)
def test_bad_arguments_are_refused(backend, error, options, message):
    """STYLE 4: one sentence each, from the one place that both backends ask."""
    with pytest.raises(error, match=message):
        shifted(backend, np.arange(4, dtype=np.int32), **options)


def test_a_batch_of_rows_has_no_single_packing(backend):
    """STYLE 4: offsets describe one row; a batch takes `segment_ids`."""
    with pytest.raises(ValueError, match="one packed row"):
        shifted(backend, np.zeros((2, 4), np.int32), cu_seqlens=np.array([0, 4], np.int32))
    with pytest.raises(TypeError, match="must be integers"):
        shifted(backend, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"\(\.\.\., tokens\); got \(\)"):
        shifted(backend, np.zeros((), np.int32))


@st.composite
def packings(draw):
    """Labels of one row or a batch, with no packing, segments or offsets."""
    kind = draw(st.sampled_from(["plain", "segments", "offsets"]))
    length = draw(st.sampled_from([0, 1, 2, 3, 6]))  # few shapes: JAX compiles each
    rows = () if kind == "offsets" else draw(st.sampled_from([(), (2,)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = rng.integers(-100, 40, (*rows, length)).astype(np.int32)
    options = {"ignore_index": draw(st.sampled_from([-100, -1, 0]))}
    if kind == "segments":
        options["segment_ids"] = rng.integers(0, 3, labels.shape).astype(np.int32)
    if kind == "offsets":
        inner = np.sort(rng.integers(0, length + 1, 4))
        options["cu_seqlens"] = np.concatenate([[0], inner]).astype(np.int32)
    return labels, options


@settings(max_examples=60, deadline=None)
@given(packing=packings())
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_any_packing_agrees_with_the_loop(name, packing):
    """A0: masks are integers, so they are equal or wrong."""
    pytest.importorskip(name)
    labels, options = packing
    agree(name, labels, **options)


# ---------------------------------------------------------------------------------
# A sequence that is spread over ranks

LENGTH = 8
CUTS = {
    2: [(4, 4), (5, 3), (0, 8), (8, 0)],
    3: [(3, 3, 2), (4, 0, 4), (0, 8, 0), (8, 0, 0)],
    4: [(2, 2, 2, 2), (1, 4, 0, 3), (4, 0, 0, 4), (0, 0, 5, 3)],
}


def calls():
    """Labels and options of whole rows: a document ends at every place, each cut's among them."""
    rng = np.random.default_rng(3)
    row = np.arange(10, 10 + LENGTH, dtype=np.int32)
    yield row, {}
    for end in range(LENGTH + 1):
        yield row, {"segment_ids": (np.arange(LENGTH) < end).astype(np.int8)}
        yield row[None], {"cu_seqlens": np.array([0, end, LENGTH], np.int32)}
    yield row, {"cu_seqlens": np.array([0, 0, 2, 2, 5], np.int64)}  # padding after 5
    for dtype, other, ignore_index in (("int8", "uint32", -100), ("uint32", "int8", 0)):
        labels = rng.integers(0, np.iinfo(dtype).max, (2, 3, LENGTH), dtype)
        labels[rng.random(labels.shape) < 0.3] = ignore_index
        # 0 or the highest power of two below the maximum: lost where the exchange narrows.
        segments = rng.integers(0, 2, labels.shape).astype(other) * (np.iinfo(other).max // 2 + 1)
        yield labels, {"ignore_index": ignore_index, "segment_ids": segments.astype(other)}
    yield np.zeros((0, LENGTH), np.int32), {}


def part(x, sizes, rank):
    start, stop = list(pairwise(accumulate(sizes, initial=0)))[rank]
    return x[..., start:stop]


def slices(rank, world, cuts):
    """Every call on this rank's slice, and whether its inputs are as they were."""
    import torch

    from xentlib.torch import next_token_labels

    found = []
    for sizes in cuts:
        for labels, options in calls():
            given = {k: torch.tensor(v) if np.ndim(v) else v for k, v in options.items()}
            if "segment_ids" in given:
                given["segment_ids"] = part(given["segment_ids"], sizes, rank)
            mine = part(torch.tensor(labels), sizes, rank)
            before = mine.clone()
            out = next_token_labels(mine, sequence_parallel=torch.distributed.group.WORLD, **given)
            found.append((out.numpy(), bool((mine == before).all())))
    return found


@pytest.mark.torch
@pytest.mark.parametrize("world", CUTS)
def test_slices_of_ranks_are_slices_of_the_row(world):
    """A0: even, uneven, empty; the next token is that of the next slice that has one."""
    pytest.importorskip("torch")
    ranks = launch(world, slices, CUTS[world])
    items = [(sizes, *call) for sizes in CUTS[world] for call in calls()]
    for (sizes, labels, options), *results in zip(items, *ranks, strict=True):
        expected = naive(labels, **options)
        for rank, (got, untouched) in enumerate(results):
            mine = part(expected, sizes, rank)
            assert got.dtype == mine.dtype
            assert bits_unequal(got, mine) == 0, (sizes, rank, options)
            assert untouched


def exchanges(rank, world):
    """Messages of two bad calls, the result over a submesh, and the collectives of six calls."""
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
    names = []
    for mine in (labels, labels[: 3 * rank]):
        for options in ({}, {"segment_ids": mine}, {"cu_seqlens": torch.tensor([0, 2])}):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                next_token_labels(mine, sequence_parallel=mesh["cp"], **options)
            events = [e for e in profiled.key_averages() if e.key.startswith("c10d::")]
            names.append([(e.key, e.count) for e in events])
    return said, shifted, names


@pytest.mark.torch
def test_ranks_exchange_one_column_once():
    """SPEC 6: one collective whatever the content, so nothing can hang; bad groups are named."""
    pytest.importorskip("torch")
    for rank, ((mesh, name), shifted, collectives) in enumerate(launch(2, exchanges)):
        assert "`sequence_parallel` must be a one-dimensional DeviceMesh; got 2" in mesh
        assert "`sequence_parallel` must be a ProcessGroup or a one-dimensional" in name
        assert shifted == [[1, 2, 10], [11, 12, -100]][rank]
        assert collectives == [[("c10d::allgather_", 1)]] * 6


def over_axis(mesh, spec, labels, *, options, **how):
    """`next_token_labels` under jit and shard_map, tokens over the axis "seq"; its arguments."""
    import jax

    from xentlib.jax import next_token_labels

    arrays = {k: v for k, v in options.items() if np.ndim(v)}
    rest = {k: v for k, v in options.items() if k not in arrays}
    specs = {k: spec if k == "segment_ids" else jax.P() for k in arrays}

    def call(labels, arrays):
        return next_token_labels(labels, sequence_parallel="seq", **arrays, **rest)

    mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec, specs), out_specs=spec, **how)
    return jax.jit(mapped), (labels, arrays)


def mesh_of(kind, **axes):
    import jax

    types = (getattr(jax.sharding.AxisType, kind),) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


@pytest.mark.jax
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("world", [1, 4])
def test_slices_of_a_mesh_axis_are_slices_of_the_row(world, check_vma):
    """A0: the calls of the ranks above, and slices without a token."""
    jax = pytest.importorskip("jax")
    empty, mesh = np.zeros((2, 0), np.int32), mesh_of("Auto", seq=world)
    none = [(empty, {"segment_ids": empty}), (empty[0], {"cu_seqlens": np.array([0], np.int32)})]
    for labels, options in [*calls(), *none]:
        spec = jax.P(*[None] * (labels.ndim - 1), "seq")
        function, given = over_axis(mesh, spec, labels, options=options, check_vma=check_vma)
        got, expected = np.array(function(*given)), naive(labels, **options)
        assert got.dtype == expected.dtype
        assert bits_unequal(got, expected) == 0, options


@pytest.mark.jax
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("manual", [("data", "seq"), ("seq",)], ids=str)
def test_a_mesh_with_another_axis(manual, kind, check_vma):
    """A0: rows over "data", inside of `shard_map` or left to the compiler."""
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 50, (4, LENGTH)).astype(np.int32)
    options = {"segment_ids": rng.integers(0, 2, labels.shape).astype(np.int32)}
    mesh, spec = mesh_of(kind, data=2, seq=2), jax.P("data", "seq")
    inner = spec if "data" in manual else jax.P(None, "seq")
    how = {"axis_names": set(manual), "check_vma": check_vma}
    function, given = over_axis(mesh, inner, labels, options=options, **how)
    placed = jax.device_put(given, jax.NamedSharding(mesh, spec))
    assert bits_unequal(np.array(function(*placed)), naive(labels, **options)) == 0


@pytest.mark.jax
@pytest.mark.parametrize("options", ["", "segment_ids", "cu_seqlens"])
def test_a_mesh_axis_exchanges_one_column_once(options):
    """SPEC 6: in the compiled program, 1 of the 16 columns of a slice."""
    jax = pytest.importorskip("jax")
    labels = np.zeros((1, 64), np.int32)
    given = {"": {}, "segment_ids": {options: labels}, "cu_seqlens": {options: np.arange(3)}}
    mesh, spec = mesh_of("Auto", seq=4), jax.P(None, "seq")
    function, arguments = over_axis(mesh, spec, labels, options=given[options])
    text = function.lower(*arguments).compile().as_text()
    names = "collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter"
    found = re.findall(rf"= s32\[([\d,]+)\]\S* (?:{names})(?:-start)?\(", text)
    columns = 2 if options == "segment_ids" else 1
    assert [np.prod([int(n) for n in dims.split(",")]) for dims in found] == [columns]
    assert len(re.findall(rf" (?:{names})(?:-start)?\(", text)) == 1


@pytest.mark.jax
@pytest.mark.parametrize("axis", ["seq", {"seq"}], ids=str)
def test_an_axis_that_is_not_bound_is_named(axis):
    """STYLE 4: JAX's own words are of an unbound name and no argument."""
    pytest.importorskip("jax")
    from xentlib.jax import next_token_labels

    message = r"`sequence_parallel` must be the name of a mesh axis inside `shard_map`; got .*'seq'"
    with pytest.raises(ValueError, match=message):
        next_token_labels(np.zeros(4, np.int32), sequence_parallel=axis)
