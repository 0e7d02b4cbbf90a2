"""`token_normalized` of JAX, a window over a host loop, against one batch that holds all tokens.

Shapes: M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from xentlib.accumulate import CountOverflowError
from xentlib.contract import check, failures

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.windows_jax import H, M, V, data, hold_tree, of_one_batch, params, sum_and_count  # noqa: E402
from xentlib.jax import chunked_nll, token_normalized  # noqa: E402

sums_of = jax.jit(jax.grad(sum_and_count, has_aux=True))  # once for all micro-batches


def micro(p: Any, batch: Any, k: int) -> tuple[Any, Any]:
    return sums_of(p, {name: x[k] for name, x in batch.items()})


def loop(tx: Any, state: Any, batch: Any, update: Any = None) -> tuple[Any, Any]:
    update = update or jax.jit(tx.update)
    for k in range(M):
        grads, count = micro(params(), batch, k)
        updates, state = update(grads, state, params(), token_count=count, is_last=k == M - 1)
        if k < M - 1:
            assert not any(np.asarray(u).any() for u in updates.values())
    return updates, state


@pytest.mark.parametrize("jitted", [True, False])
def test_the_optimizer_sees_the_window_s_gradient(jitted: bool) -> None:
    """A12, M20; where MultiSteps takes the mean of means."""
    tx, batch = token_normalized(optax.sgd(1.0)), data()
    update = None if jitted else tx.update
    updates, state = loop(tx, tx.init(params()), batch, update)
    hold_tree({name: -u for name, u in updates.items()}, of_one_batch(batch)[1])
    assert (int(state.windows), int(state.micro_batches), int(state.num_tokens)) == (1, 0, 0)


@pytest.mark.slow
def test_the_inner_optimizer_runs_once_a_window() -> None:
    """M20: Adam's step count, moments and schedule are those of windows; clipping sees the mean."""
    inner = optax.chain(optax.clip_by_global_norm(0.05), optax.adam(optax.linear_schedule(1, 0, 4)))
    tx, batch = token_normalized(inner), data()
    state = tx.init(params())
    structure = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    straight = inner.init(params())
    for seed in range(3):
        batch = data(seed)
        updates, state = loop(tx, state, batch)
        want, straight = inner.update(of_one_batch(batch)[1], straight, params())
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == structure
        assert int(optax.tree.get(state.inner, "mu") is not None)
    for name in want:
        got = np.asarray(updates[name])
        # Adam divides by the root of a square: errors of the gradient come out as they are.
        assert not failures(check("A9", got, np.asarray(want[name]), metrics=("rho / u",)))


def test_a_window_without_tokens_is_skipped() -> None:
    """No step, no NaN, the optimizer's state untouched, the next window clean."""
    tx = token_normalized(optax.adam(0.1))
    state = tx.init(params())
    updates, after = loop(tx, state, data(valid=(0, 0, 0, 0)))
    assert not any(np.asarray(u).any() for u in updates.values())
    same = jax.tree.map(np.array_equal, after, state)
    assert all(jax.tree.leaves(same))
    zero = token_normalized(optax.adam(0.1), empty="zero")
    _, after = loop(zero, zero.init(params()), data(valid=(0, 0, 0, 0)))
    assert int(after.windows) == 1


@pytest.mark.parametrize("nonfinite", ["keep", "drop"])
def test_a_nan_reaches_its_own_window_alone(nonfinite: str) -> None:
    """M20: reset with zeros, as 0 * NaN is NaN."""
    tx = token_normalized(optax.sgd(1.0), nonfinite=nonfinite)
    bad, good = data(), data(1)
    bad["x"][1] = np.nan
    updates, state = loop(tx, tx.init(params()), bad)
    broken = any(np.isnan(np.asarray(u)).any() for u in updates.values())
    assert broken == (nonfinite == "keep")
    if nonfinite == "drop":
        kept = data()
        kept["y"][1] = -100
        hold_tree({name: -u for name, u in updates.items()}, of_one_batch(kept)[1])
    updates, _ = loop(tx, state, good)
    hold_tree({name: -u for name, u in updates.items()}, of_one_batch(good)[1])


@pytest.mark.parametrize("jitted", [True, False])
def test_the_inner_optimizer_sees_the_sums_as_they_are(jitted: bool) -> None:
    """Gradients of bfloat16, whose window mean of 1 + 2^-8 is 1 there: means arrive in float32, and
    updates leave in the dtypes that the inner optimizer gives them, zeros too."""
    seen: list[Any] = []

    def keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        seen.append(updates["wide"].dtype)
        return {"wide": updates["wide"], "low": updates["low"].astype(jnp.bfloat16)}, updates

    inner = optax.GradientTransformation(lambda p: p, keep)
    tx = token_normalized(inner)
    start = {"wide": jnp.zeros(3), "low": jnp.zeros(3)}
    update = jax.jit(tx.update, donate_argnums=1) if jitted else tx.update
    state = tx.init(start)
    types = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    number = 256 if jitted else 2
    for tokens in (1, 0):
        for k in range(number):
            last = k == number - 1
            g = jnp.full(3, 2.0 if last else 1.0, jnp.bfloat16)
            grads = {"wide": g, "low": g}
            updates, state = update(grads, state, start, token_count=tokens, is_last=last)
            assert {n: u.dtype for n, u in updates.items()} == {
                "wide": jnp.float32,
                "low": jnp.bfloat16,
            }
            assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == types
        if tokens:
            assert np.array_equal(np.asarray(updates["wide"]), np.full(3, 1 + 1 / number))
    assert set(seen) == {jnp.dtype(jnp.float32)}


def test_low_precision_gradients_in_a_scan() -> None:
    """A carry of float32 parameters, gradients of bfloat16; and parameters of bfloat16, which
    `apply_updates` keeps as they are."""
    for low in (jnp.float32, jnp.bfloat16):
        tx = token_normalized(optax.adamw(0.1))
        start = jnp.zeros(3, low)

        def body(carry: Any, k: Any, tx: Any = tx) -> tuple[Any, Any]:
            p, state = carry
            g = jnp.full(3, 1.0, jnp.bfloat16)
            updates, state = tx.update(g, state, p, token_count=k, is_last=k == 3)
            return (optax.apply_updates(p, updates), state), None

        (after, state), _ = jax.lax.scan(body, (start, tx.init(start)), jnp.arange(8) % 4)
        assert after.dtype == low
        assert int(state.windows) == 2
        assert np.asarray(after, np.float32).all()


def test_a_short_window_is_flushed() -> None:
    """M15: by an update of zeros."""
    tx, batch = token_normalized(optax.sgd(1.0)), data(valid=(16, 5, 0, 0))
    state = tx.init(params())
    for k in range(2):
        grads, count = micro(params(), batch, k)
        _, state = tx.update(grads, state, params(), token_count=count, is_last=False)
    zeros = jax.tree.map(jnp.zeros_like, params())
    updates, _ = tx.update(zeros, state, params(), token_count=0, is_last=True)
    hold_tree({name: -u for name, u in updates.items()}, of_one_batch(batch)[1])


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_drop_together_in_an_optimizer(check_vma: bool) -> None:
    """Pieces of a parameter, of which one has a gradient that is NaN: the counts, and the steps, of
    all devices stay the same."""
    mesh = mesh_of(AxisType.Auto, data=4)
    tx = token_normalized(optax.sgd(-1.0), nonfinite="drop")
    grads = np.ones((3, 8), np.float32)
    grads[1, 5] = np.nan

    def steps(p: Any, g: Any) -> Any:
        state = tx.init(p)
        for k in range(3):
            updates, state = tx.update(
                g[k], state, p, token_count=jnp.int32((4, 1, 4)[k]), is_last=jnp.bool_(k == 2)
            )
        return updates

    spread = jax.shard_map(
        steps,
        mesh=mesh,
        in_specs=(P("data"), P(None, "data")),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    updates = jax.jit(spread)(jnp.zeros(8), grads)
    assert np.array_equal(np.asarray(updates), np.full(8, 2 / 8))


# --- in chains, modules and states ---------------------------------------------------------------


def test_in_a_chain_and_in_a_scan() -> None:
    """M20: extra arguments pass through optax.chain; types that never change make it a carry."""
    tx = optax.chain(token_normalized(optax.sgd(1.0)), optax.scale(2.0))
    batch = data()

    def body(carry: Any, k: Any) -> tuple[Any, Any]:
        p, state = carry
        part = jax.tree.map(lambda x: x[k], batch_there)
        grads, count = jax.grad(sum_and_count, has_aux=True)(params(), part)
        updates, state = tx.update(grads, state, p, token_count=count, is_last=k == M - 1)
        return (optax.apply_updates(p, updates), state), None

    batch_there = jax.tree.map(jnp.asarray, batch)
    start = jax.tree.map(jnp.asarray, params())
    (after, _), _ = jax.lax.scan(body, (start, tx.init(start)), jnp.arange(M))
    moved = {name: (start[name] - after[name]) / 2 for name in start}
    want = of_one_batch(batch)[1]
    for name in want:  # a difference of parameters, of their rounding
        scale = np.abs(start[name]).max() / np.abs(want[name]).max()
        error = np.abs(moved[name] - want[name]).max() / np.abs(want[name]).max()
        assert error < 2.0**-23 * scale


@pytest.mark.slow
def test_in_nnx_and_from_orbax(tmp_path: Any) -> None:
    """M20: `nnx.Optimizer` hands extra arguments on; the state is saved and restored by orbax."""
    nnx = pytest.importorskip("flax.nnx")
    ocp = pytest.importorskip("orbax.checkpoint")
    model = nnx.Linear(H, V, use_bias=False, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, token_normalized(optax.adam(0.1)), wrt=nnx.Param)
    before = np.asarray(model.kernel[...])
    batch = data()
    for k in range(M):
        x, y = batch["x"][k], batch["y"][k]

        def loss(m: Any, x: Any = x, y: Any = y) -> Any:
            out = chunked_nll(x, m.kernel[...], y, reduction="sum", weight_layout="HV")
            return out.loss, out.num_tokens

        grads, count = nnx.grad(loss, has_aux=True)(model)
        optimizer.update(model, grads, token_count=count, is_last=k == M - 1)
        assert np.array_equal(np.asarray(model.kernel[...]), before) == (k < M - 1)
    tx = token_normalized(optax.adam(0.1))
    _, state = loop(tx, tx.init(params()), data())
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        back = saver.restore(tmp_path / "state", state)
    same = jax.tree.map(lambda a, b: np.array_equal(a, b) and a.dtype == b.dtype, back, state)
    assert all(jax.tree.leaves(same))


def test_in_a_train_state_of_linen() -> None:
    """`TrainState.apply_gradients` hands no extra argument on: its transformation is asked itself.
    The state is a carry of jit, donated."""
    train_state = pytest.importorskip("flax.training.train_state")
    batch, start = data(), jax.tree.map(jnp.asarray, params())
    tx = token_normalized(optax.sgd(1.0))
    state = train_state.TrainState.create(apply_fn=sum_and_count, params=start, tx=tx)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, part: Any, is_last: Any) -> Any:
        grads, count = jax.grad(state.apply_fn, has_aux=True)(state.params, part)
        updates, opt_state = state.tx.update(
            grads, state.opt_state, state.params, token_count=count, is_last=is_last
        )
        moved = optax.apply_updates(state.params, updates)
        return state.replace(params=moved, opt_state=opt_state, step=state.step + is_last)

    for k in range(M):
        state = step(state, jax.tree.map(lambda x: x[k], batch), jnp.bool_(k == M - 1))  # noqa: B023
    assert int(state.step) == 1
    _, want = of_one_batch(batch)
    for name, old in params().items():
        new = np.asarray(state.params[name])
        # A difference of parameters, of their rounding.
        scale = np.abs(old).max() / np.abs(want[name]).max()
        error = np.abs(old - new - want[name]).max() / np.abs(want[name]).max()
        assert error < 2.0**-22 * scale


# --- counts --------------------------------------------------------------------------------------


def test_counts_that_are_none() -> None:
    """Below 0, or more than int32 holds: refused where they can be read; NaN, and in that window
    alone, where they are traced."""
    tx = token_normalized(optax.sgd(-1.0))
    state = tx.init(params())
    pair = jnp.float32(3), jnp.int32(2)
    with pytest.raises(
        ValueError, match=r"`token_count` must be an `NLLOutput` or one number; got a tuple"
    ):
        tx.update(params(), state, params(), token_count=pair, is_last=True)
    with pytest.raises(ValueError, match=r"`token_count` must be the number of.*got -3. Count"):
        tx.update(params(), state, params(), token_count=-3, is_last=True)
    with pytest.raises(ValueError, match=r"`token_count` must be one number.*got shape \(2,\)"):
        tx.update(params(), state, params(), token_count=np.array([1, 2]), is_last=True)
    update = jax.jit(tx.update)
    grads = jax.tree.map(jnp.ones_like, params())
    for counts in (
        (-3, 5),
        (5, -3),
        (-3, 3),
        (2**31 - 1, 1, 7),
        (2**31 - 1, 2**31 - 1, 4),
        (np.uint32(2**31), 1),
    ):
        for k, n in enumerate(counts):
            count = jnp.asarray(n, getattr(n, "dtype", jnp.int32))
            last = k == len(counts) - 1
            updates, state = update(grads, state, params(), token_count=count, is_last=last)
        assert all(np.isnan(np.asarray(u)).all() for u in updates.values()), counts
        updates, state = update(
            grads, state, params(), token_count=jnp.int32(2**31 - 1), is_last=False
        )
        updates, state = update(grads, state, params(), token_count=jnp.int32(0), is_last=True)
        assert all((np.asarray(u) == 2.0 / (2**31 - 1)).all() for u in updates.values())


def test_counts_are_integers_that_fit() -> None:
    """int32."""
    tx = token_normalized(optax.sgd(1.0))
    state = tx.init(params())
    with pytest.raises(TypeError, match="`token_count` must be an integer; got float64"):
        tx.update(params(), state, params(), token_count=1.5, is_last=False)
    _, state = tx.update(params(), state, params(), token_count=2**31 - 1, is_last=False)
    with pytest.raises(CountOverflowError, match=r"below 2.31; got 2147483647 and 1 more"):
        tx.update(params(), state, params(), token_count=1, is_last=False)
    with pytest.raises(ValueError, match="`empty` must be"):
        token_normalized(optax.sgd(1.0), empty="raise")
