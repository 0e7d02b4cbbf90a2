"""`accumulate_grads` of JAX, a window in one program, against one batch that holds all tokens.

Shapes: M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from xentlib import PaddedVocab
from xentlib.contract import check, failures

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.windows_jax import H, M, N, V, data, hold_tree, of_one_batch, params, sum_and_count  # noqa: E402
from xentlib.jax import accumulate_grads, chunked_nll, count_collectives, token_normalized  # noqa: E402


@pytest.mark.slow
def test_a_window_is_one_batch() -> None:
    """A12: micro-batches of uneven counts, one without any."""
    batch = data()
    stats, grads = jax.jit(partial(accumulate_grads, sum_and_count))(params(), batch)
    loss, want = of_one_batch(batch)
    hold_tree(grads, want)
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


@pytest.mark.slow
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
    hold_tree(grads, want)


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


# --- what is no sum ------------------------------------------------------------------------------


def call(p: Any, batch: Any, reduction: str = "sum") -> Any:
    return chunked_nll(batch["x"] @ p["trunk"], p["head"], batch["y"], reduction=reduction)


def mean_pair(p: Any, batch: Any) -> tuple[Any, Any]:
    out = call(p, batch, "mean")
    return out.loss, out.num_tokens


def mean_and_more(p: Any, batch: Any) -> tuple[Any, Any]:
    return call(p, batch, "mean").loss + 0.1 * (p["head"] ** 2).mean(), (batch["y"] != -100).sum()


def divided_pair(p: Any, batch: Any) -> tuple[Any, Any]:
    out = call(p, batch)
    return out.loss / jnp.maximum(out.weight_sum, 1.0), out.num_tokens


def share_pair(p: Any, batch: Any) -> tuple[Any, Any]:
    out = call(p, batch)
    return (1.0 / out.num_tokens) * out.loss, out.num_tokens


def divided_output(p: Any, batch: Any) -> Any:
    out = call(p, batch)
    return out._replace(loss=out.loss / out.num_tokens)


CACHED = jax.jit(mean_pair)
NOT_SUMS = {
    "a pair": (mean_pair, "got one that `chunked_nll` has divided"),
    "a pair and more": (mean_and_more, "got one that `chunked_nll` has divided"),
    "under jit": (CACHED, "got one that `chunked_nll` has divided"),
    "checkpointed": (jax.checkpoint(mean_pair), "got one that `chunked_nll` has divided"),
    "divided since": (divided_pair, "got one that was divided by its number of tokens since"),
    "times a share": (share_pair, "got one that was divided by its number of tokens since"),
    "beside a true output": (divided_output, "divided by its number of tokens since"),
}


@pytest.mark.parametrize("name", NOT_SUMS)
def test_a_mean_beside_a_count_is_refused(name: str) -> None:
    """`(out.loss, out.num_tokens)` of a mean gave 0.522 for 5.804: the program shows it, also where
    it was traced before."""
    function, said = NOT_SUMS[name]
    batch = data(valid=(16, 5, 3, 1))
    if function is CACHED:
        CACHED(params(), {key: x[0] for key, x in batch.items()})
    for run in (accumulate_grads, jax.jit(accumulate_grads, static_argnums=0)):
        with pytest.raises(ValueError, match=said):
            run(function, params(), batch)


def test_what_is_a_sum_after_all_is_not_refused() -> None:
    """A mean times its count, a sum with a weight or more in it, under jit and checkpointed."""

    def mean_times(p: Any, b: Any) -> tuple[Any, Any]:
        out = call(p, b, "mean")
        return out.loss * out.num_tokens, out.num_tokens

    def half(p: Any, b: Any) -> tuple[Any, Any]:
        out = call(p, b)
        return (out.loss + out.loss) / 2, out.num_tokens

    def more(p: Any, b: Any) -> Any:
        out = call(p, b)
        return out._replace(loss=out.loss + 0.0 * p["head"].sum() * out.num_tokens)

    batch = data(valid=(16, 5, 3, 1))
    want = of_one_batch(batch)[1]
    same = (mean_times, half, more, jax.jit(sum_and_count), jax.checkpoint(sum_and_count))
    for function in same:
        hold_tree(accumulate_grads(function, params(), batch)[1], want)


# --- over devices --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma: bool) -> None:
    """D8: tokens over devices, some of which have none; gradients are summed once, after the
    scan. Catches: a sum in each micro-batch, one too many, local counts."""
    mesh, batch = mesh_of(AxisType.Auto, data=4), data(valid=(16, 5, 3, 0))

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
    hold_tree(grads, want)
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
    mesh = mesh_of(AxisType.Auto, data=2, model=2)
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
    hold_tree({name: g[: len(want[name])] for name, g in grads.items()}, want)
    assert int(stats.num_tokens) == 24
    assert not failures(check("A9", np.asarray(stats.loss), np.asarray(loss), metrics=("rho / u",)))


def test_parameters_on_explicit_axes() -> None:
    """Sums are spread as the parameters are, from the start."""
    mesh, batch = mesh_of(AxisType.Explicit, data=4), data()
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
    hold_tree(grads, want)
    hold_tree(updates, want)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_global_arrays(kind: Any) -> None:
    """D8: nothing to say under jit on arrays that are spread."""
    mesh, batch = mesh_of(kind, data=4), data()
    with jax.set_mesh(mesh):
        there = NamedSharding(mesh, P(None, "data"))
        placed = {name: jax.device_put(x, there) for name, x in batch.items()}
        whole = jax.device_put(params(), NamedSharding(mesh, P()))
        stats, grads = jax.jit(partial(accumulate_grads, sum_and_count))(whole, placed)
    hold_tree(grads, of_one_batch(batch)[1])
    assert int(stats.num_tokens) == 22


# --- NaN -----------------------------------------------------------------------------------------


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
    mesh, (bad, good) = mesh_of(AxisType.Auto, data=4), broken()

    def step(p: Any, b: Any) -> Any:
        stats, grads = accumulate_grads(sum_and_count, p, b, "data", nonfinite="drop")
        return stats._replace(micro_batches=0), grads

    spread = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(), check_vma=check_vma
    )
    with count_collectives() as count:
        stats, grads = jax.jit(spread)(params(), bad)
    loss, want = of_one_batch(good)
    hold_tree(grads, want)
    assert (int(stats.num_tokens), int(stats.dropped)) == (19, 1)
    assert not failures(check("A9", np.asarray(stats.loss), np.asarray(loss), metrics=("rho / u",)))
    assert len(count.looped()) == 1


@pytest.mark.slow
def test_a_scan_keeps_what_is_nan_unless_told() -> None:
    """And drops alone, on global arrays."""
    bad, good = broken()
    stats, grads = jax.jit(partial(accumulate_grads, sum_and_count))(params(), bad)
    assert int(stats.dropped) == 0
    assert np.isnan(np.asarray(grads["head"])).any()
    drop = partial(accumulate_grads, sum_and_count, nonfinite="drop")
    stats, grads = jax.jit(drop)(params(), bad)
    hold_tree(grads, of_one_batch(good)[1])
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
