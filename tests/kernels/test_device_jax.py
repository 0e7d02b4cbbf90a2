"""What a GPU's program does otherwise in JAX, computed on this device and held to the same rows:
the head filled up to whole columns, each label once in a scatter, no array of exp(z - m).

What XLA makes of it for a GPU is in `test_hlo_jax.py`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from helpers import lowrank
from helpers.measured import SMALL, by_id, hold
from xentlib.tools.harness.cases import BASE, CHUNK_CASES, WITH_OPTIONS, low_precision, named
from xentlib.tools.harness.problems import Case, build, upstream_of
from xentlib.tools.parity.rows.head import nll, per_token

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.cpu]

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers import lowrank_jax  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import (  # noqa: E402
    KERNEL,
    KINDS,
    LOW,
    OPTIONS,
    PLAIN,
    WEIGHTS,
    called,
    hold_shards,
    sharded,
)
from xentlib.jax import chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.jax.core import device, gradients  # noqa: E402

# Few classes, each of them the label of many tokens of a chunk; and a bias.
CROWDED = Case("crowded", 509, 48, 9, std=1.0, ignored=0.2)
CASES = (
    *named(SMALL, "base", "options", "class-weights", "saturated", "kernel-layout", "one-class"),
    CROWDED,
    replace(CROWDED, id="crowded-kernel", layout="HV"),
)
SIXTEEN = low_precision(named(CASES, "base", "options", "kernel-layout", "crowded-kernel"))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Its traits, but for the rows of a chunk; labels compared in several groups, the last of them
    ragged."""
    least = device.KINDS["cpu"].least_rows
    device_info = device.KINDS["gpu"]._replace(least_rows=least, scatters_wide=True)
    monkeypatch.setattr(device, "KINDS", {"cpu": device_info})
    monkeypatch.setattr(gradients, "LABEL_GROUP", 50)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_fp32_against_the_oracle(case):
    """A0, A2, A5, A6. Catches: a column of zeros in the softmax or in label smoothing, one that
    comes back in a gradient, a label's second token lost or added twice."""
    hold(nll.against_oracle, ("jax",), build(case, 7))


@pytest.mark.parametrize("case", SIXTEEN, ids=by_id)
def test_bf16_against_the_oracle(case):
    """A7, A8. Catches: the target's dz rounded twice, or not at all."""
    hold(nll.against_oracle, ("jax",), build(case, 7))


@pytest.mark.parametrize("case", [WITH_OPTIONS, CROWDED], ids=by_id)
def test_per_token_against_the_oracle(case):
    """A0, A4, A5, A6 of `chunked_logprobs`."""
    hold(per_token.against_oracle, ("jax",), build(case, 7))


@pytest.mark.parametrize(
    "case",
    [CHUNK_CASES[3], pytest.param(CHUNK_CASES[1], marks=pytest.mark.full)],
    ids=by_id,
)
@pytest.mark.optimized
@pytest.mark.parametrize("chunks", [(8, 100)], ids=str)
def test_chunks_do_not_show(case, chunks, monkeypatch):
    """A10: chunks of 64 rows, the least on a CPU, and of 100; the last is a part of one."""
    monkeypatch.setattr("xentlib.tools.harness.cases.CHUNKS", chunks)
    hold(nll.chunks, ("jax",), build(replace(case, tokens=137), 7))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("options", chunked_nll),
        ("HV", chunked_logprobs),
        ("crowded", chunked_nll),
        pytest.param("options", chunked_logprobs, marks=pytest.mark.full),
        pytest.param("HV", chunked_nll, marks=pytest.mark.full),
        pytest.param("crowded", chunked_logprobs, marks=pytest.mark.full),
    ],
)
def test_a_low_rank_head_against_the_oracle(name, function):
    """A5, A6. Catches: columns of zeros in d B, a label's second token lost or added twice."""
    case = CROWDED if name == "crowded" else lowrank.CASES[name]
    p, more = lowrank.low_problem(case), {} if function is chunked_nll else {"entropy": True}
    _, got = lowrank_jax.gradients(p, function, **more)
    lowrank.hold(lowrank.oracle(p, upstream_of(p.base, 5) if more else None), got)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    ("case", "devices", "rows", "chunks"),
    [(PLAIN, 3, 79, True), (OPTIONS, 4, 41, True), (KERNEL, 4, 53, True), (LOW, 2, 79, False),
     (WEIGHTS, 2, 79, True)],
    ids=called,
)  # fmt: skip
def test_shards_give_the_dense_answer(kind, case, devices, rows, chunks):
    """A0, A2, A5, A6, A7, A13. Catches: a label of another device that takes a column of zeros."""
    p = build(case, 7)
    got = sharded(p, kind, mesh_of(tp=devices), rows, chunks=chunks)
    hold_shards(p, kind, got, world=devices)


def test_the_program_is_the_gpus():
    """The traits do what they are for: whole blocks of columns, each label once in a scatter, no
    barrier. Otherwise everything above would hold the CPU's program."""
    p = build(BASE, 7)
    arrays = [jnp.asarray(x) for x in (p.hidden, p.weight, p.bias, p.labels.astype(np.int32))]

    def loss(hidden, weight, bias, labels):
        return chunked_nll(hidden, weight, labels, bias=bias).loss

    text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*arrays).as_text()
    assert f"x{BASE.vocab + -BASE.vocab % 128}xf32" in text
    scatters = [x.split("stablehlo.return")[0] for x in text.split('"stablehlo.scatter"')[1:]]
    adding = [x for x in scatters if "stablehlo.add" in x]
    assert len(adding) == 2 * -(-512 // 50)  # d weight's and d bias's groups of a chunk of 512 rows
    assert all("unique_indices = true" in x for x in adding)
    assert "optimization_barrier" not in text


def test_no_column_twice_in_a_scatter():
    """A11: `unique_indices` is true. Columns of labels that come again are past the end, also past
    a label that is another device's."""
    labels = np.array([3, 8, 3, 0, 8, 8, 9, 5, 9], np.int32)
    counts, to = map(np.asarray, gradients.each_once(jnp.asarray(labels), 9))
    assert len(set(to.tolist())) == len(to)
    assert to[to < 10].tolist() == [3, 8, 0, 9, 5]
    for row, column in enumerate(to):
        assert (counts[row] == (labels == column if column < 10 else False)).all()


@pytest.mark.parametrize(
    ("platform", "limit", "share", "processes", "expected"),
    [
        ("gpu", 59 << 30, None, 1, 2 << 30),  # of 79 GiB
        ("gpu", 71 << 30, "0.9", 1, 2 << 30),
        ("gpu", 30 << 30, None, 1, 1 << 30),
        ("gpu", 18 << 30, None, 1, 512 << 20),
        ("gpu", None, None, 1, 1 << 30),
        ("gpu", 59 << 30, None, 2, 1 << 30),
    ],
)
def test_a_budget_follows_the_memory(monkeypatch, platform, limit, share, processes, expected):
    """But what was asked for is taken."""
    stats = None if limit is None else {"bytes_limit": limit}
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    if share:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", share)
    target = device.Target(platform, "a card")
    assert device.chunk_bytes(None, target) == expected
    wide = device.chunk_bytes(None, target, 4 * 128_256, 4096)
    assert wide == min(expected, 1 << 30)
    assert device.chunk_bytes(100, target) == 100


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("TPU v5", 1 << 30),
        ("TPU v5 lite", 512 << 20),
        ("TPU v6 lite", 512 << 20),
        ("TPU of later", 1 << 30),
    ],
)
def test_a_tpu_s_budget_follows_its_kind(kind, expected):
    """Also ahead of time, of a topology that is not there."""
    absent = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=absent)
    array = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    targets = []
    jax.jit(lambda x: targets.append(device.target_of(x)) or x).trace(array)
    assert targets == [device.Target("tpu", kind)]
    assert device.chunk_bytes(None, targets[0]) == expected
    assert device.chunk_bytes(100, targets[0]) == 100
