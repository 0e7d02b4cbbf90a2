"""`segment_sum` and `segment_mean` for tests: through either backend, and as sums of fractions."""

from __future__ import annotations

from contextlib import nullcontext
from fractions import Fraction

import numpy as np

from xentlib.interop import to_jax, to_numpy, to_torch

NAMES = ("segment_sum", "segment_mean")
SHAPE, SEGMENTS = (7, 71), 9  # few shapes: JAX compiles each


def crossing(backend):
    cross = to_torch if backend == "torch" else to_jax
    return lambda x: cross(x, copy=True) if isinstance(x, np.ndarray) else x


def x64(backend):
    """64-bit types in JAX."""
    if backend == "torch":
        return nullcontext()
    import jax

    return jax.enable_x64(True)


def function_of(backend, name):
    return getattr(__import__(f"xentlib.{backend}", fromlist=["_"]), name)


def computed(backend, name, values, ids, count, upstream=None, where=None):
    """Results, and the gradient of the values where there is an upstream; NumPy in and out."""
    function, cross = function_of(backend, name), crossing(backend)
    given = [cross(x) for x in (values, ids, where)]
    if upstream is None:
        return np.array(to_numpy(function(given[0], given[1], count, where=given[2])))
    if backend == "torch":
        x = given[0].requires_grad_()
        out = function(x, given[1], count, where=given[2])
        out.backward(cross(upstream))
        return np.array(to_numpy(out.detach())), np.array(to_numpy(x.grad))
    import jax

    out, back = jax.vjp(lambda x: function(x, given[1], count, where=given[2]), given[0])
    return np.array(to_numpy(out)), np.array(to_numpy(back(cross(upstream))[0]))


def truth(name, values, ids, count, upstream, where=None):
    """Sums of fractions, rounded once, and gradients, token by token."""
    kind = np.float64 if values.dtype == np.float64 else np.float32
    counts = (ids >= 0) & (np.ones(ids.shape, bool) if where is None else where)
    out, gradient = np.zeros(count, kind), np.zeros(values.shape, kind)
    for s in range(count):
        own = counts & (ids == s)
        divisor = max(1, int(own.sum())) if name == "segment_mean" else 1
        out[s] = float(
            sum(map(Fraction, values[own].astype(np.float64).tolist()), Fraction(0)) / divisor
        )
        gradient[own] = upstream[s] / kind(divisor)
    return out, gradient.astype(values.dtype)


def drawn(kind, seed=0, dtype=np.float32):
    """Values as losses have them; ids in no order, with padding and a segment that is empty."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(SHAPE)
    if kind == "logprobs":
        x = -np.exp(3 * x)
    if kind == "all sizes":
        x = x * 10.0 ** rng.uniform(-4, 4, SHAPE)
    ids = rng.integers(-1, SEGMENTS, SHAPE).astype(np.int32)
    ids[ids == 3] = -7
    x = x.astype(dtype)
    if kind == "cancelling":  # all but the last of each two
        flat = x.reshape(-1)
        flat[1::2] = -flat[:-1:2][: flat[1::2].size] * dtype(1 + 2.0**-20)
        ids = np.minimum(np.arange(x.size) // 2 % SEGMENTS, SEGMENTS - 1).reshape(SHAPE)
    if kind == "far below":  # what is left of 1 - 1 has bits that a float64 sum loses beside 1
        x = (np.sign(x) * 2.0**-31 * rng.uniform(1, 2, SHAPE)).astype(dtype)
        x[:, :SEGMENTS], x[:, SEGMENTS : 2 * SEGMENTS] = 1, -1
        ids[:, : 2 * SEGMENTS] = np.tile(np.arange(SEGMENTS), 2)
    upstream = rng.standard_normal(SEGMENTS).astype(dtype)
    return x, ids.astype(np.int32), upstream, rng.random(SHAPE) < 0.8
