"""`chunked_nll` with `recompute` in JAX, over vocabulary shards, gathered heads and hidden states
that travel; blocks of classes are small here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from xentlib import PaddedVocab
from xentlib.contract import check, failures
from xentlib.tools.harness.problems import Case, build

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.slow]

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.blocks_of_classes import seen_blocks  # noqa: E402
from helpers.heads_jax import ONE, OPTIONS, TWO, N, inputs_of, run_step  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards import V as CLASSES  # noqa: E402
from helpers.vocab_shards_jax import arguments, hold_shards, sharded, value, whole  # noqa: E402
from xentlib.jax import NLLHead, chunked_nll  # noqa: E402

AGAIN = {"recompute": True}
SHARDED = Case("sharded", 203, 24, 1009, class_weights=True, options={"label_smoothing": 0.1})


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xentlib.jax.binding.XLA_BLOCK_CLASSES", 128)
    monkeypatch.setattr("xentlib.jax.core.logits.GROUP_TOKENS", 64)


@pytest.mark.parametrize(
    ("devices", "rows", "how"),
    [
        (2, 505, {"inside": True}),
        (2, 505, {"check_vma": False}),
        (4, 253, {}),
        (4, 300, {}),
    ],
    ids=str,
)
def test_vocabulary_shards(devices: int, rows: int, how: dict[str, bool]) -> None:
    """A0, A2, A5, A6: the last of four shards has 109 classes and 191 rows of padding. Catches: an
    upstream gradient that is not summed over the shards where each has a part of it."""
    p = build(SHARDED, 7)
    got = sharded(p, "nll", mesh_of(tp=devices), rows, more=AGAIN, **how)
    hold_shards(p, "nll", got, world=devices)


@pytest.mark.parametrize(
    ("axes", "weight", "more", "in_blocks"),
    [
        (ONE, P("data", None), {}, False),
        (ONE, P(None, "data"), {}, True),
        (ONE, P("data", None), {"gather": "hidden"}, False),
        (TWO, P(("tp", "data"), None), {"gather": "hidden"}, False),
        (TWO, P("tp", "data"), {}, True),
    ],
    ids=[
        "gathered",
        "gathered by width",
        "hidden",
        "hidden, vocabulary parallel",
        "vocabulary parallel",
    ],
)
def test_whole_arrays(
    axes: dict[str, int],
    weight: P,
    more: dict[str, Any],
    in_blocks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A0, A2, A5, A6. Catches: gradients of one device's tokens, a loss divided by their count, a
    part of a row that is summed over devices twice or not at all."""
    p, seen = build(replace(OPTIONS, vocab=604), 7), seen_blocks(monkeypatch)
    inputs, options = inputs_of(p, "nll", mesh_of(**axes), "data", weight)
    options |= more | AGAIN
    got, _ = run_step(
        jax.value_and_grad(partial(value, "nll", None, options), has_aux=True), inputs
    )
    hold_shards(p, "nll", got)
    assert bool(seen) == in_blocks


def test_each_device_has_an_upstream_gradient_of_its_own() -> None:
    """A5, A6, of hidden states that travel: right where a loss that has its gradients by then gives
    NaN. Catches: one device's upstream gradient for all of them."""
    factors = np.float32([1.3, 0.7, 0.0, 2.0])
    p = build(replace(OPTIONS, options={}, vocab=CLASSES), 7)
    p = p.changed(options={"reduction": "sum"}, upstream=1.0)
    mesh = mesh_of(**ONE)
    (leaves, rest), (specs, _) = arguments(p, "nll", mesh, "data", 160, "data")

    def body(leaves: Any, labels: Any, factor: Any) -> Any:
        hidden, weight, bias = leaves
        over = {"vocab_parallel": PaddedVocab("data", CLASSES), "tokens_parallel": "data"}
        out = chunked_nll(hidden, weight, labels, bias=bias, reduction="sum", **over, **AGAIN)
        return lax.psum(factor[0] * out.loss, "data")

    given = specs, P("data"), P("data")
    step = jax.jit(jax.grad(jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=P())))
    spread = jax.device_put(factors, NamedSharding(mesh, P("data")))
    d_hidden, d_weight, d_bias = map(whole, step(leaves, rest["labels"], spread))
    o = p.changed(token_weights=np.repeat(factors, N // 4), where=None).reference()
    gradients = d_hidden, d_weight[:CLASSES], d_bias[:CLASSES]
    for row, part, got in zip(("A5", "A6", "A6"), ("hidden", "weight", "bias"), gradients):
        assert not failures(
            check(row, got, getattr(o, f"d_{part}"), getattr(o, f"bound_{part}"), quantity=part)
        )


def test_a_module_has_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flax's `NLLHead`, in a call and from its beginning, on a mesh with Auto axes, of whose arrays
    each device has its own as soon as the module says which axes spread tokens."""
    seen = seen_blocks(monkeypatch)
    p = build(Case("module", 202, 24, 331), 7)
    arrays = jnp.asarray(p.hidden), jnp.asarray(p.labels)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    found = []
    for options in ({}, AGAIN):
        head = NLLHead(24, 331, rngs=nnx.Rngs(0), tokens="data", **options)
        with jax.set_mesh(mesh):
            loss = nnx.value_and_grad(lambda head, x, y: head(x, labels=y).loss)
            found.append(jax.tree.leaves(nnx.jit(loss)(head, *arrays)))
            of_hidden = jax.grad(lambda x, head=head: head(x, labels=arrays[1]).loss)
            products = str(jax.make_jaxpr(of_hidden)(arrays[0])).count("dot_general[")
        assert products == (3 if options else 2)  # the head is a constant, without a gradient
        assert bool(seen) == bool(options)
    for x, y in zip(*found, strict=True):
        reference = np.asarray(y, np.float64)
        assert not failures(check("A6", np.asarray(x), reference, metrics=("rho / u",)))
