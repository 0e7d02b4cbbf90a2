"""Vocabularies spread over devices: what `vocab_parallel=` refuses in JAX, and what is NaN because
nobody can read it.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from helpers.vocab_shards import V
from xentlib import PaddedVocab
from xentlib.contract import check, failures
from xentlib.tools.harness.problems import build

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import KINDS, PLAIN, N, hold_shards, sharded  # noqa: E402
from xentlib.jax import chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.jax.core.vocab import vary  # noqa: E402


def attempt(parallel: Any, weight: Any, bias: Any, **how: Any) -> None:
    mesh = mesh_of(AxisType.Auto, tp=2)
    spread = jax.shard_map(
        lambda h, w, b, y: chunked_nll(h, w, y, bias=b, vocab_parallel=parallel).loss,
        mesh=mesh, in_specs=(P(), weight, bias, P()), out_specs=P(), **how,
    )  # fmt: skip
    spread(jnp.ones((8, 4)), jnp.ones((20, 4)), jnp.ones(20), jnp.zeros(8, jnp.int32))


REFUSED = {
    "another axis": (
        "dp",
        P("tp"),
        P("tp"),
        "must be the name of a mesh axis inside `shard_map`; got 'dp'",
    ),
    "whole weight": ("tp", P(), P("tp"), r"`weight` must be spread over mesh axis 'tp'"),
    "whole bias": ("tp", P("tp"), P(), r"`bias` must be spread over mesh axis 'tp'"),
    "too few": (PaddedVocab("tp", 21), P("tp"), P("tp"), "must spread 21 classes.*20 in all"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_calls_say_so(name):
    """D12, M9: what cannot be this device's part of a vocabulary."""
    *call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        attempt(*call)


def test_a_whole_head_on_every_device_is_refused():
    """M9: full logits taken for a shard. Without types only their number tells."""
    with pytest.raises(ValueError, match="got all of them on each of 2 ranks"):
        attempt(PaddedVocab("tp", 20), P(), P(), check_vma=False)
    with pytest.raises(ValueError, match="must be the name of a mesh axis inside `shard_map`"):
        chunked_nll(
            jnp.ones((8, 4)), jnp.ones((20, 4)), jnp.zeros(8, jnp.int32), vocab_parallel="tp"
        )


@pytest.mark.parametrize("classes", [1, 9])
def test_padding_may_fill_the_other_devices(classes):
    """A13. Catches: as many rows as classes on every device taken for the whole head on each."""
    draw = jax.random.split(jax.random.key(0), 2)
    hidden, head = (jax.random.normal(k, (n, 4)) for k, n in zip(draw, (8, classes), strict=True))
    rows = jnp.concatenate([head, jnp.full_like(head, jnp.nan)])
    labels = jnp.arange(8, dtype=jnp.int32) % classes
    spread = jax.shard_map(
        lambda h, w, y: chunked_nll(h, w, y, vocab_parallel=PaddedVocab("tp", classes)).loss,
        mesh=mesh_of(AxisType.Auto, tp=2), in_specs=(P(), P("tp"), P()), out_specs=P(),
    )  # fmt: skip
    got, want = spread(hidden, rows, labels), chunked_nll(hidden, head, labels).loss
    assert not failures(check("A2", got, want, magnitude=max(float(want), 1.0)))


def test_a_mean_of_each_device_s_own_tokens_is_refused():
    """A10: of two means a sum, in the gradient of the head."""
    how = {"vocab_parallel": "tp", "tokens_parallel": "tp"}

    def loss(more):
        return jax.shard_map(
            lambda h, w, y: jax.lax.psum(chunked_nll(h, w, y, **how, **more).loss, "tp"),
            mesh=mesh_of(AxisType.Auto, tp=2), in_specs=(P("tp"), P("tp"), P("tp")), out_specs=P(),
        )(jnp.ones((8, 4)), jnp.ones((20, 4)), jnp.zeros(8, jnp.int32))  # fmt: skip

    with pytest.raises(ValueError, match=r"got 'mean', over each rank's own.*sum of 2 means"):
        loss({})
    want = 8 * np.log(20)
    for more in ({"reduction": "sum"}, {"denominator": 1.0}):
        assert not failures(check("A2", loss(more), want, magnitude=want))


# What devices must have alike, and device 1 has not.
DIFFERENT = ("labels", "which labels count", "hidden", "temperature")


def differing(which, x, y, t, array):
    """By an array, one program for all of them, and for rounding, which is allowed; by a name,
    which alone varies by its type."""
    rank = jax.lax.axis_index("tp")
    named = [rank if name == which else 0 for name in (*DIFFERENT, "rounded")]
    labels, counts, hidden, temperature, rounded = named if which else array * rank
    y = jnp.where((y == 3) & (counts == 1), -100, (y + labels) % 20)
    x = jnp.where(rounded == 1, x.astype(jnp.bfloat16).astype(x.dtype), jnp.roll(x, hidden, 0))
    return x, y, t + 0.1 * jnp.asarray(temperature, t.dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "check_vma"), [("nll", True), ("logprobs", False)])
def test_what_differs_between_devices_is_nan(kind, check_vma):
    """A13. Catches: a gather forgotten under sequence parallelism, labels of another batch. What
    was gathered, and varies by type, or was rounded once more, is right."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (64, 16)), jax.random.normal(keys[1], (20, 16))
    y, t = jax.random.randint(keys[2], (64,), 0, 20), jnp.linspace(0.5, 2.0, 64)
    mesh = mesh_of(AxisType.Auto, tp=2)

    def of(change, spec):
        def call(x, w, y, t, which):
            x, y, t = change(x, y, t, which)
            options = {"temperature": t, "vocab_parallel": "tp"}
            if kind == "nll":
                value = chunked_nll(x, w, y, **options).loss
            else:
                value = -chunked_logprobs(x, w, y, **options).logprobs.mean()
            return vary(value[None], frozenset({"tp"} if check_vma else ()))

        specs = (spec, P("tp"), spec, spec, P())
        run = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=check_vma)
        run = jax.jit(run)

        def value(which):
            first, second = run(x, w, y, t, which)
            assert first == second or np.isnan([first, second]).all()
            return float(first)

        return value

    one = of(partial(differing, ""), P())
    for name, which in zip((*DIFFERENT, "rounded"), np.eye(5, dtype=np.int32), strict=True):
        found = (of(partial(differing, name), P()) if check_vma else one)(which)
        assert np.isnan(found) == (name != "rounded"), name
    slices = of(lambda *own: own[:3], P("tp"))
    assert np.isnan(slices(which))

    def gathered(*own):
        return (jax.lax.all_gather(one, "tp", tiled=True) for one in own[:3])

    dense = chunked_nll(x, w, y, temperature=t).loss
    got, scale = of(gathered, P("tp"))(which), np.float64(1.0)
    assert not failures(check("A2", got, np.float64(dense), magnitude=scale))


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_class_weights_that_differ_between_devices_are_nan(check_vma):
    """A13. Catches: each device's own inverse frequencies, normalised, so that their sum is the
    same; two classes that have changed places. What was rounded elsewhere is right."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (64, 16)), jax.random.normal(keys[1], (20, 16))
    y, c = jnp.arange(64) % 20, jnp.linspace(0.5, 1.5, 20)
    mesh = mesh_of(AxisType.Auto, tp=2)

    def call(x, w, y, c):
        options = {"vocab_parallel": "tp", "reduction": "sum"}
        value = chunked_nll(x, w, y, class_weights=c[0], **options).loss
        return vary(value[None], frozenset({"tp"} if check_vma else ()))

    specs = (P(), P("tp"), P(), P("tp"))
    run = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=check_vma)
    )

    def loss(c_R20):
        return np.asarray(run(x, w, y, c_R20))

    swapped = c.at[3].set(c[7]).at[7].set(c[3])
    for other in (jnp.roll(c, 1), swapped):
        assert np.isnan(loss(jnp.stack([c, other]))).all()
    dense = np.float64(chunked_nll(x, w, y, class_weights=c, reduction="sum").loss)
    for got in loss(jnp.stack([c, c])):
        assert not failures(check("A2", got, dense, magnitude=np.abs(dense)))
    assert np.isfinite(loss(jnp.stack([c, c * (1 + 2.0**-22)]))).all()


# Options as each of two devices computes them for itself, and how far apart roundings put them.
NUMBERS = {"logit_scale": 0.9, "softcap": 20.0, "z_loss": 0.01, "denominator": 50.0}
ROUNDED = 1 + 2.0**-22


@cache
def own_options(check_vma: bool, spread: bool) -> Any:
    """[2] losses of two devices, each with options of its own, and the sum of d weight; with
    `spread` tokens of their own too. One program for all values."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (64, 16)), jax.random.normal(keys[1], (20, 16))
    y, how = jnp.arange(64) % 20, {"vocab_parallel": "tp"}
    how |= {"tokens_parallel": "tp"} if spread else {}

    def call(x, w, y, given):
        own = {name: one[0] for name, one in given.items()}
        value = chunked_nll(x, w, y, **how, **own).loss
        return vary(value[None], frozenset({"tp"} if check_vma else ()))

    tokens, mesh = P("tp") if spread else P(), mesh_of(AxisType.Auto, tp=2)
    specs = {"in_specs": (tokens, P("tp"), tokens, P("tp")), "out_specs": P("tp")}
    run = jax.shard_map(call, mesh=mesh, check_vma=check_vma, **specs)

    def summed(w, given):
        losses = run(x, w, y, given)
        return losses.sum(), losses

    def all_of(given):
        grad, losses = jax.grad(summed, has_aux=True)(w, given)
        return jnp.append(losses, grad.sum())

    return jax.jit(all_of)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_options_that_differ_between_devices_are_nan(check_vma):
    """A13. Catches: a count or advantages of one device's own, a scale from its own schedule. The
    same, a rounding apart, and what a token that does not count has, are right."""
    run = own_options(check_vma, False)
    weights = jnp.where(jnp.arange(64) == 5, jnp.nan, jnp.linspace(0.5, 2.0, 64))
    given = {name: jnp.full(2, x) for name, x in NUMBERS.items()}
    given |= {"token_weights": jnp.stack([weights, weights])}
    given |= {"where": jnp.arange(64)[None].repeat(2, 0) != 5}
    right = run(given)
    assert right[0] == right[1]
    assert np.isfinite(right).all()
    other_weights = {"rolled": jnp.roll(weights, 1).at[5:7].set(1.0), "doubled": 2 * weights}
    for name, other in other_weights.items():
        differs = given | {"token_weights": jnp.stack([weights, other])}
        assert np.isnan(run(differs)).all(), name
    for name, x in NUMBERS.items():
        differs = given | {name: jnp.array([x, 1.01 * x])}
        assert np.isnan(run(differs)).all(), name
    close = {name: x.at[1].multiply(ROUNDED) for name, x in given.items() if name != "where"}
    close["token_weights"] = close["token_weights"].at[1, 5].set(7.0)
    assert np.isfinite(run(given | close)).all()


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_options_that_differ_between_devices_with_own_tokens_are_nan(check_vma):
    """A13. Catches: the same where tokens are spread too; there denominators and the weights of
    tokens are each device's own."""
    run, classes = own_options(check_vma, True), jnp.linspace(0.5, 1.5, 20)
    given = {name: jnp.full(2, x) for name, x in NUMBERS.items()}
    given |= {"class_weights": jnp.stack([classes, classes])}
    given |= {"token_weights": jnp.linspace(0.5, 2.0, 64).reshape(2, 32)}
    given["denominator"] = jnp.array([50.0, 70.0])
    assert np.isfinite(run(given)).all()
    close = {name: x.at[1].multiply(ROUNDED) for name, x in given.items()}
    assert np.isfinite(run(given | close)).all()
    for name in ("logit_scale", "softcap", "z_loss", "class_weights"):
        differs = given | {name: given[name].at[1].multiply(1.01)}
        assert np.isnan(run(differs)).all(), name


@pytest.mark.slow
def test_the_same_rows_on_every_device_are_no_shards():
    """A13: without types their number may be right for two vocabularies as one; NaN, where log 2
    would be added."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, w = jax.random.normal(keys[0], (8, 4)), jax.random.normal(keys[1], (20, 4))
    y = jnp.arange(8)

    def loss(w, layout):
        def call(x, w, y):
            return chunked_nll(x, w, y, vocab_parallel="tp", weight_layout=layout).loss

        mesh = mesh_of(AxisType.Auto, tp=2)
        run = jax.shard_map(call, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return float(run(x, w, y))

    assert np.isnan(loss(w, "VH"))
    assert np.isnan(loss(w.T, "HV"))
    # Rows of one value, as a head of zeros has, prove nothing.
    assert np.isfinite(loss(jnp.zeros_like(w), "VH"))


@KINDS
def test_a_label_in_the_padding(kind):
    """A0, M9, M11: a label in [V, P rows) is no class: NaN, never a plausible number, and
    nothing of it in the other tokens."""
    p, others = build(PLAIN, 7), np.arange(N) != 7
    labels = np.where(others, p.labels, V + 1).astype(np.int32)
    got = sharded(p.changed(labels=labels), kind, mesh_of(tp=4), 40)
    assert kind != "nll" or np.isnan(got["loss"])
    assert np.isnan(got["d_hidden"][7]).all()
    values = np.stack([got[name] for name in ("logprobs", "entropy", "lse")])
    assert np.array_equal(np.isnan(values), np.broadcast_to(~others, values.shape))
    hidden = np.where(others[:, None], got["d_hidden"], 0)
    p = p.changed(where=others, options={"denominator": float(p.valid.sum())})
    hold_shards(p, kind, {"d_hidden": hidden, "correct": got["correct"]})
