"""The compiled program of `chunked_logprobs` in JAX: its GEMMs, its reductions, its memory.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from xentlib.tools.harness.problems import upstream_of

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.extend.core import jaxprs_in_params  # noqa: E402

from helpers.hlo import entries, products  # noqa: E402
from helpers.leaves_jax import H, N, arrays, same  # noqa: E402
from helpers.logprobs_jax import head, scaled_logprobs  # noqa: E402

BIG = {"tokens": 2048, "hidden": 64, "vocab": 2048}


def program(argnums: tuple[int, ...], *, use=("logprobs", "entropy", "lse"), **options):
    """Lowered: a loss of the named outputs, or its gradient."""
    n, h, v = BIG.values()
    shape = jax.ShapeDtypeStruct
    inputs = [shape(s, "float32") for s in ((n, h), (v, h), (v,))] + [shape((n,), "int32")]

    def loss(*leaves):
        out = head(*leaves, max_chunk_bytes=256 * v * 4, **options)
        return sum(1.3 * (getattr(out, name) ** 2).sum() for name in use)

    return jax.jit(jax.grad(loss, argnums=argnums) if argnums else loss).trace(*inputs)


# d bias is summed by two thin products beside the GEMMs (`column_sums`).
NEEDS = {
    "outputs only": ((), 1),
    "everything": ((0, 1, 2), 4 + 2),
    "frozen head": ((0,), 3),
    "frozen trunk": ((1, 2), 3 + 2),
    "bias only": ((2,), 2 + 2),
}


def dots(traced) -> int:
    """GEMMs of the optimised program."""
    return products(traced.lower().compile().as_text())


def primitives(jaxpr, name: str) -> int:
    """How often a primitive stands in a jaxpr, those inside others included."""
    return sum(
        (eqn.primitive.name == name)
        + sum(primitives(sub, name) for sub in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


@pytest.mark.cpu
@pytest.mark.parametrize("name", NEEDS)
def test_frozen_parts_cost_nothing(name):
    """Four GEMMs, three with one side frozen, one for the outputs; in the trace too, where no
    compiler has taken out what is not used."""
    argnums, expected = NEEDS[name]
    traced = program(argnums)
    assert primitives(traced.jaxpr.jaxpr, "dot_general") == expected
    assert dots(traced) == expected


@pytest.mark.slow
def test_gradients_of_frozen_calls():
    """What is not wanted changes no bit of what is, and one function may be asked for both."""
    leaves, p = arrays()
    loss = jax.jit(partial(scaled_logprobs, upstream_of(p, 1)))
    full = jax.grad(loss, argnums=(0, 1))(*leaves)
    for argnum in (0, 1):
        assert same(full[argnum], jax.grad(loss, argnums=argnum)(*leaves))
    assert same(full, jax.grad(loss, argnums=(0, 1))(*leaves))


@pytest.mark.cpu
def test_no_gradient_no_backward():
    """A loss of `correct` alone, or of outputs cut off, has the GEMM of its outputs and no more."""
    leaves, _ = arrays()

    def loss(hidden):
        out = head(hidden, *leaves[1:])
        kept = out.correct.astype(jnp.float32) + jax.lax.stop_gradient(out.lse)
        return 1.3 * (kept.sum() + hidden.sum())

    assert np.array_equal(jax.grad(loss)(leaves[0]), np.full((N, H), np.float32(1.3)))
    traced = jax.jit(jax.grad(loss)).trace(leaves[0])
    assert primitives(traced.jaxpr.jaxpr, "dot_general") == 1
    assert dots(traced) == 0
    out, pull = jax.vjp(lambda h: head(h, *leaves[1:]).correct, leaves[0])
    backward = jax.make_jaxpr(pull)(np.zeros(out.shape, jax.dtypes.float0))
    assert primitives(backward.jaxpr, "dot_general") == 0


def test_entropy_that_is_not_asked_for_costs_nothing():
    """One sum more over columns in the forward with it; in the backward one maximum more with log
    p, and none where the entropy is an output without a gradient."""
    call = {"use": ("logprobs", "lse")}

    def count(name, argnums, **options):
        return primitives(program(argnums, **options).jaxpr.jaxpr, name)

    without, asked = (count("reduce_window_sum", (), **call, entropy=e) for e in (False, True))
    assert asked == without + 1
    without, unused, used = (
        count("max", (0,), **how)
        for how in ({**call, "entropy": False}, {**call, "entropy": True}, {})
    )
    assert without < unused < used
    leaves, _ = arrays()
    assert head(*leaves, entropy=False).entropy is None


@pytest.mark.cpu
def test_memory_is_that_of_chunks():
    """No [N, V] buffer in the program of the gradients."""
    compiled = program((0, 1, 2)).lower().compile()
    text = compiled.as_text()
    n, h, v = BIG.values()
    assert max(entries(text)) < n * v / 4
    # Logits, p and dz of a chunk, the target's mask; both gradients twice over.
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * (4 * 256 * v + 2 * h * (n + v))
