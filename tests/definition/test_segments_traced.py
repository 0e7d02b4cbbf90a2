"""`segment_sum` and `segment_mean` under the transformations of each framework."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.segments import NAMES, SEGMENTS, SHAPE, computed, drawn, function_of
from xentlib.contract import RHO_64, rho
from xentlib.ulp import bits_unequal


@pytest.mark.jax
@pytest.mark.parametrize("name", NAMES)
def test_traced_by_jax(name):
    """A0: the same bits in `jit`, where counts are constants, and `vmap`; the second derivative; an
    id that is too large."""
    jax = pytest.importorskip("jax")
    function = function_of("jax", name)
    values, ids, upstream, where = drawn("normal")
    want = computed("jax", name, values, ids, SEGMENTS, where=where)

    def call(x):
        return function(x, ids, SEGMENTS, where=where)

    assert bits_unequal(np.array(jax.jit(call)(values)), want) == 0
    for row in np.array(jax.vmap(call)(np.stack([values, values]))):
        assert bits_unequal(row, want) == 0
    squared = jax.jit(jax.grad(lambda x: 0.5 * (call(x) ** 2).sum()))
    second = jax.vjp(squared, values)[1](values)[0]  # of a quadratic form: its gradient again
    assert RHO_64.holds(rho(second, squared(values)))
    ids = np.where(ids == 5, SEGMENTS, ids)
    out, back = jax.jit(lambda x, i: jax.vjp(lambda x: function(x, i, SEGMENTS), x))(values, ids)
    assert np.isnan(out).all()
    (gradient,) = back(upstream)
    assert (np.isnan(gradient) == ((ids >= 0) & (ids < SEGMENTS))).all()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize("name", NAMES)
def test_traced_by_torch(name):
    """A0: the same bits in one graph and `vmap`; the second derivative; an id that is too large."""
    torch = pytest.importorskip("torch")
    function = function_of("torch", name)
    given = drawn("normal")
    want, slope = computed("torch", name, *given[:2], SEGMENTS, *given[2:])
    values, ids, upstream, where = map(torch.tensor, given)
    torch.compiler.reset()

    def call(x, ids):
        return function(x, ids, SEGMENTS, where=where)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x = values.clone().requires_grad_()
    out = compiled(x, ids)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    assert bits_unequal(out.detach().numpy(), want) == 0
    assert bits_unequal(gradient.numpy(), slope) == 0
    for row in torch.func.vmap(call, (0, None))(torch.stack([values, values]), ids):
        assert bits_unequal(row.numpy(), want) == 0
    (first,) = torch.autograd.grad(0.5 * (call(x, ids) ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first, x, values)  # of a quadratic form: its gradient again
    assert RHO_64.holds(rho(second, first.detach()))
    large = torch.where(ids == 5, SEGMENTS, ids)
    out = compiled(x, large)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    assert bool(out.isnan().all())
    counts = where & (large >= 0) & (large < SEGMENTS)
    assert bool((gradient.isnan() == counts).all())
    torch.compiler.reset()


@pytest.mark.torch
@pytest.mark.parametrize("name", NAMES)
def test_no_device_is_waited_for(name):
    """On meta as on a GPU: no number is read, in the backward neither."""
    torch = pytest.importorskip("torch")
    from helpers.on_meta import as_on_a_gpu

    with as_on_a_gpu():
        values = torch.empty(SHAPE, device="meta", requires_grad=True)
        ids = torch.empty(SHAPE, dtype=torch.int32, device="meta")
        out = function_of("torch", name)(values, ids, SEGMENTS, where=ids > 0)
        out.backward(torch.empty(SEGMENTS, device="meta"))
    assert (out.shape, out.dtype) == ((SEGMENTS,), torch.float32)
    assert values.grad.shape == SHAPE
