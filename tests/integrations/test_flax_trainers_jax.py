"""`TrainState` and `Optimizer` over windows of micro-batches, against one batch that holds all
tokens, on one device and on meshes of both kinds.

Shapes: M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytest.importorskip("flax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from flax.training import train_state  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.windows_jax import H, M, data, hold_tree, of_one_batch, params  # noqa: E402
from xentlib.jax import chunked_nll, token_normalized  # noqa: E402
from xentlib.jax.integrations.flax import Optimizer, TrainState  # noqa: E402

PLACES: dict[str, Any] = {"one device": None, "Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
SHARDED = {"trunk": P("data", None), "head": P(None, "data")}  # both along the hidden width


def loss(p: Any, batch: Any, reduction: str = "sum") -> tuple[Any, Any]:
    trunk = p["trunk"]
    if isinstance(spec := jax.typeof(trunk).sharding, NamedSharding) and not spec.mesh.empty:
        trunk = gathered(trunk)
    out = chunked_nll(batch["x"] @ trunk, p["head"], batch["y"], reduction=reduction)
    return out.loss, out


def gathered(x: Any) -> Any:
    """What a user's own layer does on Explicit axes; the compiler does it on Auto axes."""
    mesh = jax.typeof(x).sharding.mesh
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.sharding.reshard(x, NamedSharding(mesh, P())) if explicit else x


def placed(kind: Any, batch: dict[str, Any]) -> tuple[Any, Any]:
    """Parameters, and a window's data spread over their tokens."""
    if kind is None:
        return jax.tree.map(jnp.asarray, params()), batch
    mesh = mesh_of(kind, data=4)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    spread = {name: put(x, P(None, "data")) for name, x in batch.items()}
    return {name: put(x, SHARDED[name]) for name, x in params().items()}, spread


def stays(tree: Any, start: Any) -> bool:
    """Whether arrays are spread as the parameters were."""
    return all(x.sharding.is_equivalent_to(start[name].sharding, 2) for name, x in tree.items())


def state_of(p: Any, tx: Any) -> Any:
    return TrainState.create(apply_fn=None, params=p, tx=tx)


@jax.jit
def step(state: Any, batch: Any, is_last: Any) -> Any:
    grads, out = jax.grad(loss, has_aux=True)(state.params, batch)
    return state.apply_gradients(grads=grads, token_count=out, is_last=is_last)


@pytest.mark.parametrize("place", PLACES)
def test_a_window_of_train_state_is_one_batch(place: str) -> None:
    """A12: the step is that of one batch, and parameters stay where they are."""
    batch = data()
    start, spread = placed(PLACES[place], batch)
    state = state_of(start, optax.sgd(1.0))
    for k in range(M):
        assert int(state.step) == 0
        state = step(state, {name: x[k] for name, x in spread.items()}, k == M - 1)
    assert int(state.step) == 1
    moved = {name: np.asarray(start[name]) - np.asarray(x) for name, x in state.params.items()}
    hold_tree(moved, of_one_batch(batch)[1])
    if PLACES[place] is not None:
        assert stays(state.params, start)
        assert stays(state.opt_state.sums, start)


def test_a_batch_by_itself_is_a_window_and_one_without_tokens_is_no_step() -> None:
    full, nothing = data(), data(valid=(0, 0, 0, 0))
    state = state_of(params(), optax.sgd(0.1, momentum=0.9))
    flat = {"x": full["x"].reshape(-1, H), "y": full["y"].reshape(-1)}
    grads, out = jax.grad(loss, has_aux=True)(params(), flat)
    after = state.apply_gradients(grads=grads, token_count=out)
    assert int(after.step) == int(after.opt_state.windows) == 1
    _, none = loss(params(), {name: x[0] for name, x in nothing.items()})
    zero = jax.tree.map(jnp.zeros_like, params())
    still = after.apply_gradients(grads=zero, token_count=none)
    assert int(still.step) == 1
    same = jax.tree.map(
        np.array_equal, (still.params, still.opt_state), (after.params, after.opt_state)
    )
    assert all(jax.tree.leaves(same))


class Net(nnx.Module):
    """The same parameters, as NNX holds them."""

    def __init__(self, p: Any) -> None:
        self.trunk, self.head = nnx.Param(p["trunk"]), nnx.Param(p["head"])


@nnx.jit
def nnx_step(model: Any, optimizer: Any, batch: Any, is_last: Any) -> None:
    def of(model: Any) -> Any:
        return loss({"trunk": model.trunk[...], "head": model.head[...]}, batch)

    grads, out = nnx.grad(of, has_aux=True)(model)
    optimizer.update(model, grads, token_count=out, is_last=is_last)


@pytest.mark.parametrize("place", PLACES)
def test_a_window_of_the_optimizer_is_one_batch(place: str) -> None:
    """A12: as above, through `nnx.Optimizer`."""
    batch = data()
    start, spread = placed(PLACES[place], batch)
    model = Net(start)
    optimizer = Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
    for k in range(M):
        assert int(optimizer.step[...]) == 0
        nnx_step(model, optimizer, {name: x[k] for name, x in spread.items()}, k == M - 1)
    assert int(optimizer.step[...]) == 1
    got = {"trunk": model.trunk[...], "head": model.head[...]}
    moved = {name: np.asarray(start[name]) - np.asarray(x) for name, x in got.items()}
    hold_tree(moved, of_one_batch(batch)[1])
    if PLACES[place] is not None:
        assert stays(got, start)


@pytest.mark.parametrize("make", [lambda tx: tx, token_normalized], ids=["wrapped here", "before"])
def test_the_optimizer_is_wrapped_once(make: Any) -> None:
    state = state_of(params(), make(optax.sgd(1.0)))
    optimizer = Optimizer(Net(params()), make(optax.sgd(1.0)), wrt=nnx.Param)
    for found in (state.opt_state, optimizer.opt_state):
        assert not hasattr(found.inner, "windows")
        assert hasattr(found, "windows")


def mean() -> tuple[Any, Any]:
    """Gradients of a mean, and its output."""
    batch = {name: x[0] for name, x in data().items()}
    return jax.grad(lambda p: loss(p, batch, "mean"), has_aux=True)(params())


def test_a_mean_is_refused() -> None:
    grads, out = mean()
    with pytest.raises(ValueError, match="must be a sum over tokens; got one that `chunked_nll`"):
        state_of(params(), optax.sgd(1.0)).apply_gradients(grads=grads, token_count=out)
    model = Net(params())
    with pytest.raises(ValueError, match="must be a sum over tokens; got one that `chunked_nll`"):
        Optimizer(model, optax.sgd(1.0), wrt=nnx.Param).update(
            model, nnx.State(grads), token_count=out
        )


def test_a_missing_count_is_refused() -> None:
    grads, _ = mean()
    with pytest.raises(TypeError, match="'token_count'"):
        state_of(params(), optax.sgd(1.0)).apply_gradients(grads=grads)
    model = Net(params())
    with pytest.raises(TypeError, match="'token_count'"):
        Optimizer(model, optax.sgd(1.0), wrt=nnx.Param).update(model, nnx.State(grads))
    with pytest.raises(ValueError, match="`token_count` must be given"):
        state_of(params(), optax.sgd(1.0)).apply_gradients(grads=grads, token_count=None)


def test_an_optimizer_that_takes_no_notice_of_a_count_is_refused() -> None:
    """As optax's own do, silently, in Flax's `TrainState` and `nnx.Optimizer`."""
    grads, out = mean()
    plain = train_state.TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(1.0))
    fields = {name: getattr(plain, name) for name in ("step", "apply_fn", "params", "tx")}
    state = TrainState(**fields, opt_state=plain.opt_state)
    with pytest.raises(TypeError, match="`tx` must be token-normalised; got another optimizer"):
        state.apply_gradients(grads=grads, token_count=out)
    inside = optax.chain(optax.clip(1.0), token_normalized(optax.sgd(1.0)))
    with pytest.raises(TypeError, match="must be around the whole optimizer; got one inside"):
        state_of(params(), inside)


@pytest.mark.parametrize("how", ["output", "count"])
def test_the_count_of_one_device_is_refused(how: str) -> None:
    """Inside `shard_map`, where gradients are summed over the devices and a count is not."""
    mesh = mesh_of(AxisType.Auto, data=4)
    batch = {name: x[0] for name, x in data().items()}
    state = state_of(jax.tree.map(jnp.asarray, params()), optax.sgd(1.0))

    def local(state: Any, batch: Any, count: Any) -> Any:
        grads, out = jax.grad(loss, has_aux=True)(state.params, batch)
        return state.apply_gradients(grads=grads, token_count=count(out)).params

    def run(count: Any) -> Any:
        specs = (P(), P("data"))
        body = jax.shard_map(
            lambda state, batch: local(state, batch, count),
            mesh=mesh,
            in_specs=specs,
            out_specs=P(),
        )
        return jax.jit(body)(state, batch)

    own = (lambda out: out) if how == "output" else (lambda out: out.num_tokens)
    with pytest.raises(ValueError, match="must be the count of all devices; got one that varies"):
        run(own)
    after = run(lambda out: jax.lax.psum(out.num_tokens, "data"))
    moved = {name: params()[name] - np.asarray(x) for name, x in after.items()}
    one = jax.grad(lambda p: loss(p, batch, "mean")[0])(params())
    hold_tree(moved, one)


def test_what_is_overwritten_by_its_gradient_is_flax_s_to_see_to() -> None:
    """fp8's scales, which have no optimizer's state."""
    name = "_overwrite_with_gradient"
    start = {"params": {"w": jnp.ones(3)}, name: {"scale": jnp.ones(2)}}
    state = state_of(start, optax.sgd(1.0))
    grads = {"params": {"w": jnp.full(3, 4.0)}, name: {"scale": jnp.full(2, 7.0)}}
    after = state.apply_gradients(grads=grads, token_count=8)
    assert np.array_equal(after.params["params"]["w"], np.full(3, 0.5))
    assert np.array_equal(after.params[name]["scale"], np.full(2, 7.0))


@pytest.mark.parametrize("jitted", [False, True])
def test_the_count_of_a_mean_is_refused(jitted: bool) -> None:
    """Its gradients are beside it: 0.522 for 5.804, where nothing said so."""
    state = TrainState.create(apply_fn=None, params=params(), tx=optax.sgd(1.0))

    def step(state: Any, batch: Any, reduction: str) -> Any:
        def pair(p: Any) -> tuple[Any, Any]:
            out = chunked_nll(batch["x"] @ p["trunk"], p["head"], batch["y"], reduction=reduction)
            return out.loss, out.num_tokens

        grads, count = jax.grad(pair, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, token_count=count)

    run = jax.jit(step, static_argnums=2) if jitted else step
    batch = {name: x[0] for name, x in data().items()}
    assert int(run(state, batch, "sum").step) == 1
    with pytest.raises(ValueError, match="`token_count` must be the count of a sum"):
        run(state, batch, "mean")


def test_an_accumulation_inside_is_refused() -> None:
    """`optax.MultiSteps` inside held the step back, reported as 1, and took a mean of means;
    `optax.apply_every` added them up."""
    steps = optax.MultiSteps(optax.sgd(1.0), 4)
    inner = optax.chain(optax.clip(1.0), steps.gradient_transformation())
    every = optax.chain(optax.apply_every(4), optax.sgd(1.0))
    whole = (steps, inner, token_normalized(inner), every, optax.apply_if_finite(every, 2))
    for tx in whole:
        name = "MultiSteps" if tx in whole[:3] else "apply_every"
        said = f"`token_normalized` must be in place of `optax.{name}`"
        with pytest.raises(TypeError, match=said):
            TrainState.create(apply_fn=None, params=params(), tx=tx)
        with pytest.raises(TypeError, match=said):
            Optimizer(nnx.Linear(H, H, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
