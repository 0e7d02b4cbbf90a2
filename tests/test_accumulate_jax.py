"""Windows in JAX: `accumulate_grads` in one program, `token_normalized` over a host loop, against
one batch that holds all tokens.

Shapes: M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from xentlib import PaddedVocab
from xentlib.accumulate import CountOverflowError
from xentlib.contract import check, failures

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from xentlib.jax import (  # noqa: E402
    Evaluation,
    accumulate_grads,
    chunked_nll,
    count_collectives,
    token_normalized,
)

M, N, V, H = 4, 16, 31, 8


def data(seed: int = 0, valid: tuple[int, ...] = (16, 5, 0, 1)) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, V, (M, N)).astype(np.int32)
    for k, n in enumerate(valid):
        labels[k, n:] = -100
    return {"x": rng.standard_normal((M, N, H), np.float32), "y": labels}


def params() -> dict[str, Any]:
    rng = np.random.default_rng(9)
    return {
        "trunk": rng.standard_normal((H, H), np.float32),
        "head": rng.standard_normal((V, H), np.float32),
    }


def sum_and_count(p: Any, batch: Any) -> tuple[Any, Any]:
    out = chunked_nll(batch["x"] @ p["trunk"], p["head"], batch["y"], reduction="sum")
    return out.loss, out.num_tokens


def of_one_batch(batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    flat = {"x": batch["x"].reshape(-1, H), "y": batch["y"].reshape(-1)}
    count = max(int((flat["y"] >= 0).sum()), 1)
    value, grads = jax.value_and_grad(lambda p: sum_and_count(p, flat)[0] / count)(params())
    return value, grads


def hold(got: Any, want: Any) -> None:
    """A12; without an oracle of a whole network, in norm."""
    for name in want:
        g, w = (np.asarray(x[name]) for x in (got, want))
        assert np.abs(g).max() > 0
        assert not failures(check("A9", g, w, metrics=("rho / u",), quantity=name))


# --- one program ---------------------------------------------------------------------------------


def test_a_window_is_one_batch() -> None:
    """A12: micro-batches of uneven counts, one without any."""
    batch = data()
    stats, grads = jax.jit(partial(accumulate_grads, sum_and_count))(params(), batch)
    loss, want = of_one_batch(batch)
    hold(grads, want)
    assert int(stats.num_tokens) == 22
    assert stats.num_tokens.dtype == jnp.int32
    assert not failures(check("A9", np.asarray(stats.loss), np.asarray(loss), metrics=("rho / u",)))
    assert stats.micro_batches == M
    assert not bool(stats.skipped)


@pytest.mark.parametrize("empty", ["skip", "zero"])
def test_a_window_without_tokens(empty: str) -> None:
    """Gradients of exactly +0."""
    batch = data(valid=(0, 0, 0, 0))
    stats, grads = accumulate_grads(sum_and_count, params(), batch, empty=empty)
    assert not any(np.asarray(g).view(np.uint32).any() for g in grads.values())
    assert float(stats.loss) == 0
    assert bool(stats.skipped) == (empty == "skip")


def test_weights_are_counted_in_float32() -> None:
    """And gradients have the parameters' dtypes."""
    batch = data() | {"w": np.random.default_rng(3).random((M, N), np.float32)}

    def weighted(p: Any, b: Any) -> tuple[Any, Any]:
        how = {"token_weights": b["w"], "reduction": "sum"}
        out = chunked_nll((b["x"] @ p["trunk"]), p["head"].astype(jnp.float32), b["y"], **how)
        return out.loss, out.weight_sum

    low = params() | {"head": jnp.asarray(params()["head"], jnp.bfloat16)}
    stats, grads = accumulate_grads(weighted, low, batch)
    assert stats.num_tokens.dtype == jnp.float32
    assert {name: g.dtype for name, g in grads.items()} == {
        "trunk": jnp.float32,
        "head": jnp.bfloat16,
    }


@pytest.mark.parametrize("through", ["accumulate_grads", "token_normalized"])
def test_weights_that_sum_to_less_than_one(through: str) -> None:
    """A12, M20. Catches: a denominator that is kept at 1 or above, or counted in integers."""
    batch = data() | {"w": np.random.default_rng(3).random((M, N), np.float32) / 100}
    total = float(np.where(batch["y"] >= 0, batch["w"], 0).sum())
    assert 0 < total < 0.5

    def weighted(p: Any, b: Any) -> tuple[Any, Any]:
        how = {"token_weights": b["w"], "reduction": "sum"}
        out = chunked_nll(b["x"] @ p["trunk"], p["head"], b["y"], **how)
        return out.loss, out.weight_sum

    whole = {name: x.reshape(M * N, *x.shape[2:]) for name, x in batch.items()}
    want = jax.grad(lambda p: weighted(p, whole)[0] / total)(params())
    if through == "accumulate_grads":
        grads = accumulate_grads(weighted, params(), batch)[1]
    else:
        tx = token_normalized(optax.sgd(1.0), weighted=True)
        state = tx.init(params())
        for k in range(M):
            part = {name: x[k] for name, x in batch.items()}
            sums, count = jax.grad(weighted, has_aux=True)(params(), part)
            last = k == M - 1
            updates, state = tx.update(sums, state, params(), token_count=count, is_last=last)
        grads = {name: -u for name, u in updates.items()}
    hold(grads, want)


def test_float64_stays_float64() -> None:
    """A third is rounded in the sum's dtype, and once."""
    with jax.enable_x64(True):
        p = {"w": jnp.asarray([1.0, 5.0, 7.0], jnp.float64)}
        batch = {"x": jnp.ones((1, 3), jnp.float64)}

        def linear(p: Any, b: Any) -> tuple[Any, Any]:
            return (p["w"] * b["x"]).sum(), jnp.asarray(3, jnp.int32)

        stats, grads = accumulate_grads(linear, p, batch)
        assert grads["w"].dtype == jnp.float64
        assert np.array_equal(np.asarray(grads["w"]), np.full(3, 1 / 3))
        assert float(stats.loss) == 13 / 3
        tx = token_normalized(optax.sgd(1.0))
        g = {"w": jnp.ones(3, jnp.float64)}
        updates, _ = tx.update(g, tx.init(p), p, token_count=3, is_last=True)
        assert np.array_equal(np.asarray(updates["w"]), np.full(3, -1 / 3))


def mesh_of(kind: Any) -> Any:
    return jax.make_mesh((4,), ("data",), axis_types=(kind,))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    """D8: tokens over devices, some of which have none; gradients are summed once, after the
    scan. Catches: a sum in each micro-batch, one too many, local counts."""
    mesh, batch = mesh_of(AxisType.Auto), data(valid=(16, 5, 3, 0))

    def step(p: Any, b: Any) -> Any:
        stats, grads = accumulate_grads(sum_and_count, p, b, "data")
        return stats._replace(micro_batches=0), grads

    spread = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=check_vma
        )
    )
    with count_collectives() as count:
        stats, grads = spread(params(), batch)
    loss, want = of_one_batch(batch)
    hold(grads, want)
    assert int(stats.num_tokens) == 24
    assert not failures(check("A9", np.asarray(stats.loss), np.asarray(loss), metrics=("rho / u",)))
    assert not count.looped()
    assert count.bytes("all_reduce") == 4 * (H * H + V * H + 2)


def over_two_axes(p: Any, batch: Any) -> tuple[Any, Any]:
    hidden = batch["x"] @ p["trunk"]
    how = {"reduction": "sum", "vocab_parallel": PaddedVocab("model", V)}
    out = chunked_nll(hidden, p["head"], batch["y"], **how)
    return out.loss, out.num_tokens


@pytest.mark.parametrize("tokens", ["data", ("data", "model")])
def test_a_mesh_of_two_axes(tokens: Any) -> None:
    """Tokens over one, the vocabulary over the other, or tokens over both: what is summed is summed
    over the axes that were named, and the count too."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    cut = tokens == "data"
    batch, start = data(valid=(16, 5, 3, 0)), params()
    specs = {"trunk": P(), "head": P("model") if cut else P()}
    if cut:  # a row of padding
        start["head"] = np.concatenate([start["head"], np.full((1, H), 3, np.float32)])

    def step(p: Any, b: Any) -> Any:
        stats, grads = accumulate_grads(over_two_axes if cut else sum_and_count, p, b, tokens)
        return stats._replace(micro_batches=0), grads

    spread = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, P(None, tokens)), out_specs=(P(), specs)
    )
    stats, grads = jax.jit(spread)(start, batch)
    loss, want = of_one_batch(batch)
    hold({name: g[: len(want[name])] for name, g in grads.items()}, want)
    assert int(stats.num_tokens) == 24
    assert not failures(check("A9", np.asarray(stats.loss), np.asarray(loss), metrics=("rho / u",)))


def test_parameters_on_explicit_axes() -> None:
    """Sums are spread as the parameters are, from the start."""
    mesh, batch = mesh_of(AxisType.Explicit), data()
    with jax.set_mesh(mesh):
        there = {"trunk": P("data"), "head": P(None, "data")}
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, there[name]))
            for name, x in params().items()
        }

        def own(p: Any, b: Any) -> tuple[Any, Any]:
            whole = jax.tree.map(lambda x: jax.sharding.reshard(x, P()), p)
            return sum_and_count(whole, b)

        _, grads = jax.jit(partial(accumulate_grads, own))(placed, batch)
        tx = token_normalized(optax.sgd(-1.0))
        state = tx.init(placed)
        assert {n: x.sharding for n, x in state.sums.items()} == {
            n: x.sharding for n, x in placed.items()
        }
        step = jax.jit(tx.update)
        updates, state = step(grads, state, placed, token_count=jnp.int32(1), is_last=False)
        updates, state = step(grads, state, placed, token_count=jnp.int32(1), is_last=True)
    want = of_one_batch(batch)[1]
    hold(grads, want)
    hold(updates, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_global_arrays(kind: Any) -> None:
    """D8: nothing to say under jit on arrays that are spread."""
    mesh, batch = mesh_of(kind), data()
    with jax.set_mesh(mesh):
        there = NamedSharding(mesh, P(None, "data"))
        placed = {name: jax.device_put(x, there) for name, x in batch.items()}
        whole = jax.device_put(params(), NamedSharding(mesh, P()))
        stats, grads = jax.jit(partial(accumulate_grads, sum_and_count))(whole, placed)
    hold(grads, of_one_batch(batch)[1])
    assert int(stats.num_tokens) == 22


# --- an evaluation -------------------------------------------------------------------------------


def test_an_evaluation_is_one_batch() -> None:
    """M26: in a host loop, in a scan under jit, on global arrays; one without a token is NaN."""
    batch = data()
    want = np.asarray(of_one_batch(batch)[0])

    def output(part: Any) -> Any:
        p = params()
        return chunked_nll(part["x"] @ p["trunk"], p["head"], part["y"], reduction="sum")

    def add(evaluation: Any, part: Any) -> Any:
        return evaluation.add(output(part))

    loop, step = Evaluation(), jax.jit(add, donate_argnums=0)
    for k in range(M):
        loop = step(loop, {name: x[k] for name, x in batch.items()})

    def scan(batch: Any) -> Any:
        return jax.lax.scan(lambda e, x: (add(e, x), None), Evaluation(), batch)[0].mean_loss()

    found = [loop.mean_loss(), jax.jit(loop.mean_loss)(), jax.jit(scan)(batch)]
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh_of(kind)):
            there = NamedSharding(mesh_of(kind), P(None, "data"))
            found.append(jax.jit(scan)(jax.device_put(batch, there)))
    for loss in found:
        assert (loss.dtype, loss.shape) == (jnp.float32, ())
        assert not failures(check("A9", np.asarray(loss), want, metrics=("rho / u",)))
    assert np.isnan(Evaluation().mean_loss())
    assert np.isnan(Evaluation().add(jnp.float32(0), 0).mean_loss())
    assert not np.isfinite(Evaluation().add(np.float32(np.inf), 3).mean_loss())


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_evaluation_over_devices(check_vma: bool) -> None:
    """Inside `shard_map`, of one axis or of two, on one of which tokens are copies; of one axis if
    it is said."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    batch = data(valid=(16, 5, 3, 0))
    want = np.asarray(of_one_batch(batch)[0])

    def over(axes: Any, part: Any) -> Any:
        start = Evaluation()
        if check_vma:
            start = jax.lax.pcast(start, "data", to="varying")
        add = lambda e, x: (e.add(*sum_and_count(params(), x)), None)  # noqa: E731
        return jax.lax.scan(add, start, part)[0].mean_loss(axes)

    for axes in (None, "data", ("data", "model")):
        spread = jax.shard_map(
            partial(over, axes),
            mesh=mesh,
            in_specs=P(None, "data"),
            out_specs=P(),
            check_vma=check_vma,
        )
        with count_collectives() as count:
            loss = jax.jit(spread)(batch)
        assert not failures(check("A9", np.asarray(loss), want, metrics=("rho / u",)))
        assert (count.counts(), count.bytes("all_reduce")) == ({"all_reduce": 1}, 16)
    with pytest.raises(ValueError, match="`data_parallel` must be the name of a mesh axis inside"):
        Evaluation().mean_loss("data")


def test_an_evaluation_of_many_batches_is_not_rounded_away() -> None:
    """What each float32 sum has lost is kept: 1e5 batches are as right as one."""
    rng = np.random.default_rng(0)
    loss = 3e4 * rng.random(100_000, np.float32)
    count = rng.integers(2**23, 2**24 + 3, 100_000).astype(np.int32) // 200
    want = loss.sum(dtype=np.float64) / count.sum(dtype=np.int64)

    def mean(*given: Any) -> Any:
        add = lambda e, x: (e.add(*x), None)  # noqa: E731
        return jax.lax.scan(add, Evaluation(), given)[0].mean_loss()

    got = float(jax.jit(mean)(loss, count))
    assert abs(got - want) < 2 * 2.0**-24 * want
    # A large batch after a small one, and the other way round.
    for pairs in (((3.0, 1), (2.0**30, 2**30)), ((2.0**30, 2**30), (3.0, 1))):
        evaluation = Evaluation()
        for pair in pairs:
            evaluation = jax.jit(Evaluation.add)(evaluation, *map(jnp.asarray, pair))
        exactly = np.sum(np.asarray(evaluation, np.float64), axis=0)
        assert np.array_equal(exactly, [2**30 + 3, 2**30 + 1])


def test_an_evaluation_takes_sums() -> None:
    """A mean that `chunked_nll` has taken is refused, traced or not."""
    p, x = params(), data()["x"][0]
    y = data()["y"][0]

    def add(**how: Any) -> Any:
        return Evaluation().add(chunked_nll(x @ p["trunk"], p["head"], y, **how)).mean_loss()

    for how in ({}, {"denominator": 7.0}, {"denominator": jnp.int32(7), "reduction": "sum"}):
        for call in (add, jax.jit(partial(add, **how))):
            with pytest.raises(
                ValueError, match="must be a sum over tokens; got one that `chunked"
            ):
                call(**how) if call is add else call()
    for given, said in (
        ((jnp.float32(2),), "`num_tokens` must be given with a loss that is no `NLLOutput`"),
        ((2.0, 0), "must be the number of tokens that the loss is the sum of; got 0"),
        ((jnp.ones(3), 3), "must be one number, the sum over this rank's valid tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            Evaluation().add(*given)


# --- a host loop ---------------------------------------------------------------------------------


def micro(p: Any, batch: Any, k: int) -> tuple[Any, Any]:
    part = {name: x[k] for name, x in batch.items()}
    grads, count = jax.grad(sum_and_count, has_aux=True)(p, part)
    return grads, count


def loop(tx: Any, state: Any, batch: Any, update: Any = None) -> tuple[Any, Any]:
    update = update or tx.update
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
    update = jax.jit(tx.update) if jitted else None
    updates, state = loop(tx, tx.init(params()), batch, update)
    hold({name: -u for name, u in updates.items()}, of_one_batch(batch)[1])
    assert (int(state.windows), int(state.micro_batches), int(state.num_tokens)) == (1, 0, 0)


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
        hold({name: -u for name, u in updates.items()}, of_one_batch(kept)[1])
    updates, _ = loop(tx, state, good)
    hold({name: -u for name, u in updates.items()}, of_one_batch(good)[1])


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
    hold({name: -u for name, u in updates.items()}, of_one_batch(batch)[1])


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


def test_counts_that_are_none() -> None:
    """Below 0, or more than int32 holds: refused where they can be read; NaN, and in that window
    alone, where they are traced."""
    tx = token_normalized(optax.sgd(-1.0))
    state = tx.init(params())
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


def test_more_tokens_in_a_scan_than_int32_holds() -> None:
    """A number that wraps around would be a denominator like any other."""

    def many(p: Any, batch: Any) -> tuple[Any, Any]:
        return (p["trunk"] * batch).sum(), jnp.int32(2**30)

    def whole(p: Any, b: Any) -> Any:
        return accumulate_grads(many, p, b)

    for number in (1, 2, 5):
        stats, grads = jax.jit(whole)(params(), jnp.ones((number, H, H)))
        wrong = number > 1
        assert np.isnan(np.asarray(grads["trunk"])).all() == wrong
        assert bool(jnp.isnan(stats.loss)) == wrong


# --- NaN, over devices ---------------------------------------------------------------------------


def broken() -> tuple[dict[str, Any], dict[str, Any]]:
    """A window with NaN in a token of its second micro-batch, and the window without that."""
    bad, kept = data(valid=(16, 7, 3, 0)), data(valid=(16, 7, 3, 0))
    bad["x"][1, 2] = np.nan
    kept["y"][1] = -100
    return bad, kept


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_drop_together_in_a_scan(check_vma: bool) -> None:
    """The micro-batch that is NaN on one of four devices counts on none, and the window is that of
    the others; no other collective is in the loop."""
    mesh, (bad, good) = mesh_of(AxisType.Auto), broken()

    def step(p: Any, b: Any) -> Any:
        stats, grads = accumulate_grads(sum_and_count, p, b, "data", nonfinite="drop")
        return stats._replace(micro_batches=0), grads

    spread = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=check_vma
    )
    with count_collectives() as count:
        stats, grads = jax.jit(spread)(params(), bad)
    loss, want = of_one_batch(good)
    hold(grads, want)
    assert (int(stats.num_tokens), int(stats.dropped)) == (19, 1)
    assert not failures(check("A9", np.asarray(stats.loss), np.asarray(loss), metrics=("rho / u",)))
    assert len(count.looped()) == 1


def test_a_scan_keeps_what_is_nan_unless_told() -> None:
    """And drops alone, on global arrays."""
    bad, good = broken()
    stats, grads = jax.jit(partial(accumulate_grads, sum_and_count))(params(), bad)
    assert int(stats.dropped) == 0
    assert np.isnan(np.asarray(grads["head"])).any()
    drop = partial(accumulate_grads, sum_and_count, nonfinite="drop")
    stats, grads = jax.jit(drop)(params(), bad)
    hold(grads, of_one_batch(good)[1])
    assert (int(stats.num_tokens), int(stats.dropped)) == (19, 1)

    def steep(p: Any, x: Any) -> tuple[Any, Any]:  # of 0 at 0, where its slope is infinite
        return jnp.sqrt(p * x), jnp.int32(1)

    xs = jnp.asarray([1.0, 0.0, 4.0])
    stats, slope = accumulate_grads(steep, jnp.float32(1.0), xs, nonfinite="drop")
    assert (float(slope), int(stats.num_tokens), float(stats.loss)) == (0.75, 2, 1.5)

    def lost(p: Any, x: Any) -> tuple[Any, Any]:  # with a slope all the same
        return p * x + jnp.where(x == 0, jnp.nan, 0.0), jnp.int32(1)

    stats, slope = accumulate_grads(lost, jnp.float32(1.0), xs, nonfinite="drop")
    assert (float(slope), int(stats.num_tokens), float(stats.loss)) == (2.5, 2, 2.5)
    with pytest.raises(ValueError, match="`nonfinite` must be one of 'keep', 'drop'; got 'skip'"):
        accumulate_grads(sum_and_count, params(), bad, nonfinite="skip")


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_drop_together_in_an_optimizer(check_vma: bool) -> None:
    """Pieces of a parameter, of which one has a gradient that is NaN: the counts, and the steps, of
    all devices stay the same."""
    mesh = mesh_of(AxisType.Auto)
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
