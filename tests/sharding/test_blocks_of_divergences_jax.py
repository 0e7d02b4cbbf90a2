"""Divergences of each token in JAX over vocabulary shards, and over tokens that a mesh spreads. The
backward reads both heads in blocks of classes, small ones here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from xentlib import PaddedVocab
from xentlib.contract import check, failures

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.slow]

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.blocks_of_classes import seen_blocks, small_blocks  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from xentlib.jax import TeacherHead, chunked_divergence  # noqa: E402

TOKENS, CLASSES = 202, 1009
OPTIONS: dict[str, Any] = {"kind": "jsd", "beta": 0.3, "nll_weight": 0.4, "reduction": "none"}


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    small_blocks(monkeypatch)
    return seen_blocks(monkeypatch)


def arrays() -> list[Any]:
    """Hidden states and head of student and teacher, labels, and upstream gradients."""
    rng = np.random.default_rng(3)
    shapes = (TOKENS, 24), (CLASSES, 24), (TOKENS, 40), (CLASSES, 40)
    labels = rng.integers(0, CLASSES, TOKENS)
    labels[:2], labels[3::5] = (1008, 253), -100
    of = [np.float32(rng.standard_normal(x)) for x in shapes]
    of[3] /= 3
    return [*of, labels, np.float32(rng.standard_normal(TOKENS))]


def gradients(*, compute: str | None = None, layout: str = "VH", **more: Any) -> Callable[..., Any]:
    """Of hidden states and head."""
    of_head: Any = {"weight_layout": layout}

    def total(hidden: Any, weight: Any, states: Any, rows: Any, labels: Any, upstream: Any) -> Any:
        how = OPTIONS | more | of_head | {"labels": labels, "compute_dtype": compute}
        out = chunked_divergence(hidden, weight, TeacherHead(states, rows, **of_head), **how)
        return (out.loss * upstream).sum()

    return jax.grad(total, (0, 1))


def exact(*arrays: Any) -> list[Any]:
    with jax.enable_x64(True):
        of = [np.float64(x) if x.dtype == np.float32 else x for x in arrays]
        return [np.asarray(x) for x in gradients(compute="float64")(*of)]


def hold(found: Any, right: list[Any]) -> None:
    for x, y in zip(found, right, strict=True):
        assert not failures(check("A6", np.asarray(x), y, metrics=("rho / u",)))


@pytest.mark.parametrize(("devices", "rows"), [(2, 505), (4, 253), (4, 300)])
def test_vocabulary_shards(devices: int, rows: int, seen: list[str]) -> None:
    """The last of four shards has 109 classes and 191 rows of padding. Catches: a teacher's rows of
    another block, rows of padding that are multiplied."""
    hidden, weight, states, other, *rest = arrays()
    fill = ((0, devices * rows - CLASSES), (0, 0))
    weight, other = (np.pad(x, fill, constant_values=np.nan) for x in (weight, other))
    shard, over = P("tp", None), {"vocab_parallel": PaddedVocab("tp", CLASSES)}
    mesh, specs = mesh_of(tp=devices), (P(), shard, P(), shard, P(), P())
    step = jax.shard_map(gradients(**over), mesh=mesh, in_specs=specs, out_specs=(P(), shard))
    inputs = (
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((hidden, weight, states, other, *rest), specs, strict=True)
    )
    d_hidden, d_weight = map(np.asarray, jax.jit(step)(*inputs))
    assert seen
    assert not d_weight[CLASSES:].any()
    hold((d_hidden, d_weight[:CLASSES]), exact(*arrays()))


@pytest.mark.parametrize(
    ("spec", "in_blocks"),
    [(P(), True), (P(None, "d"), True), (P("d", None), False)],
    ids=["whole", "gathered by width", "gathered"],
)
@pytest.mark.parametrize("layout", ["VH", "HV"])
def test_tokens_that_a_mesh_spreads(layout: str, spec: P, in_blocks: bool, seen: list[str]) -> None:
    """Over two devices, whose float32 blocks of d weight are summed before they are rounded, of
    heads that each device has whole, or parts of whose rows. Catches: another device's part."""
    hidden, weight, states, other, *rest = arrays()
    if spec and spec[0]:  # as many rows on both
        weight, other = weight[:-1], other[:-1]
        rest[0] = np.where(rest[0] == CLASSES - 1, 7, rest[0])
    if layout == "HV":
        rest[0] = np.where(np.arange(TOKENS) < TOKENS // 2, -100, rest[0])  # none of one device
    right = exact(hidden, weight, states, other, *rest)
    seen.clear()
    if layout == "HV":
        weight, other, spec = weight.T, other.T, P(*spec[::-1])
        right[1] = right[1].T
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        spread, head = (NamedSharding(mesh, x) for x in (P("d"), spec))
        hidden, states, *rest = (jax.device_put(x, spread) for x in (hidden, states, *rest))
        weight, other = (jax.device_put(jnp.asarray(x), head) for x in (weight, other))
        step = jax.jit(gradients(layout=layout))
        found = step(hidden, weight, states, other, *rest)
    assert bool(seen) == in_blocks
    hold(found, right)
