"""Arrays between the frameworks that are copied on purpose: views, strides, other layouts.

Sharing is proved by pointers, contents are compared bit for bit.
"""

from __future__ import annotations

import numpy as np
import pytest

import xentlib.interop
from helpers.crossing import (
    CROSS,
    DTYPES,
    aligned,
    bits,
    build,
    frameworks,
    patterns,
    pointer,
    routes,
)
from xentlib.interop import to_jax, to_numpy, to_torch


def sliced(name, x):
    return {
        "strided": lambda: x[:, ::2],
        "transposed": lambda: x.T,
        "offset": lambda: x.reshape(-1)[1:],
        "column": lambda: x[:, 3],
        "expanded": lambda: (
            np.lib.stride_tricks.as_strided(x, (5, 64), (0, x.itemsize))
            if isinstance(x, np.ndarray)
            else x[:1].expand(5, 64)
        ),
        "windows": lambda: (
            np.lib.stride_tricks.as_strided(x, (8, 4), (2 * x.itemsize, x.itemsize))
            if isinstance(x, np.ndarray)
            else x.as_strided((8, 4), (2, 1))
        ),
    }[name]()


# name -> what copy=False says per target; None: it is shared
VIEWS = {
    "strided": {"torch": None, "numpy": None, "jax": "strides"},
    "transposed": {"torch": None, "numpy": None, "jax": "strides"},
    "column": {"torch": None, "numpy": None, "jax": "strides"},
    "offset": {"torch": None, "numpy": None, "jax": r"bytes past a 64-byte boundary"},
    "expanded": {"torch": "overlap", "numpy": "overlap", "jax": "strides"},
    "windows": {"torch": "overlap", "numpy": "overlap", "jax": "strides"},
}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("view", VIEWS)
@routes(("torch", "numpy"), ("torch", "jax"), ("numpy", "torch"), ("numpy", "jax"))
def test_views_are_shared_or_copied_as_the_table_says(source, target, view, dtype):
    frameworks(source, target)
    x = sliced(view, build(source, patterns(dtype)))
    reason = VIEWS[view][target]
    y = CROSS[target](x)
    assert bits(y) == bits(x)
    if reason is None:
        assert pointer(y) == pointer(x)
        assert pointer(CROSS[target](x, copy=False)) == pointer(x)
    else:
        assert pointer(y) != pointer(x)
        with pytest.raises(ValueError, match=f"{reason}.*Pass copy=None"):
            CROSS[target](x, copy=False)


@pytest.mark.parametrize("offset", [4, 16, 32])
@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_an_unaligned_copy_is_made_before_the_source_can_change(source, offset):
    frameworks(source, "jax")
    x = build(source, aligned(1 << 20, np.int32))
    x = x[offset // 4 :]
    x[:] = 1
    y = to_jax(x)
    x[:] = 2
    assert bits(y) == bits(np.ones(x.shape, np.int32))
    with pytest.raises(ValueError, match=f"it starts {offset} bytes past a 64-byte boundary"):
        to_jax(x, copy=False)


def reversed_rows():
    return patterns(np.float32)[::-1]


def field():
    return np.zeros(64, dtype=[("a", "u1"), ("b", "f4"), ("c", "u1", 3)])["b"]


def packed_field():
    return np.zeros(64, dtype=[("a", "u1"), ("b", "f4")])["b"]


def byte_swapped():
    return patterns(np.int32).astype(np.dtype(np.int32).newbyteorder())


def unaligned_items():
    return aligned(260, np.uint8)[1:257].view(np.float32)


@pytest.mark.parametrize(
    ("make", "refused"),
    [
        (reversed_rows, {"torch": "cannot express its strides", "jax": "strides"}),
        (packed_field, dict.fromkeys(CROSS, "not aligned to their size")),
        (field, dict.fromkeys(CROSS, "not aligned to their size")),
        (byte_swapped, dict.fromkeys(CROSS, "byte order")),
        (unaligned_items, dict.fromkeys(CROSS, "not aligned to their size")),
    ],
)
@pytest.mark.parametrize("target", CROSS)
def test_numpy_memory_that_no_one_else_reads_is_copied(make, refused, target):
    """torch 2.13 aborts the process on a negative stride that comes through DLPack."""
    frameworks(target)
    x = make()
    want = x.astype(x.dtype.newbyteorder("="))
    if target in refused:
        assert bits(CROSS[target](x)) == bits(want)
        assert pointer(CROSS[target](x)) != pointer(x)
        with pytest.raises(ValueError, match=refused[target]):
            CROSS[target](x, copy=False)
    else:
        assert CROSS[target](x, copy=False) is x


@pytest.mark.parametrize("target", ["torch", "jax"])
def test_odd_strides_of_an_empty_array_are_no_obstacle(target):
    frameworks(target)
    x = np.zeros((0, 4), np.float32)[:, ::-2]
    x.flags.writeable = False
    assert CROSS[target](x, copy=False).shape == (0, 2)


@pytest.mark.parametrize("target", ["jax", "numpy"])
@pytest.mark.parametrize("copy", [None, True, False])
def test_odd_views_of_an_empty_tensor_are_no_obstacle(target, copy):
    frameworks("torch", target)
    import torch

    for x in (torch.zeros(0, 1).expand(0, 5), torch.ones(5)[1:1], torch.zeros(4, 0).T):
        assert bits(CROSS[target](x, copy=copy)) == bits(x)


@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_copy_false_holds_even_where_jax_copies_for_a_reason_not_foreseen(source, monkeypatch):
    frameworks(source, "jax")
    monkeypatch.setattr(xentlib.interop, "_XLA_ALIGNMENT", 1)
    x = build(source, patterns(np.float32))[0, 1:]
    with pytest.raises(ValueError, match="JAX made one"):
        to_jax(x, copy=False)


@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_the_negative_bit_of_a_tensor_is_resolved(target):
    frameworks("torch", target)
    import torch

    x = torch.complex(torch.zeros(4), torch.arange(4.0)).conj().imag
    assert x.is_neg()
    y = CROSS[target](x)
    assert bits(y) == bits(np.array([-0.0, -1.0, -2.0, -3.0], np.float32))
    with pytest.raises(ValueError, match=r"copy=False"):
        CROSS[target](x, copy=False)


@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_a_contiguous_negative_view_is_not_read_unnegated(target):
    frameworks("torch", target)
    import torch

    x = torch._neg_view(torch.arange(16.0))
    assert x.is_contiguous()
    assert bits(CROSS[target](x)) == bits(-np.arange(16, dtype=np.float32))
    with pytest.raises(ValueError, match="negative bit"):
        CROSS[target](x, copy=False)


def test_a_jax_array_with_its_own_layout_keeps_its_values():
    frameworks("jax", "torch")
    import jax
    import torch

    x = jax.dlpack.from_dlpack(build("torch", patterns(np.float32)).T)
    y = to_torch(x, copy=False)
    assert (y.stride(), pointer(y)) == ((1, 64), pointer(x))
    assert torch.equal(y.view(torch.int32), torch.from_numpy(patterns(np.int32).T))
    assert bits(to_numpy(x)) == bits(patterns(np.float32).T)
    with pytest.raises(ValueError, match="not row-major"):
        to_numpy(x, copy=False)


@pytest.mark.parametrize("target", ["torch", "jax", "numpy"])
def test_any_basic_slice_crosses_with_its_bits_and_copy_false_tells_the_truth(target):
    hypothesis = pytest.importorskip("hypothesis")
    frameworks(target)
    base = patterns(np.float32, (6, 5, 7))
    steps = hypothesis.strategies.tuples(
        *(
            hypothesis.strategies.slices(n).filter(lambda s: s.step is None or abs(s.step) < 4)
            for n in base.shape
        )
    )

    @hypothesis.settings(max_examples=150, deadline=None, database=None)
    @hypothesis.given(steps, hypothesis.strategies.permutations([0, 1, 2]))
    def check(index, axes):
        x = base[index].transpose(axes)
        assert bits(CROSS[target](x)) == bits(x)
        try:
            y = CROSS[target](x, copy=False)
        except ValueError:
            shareable = target == "jax" and x.flags.c_contiguous and pointer(x) % 64 == 0
            assert not shareable
            assert target != "numpy"
            assert x.size > 0
        else:
            assert bits(y) == bits(x)
            assert x.size == 0 or pointer(y) == pointer(x)

    check()
