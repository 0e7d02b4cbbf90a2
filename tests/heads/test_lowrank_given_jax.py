"""What a head with a low-rank part may be given as in JAX: a scale that is a number, an array or a
tracer, a module of Flax; and what is refused.

Shapes: N tokens, V vocabulary, H hidden width, R rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402

from helpers.leaves_jax import same  # noqa: E402
from helpers.lowrank import CASES, V, held_to, hold, low_problem, oracle  # noqa: E402
from helpers.lowrank_jax import called, leaves_of  # noqa: E402
from xentlib.jax import LowRankHead, chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.tools.harness.device import on_jax  # noqa: E402

PROBLEM = low_problem(CASES["plain"])
LABELS = on_jax(PROBLEM.base.labels)


def head(scale: Any = PROBLEM.scale, keep: Any = None) -> LowRankHead[jax.Array]:
    leaves = leaves_of(PROBLEM)
    return LowRankHead(leaves["weight"], leaves["a"], leaves["b"], scale, keep)


def lse(head: LowRankHead[jax.Array]) -> Any:
    return chunked_logprobs(leaves_of(PROBLEM)["hidden"], head, LABELS).lse


ALIKE = {
    "an array": jnp.float32(0.7),
    "NumPy's": np.float64(0.7),
    "NumPy's array": np.array(0.7, np.float32),
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_scale_may_be_an_array(name: str) -> None:
    assert same(lse(head(ALIKE[name])), lse(head()))


def test_a_head_goes_through_jit_as_an_argument() -> None:
    """Its scale, and an integer as scale, are tracers there: the same bits, and a program for all
    scales. Catches: a scale that is left out where it is no number."""
    traced = []

    def call(low: Any) -> Any:
        traced.append(None)
        return lse(low)

    jitted = jax.jit(call)
    assert same(jitted(head()), lse(head()))
    assert same(jitted(head(1.9)), lse(head(1.9)))
    assert len(traced) == 1
    assert same(jitted(head(2)), lse(head(2.0)))
    keep = jnp.asarray(np.random.default_rng(0).random((len(LABELS), 24)) < 0.5)
    assert same(jitted(head(keep=keep)), lse(head(keep=keep)))
    assert not same(jitted(head()), jitted(head(1.9)))


@pytest.mark.parametrize("function", [chunked_nll, chunked_logprobs])
def test_a_scale_has_no_gradient_without_a_word(function: Any) -> None:
    """D12: of a head that is differentiated as a whole; with the way out, which has the others'."""

    def step(low: Any, stop: bool) -> Any:
        low = low._replace(scale=jax.lax.stop_gradient(low.scale)) if stop else low
        out = function(leaves_of(PROBLEM)["hidden"], low, LABELS)
        return (out.loss if function is chunked_nll else -out.logprobs.sum()) * 1.3

    said = r"`scale` must be a constant; got an array that is differentiated.*stop_gradient\(scale"
    for wrap in (lambda f: f, jax.jit):
        with pytest.raises(ValueError, match=said):
            wrap(jax.grad(partial(step, stop=False)))(head())
    found = jax.grad(partial(step, stop=True))(head())
    assert found.scale == 0
    assert all(np.asarray(x).any() for x in found[:3])
    frozen = jax.grad(lambda a: step(head()._replace(a=a), False))(head().a)
    assert same(frozen, found.a)


REFUSED = {
    "one for each rank": (jnp.ones(3), r"got an array \[3\] of float32"),
    "a bool": (jnp.asarray(True), r"got an array \[\] of bool"),
    "not finite": (jnp.float32(jnp.nan), "got nan"),
    "complex": (jnp.complex64(1), r"got an array \[\] of complex64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_scale(name: str) -> None:
    scale, came = REFUSED[name]
    with pytest.raises(ValueError, match=f"`scale` must be a finite number; {came}"):
        lse(head(scale))
    if name != "not finite":  # which a trace cannot know: NaN shows
        with pytest.raises(ValueError, match="`scale` must be a finite number"):
            jax.jit(lse)(head(scale))
    else:
        assert np.isnan(jax.jit(lse)(head(scale))[LABELS >= 0]).all()


def test_tensors_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="`a` of `LowRankHead` must be an array of the backend"):
        lse(head()._replace(a=torch.ones(3, 24)))


# --- modules --------------------------------------------------------------------------------------


def test_layers_of_flax() -> None:
    """Their kernel and bias are taken; parameters may be NNX's own. The same bits."""
    nnx = pytest.importorskip("flax.nnx")
    from flax import linen as nn

    p = low_problem(CASES["bias, confident"])
    leaves = leaves_of(p)
    want, options = called(p, leaves).loss, {"max_chunk_bytes": 64 * V * 4}
    layer = nnx.Linear(24, V, rngs=nnx.Rngs(0))
    layer.kernel[...], layer.bias[...] = leaves["weight"].T, on_jax(p.base.bias)
    labels, a, b = on_jax(p.base.labels), nnx.Param(leaves["a"]), nnx.Param(leaves["b"])
    low = LowRankHead(layer, a, b, p.scale)
    held_to("A10", chunked_nll(leaves["hidden"], low, labels, **options).loss, want)
    low = LowRankHead(nnx.Param(leaves["weight"]), a, b, p.scale)
    bias = on_jax(p.base.bias)
    assert same(chunked_nll(leaves["hidden"], low, labels, bias=bias, **options).loss, want)
    params = {"kernel": leaves["weight"].T, "bias": bias}
    low = LowRankHead(nn.Dense(V).bind({"params": params}), leaves["a"], leaves["b"], p.scale)
    held_to("A10", chunked_nll(leaves["hidden"], low, labels, **options).loss, want)


def test_lora_of_nnx_as_its_refusal_says() -> None:
    """A5, A6: by `LowRankHead` of its arrays, to its own parameters."""
    nnx = pytest.importorskip("flax.nnx")
    p = low_problem(CASES["plain"])
    leaves = leaves_of(p)
    layer = nnx.LoRALinear(24, V, lora_rank=3, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = leaves["weight"].T
    layer.lora.lora_a[...], layer.lora.lora_b[...] = leaves["a"].T, leaves["b"].T
    labels = on_jax(p.base.labels)
    with pytest.raises(TypeError, match="LoRALinear of NNX"):
        chunked_nll(leaves["hidden"], layer, labels)

    def step(layer: Any, hidden: Any) -> Any:
        a, b = layer.lora.lora_a[...].T, layer.lora.lora_b[...].T
        low = LowRankHead(layer.kernel[...], a, b)
        out = chunked_nll(hidden, low, labels, weight_layout="HV")
        return p.base.upstream * out.loss

    wanted = nnx.DiffState(0, nnx.LoRAParam)
    found, d_hidden = nnx.jit(nnx.grad(step, argnums=(wanted, 1)))(layer, leaves["hidden"])
    got = {"a": found["lora"]["lora_a"][...].T, "b": found["lora"]["lora_b"][...].T}
    assert set(found) == {"lora"}
    hold(oracle(p._replace(scale=1.0)), got | {"hidden": d_hidden})
