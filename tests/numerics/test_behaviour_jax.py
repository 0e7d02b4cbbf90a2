"""What JAX does around the operator: transformations, tracing, buffers; what is refused, and what
cannot be.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import numpy as np
import pytest

from helpers.held import hold_gradients
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import run
from xentlib.tools.harness.problems import Case, build
from xentlib.ulp import bits_unequal

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402

from helpers.leaves_jax import BUDGET, NAMES, OUTPUTS, H, N, V, arrays, same  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.nll_jax import nll, scaled  # noqa: E402
from xentlib.jax import chunked_logprobs, chunked_nll, vocab_parallel_logprobs  # noqa: E402


@pytest.mark.slow
def test_jit_grad_and_value_and_grad():
    """A5, A6, A11, M19: each road to the gradients gives the same bits."""
    leaves, p = arrays()
    loss = partial(scaled, p.upstream)
    want = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    value, got = jax.value_and_grad(loss, argnums=(0, 1, 2))(*leaves)
    assert same(want, got)
    assert same(value, loss(*leaves))
    assert same(want, jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*leaves))
    hold_gradients(p.reference(), dict(zip(NAMES, want)))


@pytest.mark.slow
def test_vmap_is_a_loop():
    """M19: a batch of problems with unequal valid tokens, head shared; A5 and A6."""
    problems = [build(Case(f"b{i}", N, H, V, ignored=i / 3), i) for i in range(4)]
    assert len({int(p.valid.sum()) for p in problems}) == 4
    weight, bias = problems[0].weight, problems[0].bias
    problems = [p.changed(weight=weight, bias=bias) for p in problems]
    upstream = jnp.asarray([p.upstream for p in problems], jnp.float32)
    batch = [jnp.stack([getattr(p, k) for p in problems]) for k in ("hidden", "labels")]

    def step(factor, hidden, labels):
        def loss(*leaves):
            out = nll(*leaves, labels, outputs=OUTPUTS)
            return factor * out.loss, out

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(
            hidden, jnp.asarray(weight), jnp.asarray(bias)
        )

    (values, outs), gradients = jax.vmap(step)(upstream, *batch)
    for i, p in enumerate(problems):
        o = p.reference()
        found = check("A2", outs.loss[i], o.loss, magnitude=o.loss_magnitude)
        assert failures(found) == []
        assert int(outs.num_tokens[i]) == o.num_tokens
        assert np.array_equal(np.asarray(outs.correct[i]), o.correct)
        if o.num_tokens:
            hold_gradients(p.reference(), {k: g[i] for k, g in zip(NAMES, gradients)})
        else:
            assert float(values[i]) == 0
            assert not any(np.asarray(g[i]).view(np.uint32).any() for g in gradients)  # A0: +0


@pytest.mark.slow
def test_remat():
    """A11: the recomputed forward gives the same bits."""
    leaves, p = arrays()
    loss = partial(scaled, p.upstream)
    want = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    assert same(want, jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))(*leaves))
    policy = jax.checkpoint_policies.nothing_saveable
    again = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1, 2)))
    assert same(want, again(*leaves))


@cache
def micro_batches(remat: bool):
    """Gradients of four micro-batches in one `lax.scan`, and of their concatenation."""
    leaves, p = arrays(Case("scan", 64, H, V, ignored=0.3))
    hidden, weight, bias, labels = leaves
    window = jnp.float32(p.valid.sum())

    def total(hidden, weight, bias):
        def body(carry, batch):
            return carry + nll(batch[0], weight, bias, batch[1], denominator=window).loss, None

        body = jax.checkpoint(body) if remat else body
        batches = (hidden.reshape(4, 16, H), labels.reshape(4, 16))
        carry, _ = jax.lax.scan(body, jnp.float32(0), batches)
        return jnp.float32(p.upstream) * carry

    return jax.jit(jax.grad(total, argnums=(0, 1, 2)))(hidden, weight, bias), p


@pytest.mark.optimized  # the programs of the next test
@pytest.mark.parametrize("remat", [False, True], ids=["saved", "remat"])
def test_scan_over_micro_batches(remat):
    """A12, M15: accumulation equals one batch, differentiated through the scan."""
    got, p = micro_batches(remat)
    hold_gradients(p.reference(), dict(zip(NAMES, got)), "A12")


@pytest.mark.optimized
def test_checkpointed_scan_keeps_the_bits():
    """A11: remat inside the scan changes nothing."""
    assert same(micro_batches(False)[0], micro_batches(True)[0])


def test_second_pull_is_the_same():
    """M10: a vjp may be pulled again, with another cotangent in between."""
    leaves, p = arrays()
    value, pull = jax.vjp(lambda *x: nll(*x, leaves[3]).loss, *leaves[:3])
    upstream = jnp.asarray(p.upstream, value.dtype)
    first = pull(upstream)
    pull(jnp.asarray(-1.7, value.dtype))
    assert same(first, pull(upstream))
    hold_gradients(p.reference(), dict(zip(NAMES, first)))


FUNCTIONS = {
    "nll": lambda h, w, y: nll(h, w, None, y, outputs=OUTPUTS)[:8],
    "logprobs": lambda h, w, y: chunked_logprobs(h, w, y, entropy=True, max_chunk_bytes=BUDGET),
    "given": lambda z, _, y: vocab_parallel_logprobs(z, y, entropy=True, max_chunk_bytes=BUDGET),
}


@pytest.mark.cpu  # row A10 is of CPUs
@pytest.mark.optimized
@pytest.mark.slow
# A part of a chunk, one, four.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *product(["nll"], [(2, 32), (13, 17)]),
        *product(["given"], [(1, 3), (13, 17)]),
        *(pytest.param("logprobs", x, marks=pytest.mark.full) for x in [(1, 3), (2, 32), (13, 17)]),
    ],
    ids=str,
)
def test_exported_for_any_number_of_tokens(name, shape):
    """A10: forward and backward of one exported program with symbolic [b, t] give the bits of each
    call by itself. Catches: a plan that needs N as a number, a chunk that N may not fill."""
    leaves, _ = arrays()
    x, weight = leaves[:2]
    x = x @ weight.T if name == "given" else x

    def step(x, labels):
        def total(x):
            out = FUNCTIONS[name](x, weight, labels)
            with_gradient = out[:1] if name == "nll" else out
            return sum(
                x.sum() for x in with_gradient if x is not None and x.dtype == jnp.float32
            ), out

        d_x, out = jax.grad(total, has_aux=True)(x)
        return (d_x, *out[4 if name == "nll" else 0 :])  # A10 says nothing of a mean

    sizes = export.symbolic_shape("b, t")
    exported = export.export(jax.jit(step))(
        jax.ShapeDtypeStruct((*sizes, x.shape[1]), jnp.float32),
        jax.ShapeDtypeStruct(sizes, jnp.int32),
    )
    b, t = shape
    given = x[: b * t].reshape(b, t, -1), leaves[3][: b * t].reshape(b, t)
    assert same(exported.call(*given), jax.jit(step)(*given))


@pytest.mark.slow
def test_numpy_inputs():
    """D6: NumPy arrays come in as they are, same bits; they are not written to."""
    leaves, p = arrays()
    own = [p.hidden, p.weight, p.bias, p.labels]
    before = [x.copy() for x in own]
    want = nll(*leaves, outputs=OUTPUTS)
    assert same(want, nll(*own, outputs=OUTPUTS))
    loss = partial(scaled, p.upstream)
    want = jax.grad(loss, argnums=(0, 1, 2))(*leaves)
    assert same(want, jax.grad(loss, argnums=(0, 1, 2))(*own))
    assert all(bits_unequal(a, b) == 0 for a, b in zip(before, own))


def test_donated_buffers():
    """D6: donating hidden and weight to the step changes no bit of what it returns."""
    leaves, p = arrays()
    step = jax.grad(partial(scaled, p.upstream), argnums=(0, 1))
    want = jax.jit(step)(*leaves)
    donating = jax.jit(step, donate_argnums=(0, 1))
    got = donating(*[jnp.array(x, copy=True) for x in leaves])
    assert same(want, got)


def test_leading_dimensions_are_free():
    """D6: `[..., H]`; the same bits as the flat call."""
    (hidden, weight, bias, labels), _ = arrays(Case("leading", 60, H, V))
    flat = nll(hidden, weight, bias, labels, outputs=OUTPUTS)
    deep = nll(hidden.reshape(3, 4, 5, H), weight, bias, labels.reshape(3, 4, 5), outputs=OUTPUTS)
    assert {getattr(deep, name).shape for name in OUTPUTS} == {(3, 4, 5)}
    assert same(flat, jax.tree.map(lambda x: x.reshape(-1) if x.ndim else x, deep))


@pytest.mark.optimized
def test_runs_do_not_change_bits():
    """A11: run to run."""
    p = build(Case("runs", 257, 64, 1031, token_weights=True), 5)
    first, second = (run("jax", p, chunk_tokens=64) for _ in range(2))
    for name, want in first.by_name().items():
        got = getattr(second, name)
        assert failures(check("A11", got, want, quantity=name)) == []


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_invalid_rows_reach_nothing(poison):
    """A0, M4: inf and NaN in rows that are not valid; +0 gradient, other bits the same."""
    leaves, p = arrays()
    hidden = jnp.where(jnp.asarray(p.valid)[:, None], leaves[0], jnp.float32(poison))
    loss = partial(scaled, p.upstream)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2))
    want, got = step(*leaves), step(hidden, *leaves[1:])
    assert same(want, got)
    assert not np.asarray(got[1][0])[~p.valid].view(np.uint32).any()


# --- what is refused, and what cannot be ---------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, V, V + 5])
def test_label_out_of_range_under_jit(bad):
    """M11: NaN for that token and for what sums over it, nothing plausible; the other
    tokens keep their bits. Eager on CPU it raises."""
    leaves, p = arrays()
    labels = leaves[3].at[7].set(bad)
    with pytest.raises(ValueError, match=rf"must lie in \[0, {V}\).*got {bad}\."):
        nll(*leaves[:3], labels)
    call = jax.jit(partial(nll, outputs=OUTPUTS))
    good = call(*leaves[:3], leaves[3].at[7].set(0))
    out = call(*leaves[:3], labels)
    others = np.arange(N) != 7
    assert np.isnan(out.loss)
    for name in ("logprobs", "entropy", "lse"):
        want, got = np.asarray(getattr(good, name)), np.asarray(getattr(out, name))
        assert np.isnan(got[7]), name
        assert bits_unequal(want[others], got[others]) == 0
    gradients = jax.jit(jax.grad(partial(scaled, p.upstream), argnums=(0, 1)))(*leaves[:3], labels)
    assert np.isnan(gradients[0][7]).all()
    assert np.isnan(gradients[1]).any()


@pytest.mark.parametrize("name", ["token_weights", "temperature", "logit_scale", "denominator"])
def test_constants_are_not_differentiated(name):
    """D12: a gradient that is not computed is refused, with the way out."""
    leaves, _ = arrays()
    shape = () if name in ("logit_scale", "denominator") else (N,)

    def loss(value, stop):
        value = jax.lax.stop_gradient(value) if stop else value
        return 1.3 * nll(*leaves, **{name: value}).loss

    with pytest.raises(ValueError, match=rf"`{name}` must be a constant.*stop_gradient\({name}\)"):
        jax.grad(loss)(jnp.ones(shape), False)
    assert not np.asarray(jax.grad(loss)(jnp.ones(shape), True)).any()


def bonus(name):
    """The loss and a result that has no gradient, as an entropy bonus is written."""
    leaves, _ = arrays()

    def loss(*three):
        out = nll(*three, leaves[3], outputs=OUTPUTS, z_loss=0.1)
        return out.loss - 0.01 * getattr(out, name).mean()

    return loss, leaves[:3]


@pytest.mark.parametrize("name", ["entropy", "logprobs", "lse", "z_loss"])
def test_only_the_loss_has_a_gradient(name):
    """D6: that of another result is refused; where no value is known, inside `jit`, it is NaN."""
    loss, leaves = bonus(name)
    with pytest.raises(
        RuntimeError, match=f"^`{name}` of `chunked_nll` must not be diff.*logprobs"
    ):
        jax.grad(loss)(*leaves)
    every = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*leaves)
    assert all(np.isnan(x).any() for x in every)
    for wanted in range(3 if name == "entropy" else 0):  # each alone is another program
        assert np.isnan(jax.jit(jax.grad(loss, argnums=wanted))(*leaves)).any()
    counts = jax.grad(lambda h: nll(h, *leaves[1:], arrays()[0][3]).weight_sum)(leaves[0])
    assert not np.asarray(counts).any()  # which depends on no leaf


def test_a_bonus_is_not_lost_in_loops_and_checkpoints():
    """D6: M19's transformations, of which some fill in zeros for what was not used."""
    leaves = bonus("entropy")[1]
    labels = arrays()[0][3]

    def both(*three):
        out = nll(*three, labels, outputs=OUTPUTS, z_loss=0.1)
        return out.loss, {name: getattr(out, name) for name in (*OUTPUTS, "z_loss")}

    def scanned(*three):
        return jax.lax.scan(lambda c, _: (c + both(*three)[0], both(*three)[1]), 0.0, jnp.arange(1))

    want = jax.grad(lambda *three: both(*three)[0], argnums=(0, 1, 2))(*leaves)
    for function in (both, jax.checkpoint(both), scanned):
        assert same(want, jax.grad(function, argnums=(0, 1, 2), has_aux=True)(*leaves)[0])
    for function in (jax.checkpoint(both), scanned):

        def added(*three, function=function):
            value, rest = function(*three)
            return value - 0.01 * rest["entropy"].mean()

        assert np.isnan(jax.grad(added)(*leaves)).any()


@pytest.mark.cpu  # its mesh is of CPUs
@pytest.mark.parametrize("mapped", [True, False])
def test_a_bonus_is_not_lost_on_devices(mapped):
    """D6: as above."""
    loss, leaves = bonus("entropy")
    spec = jax.sharding.PartitionSpec
    cut = jax.shard_map(
        lambda *three: jax.lax.pmean(loss(*three), "d") if mapped else loss(*three)[None],
        mesh=mesh_of(d=1),
        in_specs=(spec(),) * 3,
        out_specs=spec() if mapped else spec("d"),
        check_vma=mapped,
    )
    assert np.isnan(jax.jit(jax.grad(lambda *three: cut(*three).sum()))(*leaves)).any()


def test_forward_mode_raises():
    """D12: what is not computed is refused; JAX says so for a custom_vjp."""
    leaves, _ = arrays()
    hidden, *rest = leaves
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda h: nll(h, *rest).loss, (hidden,), (hidden,))


def test_float64_needs_64_bit_types():
    """D12: JAX would narrow to float32 without a word; so it is refused."""
    leaves, p = arrays()
    with pytest.raises(ValueError, match=r"64-bit types.*jax\.enable_x64\(True\)"):
        nll(*leaves, compute_dtype="float64")
    with pytest.raises(ValueError, match="64-bit types"):
        nll(p.hidden.astype(np.float64), *leaves[1:])
    with jax.enable_x64(True):
        assert nll(*leaves, compute_dtype="float64").loss.dtype == jnp.float32
        assert nll(leaves[0].astype(jnp.float64), *leaves[1:]).loss.dtype == jnp.float64


def test_class_weights_of_absent_classes_may_be_infinite() -> None:
    """1 / count: gradients were NaN, as 0 times the sum of the weights entered each of them."""
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.normal(size=(n, 4)), jnp.float32) for n in (6, 5))
    labels, by = jnp.array([0, 1, 3, 1, 0, 3]), np.array([0.5, 0.5, np.inf, 0.5, np.inf], "f")

    def loss(x, class_weights):
        return chunked_nll(x, weight, labels, class_weights=class_weights).loss

    got, want = (jax.grad(loss)(hidden, jnp.asarray(w)) for w in (by, np.minimum(by, 1)))
    assert (got == want).all()
