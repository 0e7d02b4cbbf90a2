"""Hidden states that travel to the rows of a head that stay sharded, in JAX: `gather="hidden"` on
whole arrays and `tokens_parallel=` inside `shard_map`, against one device.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from helpers.vocab_shards import V as CLASSES
from xentlib import PaddedVocab
from xentlib.contract import check, failures
from xentlib.tools.harness.backends import GRADIENTS
from xentlib.tools.harness.findings import check_gradient
from xentlib.tools.harness.problems import Case, build

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.heads_jax import KERNEL, LOW, ONE, OPTIONS, TWO, H, N, V, inputs_of, on, run_step  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import (  # noqa: E402
    AUDIT,
    KINDS,
    NOTHING,
    WEIGHTS,
    arguments,
    dense_of,
    hold_shards,
    sharded,
    value,
    whole,
)
from xentlib.jax import chunked_logprobs, chunked_nll  # noqa: E402

PLAIN = replace(OPTIONS, id="plain", options={})
SUM = replace(PLAIN, id="sum", options={"reduction": "sum"})
# 16 tokens of each of four devices, 4 of them where there are fewer: several chunks, a ragged one.
CHUNK = 4 * V * 16
AXES = {"data": 2}

# Case, axes, tokens, the weight's pieces and the bias's.
PLACES = {
    "rows": (OPTIONS, ONE, "data", P("data", None), P()),
    "two devices": (SUM, AXES, "data", P("data", None), P("data")),
    "kernel": (KERNEL, AXES, "data", P(None, "data"), P("data")),
    "16 bits": (LOW, ONE, "data", P("data", None), P("data")),
    "replicas": (PLAIN, TWO, ("data", "tp"), P("tp", None), P()),
    "vocabulary parallel": (OPTIONS, TWO, "data", P(("tp", "data"), None), P("tp")),
    "data first": (PLAIN, TWO, "data", P(("data", "tp"), None), P()),
    "two axes of tokens": (PLAIN, TWO, ("data", "tp"), P(("tp", "data"), None), P()),
    "width elsewhere": (PLAIN, TWO, "data", P("data", "tp"), P()),
}
PLACED = [
    *(("nll", name) for name in PLACES),
    *(("logprobs", name) for name in ("rows", "kernel", "16 bits", "vocabulary parallel")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), PLACED)
def test_whole_arrays(kind, name):
    """A0, A2, A5, A6, A7: a loss of all devices' tokens. Catches: d hidden of one device's rows, in
    another order or rounded before it is summed, labels and factors of the own tokens alone, rows
    in another order, a replica's tokens left out."""
    case, axes, tokens, weight, bias = PLACES[name]
    p = build(case, 7)
    p = p.changed(labels=np.where(np.arange(N) < N // 4, -100, p.labels).astype(np.int32))
    inputs, options = inputs_of(p, kind, mesh_of(**axes), tokens, weight, bias)
    options |= {"max_chunk_bytes": CHUNK, "gather": "hidden"}
    got, _ = run_step(jax.value_and_grad(partial(value, kind, None, options), has_aux=True), inputs)
    hold_shards(p.changed(text=f"{p.text} quarter"), kind, got)


def own_tokens(p, kind, rows, devices=4, **how):
    """Inside `shard_map`, the loss a sum over devices; 157 classes in padded shards."""
    mesh = mesh_of(data=devices)
    more = {"tokens_parallel": "data"}
    return sharded(p, kind, mesh, rows, over="data", data="data", more=more, **how)


INSIDE = [
    ("nll", OPTIONS, 4, 53, {}),  # the last device has one class
    ("nll", WEIGHTS, 2, 79, {"inside": True}),
    ("nll", NOTHING, 4, 40, {}),
    ("nll", OPTIONS, 4, 40, {"check_vma": False}),
    ("logprobs", OPTIONS, 4, 53, {}),
    ("logprobs", OPTIONS, 4, 40, {"check_vma": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case", "devices", "rows", "how"), INSIDE)
def test_each_device_s_own_tokens(kind, case, devices, rows, how):
    """A0, A5, A6: in padded shards, with NaN in the padding. Catches: offsets that are not those of
    the shards, d weight that is summed once more, or not of all tokens."""
    p = build(replace(case, tokens=N, vocab=CLASSES), 7)
    p = p.changed(options=p.options | ({"denominator": 97.0} if kind == "nll" else {}))
    got = own_tokens(p, kind, rows, devices, **how)
    hold_shards(p, kind, got)
    if case.id == "nothing":
        assert not any(got[name].view(np.uint32).any() for name in GRADIENTS)


def test_few_digits_of_float16():
    """A16, A19: one power of two for all tokens that meet the same rows, though factors differ by
    2^10. Catches: the exponent of one device's factors."""
    p = build(Case("fp16", N, H, V, dtype="float16"), 7)
    weights = np.exp2(10 * (np.arange(N) * 4 // N - 3) / 3).astype(np.float32)
    p = p.changed(token_weights=weights)
    inputs, options = inputs_of(p, "nll", mesh_of(**ONE), "data", P("data", None))
    options |= {"max_chunk_bytes": CHUNK, "gather": "hidden"}
    body = partial(value, "nll", None, options)
    got, _ = run_step(jax.value_and_grad(body, has_aux=True), inputs)
    o, found = p.reference(dz_dtype="float16"), []
    for name in GRADIENTS:
        found += check_gradient("A16", name, got[name], o)
    assert not failures(found)


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize(("devices", "rows"), [(2, 79), (4, 40)])
@pytest.mark.parametrize("kind", [pytest.param("nll", marks=pytest.mark.full), "logprobs"])
def test_audit_mode_does_not_know_of_devices(kind, devices, rows):
    """A1: the gradients of one device, to the bit, on two and on four."""
    p = build(replace(AUDIT, tokens=N), 7)
    p = p.changed(options=p.options | ({"denominator": 97.0} if kind == "nll" else {}))
    dense = dense_of(p, kind, "jax", audit=True)
    got = own_tokens(p, kind, rows, devices, audit=True)
    for name in GRADIENTS:
        assert not failures(check("A1", got[name], getattr(dense, name), quantity=name))


# --- results and upstream gradients of each device ------------------------------------------------

QUARTER = N // 4
OWN = build(Case("own", N, H, CLASSES, confident=0.3), 7)
OWN = OWN.changed(labels=np.where(np.arange(N) // QUARTER == 2, -100, OWN.labels).astype(np.int32))


def quarter(p, k):
    rows = slice(k * QUARTER, (k + 1) * QUARTER)
    return p.changed(hidden=p.hidden[rows], labels=p.labels[rows])


def of_their_sum(p, factors):
    """Gradients of the sum of the devices' means, each times its factor."""
    counts = np.maximum(p.valid.reshape(4, QUARTER).sum(axis=1), 1)
    weights = np.repeat(np.float32(factors) / np.float32(counts), QUARTER)
    p = p.changed(token_weights=weights, options={"reduction": "sum"}, upstream=1.0)
    return p.reference()


def per_device(kind, p, factors, check_vma=True):
    """Each device's loss and number of tokens, and gradients of the sum of the losses times the
    factors."""
    options = {"max_chunk_bytes": 64 * 40 * 4, "tokens_parallel": "data"}
    options["vocab_parallel"] = PaddedVocab("data", CLASSES)
    (leaves, rest), (specs, _) = arguments(p, kind, mesh_of(**ONE), "data", 160, "data")

    def body(leaves, labels, factor):
        hidden, weight, bias = leaves
        if kind == "nll":
            # A device's own mean, which is refused unless it is asked for so.
            own = {"denominator": jnp.maximum((labels != -100).sum(), 1).astype(jnp.float32)}
            loss, count, *_ = chunked_nll(hidden, weight, labels, bias=bias, **options, **own)
        else:
            out = chunked_logprobs(hidden, weight, labels, bias=bias, **options)
            count = (labels != -100).sum()
            loss = -out.logprobs.sum() / jnp.maximum(count, 1).astype(jnp.float32)
        return lax.psum(factor[0] * loss, "data"), (loss[None], count[None])

    spread = jax.shard_map(
        body, mesh=mesh_of(**ONE), in_specs=(specs, P("data"), P("data")), check_vma=check_vma,
        out_specs=(P(), (P("data"), P("data"))),
    )  # fmt: skip
    step = jax.jit(jax.value_and_grad(spread, has_aux=True))
    factors = on(mesh_of(**ONE), P("data"), np.float32(factors))
    (_, out), gradients = step(leaves, rest["labels"], factors)
    d_hidden, d_weight, d_bias = map(whole, gradients)
    return *map(np.asarray, out), d_hidden, d_weight[:CLASSES], d_bias[:CLASSES]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "check_vma"), [("nll", True), ("nll", False), ("logprobs", True)])
def test_results_are_a_device_s_own(kind, check_vma):
    """A0, A2, A5, A6: the mean of its tokens, 0 where it has none, whatever the gradient of that.
    Catches: a mean over all devices, the numbers of one device for all, 0 times inf."""
    loss, count, *gradients = per_device(kind, OWN, (1.3, 1.3, np.inf, 1.3), check_vma)
    assert not failures(check("A0", count, OWN.valid.reshape(4, QUARTER).sum(1).astype(np.int32)))
    for k in (0, 1, 3):
        o = quarter(OWN, k).reference()
        assert not failures(check("A2", loss[k], o.loss, magnitude=o.loss_magnitude))
    assert loss[2] == 0
    hold_gradients(gradients, of_their_sum(OWN, (1.3, 1.3, 0, 1.3)))


def hold_gradients(gradients, o):
    found = []
    for row, part, got in zip(("A5", "A6", "A6"), ("hidden", "weight", "bias"), gradients):
        found += check(row, got, getattr(o, f"d_{part}"), getattr(o, f"bound_{part}"))
    assert not failures(found)


@KINDS
def test_upstream_gradients_that_differ(kind):
    """A5, A6: `chunked_nll` has added up the head's gradient before it knows them, and gives NaN;
    `chunked_logprobs` reads each token's. Catches: one device's gradient for all of them."""
    factors = (1.3, 0.7, 1.0, 1.0)
    *_, d_hidden, d_weight, d_bias = per_device(kind, OWN, factors)
    o = of_their_sum(OWN, factors)
    if kind == "nll":
        assert np.isnan(d_weight).all()
        assert np.isnan(d_bias).all()
        d_weight, d_bias = o.d_weight, o.d_bias
    hold_gradients((d_hidden, d_weight, d_bias), o)


def test_no_tokens_at_all():
    mesh = mesh_of(**ONE)
    arrays = jnp.zeros((0, H)), jnp.ones((V, H)), jnp.zeros(0, jnp.int32)
    empty = [on(mesh, P("data"), x) for x in arrays]

    def loss(hidden, weight, labels):
        own = {"vocab_parallel": "data", "tokens_parallel": "data", "denominator": 1.0}
        return lax.psum(chunked_nll(hidden, weight, labels, **own).loss, "data")

    spread = jax.shard_map(loss, mesh=mesh, in_specs=P("data"), out_specs=P())
    value, (d_hidden, d_weight) = jax.jit(jax.value_and_grad(spread, (0, 1)))(*empty)
    assert value == 0
    assert d_hidden.shape == (0, H)
    assert not np.asarray(d_weight).view(np.uint32).any()


@pytest.mark.optimized
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logprobs", pytest.param("nll", marks=pytest.mark.full)])
def test_chunks_do_not_show(kind):
    """A10: rows of d hidden and what is per token, in one chunk and in four. Catches: parts that
    are added in an order which the chunks decide."""
    p, found = build(replace(PLAIN, vocab=4 * V), 7), []
    for chunk in (4 * CHUNK, 16 * CHUNK):
        inputs, options = inputs_of(p, kind, mesh_of(**ONE), "data", P("data", None), P("data"))
        options |= {"max_chunk_bytes": chunk, "gather": "hidden"}
        body = partial(value, kind, None, options)
        found.append(run_step(jax.value_and_grad(body, has_aux=True), inputs)[0])
    for name in ("d_hidden", "logprobs", "lse", "entropy"):
        assert not failures(check("A10", found[0][name], found[1][name], quantity=name))
