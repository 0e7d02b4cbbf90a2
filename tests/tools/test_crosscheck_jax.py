"""`CrossCheck` in jitted steps of JAX and Flax."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax
pytest.importorskip("flax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from flax.training.train_state import TrainState  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.corrupted import WRONG_AT, wrong_jax  # noqa: E402
from helpers.handed import options_missed  # noqa: E402
from xentlib.jax import CrossCheck, chunked_nll  # noqa: E402
from xentlib.tools.crosscheck import CrossCheckError, CrossCheckWarning  # noqa: E402

H, V, N = 24, 157, 63


def batch(step: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(step)
    labels = rng.integers(V, size=N)
    labels[:5] = -100
    return jnp.asarray(rng.standard_normal((N, H)), jnp.float32), jnp.asarray(labels)


def params(dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(9)
    arrays = {"body": (H, H), "head": (H, V), "bias": (V,)}
    return {k: jnp.asarray(rng.standard_normal(x) / 5, dtype) for k, x in arrays.items()}


def steps(
    number: int, check: CrossCheck | None = None, *, before: Any = None, **options: Any
) -> Any:
    """A run with `TrainState`: its losses, and its parameters at the end."""
    dtype = options.pop("dtype", jnp.float32)
    state = TrainState.create(apply_fn=None, params=params(dtype), tx=optax.sgd(0.1))

    @jax.jit
    def step(state: Any, x: Any, y: Any) -> Any:
        def loss_of(p: Any) -> Any:
            call = partial(check.nll, state.step) if check else chunked_nll
            hidden = x.astype(dtype) @ p["body"]
            out = call(hidden, p["head"], y, bias=p["bias"], weight_layout="HV", **options)
            return 1.7 * out.loss

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for k in range(number):
        if before is not None:
            before(k)
        state, loss = step(state, *batch(k))
        losses.append(loss)
    if check:
        check.wait()
    return losses, state.params


CASES: dict[str, dict[str, Any]] = {
    "plain": {"label_smoothing": 0.1},
    "options": {"softcap": jnp.float32(3.0), "z_loss": 1e-3, "temperature": 0.7},
    "weights": {"denominator": jnp.float32(77), "token_weights": jnp.linspace(-0.5, 2, N)},
    "bf16": {"dtype": jnp.bfloat16},
    "recompute": {"recompute": True, "dtype": jnp.bfloat16},
}


@pytest.mark.parametrize(
    ("case", "tokens"),
    [("plain", None), ("options", None), ("weights", 9), ("bf16", 9), ("recompute", 9)],
)
def test_a_right_run_passes_and_says_what_was_held(case: str, tokens: int | None) -> None:
    check = CrossCheck(every=2, tokens=tokens, exceeded="raise")
    steps(3, check, **CASES[case])
    assert [x.step for x in check.results] == [0, 2]
    named = {m.quantity for x in check.results for m in x.measurements}
    want = {"token count", "log-probability", "d hidden"}
    want |= {"loss", "d weight", "d bias", "d weight of all rows", "lse of all tokens"}
    assert want <= named


@pytest.mark.torch
@pytest.mark.parametrize("case", ["plain", "bf16"])
def test_against_the_other_backend(case: str) -> None:
    pytest.importorskip("torch")
    check = CrossCheck(every=2, against="other", exceeded="raise")
    steps(3, check, **CASES[case])
    assert {"A9"} < {m.row for m in check.results[-1].measurements}


def test_bits_are_those_of_a_run_that_is_not_checked() -> None:
    want = steps(4)
    same = jax.tree.map(np.array_equal, steps(4, CrossCheck(every=3)), want)
    assert all(jax.tree.leaves(same))


def test_a_step_that_is_made_wrong_is_caught(monkeypatch: Any) -> None:
    def before(step: int) -> None:
        if step == WRONG_AT:
            wrong_jax(monkeypatch)

    check = CrossCheck(every=10)
    try:
        with pytest.warns(CrossCheckWarning, match="step 30.*A5 jax d hidden.*A6 jax d weight"):
            steps(WRONG_AT + 1, check, before=before)
    finally:
        monkeypatch.undo()
        jax.clear_caches()
    assert [x.passed for x in check.results] == [True, True, True, False]


def test_an_nnx_loop_with_a_frozen_model() -> None:
    """A module as the head, the optimizer's own count, and no gradient of hidden states."""
    head = nnx.Linear(H, V, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(head, optax.sgd(0.1), wrt=nnx.Param)
    check = CrossCheck(every=2, exceeded="raise")

    @nnx.jit
    def step(head: Any, optimizer: Any, x: Any, y: Any) -> None:
        grads = nnx.grad(lambda head: check.nll(optimizer.step[...], x, head, y).loss)(head)
        optimizer.update(head, grads)

    for k in range(3):
        step(head, optimizer, *batch(k))
    check.wait()
    assert [x.step for x in check.results] == [0, 2]
    named = {m.quantity for m in check.results[-1].measurements}
    assert {"d weight", "d bias"} < named
    assert "d hidden" not in named


def on_mesh(check: CrossCheck | None, place: str, number: int = 3) -> Any:
    """A step on two devices: whole arrays that are spread, or each device's tokens by hand; of the
    last step the gradients of head and hidden states."""
    mesh = jax.make_mesh((2,), ("data",))
    x, y = batch(0)
    arrays = x[1:], params()["head"], y[1:]
    call = check.nll if check else lambda step, *arrays, **options: chunked_nll(*arrays, **options)

    def whole(step: Any, x: Any, w: Any, y: Any) -> Any:
        return call(step, x, w, y, weight_layout="HV").loss

    @partial(jax.shard_map, in_specs=(P(), P("data"), P(), P("data")), out_specs=P())
    def by_hand(step: Any, x: Any, w: Any, y: Any) -> Any:
        count = jax.lax.psum((y >= 0).sum(), "data")
        out = call(step, x, w, y, weight_layout="HV", denominator=count)
        return jax.lax.psum(out.loss, "data")

    with jax.set_mesh(mesh):
        specs = {"spread": P(), "by hand": P(), "spread head": P("data")}
        placed = zip(arrays, (P("data"), specs[place], P("data")), strict=True)
        spread = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in placed]
        step = jax.jit(jax.grad(by_hand if place == "by hand" else whole, (1, 2)))
        for k in range(number):
            found = step(k, *spread)
    if check:
        check.wait()
    return [np.asarray(g) for g in found]


@pytest.mark.parametrize("place", ["spread", "spread head", "by hand"])
def test_two_devices(place: str) -> None:
    """Where `shard_map` calls it the calls of both devices, of whose tokens there is one gradient
    of the head."""
    if jax.device_count() < 2:
        pytest.skip("there is one device")
    check, calls = CrossCheck(every=2, exceeded="raise"), 2 if place == "by hand" else 1
    got, want = on_mesh(check, place), on_mesh(None, place)
    assert [(x.step, x.calls) for x in check.results] == [(k, calls) for k in (0, 2)]
    named = {m.quantity for x in check.results for m in x.measurements}
    assert {"loss", "d hidden", "d weight"} < named
    sizes = {x.measurements[0].case.split()[6] for x in check.results}
    assert sizes == {"N=31" if place == "by hand" else "N=62"}
    assert all(map(np.array_equal, got, want))


@pytest.mark.parametrize("step", [0.0, "0", None, np.zeros(3, np.int32), jnp.float32(0)])
def test_a_step_that_is_no_number_of_one(step: Any) -> None:
    x, y = batch(0)
    with pytest.raises(TypeError, match=r"`step` must be an integer of shape \(\), .*; got "):
        CrossCheck(every=2).nll(step, x, params()["head"], y, weight_layout="HV")


def test_misuse_is_loud() -> None:
    x, y = batch(0)
    w = params()["head"]
    check = CrossCheck(every=2)
    call = partial(check.nll, weight=w, labels=y, weight_layout="HV")
    with pytest.raises(CrossCheckError, match=r"call `check\.nll`; got none"):
        check.wait()
    with pytest.raises(ValueError, match="`step` must be an argument of the jitted function"):
        jax.jit(lambda x: call(0, x).loss)(x)
    with pytest.raises(ValueError, match="`step` must be an argument of the jitted function"):
        jax.jit(jax.grad(lambda w: check.nll(0, x, w, y, weight_layout="HV").loss))(w)
    for constant in (lambda: jnp.asarray(0), lambda: jnp.int32(2) * 3, lambda: jnp.zeros((), int)):
        with pytest.raises(ValueError, match="`step` must be an argument of the jitted function"):
            jax.jit(lambda x, step=constant: call(step(), x).loss)(x)
    with pytest.raises(ValueError, match="`token_weights` must be a constant"):
        jax.grad(lambda t: call(0, x, token_weights=t).loss)(jnp.ones(N))
    assert call(1, x).logprobs is None  # not a checked one
    jax.effects_barrier()
    assert not check.results
    call(2, x)  # a loss without a gradient
    jax.grad(lambda x: call(4, x).loss)(x)
    check.wait()
    quantities = [{m.quantity for m in r.measurements} for r in check.results]
    assert ["d hidden" in q for q in quantities] == [False, True]
    bad = CrossCheck(every=1, exceeded="raise")
    jax.jit(lambda s, x: bad.nll(s, x, w, y, weight_layout="HV").loss)(0, x * jnp.inf)
    with pytest.raises(CrossCheckError, match="inf or NaN"):
        bad.wait()


def test_every_option_is_handed_over() -> None:
    """One that is not would be reported as an error of the step."""
    check = CrossCheck(every=1)

    def call(**given: Any) -> None:
        check.nll(0, **given)
        jax.effects_barrier()
        assert check.raised == []

    assert options_missed(check, call, jnp.asarray, "float32") == []
