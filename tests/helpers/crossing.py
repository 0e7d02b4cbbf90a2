"""Arrays of every framework for tests of `xentlib.interop`: made, pointed at and read without it.

A route is (from, to). `frameworks` asks for what a test needs, so the suite runs with only one of
them installed.
"""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

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
