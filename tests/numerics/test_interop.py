"""Arrays between the frameworks that are shared, and the hazards of sharing.

Sharing is proved by pointers, contents are compared bit for bit. The rows of the tables in
`xentlib.interop` are rows of data here.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from helpers.crossing import (
    CROSS,
    DTYPES,
    NARROW,
    WIDE,
    bits,
    build,
    frameworks,
    kind,
    patterns,
    pointer,
    routes,
)
from xentlib.interop import to_jax, to_numpy, to_torch


@pytest.mark.parametrize("copy", [None, False])
@pytest.mark.parametrize("dtype", {**DTYPES, **NARROW}.items(), ids=lambda item: item[0])
@routes()
def test_every_dtype_is_shared_on_every_route(source, target, dtype, copy):
    frameworks(source, target)
    x = build(source, patterns(dtype[1]))
    y = CROSS[target](x, copy=copy)
    assert kind(y) == {"torch": "tor", "jax": "jax", "numpy": "numpy"}[target]
    assert pointer(y) == pointer(x)
    assert bits(y) == bits(x)
    assert bits(y)[1] == dtype[0]


@pytest.mark.parametrize("dtype", WIDE.items(), ids=lambda item: item[0])
@routes()
def test_64_bits_are_shared_where_they_stay_64_bits(source, target, dtype):
    frameworks(source, target)
    if "jax" not in (source, target):
        x = build(source, patterns(dtype[1]))
        y = CROSS[target](x, copy=False)
        assert (pointer(y), bits(y)) == (pointer(x), bits(x))
        return
    with pytest.importorskip("jax").enable_x64(True):
        x = build(source, patterns(dtype[1]))
        y = CROSS[target](x, copy=False)
        assert (pointer(y), bits(y)) == (pointer(x), bits(x))


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("shape", [(64,), (0, 3)])
@pytest.mark.parametrize("dtype", WIDE.items(), ids=lambda item: item[0])
@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_jax_without_x64_refuses_64_bits_instead_of_narrowing(source, dtype, shape, copy):
    """M22: from_dlpack turns 2**40 + k into k without a word."""
    frameworks(source, "jax")
    x = build(source, patterns(dtype[1], shape))
    off = sys.modules["jax"].enable_x64(False)
    with off, pytest.raises(ValueError, match=rf"got {dtype[0]}.*jax\.enable_x64\(True\).*cast"):
        to_jax(x, copy=copy)


def test_a_64_bit_jax_array_leaves_with_all_its_bits():
    frameworks("jax")
    import jax

    with jax.enable_x64(True):
        x = build("jax", patterns(np.int64))
    assert bits(to_numpy(x)) == bits(x)
    assert pointer(to_numpy(x)) == pointer(x)


@pytest.mark.parametrize("framework", CROSS)
def test_an_array_that_is_already_there_is_returned_itself(framework):
    frameworks(framework)
    x = build(framework, patterns(np.float32))
    assert CROSS[framework](x) is x
    assert CROSS[framework](x, copy=False) is x
    y = CROSS[framework](x, copy=True)
    assert pointer(y) != pointer(x)
    assert bits(y) == bits(x)


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 5), (5, 1)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@routes()
def test_scalars_and_empty_arrays_keep_shape_and_dtype(source, target, dtype, shape, copy):
    frameworks(source, target)
    x = build(source, patterns(dtype, shape))
    y = CROSS[target](x, copy=copy)
    assert bits(y) == bits(x)
    if copy is not True and 0 not in shape:
        assert pointer(y) == pointer(x)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@routes()
def test_copy_true_shares_nothing(source, target, dtype):
    frameworks(source, target)
    x = build(source, patterns(dtype))
    y = CROSS[target](x, copy=True)
    assert pointer(y) != pointer(x)
    assert bits(y) == bits(x)
    if target == "numpy":
        assert y.flags.writeable


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
@routes()
def test_there_and_back_is_the_same_memory(source, target, dtype):
    frameworks(source, target)
    x = build(source, patterns(dtype))
    if (source, target) == ("jax", "numpy"):
        x.block_until_ready()
    y = CROSS[source](CROSS[target](x))
    assert pointer(y) == pointer(x)
    assert bits(y) == bits(x)


# --- the hazard of sharing -----------------------------------------------------------------------


@routes(
    ("torch", "jax"), ("numpy", "jax"), ("jax", "torch"), ("numpy", "torch"), ("torch", "numpy")
)
@pytest.mark.parametrize("copy", [None, True])
def test_a_write_shows_on_the_other_side_exactly_when_shared(source, target, copy):
    """The documented hazard; if a framework starts to protect itself, the docs must change."""
    frameworks(source, target)
    x = build(source, patterns(np.int32))
    y = CROSS[target](x, copy=copy)
    before = bits(y)
    writable, other = (y, x) if source == "jax" else (x, y)
    writable[0, 0] ^= 1
    assert (bits(other) != before) == (copy is None)


def test_a_numpy_view_of_a_jax_array_cannot_be_written():
    frameworks("jax")
    y = to_numpy(build("jax", patterns(np.float32)))
    assert not y.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        y[0, 0] = 1


def test_a_read_only_numpy_array_never_becomes_a_writable_tensor():
    frameworks("torch")
    x = patterns(np.float32)
    x.flags.writeable = False
    before = bits(x)
    y = to_torch(x)
    y.zero_()
    assert bits(x) == before
    with pytest.raises(ValueError, match=r"read-only, which torch cannot express.*Pass copy=None"):
        to_torch(x, copy=False)


def test_jax_memory_does_not_become_writable_by_way_of_numpy():
    frameworks("jax", "torch")
    x = build("jax", patterns(np.float32))
    before = bits(x)
    to_torch(to_numpy(x)).zero_()
    assert bits(x) == before


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=list(DTYPES))
def test_a_read_only_numpy_array_is_shared_with_jax(dtype):
    frameworks("jax")
    x = patterns(dtype)
    x.flags.writeable = False
    assert pointer(to_jax(x, copy=False)) == pointer(x)


@pytest.mark.parametrize("source", ["torch", "numpy"])
def test_donating_a_shared_array_does_not_overwrite_its_other_owner(source):
    frameworks(source, "jax")
    import jax

    x = build(source, patterns(np.int32))
    before = bits(x)
    y = jax.jit(lambda a: a ^ 1, donate_argnums=0)(to_jax(x, copy=False)).block_until_ready()
    assert bits(x) == before
    assert pointer(y) != pointer(x)


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_memory_outlives_the_jax_array_it_came_from(target):
    frameworks("jax", target)
    import jax

    x = build("jax", patterns(np.int32))
    before = bits(x)
    y = CROSS[target](x, copy=False)
    z = jax.jit(lambda a: a ^ 1, donate_argnums=0)(x).block_until_ready()
    if not x.is_deleted():
        x.delete()
    assert pointer(z) != pointer(y)
    refill = [build("jax", np.zeros((64, 64), np.int32)) for _ in range(8)]
    assert bits(y) == before
    del refill


@routes()
def test_memory_outlives_the_source(source, target):
    frameworks(source, target)
    before = bits(build(source, patterns(np.int32)))
    y = CROSS[target](build(source, patterns(np.int32)))
    refill = [build(source, np.zeros((64, 64), np.int32)) for _ in range(8)]
    assert bits(y) == before
    del refill


@pytest.mark.parametrize("target", ["torch", "numpy"])
def test_a_jax_array_that_is_still_being_computed_is_waited_for(target):
    frameworks("jax", target)
    import jax

    a = build("jax", np.eye(500, dtype=np.float32))
    slow = jax.jit(lambda a: jax.lax.fori_loop(0, 60, lambda i, b: b @ a + 1, a))
    want = bits(np.array(slow(a)))
    assert bits(CROSS[target](slow(a), copy=False)) == want
