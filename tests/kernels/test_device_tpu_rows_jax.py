"""Rows in a TPU's program, computed on this device: those as wide as the vocabulary stay where they
are, and bits of a token do not depend on other rows, nor on shards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from xentlib import PaddedVocab
from xentlib.contract import check, failures

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.cpu]

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import xentlib.jax as ours  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.tpu_jax import as_on_a_tpu, equations  # noqa: E402, F401

N, H, V = 150, 24, 301
RNG = np.random.default_rng(3)
HIDDEN, WEIGHT = (RNG.standard_normal(x).astype(np.float32) for x in ((N, H), (V, H)))
LABELS = np.where(np.arange(N) % 7 == 3, -100, RNG.integers(0, V, N)).astype(np.int32)

# --- rows as wide as the vocabulary, in the order of the tokens -----------------------------------

ROWS = 3 * 128  # of three chunks
WIDE = RNG.standard_normal((2, ROWS, V)).astype(np.float32)
COUNTS = np.arange(ROWS) % 5 < 3
WIDE[:, ~COUNTS] = np.nan
SOFT = np.exp(WIDE[1]) / np.exp(WIDE[1]).sum(1, keepdims=True)
INDEX = np.where(COUNTS, RNG.integers(0, V, ROWS), -100).astype(np.int32)
STATES = RNG.standard_normal((ROWS, H)).astype(np.float32)
STATES[~COUNTS] = np.nan
IN_CHUNKS = {"max_chunk_bytes": 2 * 128 * (V + -V % 128) * 4}


def precomputed(x: Any) -> Any:
    out = ours.vocab_parallel_logprobs(x, INDEX, entropy=True, **IN_CHUNKS)
    return (out.logprobs * np.arange(ROWS, dtype=np.float32)).sum() + out.entropy.sum(), tuple(out)


def precomputed_soft(x: Any) -> Any:
    out = ours.vocab_parallel_logprobs(x, SOFT, where=COUNTS, **IN_CHUNKS)
    return (out.logprobs * np.arange(ROWS, dtype=np.float32)).sum(), out.logprobs


def soft_nll(w: Any) -> Any:
    out = ours.chunked_nll(STATES, w, SOFT, where=COUNTS, **IN_CHUNKS)
    return out.loss, out.num_tokens


def from_logits(w: Any) -> Any:
    out = ours.chunked_divergence(STATES, w, ours.TeacherLogits(WIDE[1]), where=COUNTS, **IN_CHUNKS)
    return out.loss, out.num_tokens


@pytest.mark.parametrize("loss", [precomputed, precomputed_soft, soft_nll, from_logits])
def test_wide_rows_stay_where_they_are(loss: Any, request: Any) -> None:
    """Catches: a token's row in another's place, one that does not count among those that do, a
    gather of rows, for which a TPU copies all of them in each chunk."""
    x = WIDE[0] if "precomputed" in loss.__name__ else WEIGHT
    here = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    request.getfixturevalue("as_on_a_tpu")
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for got, right in zip(jax.tree.leaves(step(x)), jax.tree.leaves(here), strict=True):
        assert not failures(check("A9", got, right, metrics=("rho / u",)))
    traced = list(equations(step.trace(x).jaxpr))
    assert not [
        one
        for one in traced
        if one[0] in ("gather", "scatter") and one[1].startswith(f"float32[{ROWS},{V}]")
    ]
    assert [one for one in traced if one[0] == "dynamic_slice" and f"float32[{ROWS},{V}]" in one]


NOT_A_NUMBER = np.where(COUNTS, 1.3, np.nan).astype(np.float32)


def cotangents(loss: Any, x: Any) -> Any:
    """Of upstream gradients that are NaN where a token does not count."""
    out, back = jax.vjp(loss, x)
    return back(jax.tree.map(lambda y: jnp.where(COUNTS, 1.0, jnp.nan).astype(y.dtype), out))[0]


def tempered(x: Any) -> Any:
    more = {"temperature": NOT_A_NUMBER, "entropy": True, **IN_CHUNKS}
    out = ours.vocab_parallel_logprobs(x, INDEX, **more)
    return out.logprobs, out.entropy


def tempered_soft(x: Any) -> Any:
    more = {"temperature": NOT_A_NUMBER, "where": COUNTS, **IN_CHUNKS}
    return ours.vocab_parallel_logprobs(x, SOFT, **more).logprobs


def weighted(w: Any) -> Any:
    more = {"token_weights": NOT_A_NUMBER, "where": COUNTS, **IN_CHUNKS}
    nll = ours.chunked_nll(STATES, w, SOFT, temperature=NOT_A_NUMBER, **more).loss
    return nll + ours.chunked_divergence(STATES, w, ours.TeacherLogits(WIDE[1]), **more).loss


def over_devices(x: Any, labels: Any) -> Any:
    """Log-probabilities and gradient over three shards, the last of which is filled up."""
    mesh = mesh_of(jax.sharding.AxisType.Auto, x=3)
    columns = [(0, 0), (0, 3 * 128 - V)]
    soft = labels.ndim == 2
    labels = np.pad(labels, columns) if soft else labels
    of_classes = P(None, "x")

    def loss(x: Any, y: Any) -> Any:
        how = {"where": COUNTS, "vocab_parallel": PaddedVocab("x", V)}
        return ours.vocab_parallel_logprobs(x, y, max_chunk_bytes=128 * 128 * 4, **how).logprobs

    step = jax.shard_map(
        lambda x, y: jax.value_and_grad(lambda x: loss(x, y).sum())(x),
        mesh=mesh,
        in_specs=(of_classes, of_classes if soft else P()),
        out_specs=(P(), of_classes),
    )
    value, gradient = step(jnp.pad(x, columns, constant_values=jnp.nan), labels)
    return value, gradient[:, :V]


PAIRS = {
    "temperature": (lambda x: cotangents(tempered, x), WIDE[0]),
    "soft, temperature": (lambda x: cotangents(tempered_soft, x), WIDE[0]),
    "token weights": (jax.grad(weighted), WEIGHT),
    "bf16": (lambda x: cotangents(tempered, x), jnp.asarray(WIDE[0], jnp.bfloat16)),
    "shards": (lambda x: over_devices(x, INDEX), WIDE[0]),
    "shards, soft": (lambda x: over_devices(x, SOFT), WIDE[0]),
    "vmap": (jax.vmap(lambda x: cotangents(tempered, x)), np.stack([WIDE[0], 2 * WIDE[0]])),
}


@pytest.mark.parametrize("name", PAIRS)
def test_wide_rows_beside_what_is_not_a_number(name: str, request: Any) -> None:
    """Temperatures, weights and upstream gradients that are NaN where a token does not count, and
    logits that are 20 lower. Catches: a gradient of such a token that is not 0: it is written too.
    """
    step, x = PAIRS[name]
    lower = x if name == "token weights" else x - jnp.asarray(20, x.dtype)
    here = [np.asarray(y, np.float32) for y in jax.tree.leaves(jax.jit(step)(lower))]
    request.getfixturevalue("as_on_a_tpu")
    for got, right in zip(jax.tree.leaves(jax.jit(step)(lower)), here, strict=True):
        assert right.any()
        if name == "bf16":  # of which a rounding may fall to the other side
            row, metric = "A19", "bf16 correctly rounded"
        else:
            row, metric = "A9", "rho / u"
        assert not failures(check(row, np.asarray(got, np.float32), right, metrics=(metric,)))


# --- bits, of operands whose products are exact: our own sums decide ------------------------------

QUARTERS = np.round(HIDDEN) / 4, np.round(4 * WEIGHT) / 4
# Not of entropy, whose terms this device's compiler multiplies and adds in one, in some lanes.
OF_BITS = ("logprobs", "lse")


def bits(h: Any, w: Any, y: Any, **more: Any) -> dict[str, Any]:
    out = ours.chunked_logprobs(h, w, y, **more)
    return {name: getattr(out, name) for name in OF_BITS}


@pytest.mark.usefixtures("as_on_a_tpu")
def test_other_tokens_do_not_show() -> None:
    """A17: a part of the tokens, in another order, one alone. Catches: a sum over columns whose
    order follows the number of rows."""
    hidden, weight = QUARTERS
    whole = bits(hidden, weight, LABELS)
    for some in (np.arange(N)[::-1], np.arange(40, 80), np.array([7])):
        part = bits(hidden[some], weight, LABELS[some])
        for name in OF_BITS:
            assert not failures(check("A17", part[name], whole[name][some]))


@pytest.mark.usefixtures("as_on_a_tpu")
@pytest.mark.parametrize(("devices", "rows"), [(2, 256), (3, 128), (4, 128)])
def test_shards_do_not_show(devices: int, rows: int) -> None:
    """A18, of shards that are whole blocks, the last one filled up, or empty. Catches: a block that
    begins elsewhere, the shard's filling among the classes."""
    hidden, weight = QUARTERS
    filled = np.full((devices * rows, H), np.nan, np.float32)
    filled[:V] = weight
    of_shards = jax.shard_map(
        lambda *x: bits(*x, vocab_parallel=PaddedVocab("x", V)),
        mesh=mesh_of(jax.sharding.AxisType.Auto, x=devices),
        in_specs=(P(), P("x"), P()),
        out_specs=P(),
    )
    whole = bits(hidden, weight, LABELS)
    for name, x in jax.jit(of_shards)(hidden, filled, LABELS).items():
        assert not failures(check("A18", x, whole[name]))
