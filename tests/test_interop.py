"""Arrays between the frameworks: what is shared, what is copied, what is refused.

Sharing is proved by pointers, contents are compared bit for bit. A route is (from, to); the rows of
the tables in `xentlib.interop` are rows of data here. Each test asks for the frameworks it needs
through `importorskip`, so the suite runs with only one of them installed.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest

import xentlib.interop
from xentlib.interop import to_jax, to_numpy, to_torch

CROSS = {"torch": to_torch, "jax": to_jax, "numpy": to_numpy}
ROUTES = [(a, b) for a in CROSS for b in CROSS if a != b]
DTYPES = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "int32": np.int32,
    "bool": np.bool_,
}
WIDE = {"float64": np.float64, "int64": np.int64, "uint64": np.uint64}
NARROW = {"int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16}
NARROW["uint32"] = np.uint32


def aligned(count, dtype, offset=0):
    """A NumPy array that starts `offset` bytes past a 64-byte boundary (np.empty: usually 16)."""
    size = count * np.dtype(dtype).itemsize
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    return raw[start : start + size].view(dtype)


def patterns(dtype, shape=(64, 64)):
    """Bits at random: NaN payloads, infinities, subnormals and both signs are among them."""
    count = int(np.prod(shape))
    x = aligned(count, dtype)
    rng = np.random.default_rng(7)
    high = 2 if x.dtype == np.bool_ else 256
    x.view(np.uint8)[:] = rng.integers(0, high, x.nbytes, dtype=np.uint8)
    if x.dtype.itemsize == 2:  # 4096 of the 65536 patterns, spread over all of them
        x.view(np.uint16)[:] = np.arange(count, dtype=np.uint32) * 16 + rng.integers(0, 16, count)
    return x.reshape(shape)


def build(framework, x):
    """The same bits in another framework, made without the module under test."""
    if framework == "numpy":
        return x
    if framework == "jax":
        return pytest.importorskip("jax").numpy.array(x, copy=True)
    torch = pytest.importorskip("torch")
    raw = torch.empty(max(x.nbytes, 1), dtype=torch.uint8)[: x.nbytes]
    raw.copy_(
        torch.frombuffer(bytearray(x.tobytes()) or bytearray(1), dtype=torch.uint8)[: x.nbytes]
    )
    return raw.view(getattr(torch, x.dtype.name)).reshape(x.shape)


def kind(x):
    return "numpy" if isinstance(x, np.ndarray) else type(x).__module__.partition(".")[0][:3]


def pointer(x):
    """Where the memory starts, asked of the framework itself."""
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"][0]
    return x.data_ptr() if hasattr(x, "data_ptr") else x.unsafe_buffer_pointer()


def bits(x):
    """Shape, dtype name and bytes, read without the module under test."""
    shape, name = tuple(x.shape), str(x.dtype).removeprefix("torch.")
    if hasattr(x, "data_ptr"):
        torch = sys.modules["torch"]
        flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1))
        return shape, name, flat.view(torch.uint8).numpy().tobytes()
    return shape, name, np.asarray(x).tobytes()


def frameworks(*names):
    for name in names:
        pytest.importorskip(name)


def routes(*pairs):
    return pytest.mark.parametrize(("source", "target"), pairs or ROUTES)


# ---------------------------------------------------------------------------- shared


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


# ---------------------------------------------------------------------------- the hazard of sharing


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


# ---------------------------------------------------------------------------- copied on purpose


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


# ---------------------------------------------------------------------------- refused


def dtensor(torch):
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return distribute_tensor(torch.ones(8), init_device_mesh("cpu", (1,)))
    finally:
        destroy_process_group()


def fake(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(8)


def freed(torch):
    x = torch.ones(8)
    x.untyped_storage().resize_(0)
    return x


def subclass(torch):
    return torch.ones(8).as_subclass(type("Tagged", (torch.Tensor,), {}))


REFUSED_TORCH = {
    "requires_grad": (
        lambda torch: torch.ones(8, requires_grad=True),
        ValueError,
        r"pass tensor\.detach\(\)",
    ),
    "parameter": (
        lambda torch: torch.nn.Parameter(torch.ones(8)),
        ValueError,
        r"pass tensor\.detach\(\)",
    ),
    "result of a graph": (
        lambda torch: torch.ones(8, requires_grad=True) * 2,
        ValueError,
        r"pass tensor\.detach\(\)",
    ),
    "DTensor": (dtensor, TypeError, r"DTensor.*full_tensor"),
    "fake": (fake, TypeError, "FakeTensor"),
    "subclass": (subclass, TypeError, "Tagged"),
    "freed": (freed, ValueError, r"got \(8,\) on cpu without any.*Gather"),
    "meta": (lambda torch: torch.ones(8, device="meta"), ValueError, "meta"),
    "sparse": (lambda torch: torch.eye(3).to_sparse(), TypeError, "sparse_coo.*to_dense"),
    "mkldnn": (lambda torch: torch.eye(3).to_mkldnn(), TypeError, "mkldnn.*to_dense"),
    "complex": (lambda torch: torch.ones(8, dtype=torch.complex64), TypeError, "complex64"),
    "conjugate": (
        lambda torch: torch.ones(8, dtype=torch.complex64).conj(),
        TypeError,
        "complex64",
    ),
    "float8": (lambda torch: torch.ones(8).to(torch.float8_e4m3fn), TypeError, "float8_e4m3fn"),
}


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize(
    ("make", "error", "words"), REFUSED_TORCH.values(), ids=list(REFUSED_TORCH)
)
def test_torch_tensors_that_would_be_misread_are_refused(make, error, words, target, copy):
    frameworks("torch", target)
    x = make(sys.modules["torch"])
    with pytest.raises(error, match=words):
        CROSS[target](x, copy=copy)


def test_a_parameter_without_gradient_is_shared():
    frameworks("torch")
    import torch

    x = torch.nn.Parameter(torch.ones(8), requires_grad=False)
    assert pointer(to_numpy(x, copy=False)) == pointer(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "jvp", "functionalize"])
@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_torch_func_wrappers_are_refused(transform, target):
    frameworks("torch", target)
    import torch

    calls = {
        "vmap": lambda f: torch.func.vmap(f)(torch.ones(4, 5)),
        "jvp": lambda f: torch.func.jvp(f, (torch.ones(4),), (torch.ones(4),)),
        "functionalize": lambda f: torch.func.functionalize(f)(torch.ones(4)),
    }

    def body(x):
        CROSS[target](x)
        return x

    with pytest.raises(ValueError, match=r"inside torch\.func"):
        calls[transform](body)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("target", ["jax", "numpy"])
def test_a_forward_mode_tangent_is_not_dropped(target):
    frameworks("torch", target)
    from torch import ones
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        x = forward_ad.make_dual(ones(4), ones(4))
        with pytest.raises(ValueError, match=r"tangent.*unpack_dual"):
            CROSS[target](x)


def deleted(jax):
    x = jax.numpy.ones(8)
    x.delete()
    return x


def donated(jax):
    x = jax.numpy.ones(8)
    jax.jit(lambda a: a + 1, donate_argnums=0)(x)
    return x


REFUSED_JAX = {
    "key": (lambda jax: jax.random.key(0), TypeError, r"key<.*jax\.random\.key_data"),
    "deleted": (deleted, ValueError, "deleted or donated"),
    "donated": (donated, ValueError, "deleted or donated"),
    "complex": (lambda jax: jax.numpy.ones(8, jax.numpy.complex64), TypeError, "complex64"),
    "int4": (lambda jax: jax.numpy.ones(8, jax.numpy.int4), TypeError, "int4"),
    "float8": (lambda jax: jax.numpy.ones(8, "float8_e5m2"), TypeError, "float8_e5m2"),
}


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize(("make", "error", "words"), REFUSED_JAX.values(), ids=list(REFUSED_JAX))
def test_jax_arrays_without_one_buffer_are_refused(make, error, words, target, copy):
    frameworks("jax", target)
    x = make(pytest.importorskip("jax"))
    with pytest.raises(error, match=words):
        CROSS[target](x, copy=copy)


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "eval_shape"])
@pytest.mark.parametrize("target", CROSS)
def test_tracers_are_refused(transform, target):
    frameworks("jax", target)
    import jax

    def body(x):
        CROSS[target](x)
        return x.sum()

    transformed = {
        "jit": jax.jit(body),
        "grad": jax.grad(body),
        "vmap": jax.vmap(body),
        "eval_shape": lambda x: jax.eval_shape(body, x),
    }[transform]
    with pytest.raises(TypeError, match=r"traced.*jax\.pure_callback"):
        transformed(jax.numpy.ones((2, 3)))


@pytest.mark.parametrize("copy", [None, True])
@pytest.mark.parametrize("source", CROSS)
def test_what_crosses_inside_jit_is_a_value(source, copy):
    frameworks(source, "jax")
    import jax

    x = build(source, patterns(np.int32))
    seen = []
    jax.jit(lambda a: seen.append(to_jax(x, copy=copy)) or a)(jax.numpy.ones(2))
    assert bits(seen[0]) == bits(x)


@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.ones(3, np.complex64), "complex64"),
        (np.ones(3, np.longdouble), "float128|longdouble|float96"),
        (np.array([None]), "object"),
        (np.array(["a"]), "str"),
        (np.array(["2020"], "M8[D]"), "datetime64"),
        (np.zeros(3, [("a", "f4")]), "void"),
        (np.ones(3, ml_dtypes.float8_e4m3fn), "float8_e4m3fn"),
        (np.ma.masked_array([1.0, 2.0], [0, 1]), r"masked.*x\.filled"),
        (np.float32(3), r"numpy\.float32.*numpy\.asarray"),
        ([1.0, 2.0], r"builtins\.list.*numpy\.asarray"),
        (None, "NoneType"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:12],
)
def test_what_is_no_array_of_numbers_is_refused(x, words, target):
    frameworks(target)
    with pytest.raises(TypeError, match=words):
        CROSS[target](x)


@pytest.mark.parametrize("target", CROSS)
@pytest.mark.parametrize("copy", [0, 1, "never", np.True_])
def test_copy_has_three_values(copy, target):
    frameworks(target)
    with pytest.raises(TypeError, match="`copy` must be None, True or False"):
        CROSS[target](np.ones(3, np.float32), copy=copy)


# ---------------------------------------------------------------------------- own processes


def python(code, **environment):
    root = str(pathlib.Path(xentlib.interop.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


LOADS = {
    "the import": ([], "xentlib.interop", ["torch", "jax"]),
    "numpy to numpy": ([], "to_numpy(np.ones(3))", ["torch", "jax"]),
    "torch to numpy": (["torch"], "import torch; to_numpy(torch.ones(3))", ["jax"]),
    "jax to numpy": (["jax"], "import jax; to_numpy(jax.numpy.ones(3))", ["torch"]),
    "numpy to torch": (["torch"], "to_torch(np.ones(3))", ["jax"]),
    "numpy to jax": (["jax"], "to_jax(np.ones(3, np.float32))", ["torch"]),
    "torch to torch": (["torch"], "import torch; to_torch(torch.ones(3))", ["jax"]),
    "jax to jax": (["jax"], "import jax; to_jax(jax.numpy.ones(3))", ["torch"]),
}


@pytest.mark.parametrize(("needs", "statement", "unloaded"), LOADS.values(), ids=list(LOADS))
def test_a_framework_is_loaded_only_when_its_array_is_there(needs, statement, unloaded):
    frameworks(*needs)
    done = python(f"""
        import sys
        import numpy as np
        import xentlib.interop
        from xentlib.interop import to_jax, to_numpy, to_torch
        {statement}
        loaded = [name for name in {unloaded} if name in sys.modules]
        assert not loaded, loaded
        sys.modules.update(dict.fromkeys({unloaded}))  # as if it were not installed
        {statement}
    """)
    assert done.returncode == 0, done.stderr


def test_arrays_over_several_devices_are_refused_and_one_shard_is_shared():
    frameworks("jax")
    done = python(
        """
        import importlib.util
        import jax
        from jax.sharding import NamedSharding, PartitionSpec
        from xentlib.interop import to_jax, to_numpy, to_torch
        crossings = [to_jax, to_numpy]
        if importlib.util.find_spec("torch"):
            crossings.append(to_torch)
        mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        for spec in (PartitionSpec("x"), PartitionSpec()):
            x = jax.device_put(jax.numpy.arange(64.0), NamedSharding(mesh, spec))
            for cross in crossings:
                for copy in (None, True, False):
                    try:
                        cross(x, copy=copy)
                    except ValueError as error:
                        assert "addressable_data(0)" in str(error), error
                    else:
                        raise AssertionError(f"{cross} took {x.sharding}")
            shard = x.addressable_data(1)
            y = to_numpy(shard, copy=False)
            assert y.__array_interface__["data"][0] == shard.unsafe_buffer_pointer()
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode == 0, done.stderr
