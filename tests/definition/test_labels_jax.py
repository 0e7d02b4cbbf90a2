"""`next_token_labels` of a sequence that is spread over the axis of a JAX mesh."""

from __future__ import annotations

import re

import numpy as np
import pytest

from helpers.labels import LENGTH, SHIFTS, calls, every_packing, longer_calls, naive, zigzag
from xentlib.ulp import bits_unequal

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

from jax.sharding import AxisType  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from xentlib.jax import next_token_labels  # noqa: E402


def over_axis(mesh, spec, labels, *, options, **how):
    """`next_token_labels` under jit and shard_map, tokens over the axis "seq"; its arguments."""
    arrays = {k: v for k, v in options.items() if np.ndim(v)}
    rest = {k: v for k, v in options.items() if k not in arrays}
    specs = {k: jax.P() if k == "cu_seqlens" else spec for k in arrays}

    def call(labels, arrays):
        return next_token_labels(labels, sequence_parallel="seq", **arrays, **rest)

    mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec, specs), out_specs=spec, **how)
    return jax.jit(mapped), (labels, arrays)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_on_a_mesh_under_jit(kind):
    """A0: tokens over an Auto axis, rows over either kind, without an argument; rows of an Auto
    axis are not gathered."""
    labels = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
    ids = np.random.default_rng(6).integers(0, 2, labels.shape).astype(np.int32)
    mesh = mesh_of(AxisType[kind], data=2, seq=2)
    sharding = jax.NamedSharding(mesh, jax.P("data", "seq" if kind == "Auto" else None))
    with jax.set_mesh(mesh):
        for shift in (1, 3):
            call = jax.jit(lambda y, i, k=shift: next_token_labels(y, segment_ids=i, shift=k))
            compiled = call.lower(*jax.device_put((labels, ids), sharding)).compile()
            got = np.array(compiled(*jax.device_put((labels, ids), sharding)))
            assert bits_unequal(got, naive(labels, segment_ids=ids, shift=shift)) == 0
            assert "all-gather" not in compiled.as_text()


WAYS = [
    *((4, True, shift) for shift in SHIFTS),
    *((*how, shift) for how in ((1, True), (2, True), (4, False)) for shift in (1, 5)),
]
# Those of one layout that run with the other under --full alone: a program each, of two seconds
ONCE = {"contiguous": WAYS[1::2], "zigzag": WAYS[2::2]}


@pytest.mark.parametrize(
    ("layout", "world", "check_vma", "shift"),
    [
        pytest.param(layout, *way, marks=pytest.mark.full if way in once else ())
        for layout, once in ONCE.items()
        for way in WAYS
    ],
)
def test_slices_of_a_mesh_axis_are_slices_of_the_row(layout, world, check_vma, shift):
    """A0: the calls of the ranks above, and slices without a token; each packing by `vmap`."""
    over = {"sequence_parallel": "seq", "layout": layout}
    mesh, empty = mesh_of(AxisType.Auto, seq=world), np.zeros((2, 0), np.int32)
    none = [(empty, {"segment_ids": empty}), (empty[0], {"cu_seqlens": np.array([0], np.int32)})]
    every, items = every_packing(), [*calls(), *longer_calls(), *none]
    specs = [jax.P(*[None] * (labels.ndim - 1), "seq") for labels, _ in items]

    def call(given, labels, offsets):
        found = [
            next_token_labels(y, shift=shift, **over, **arrays, **rest)
            for (y, arrays), rest in zip(given, numbers)
        ]
        one = lambda y, ends: next_token_labels(y, shift=shift, cu_seqlens=ends, **over)  # noqa: E731
        return found, jax.vmap(one)(labels, offsets)

    arrays = [{k: v for k, v in o.items() if np.ndim(v)} for _, o in items]
    numbers = [{k: v for k, v in o.items() if not np.ndim(v)} for _, o in items]
    placed = [
        (spec, {k: jax.P() if k == "cu_seqlens" else spec for k in a})
        for spec, a in zip(specs, arrays)
    ]
    many, rows = np.arange(128 * LENGTH, dtype=np.int32).reshape(128, LENGTH), jax.P(None, "seq")
    function = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(placed, rows, jax.P()),
        out_specs=(specs, rows),
        check_vma=check_vma,
    )

    def laid(x):
        """In the order in which devices have it."""
        parts = [zigzag(x, rank, world) for rank in range(world)]
        return np.concatenate(parts, -1) if layout == "zigzag" else x

    given = [
        (laid(labels), {k: v if k == "cu_seqlens" else laid(v) for k, v in a.items()})
        for (labels, _), a in zip(items, arrays)
    ]
    found, mapped = jax.jit(function)(given, laid(many), every["cu_seqlens"])
    for got, (labels, options) in zip(found, items, strict=True):
        expected = laid(naive(labels, shift=shift, **options))
        assert got.dtype == expected.dtype
        assert bits_unequal(np.array(got), expected) == 0, options
    expected = laid(naive(many, shift=shift, segment_ids=every["segment_ids"]))
    assert bits_unequal(np.array(mapped), expected) == 0


def test_slices_of_a_mesh_axis_in_64_bits():
    """A0: ids that 32 bits do not hold travel between devices."""
    labels = 2**40 + np.arange(LENGTH)
    segments = np.array([0, 0, 0, 1, 1, 1, 1, 1]) << 33
    with jax.enable_x64(True):
        mesh, spec = mesh_of(AxisType.Auto, seq=4), jax.P("seq")
        for shift in (1, 3):
            options = {"shift": shift, "ignore_index": -(2**50), "segment_ids": segments}
            function, given = over_axis(mesh, spec, labels, options=options)
            assert bits_unequal(np.array(function(*given)), naive(labels, **options)) == 0
            options = {"shift": shift, "cu_seqlens": np.array([0, 3, 8])}
            function, given = over_axis(mesh, spec, labels, options=options)
            assert bits_unequal(np.array(function(*given)), naive(labels, **options)) == 0


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("manual", [("data", "seq"), ("seq",)], ids=str)
def test_a_mesh_with_another_axis(manual, kind, check_vma):
    """A0: rows over "data", inside of `shard_map` or left to the compiler."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 50, (4, LENGTH)).astype(np.int32)
    ids = rng.integers(0, 2, labels.shape).astype(np.int32)
    mesh, spec = mesh_of(AxisType[kind], data=2, seq=2), jax.P("data", "seq")
    inner = spec if "data" in manual else jax.P(None, "seq")
    how = {"axis_names": set(manual), "check_vma": check_vma}
    for name, shift in (("segment_ids", 1), ("position_ids", 3), ("segment_ids", 6)):
        options = {name: ids, "shift": shift}
        function, given = over_axis(mesh, inner, labels, options=options, **how)
        placed = jax.device_put(given, jax.NamedSharding(mesh, spec))
        assert bits_unequal(np.array(function(*placed)), naive(labels, **options)) == 0


@pytest.mark.parametrize("shift", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("options", ["", "segment_ids", "cu_seqlens", "position_ids", "layout"])
def test_a_mesh_axis_exchanges_its_columns_once(options, shift):
    """In the compiled program: `shift` of the 16 columns of a slice, or all of every slice; of
    every piece in zig-zag."""
    labels = np.zeros((1, 64), np.int32)
    given = {options: labels} if options else {}
    if options == "cu_seqlens":
        given = {options: np.arange(3)}
    elif options == "layout":
        given = {options: "zigzag"}
    mesh, spec = mesh_of(AxisType.Auto, seq=4), jax.P(None, "seq")
    function, arguments = over_axis(mesh, spec, labels, options={"shift": shift, **given})
    text = function.lower(*arguments).compile().as_text()
    names = "collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter"
    found = re.findall(rf"= s32\[([\d,]+)\]\S* (?:{names})(?:-start)?\(", text)
    columns = (shift if shift <= 16 else 64) * (2 if options.endswith("ids") else 1)
    if options == "layout":
        columns = 8 * min(shift, 8)
    assert [np.prod([int(n) for n in dims.split(",")]) for dims in found] == [columns]
    assert len(re.findall(rf" (?:{names})(?:-start)?\(", text)) == 1


@pytest.mark.parametrize("axis", ["seq", {"seq"}], ids=str)
def test_an_axis_that_is_not_bound_is_named(axis):
    """D12: JAX's own words are of an unbound name and no argument."""
    message = r"`sequence_parallel` must be the name of a mesh axis inside `shard_map`; got .*'seq'"
    with pytest.raises(ValueError, match=message):
        next_token_labels(np.zeros(4, np.int32), sequence_parallel=axis)


def test_an_odd_number_of_tokens_is_no_two_pieces():
    """D12: zig-zag, where every device has as many."""
    mesh, spec = mesh_of(AxisType.Auto, seq=4), jax.P("seq")
    options = {"layout": "zigzag"}
    function, given = over_axis(mesh, spec, np.zeros(20, np.int32), options=options)
    with pytest.raises(ValueError, match=r"`labels` must be two pieces .*; got 5 tokens"):
        function(*given)
