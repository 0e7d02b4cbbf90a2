"""`chunked_logprobs` under JAX's transformations; what is refused there, and what cannot be.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

from helpers.held import hold_gradients
from xentlib import logprobs as spec
from xentlib.tools.harness.problems import Case, build, upstream_of
from xentlib.ulp import bits_unequal

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402

from helpers.leaves_jax import BUDGET, NAMES, H, N, V, arrays, same  # noqa: E402
from helpers.logprobs_jax import head, reference_of, scaled_logprobs  # noqa: E402
from xentlib.jax import chunked_logprobs  # noqa: E402


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [pytest.param(BUDGET, id="chunks"), pytest.param(None, id="one chunk", marks=pytest.mark.full)],
)
@pytest.mark.parametrize("road", ["eager", "jit", "jitted remat"])
def test_each_road_to_the_gradients_gives_the_same_bits(budget, road):
    """A5, A6, A11. Catches: a product and its sum in one program, which XLA may contract."""
    leaves, p = arrays()
    upstream = upstream_of(p, 1)
    loss = partial(scaled_logprobs, upstream, max_chunk_bytes=budget)
    want = eager(budget)
    if road == "eager":
        value, got = jax.value_and_grad(loss, argnums=(0, 1, 2))(*leaves)
        assert same(want, got)
        assert same(value, loss(*leaves))
        hold_gradients(reference_of(p, upstream), dict(zip(NAMES, want)))
        return
    loss = jax.checkpoint(loss) if "remat" in road else loss
    assert same(want, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*leaves))


@cache
def eager(budget):
    leaves, p = arrays()
    loss = partial(scaled_logprobs, upstream_of(p, 1), max_chunk_bytes=budget)
    return jax.grad(loss, argnums=(0, 1, 2))(*leaves)


def test_vmap_is_a_loop():
    """A batch of problems with unequal valid tokens, head shared; A5 and A6."""
    problems = [build(Case(f"b{i}", N, H, V, ignored=i / 3), i) for i in range(4)]
    weight, bias = problems[0].weight, problems[0].bias
    problems = [p.changed(weight=weight, bias=bias) for p in problems]
    ups = [upstream_of(p, i) for i, p in enumerate(problems)]

    def step(upstream, hidden, labels):
        loss = partial(scaled_logprobs, upstream, labels=labels)
        return jax.grad(loss, argnums=(0, 1, 2))(hidden, jnp.asarray(weight), jnp.asarray(bias))

    upstream = tuple(jnp.stack([u[k] for u in ups]) for k in range(3))
    batch = [jnp.stack([getattr(p, k) for p in problems]) for k in ("hidden", "labels")]
    got = jax.vmap(step)(upstream, *batch)
    for i, p in enumerate(problems):
        assert p.valid.any() or not any(np.asarray(g[i]).view(np.uint32).any() for g in got)
        hold_gradients(reference_of(p, ups[i]), {k: np.asarray(g[i]) for k, g in zip(NAMES, got)})


@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
def test_scan_over_micro_batches(remat):
    """A12: four micro-batches in one `lax.scan` are one batch."""
    (hidden, weight, bias, labels), p = arrays(Case("scan", 64, H, V, ignored=0.3))
    upstream = upstream_of(p, 1)

    def total(hidden, weight, bias):
        def body(carry, batch):
            return carry + scaled_logprobs(batch[2:], batch[0], weight, bias, batch[1]), None

        body = jax.checkpoint(body) if remat else body
        batches = (hidden.reshape(4, 16, H), *(x.reshape(4, 16) for x in (labels, *upstream)))
        return jax.lax.scan(body, jnp.float32(0), batches)[0]

    got = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(hidden, weight, bias)
    hold_gradients(reference_of(p, upstream), dict(zip(NAMES, got)), "A12")


@pytest.mark.optimized
def test_second_pull_is_the_same():
    """A vjp may be pulled again, with another cotangent in between."""
    leaves, p = arrays()
    out, pull = jax.vjp(lambda *x: head(*x, leaves[3])[:3], *leaves[:3])
    upstream = tuple(jnp.asarray(g) for g in upstream_of(p, 1))
    first = pull(upstream)
    pull(tuple(-g for g in upstream))
    assert same(first, pull(upstream))
    assert len(out) == 3


def test_second_and_forward_derivatives_raise():
    """D12: what is not computed is refused."""
    (hidden, *rest), p = arrays()
    loss = partial(scaled_logprobs, upstream_of(p, 1))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: loss(h, *rest), (hidden,), (hidden,))
    with pytest.raises(RuntimeError, match="must be differentiated once"):
        jax.grad(lambda h: jax.grad(loss)(h, *rest).sum())(hidden)


def test_leading_dimensions_and_dtypes():
    """`[..., H]`: the same bits as the flat call; a 16-bit head gives float32 all the same."""
    (hidden, weight, bias, labels), _ = arrays(Case("leading", 60, H, V))
    flat = head(hidden, weight, bias, labels)
    deep = head(hidden.reshape(3, 4, 5, H), weight, bias, labels.reshape(3, 4, 5))
    assert {x.shape for x in deep[:4]} == {(3, 4, 5)}
    assert same(flat, jax.tree.map(lambda x: x.reshape(-1), deep))
    low = head(*(x.astype(jnp.bfloat16) for x in (hidden, weight, bias)), labels)
    assert [str(x.dtype) for x in low[:4]] == ["float32"] * 3 + ["bool"]
    assert chunked_logprobs.__doc__ == spec.chunked_logprobs.__doc__


def test_a_policy_gradient_step():
    """What it is for: a clipped ratio and an entropy bonus, gradients from the loss itself."""
    leaves, p = arrays()
    rng = np.random.default_rng(0)
    advantage = jnp.asarray(rng.standard_normal(N), jnp.float32)
    old = head(*leaves).logprobs + jnp.asarray(0.2 * rng.standard_normal(N), jnp.float32)

    def objective(logprobs, entropy):
        ratio = jnp.exp(logprobs - old)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 0.8, 1.2) * advantage)
        return -(surrogate + 0.01 * entropy).mean()

    def loss(*x):
        out = head(*x)
        return objective(out.logprobs, out.entropy)

    got = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    out = head(*leaves)
    d_logprobs, d_entropy = jax.grad(objective, argnums=(0, 1))(out.logprobs, out.entropy)
    hold_gradients(
        reference_of(p, (d_logprobs, d_entropy, None)), dict(zip(NAMES, map(np.asarray, got)))
    )


# --- what is refused, and what cannot be ---------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, V, V + 5])
def test_label_out_of_range_under_jit(bad):
    """NaN for that token's outputs and gradient, with a gradient of 0 too; the others keep their
    bits. Eager on CPU it raises."""
    leaves, p = arrays()
    labels = leaves[3].at[7].set(bad)
    with pytest.raises(ValueError, match=rf"must lie in \[0, {V}\).*got {bad}\."):
        head(*leaves[:3], labels)
    call = jax.jit(head)
    good, out = call(*leaves[:3], leaves[3].at[7].set(0)), call(*leaves[:3], labels)
    others = np.arange(N) != 7
    for name in ("logprobs", "entropy", "lse"):
        want, got = np.asarray(getattr(good, name)), np.asarray(getattr(out, name))
        assert np.isnan(got[7]), name
        assert bits_unequal(want[others], got[others]) == 0
    assert not out.correct[7]
    step = jax.jit(jax.grad(scaled_logprobs, argnums=(1, 2)))
    for factor in (np.float32(1), (others | (np.arange(N) > N)).astype(np.float32)):
        upstream = tuple(factor * g for g in upstream_of(p, 1))
        d_hidden, d_weight = step(upstream, *leaves[:3], labels)
        assert np.isnan(d_hidden[7]).all()
        assert np.isfinite(np.asarray(d_hidden)[others]).all()
        assert np.isnan(d_weight).any()


@pytest.mark.parametrize("name", ["temperature", "logit_scale"])
def test_constants_are_not_differentiated(name):
    """D12: a gradient that is not computed is refused, with the way out."""
    leaves, p = arrays()
    upstream = upstream_of(p, 1)

    def loss(value, stop):
        value = jax.lax.stop_gradient(value) if stop else value
        return scaled_logprobs(upstream, *leaves, **{name: value})

    value = jnp.ones(() if name == "logit_scale" else (N,))
    with pytest.raises(ValueError, match=rf"`{name}` must be a constant.*stop_gradient\({name}\)"):
        jax.grad(loss)(value, False)
    assert not np.asarray(jax.grad(loss)(value, True)).any()


def test_float64_needs_64_bit_types():
    """D12: JAX would narrow to float32 without a word; so it is refused."""
    leaves, _ = arrays()
    with pytest.raises(ValueError, match=r"64-bit types.*jax\.enable_x64\(True\)"):
        head(*leaves, compute_dtype="float64")
