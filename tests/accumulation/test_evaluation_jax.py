"""`Evaluation` in JAX: the mean loss over batches of uneven counts, in a host loop, in a scan and
over devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from xentlib.contract import check, failures

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.windows_jax import M, data, of_one_batch, params, sum_and_count  # noqa: E402
from xentlib.jax import Evaluation, chunked_nll, count_collectives  # noqa: E402


@pytest.mark.slow
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
        with jax.set_mesh(mesh_of(kind, data=4)):
            there = NamedSharding(mesh_of(kind, data=4), P(None, "data"))
            found.append(jax.jit(scan)(jax.device_put(batch, there)))
    for loss in found:
        assert (loss.dtype, loss.shape) == (jnp.float32, ())
        assert not failures(check("A9", np.asarray(loss), want, metrics=("rho / u",)))
    assert np.isnan(Evaluation().mean_loss())
    assert np.isnan(Evaluation().add(loss_sum=jnp.float32(0), num_tokens=0).mean_loss())
    given = {"loss_sum": np.float32(np.inf), "num_tokens": 3}
    assert not np.isfinite(Evaluation().add(**given).mean_loss())


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_evaluation_over_devices(check_vma: bool) -> None:
    """Inside `shard_map`, of one axis or of two, on one of which tokens are copies; of one axis if
    it is said."""
    mesh = mesh_of(AxisType.Auto, data=2, model=2)
    batch = data(valid=(16, 5, 3, 0))
    want = np.asarray(of_one_batch(batch)[0])

    def over(axes: Any, part: Any) -> Any:
        start = Evaluation()
        if check_vma:
            start = jax.lax.pcast(start, "data", to="varying")

        def add(evaluation: Any, x: Any) -> Any:
            loss, number = sum_and_count(params(), x)
            return evaluation.add(loss_sum=loss, num_tokens=number), None

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
        add = lambda e, x: (e.add(loss_sum=x[0], num_tokens=x[1]), None)  # noqa: E731
        return jax.lax.scan(add, Evaluation(), given)[0].mean_loss()

    got = float(jax.jit(mean)(loss, count))
    assert abs(got - want) < 2 * 2.0**-24 * want
    # A large batch after a small one, and the other way round.
    for pairs in (((3.0, 1), (2.0**30, 2**30)), ((2.0**30, 2**30), (3.0, 1))):
        evaluation = Evaluation()
        for pair in pairs:
            loss, number = map(jnp.asarray, pair)
            evaluation = jax.jit(Evaluation.add)(evaluation, loss_sum=loss, num_tokens=number)
        exactly = np.sum(np.asarray(evaluation, np.float64), axis=0)
        assert np.array_equal(exactly, [2**30 + 3, 2**30 + 1])


NAMELESS = "`loss` must be an `NLLOutput`, which says whether it is a sum; got one number"


def test_an_output_knows_its_own_sum() -> None:
    """A mean that is put in its place, outside of a program."""
    part, p = jax.tree.map(lambda x: x[0], data()), params()
    out = chunked_nll(part["x"] @ p["trunk"], p["head"], part["y"], reduction="sum")
    with pytest.raises(ValueError, match="got one that was divided by its number of tokens since"):
        Evaluation().add(out._replace(loss=out.loss / int(out.num_tokens)))
    more = Evaluation().add(out._replace(loss=out.loss + 0.7)).mean_loss()
    want = (float(out.loss) + 0.7) / int(out.num_tokens)
    assert not failures(check("A9", float(more), want, magnitude=want, metrics=("rho / u",)))


def test_one_number_says_by_its_name_what_it_is() -> None:
    """`add(out.loss, out.num_tokens)` took a mean for a sum, 0.522 for 5.804: an array cannot say
    what it was divided by, traced or not."""
    p, x, y = params(), data()["x"][0], data(valid=(7, 5, 0, 1))["y"][0]
    out, mean = (
        chunked_nll(x @ p["trunk"], p["head"], y, reduction=how) for how in ("sum", "mean")
    )
    want = np.asarray(mean.loss)
    for given in (
        {"loss": out},
        {"loss_sum": out.loss, "num_tokens": out.num_tokens},
        {"loss_mean": mean},
        {"loss_mean": mean.loss, "num_tokens": mean.num_tokens},
        {"loss_mean": float(mean.loss), "num_tokens": 7},
    ):
        mean_loss = lambda given: Evaluation().add(**given).mean_loss()  # noqa: E731
        for loss in (mean_loss(given), jax.jit(mean_loss)(given)):
            assert not failures(check("A9", np.asarray(loss), want, metrics=("rho / u",)))
    for bare in (out, mean):
        pair = (bare.loss, bare.num_tokens)
        for add in (Evaluation().add, jax.jit(Evaluation().add)):
            with pytest.raises(ValueError, match=NAMELESS):
                add(*pair)
    # The very array that was returned says what it is, inside a `jit` or a scan too.
    not_mean = "`loss_mean` must be a mean over its tokens"
    by_one = chunked_nll(x @ p["trunk"], p["head"], y, denominator=1)
    loss = Evaluation().add(loss_sum=by_one.loss, num_tokens=7).mean_loss()
    assert not failures(check("A9", np.asarray(loss), want, metrics=("rho / u",)))

    def named(how: str, name: str) -> Any:
        def add(evaluation: Any, x: Any) -> Any:
            got = chunked_nll(x @ p["trunk"], p["head"], y, reduction=how)
            return evaluation.add(**{name: got.loss}, num_tokens=got.num_tokens), None

        return add

    for how, name, said in (
        ("mean", "loss_sum", "got one that `chunked_nll` has divided"),
        ("sum", "loss_mean", not_mean),
    ):
        for add in (named(how, name), jax.jit(named(how, name))):
            with pytest.raises(ValueError, match=said):
                add(Evaluation(), x)
        with pytest.raises(ValueError, match=said):
            jax.lax.scan(named(how, name), Evaluation(), x[None])
    by_five = chunked_nll(x @ p["trunk"], p["head"], y, denominator=5.0)
    for wrong in ({"loss_mean": out}, {"loss_mean": by_five}):
        with pytest.raises(ValueError, match=not_mean):
            Evaluation().add(**wrong)
    with pytest.raises(ValueError, match="got one that `chunked_nll` has divided"):
        Evaluation().add(loss_sum=mean)
    none = Evaluation().add(loss_mean=np.nan, num_tokens=0).add(out).mean_loss()
    assert float(none) == float(Evaluation().add(out).mean_loss())
    with pytest.raises(TypeError, match="must have one of `loss`, `loss_sum` and `loss_mean`"):
        Evaluation().add(num_tokens=3)


@pytest.mark.slow
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
    mean, sums = (
        chunked_nll(x @ p["trunk"], p["head"], y, reduction=how) for how in ("mean", "sum")
    )
    for given, said in (
        ((mean.loss, mean.num_tokens), NAMELESS),
        ((sums.loss, sums.num_tokens), NAMELESS),
        ((2.0, 3), NAMELESS),
        ((sums, 15), "has counted for this loss, 16; got 15"),
        ((jnp.float32(2),), "`num_tokens` must be given with a loss that is no `NLLOutput`"),
        ((2.0, 0), "must be the number of tokens that the loss is the sum of; got 0"),
        ((jnp.ones(3), 3), "must be one number, the sum over this rank's valid tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            Evaluation().add(*given)
