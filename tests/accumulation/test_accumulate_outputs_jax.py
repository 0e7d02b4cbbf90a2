"""What a window of JAX is told: `chunked_nll`'s own result, which knows whether it is a sum.

Shapes: M micro-batches of N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.leaves_jax import same  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.windows_jax import M, N, data, params, sum_and_count  # noqa: E402
from xentlib.jax import NLLOutput, accumulate_grads, chunked_nll, token_normalized  # noqa: E402

DIVIDED = "`loss` must be a sum over tokens; got one that `chunked_nll` has divided. Pass "


def output(p: Any, batch: Any, **options: Any) -> NLLOutput:
    options = {"reduction": "sum"} | options
    return chunked_nll(
        batch["x"] @ p["trunk"], p["head"], batch["y"], token_weights=batch.get("w"), **options
    )


def weighted_data() -> dict[str, Any]:
    return data() | {"w": np.random.default_rng(3).random((M, N), np.float32)}


def test_a_window_takes_the_output_itself() -> None:
    """The bits of the pair that it stands for, with token weights those of their sum; the number
    that comes beside it wins."""
    window = jax.jit(accumulate_grads, static_argnums=0)
    stats, grads = window(output, params(), data())
    same_stats, want = window(sum_and_count, params(), data())
    assert same(grads, want)
    assert float(stats.loss) == float(same_stats.loss)
    assert float(stats.num_tokens) == 22
    weighted = weighted_data()
    stats, grads = window(output, params(), weighted)
    same_stats, want = window(
        lambda p, b: (output(p, b).loss, output(p, b).weight_sum), params(), weighted
    )
    assert same((grads, stats), (want, same_stats))
    assert float(stats.num_tokens) < 20
    stats, grads = window(lambda p, b: (output(p, b), jnp.int32(2)), params(), data())
    assert int(stats.num_tokens) == 2 * M


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_output_of_each_device(check_vma: bool) -> None:
    """D8: inside `shard_map`; counts that vary over devices are a carry that does."""
    mesh, batch = mesh_of(AxisType.Auto, data=4), data(valid=(16, 5, 3, 0))

    def step(function: Any, p: Any, b: Any) -> Any:
        stats, grads = accumulate_grads(function, p, b, "data", nonfinite="drop")
        return stats.num_tokens, stats.loss, grads

    def spread(function: Any) -> Any:
        return jax.shard_map(
            partial(step, function),
            mesh=mesh,
            in_specs=(P(), P(None, "data")),
            out_specs=P(),
            check_vma=check_vma,
        )

    number, *got = jax.jit(spread(output))(params(), batch)
    _, *want = jax.jit(spread(sum_and_count))(params(), batch)
    assert same(got, want)
    assert float(number) == 24
    number, *_ = jax.jit(spread(lambda p, b: (output(p, b), jnp.float32(0.5))))(params(), batch)
    assert float(number) == 0.5 * M * 4


@pytest.mark.parametrize("divided", [{"reduction": "mean"}, {"denominator": 7.0}])
def test_a_mean_is_refused(divided: dict[str, Any]) -> None:
    """M15: 0.163 for 6.03 without a word. As the loss of a scan and as the count of an update,
    traced or not."""
    mean, batch = partial(output, **divided), data()
    for window in (accumulate_grads, jax.jit(accumulate_grads, static_argnums=0)):
        with pytest.raises(ValueError, match=DIVIDED + "reduction='sum' to it"):
            window(mean, params(), batch)
    tx = token_normalized(optax.sgd(1.0))
    first = jax.tree.map(lambda x: x[0], batch)
    grads, out = jax.grad(lambda p: pair(mean(p, first)), has_aux=True)(params())
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=DIVIDED):
            update(grads, tx.init(params()), params(), token_count=out, is_last=True)


def pair(out: NLLOutput) -> tuple[Any, NLLOutput]:
    """A loss and, beside it, what it comes from."""
    return out.loss, out


def test_a_loss_without_its_count_is_refused() -> None:
    def alone(p: Any, batch: Any) -> Any:
        return sum_and_count(p, batch)[0]

    def three(p: Any, batch: Any) -> Any:
        return (*sum_and_count(p, batch), 0)

    with pytest.raises(
        ValueError, match=r"`num_tokens` must be given with a loss that is no `NLLO"
    ):
        accumulate_grads(alone, params(), data())
    with pytest.raises(ValueError, match=r"`loss` must be one number, .*; got tuple\. Pass"):
        accumulate_grads(three, params(), data())


def test_a_number_beyond_what_float32_counts() -> None:
    """2^24 + 1 is none of its numbers; what each addition has lost is kept. A NaN that is dropped
    is dropped with its tokens."""

    def made(p: Any, weight: Any) -> NLLOutput:
        return NLLOutput(p * weight, None, weight, None)

    counts = jnp.asarray([2.0**24, 1, 1, 1, 1, 2.0**24])
    stats, _ = jax.jit(partial(accumulate_grads, made))(jnp.float32(1), counts)
    assert float(stats.num_tokens) == 2**25 + 4
    kept, slope = accumulate_grads(
        made, jnp.float32(1), counts.at[0].set(jnp.nan), nonfinite="drop"
    )
    assert (float(kept.num_tokens), float(slope), int(kept.dropped)) == (2**24 + 4, 1, 1)


@pytest.mark.parametrize("jitted", [True, False])
def test_an_update_takes_the_output_itself(jitted: bool) -> None:
    """As the count of its tokens: the bits of the number, or of the weight where weights count."""
    for weighted, field in ((False, "num_tokens"), (True, "weight_sum")):
        tx = token_normalized(optax.sgd(1.0), weighted=weighted)
        batch = weighted_data() if weighted else data()
        found = []
        for count_of in (lambda out: out, attrgetter(field)):
            update, state = (jax.jit(tx.update) if jitted else tx.update), tx.init(params())
            for k in range(M):
                part = {name: x[k] for name, x in batch.items()}
                grads, out = jax.grad(lambda p: pair(output(p, part)), has_aux=True)(params())  # noqa: B023
                updates, state = update(
                    grads, state, params(), token_count=count_of(out), is_last=k == M - 1
                )
            found.append(updates)
        assert same(*found)
        assert all(np.asarray(u).any() for u in found[0].values())


def test_weights_where_tokens_are_counted() -> None:
    """The number of tokens is no denominator of a weighted sum: refused where that can be read, NaN
    where it is traced. Where all weights are 1 it is one."""
    tx, batch = token_normalized(optax.sgd(1.0)), weighted_data()
    first = {name: x[0] for name, x in batch.items()}
    out, grads = output(params(), first), params()
    update = partial(tx.update, grads, tx.init(params()), params(), is_last=True)
    with pytest.raises(TypeError, match=r"`token_count` must be an integer; got float32"):
        update(token_count=out)
    updates, _ = jax.jit(update)(token_count=out)
    assert all(np.isnan(np.asarray(u)).all() for u in updates.values())
    ones = output(params(), first | {"w": np.ones(N, np.float32)})
    for step in (update, jax.jit(update)):
        updates, _ = step(token_count=ones)
        assert np.array_equal(updates["head"], -grads["head"] * np.float32(1 / 16))
