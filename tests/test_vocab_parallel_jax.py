"""Vocabularies spread over devices: `vocab_parallel=` inside `jax.shard_map` against the dense
answer, what the compiled programs hold, and sharded heads without it.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from helpers.hlo import collectives, entries, trip_counts
from helpers.vocab_shards import CASES, V, held, same_on_all_ranks
from xentlib import PaddedVocab, plan
from xentlib.contract import check, failures
from xentlib.parity.backends import GRADIENTS, run, run_logprobs
from xentlib.parity.findings import Findings
from xentlib.parity.problem import Case, Problem, build, upstream_of
from xentlib.parity.rows import sharded as parity_shards
from xentlib.parity.shards import run_calls
from xentlib.processes import launch

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.vocab_shards_jax import arguments, keywords, mesh_of, sharded, value, whole  # noqa: E402
from xentlib.jax import chunked_logprobs, chunked_nll  # noqa: E402
from xentlib.jax.ranks import vary  # noqa: E402

N, H = 221, 24
PLAIN, OPTIONS, KERNEL, LOW, NOTHING, WEIGHTS = (replace(case, tokens=N) for case in CASES)
EVEN = replace(PLAIN, id="even", vocab=156)
AUDIT = replace(OPTIONS, id="options-bf16", dtype="bfloat16")
KINDS = pytest.mark.parametrize("kind", ["nll", "logprobs"])


DENSE: dict[tuple, Any] = {}


def dense_of(p: Problem, kind: str, backend: str, *, audit: bool = False) -> Any:
    key = (p.text, kind, backend, audit)
    if key not in DENSE and kind == "nll":
        DENSE[key] = run(backend, p, audit=audit)
    elif key not in DENSE:
        DENSE[key] = run_logprobs(backend, p, upstream_of(p, 5), audit=audit)
    return DENSE[key]


def oracle_of(p: Problem, kind: str) -> Any:
    rounding = {"dz_dtype": "bfloat16" if p.hidden.dtype.itemsize == 2 else "float64"}
    if kind == "nll":
        return p.reference(**rounding)
    return p.per_token_reference(upstream_of(p, 5), **rounding)


def hold(p: Problem, kind: str, got: dict[str, Any], world: int = 0) -> None:
    """A0, A2, A5, A6, A7 for what one call gave; on one device the dense values to the bit."""
    low, oracle = p.hidden.dtype.itemsize == 2, oracle_of(p, kind)
    dense = dense_of(p, kind, "jax") if world == 1 else oracle
    for name, x in got.items():
        want = np.asarray(getattr(dense, name))
        if name == "weight_sum" and world != 1:
            assert not failures(check("A2", x, want, quantity=name))
        else:
            want = want.astype(x.dtype) if name in ("num_tokens", "correct", "predicted") else want
            held(name, x, want, oracle, low=low, world=world)


def called(x: Any) -> str | None:
    return x.id if isinstance(x, Case) else None


# (case, devices, rows of each, several chunks): even and not, a last device of padding alone.
GRID = (
    (PLAIN, 1, 157, True),
    (EVEN, 2, 78, True),
    (OPTIONS, 3, 79, False),
    (OPTIONS, 4, 40, True),
    (KERNEL, 4, 53, True),
    (LOW, 2, 79, False),
    (NOTHING, 4, 40, True),
    (WEIGHTS, 2, 79, True),
)


@KINDS
@pytest.mark.parametrize(("case", "devices", "rows", "chunks"), GRID, ids=called)
def test_shards_give_the_dense_answer(kind, case, devices, rows, chunks):
    """A0, A2, A5, A6, A7, A13, M1, M4, M8, M9. Catches: d hidden summed twice or not at
    all, a label on another device, label smoothing over one device's rows, padding that counts."""
    p = build(case, 7)
    got = sharded(p, kind, mesh_of(tp=devices), rows, chunks=chunks)
    hold(p, kind, got, world=devices)
    if case is NOTHING:
        assert not any(got[name].view(np.uint32).any() for name in ("d_hidden", "logprobs"))


@KINDS
@pytest.mark.parametrize(("case", "rows"), [(OPTIONS, 40), (KERNEL, 53)], ids=called)
def test_what_padding_holds_reaches_nothing(kind, case, rows):
    """A0, M4, M9: NaN and inf in rows that are no classes, as zeros there. Catches: 0
    times NaN in d hidden, or in a softcap's derivative."""
    p, mesh = build(case, 7), mesh_of(tp=4)
    zeros = sharded(p, kind, mesh, rows, fill=(0.0,))
    for name, got in sharded(p, kind, mesh, rows).items():
        assert not failures(check("A0", got, zeros[name], quantity=name))


ROADS = {
    "no types": {"check_vma": False},
    "gradient inside": {"inside": True},
    "two axes": {"over": ("a", "b"), "mesh": {"a": 2, "b": 2}},
    "remat": {"wrap": jax.checkpoint, "mesh": {"one": 1, "tp": 4}, "types": AxisType.Auto},
    "eager": {"jit": False, "types": AxisType.Auto},
}


# Once is enough for a call that compiles every operator by itself.
BOTH = [(k, road) for road in ROADS for k in ("nll", "logprobs") if (k, road) != ("nll", "eager")]


@pytest.mark.parametrize(("kind", "road"), BOTH)
def test_each_road_to_the_gradients(kind, road):
    """A2, A5, A6, D6: with and without types, inside and outside, under every kind of mesh.
    Catches: a sum that only one of them needs."""
    p, how = build(OPTIONS, 7), dict(ROADS[road])
    mesh = mesh_of(how.pop("types", None), **how.pop("mesh", {"tp": 4}))
    hold(p, kind, sharded(p, kind, mesh, 40, **how))


@KINDS
def test_a_gradient_inside_without_types_counts_the_devices(kind):
    """JAX's convention: each device has a loss of its own and the gradient is that of their sum.
    Ours is then P times d weight, and parts of P times d hidden."""
    mesh = mesh_of(tp=4)
    count = jax.grad(lambda x: jax.lax.psum(x, "tp"))
    one = jax.shard_map(count, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    assert float(one(jnp.float32(3))) == 4
    p = build(OPTIONS, 7)
    inputs, specs = arguments(p, kind, mesh, "tp", 160)
    body = partial(value, kind, PaddedVocab("tp", V), keywords(p, kind, 40, True))
    step = jax.shard_map(
        lambda *x: jax.grad(body, has_aux=True)(*x)[0],
        mesh=mesh, in_specs=specs, out_specs=(P("tp"), *specs[0][1:]), check_vma=False,
    )  # fmt: skip
    parts, d_weight, d_bias = (np.asarray(g) / 4 for g in jax.jit(step)(*inputs))
    d_hidden = parts.reshape(4, N, H).sum(axis=0)
    hold(p, kind, {"d_hidden": d_hidden, "d_weight": d_weight[:V], "d_bias": d_bias[:V]})


@KINDS
def test_bf16_without_types_rounds_each_part(kind):
    """A7: `shard_map` then sums d hidden itself, in its own dtype: a part is rounded before the sum
    (76 % correctly rounded), within A7's other bound. Everything else is as with types."""
    p = build(LOW, 7)
    got = sharded(p, kind, mesh_of(tp=4), 40, check_vma=False)
    d_hidden, o = got.pop("d_hidden"), oracle_of(p, kind)
    hold(p, kind, got)
    metrics = ["bf16 ULP unless cancelled"]
    found = check("A7", d_hidden, o.d_hidden, magnitude=o.magnitude_hidden, metrics=metrics)
    assert not failures(found)


@KINDS
@pytest.mark.parametrize("how", [{}, {"inside": True}, {"check_vma": False}], ids=str)
def test_tokens_over_a_second_axis(kind, how):
    """A5, A6, M5. Catches: d weight not summed over the data, or twice; a device without
    a valid token that waits for another, or has a gradient."""
    p = build(replace(OPTIONS, tokens=220, options=OPTIONS.options | {"denominator": 97.0}), 7)
    p = p.changed(labels=np.where(np.arange(220) < 110, -100, p.labels).astype(np.int32))
    got = sharded(p, kind, mesh_of(data=2, tp=2), 79, data="data", **how)
    hold(p, kind, got)
    assert not got["d_hidden"][:110].view(np.uint32).any()


@pytest.mark.parametrize("check_vma", [True, False], ids=["types", "no types"])
def test_scan_over_micro_batches(check_vma):
    """A12, M15: four micro-batches in one `lax.scan` with remat are one batch."""
    p = build(replace(PLAIN, tokens=220, options={"denominator": 97.0}), 7)
    mesh = mesh_of(tp=2)
    inputs, specs = arguments(p, "nll", mesh, "tp", 158)

    def window(leaves, rest):
        def body(carry, batch):
            out = chunked_nll(
                batch[0], leaves[1], batch[1], bias=leaves[2], denominator=97.0,
                vocab_parallel=PaddedVocab("tp", V),
            )  # fmt: skip
            return carry + out.loss, None

        batches = (leaves[0].reshape(4, 55, H), rest["labels"].reshape(4, 55))
        return rest["upstream"] * jax.lax.scan(jax.checkpoint(body), jnp.float32(0), batches)[0]

    spread = jax.shard_map(window, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    d_hidden, d_weight, d_bias = map(np.asarray, jax.jit(jax.grad(spread))(*inputs))
    o = p.reference()
    found = check("A12", d_hidden, o.d_hidden, o.bound_hidden)
    found += check("A12", d_weight[:V], o.d_weight, o.bound_weight)
    assert not failures(found + check("A12", d_bias[:V], o.d_bias, o.bound_bias))


@KINDS
@pytest.mark.parametrize(
    ("case", "devices", "rows"),
    [(EVEN, 2, 78), (OPTIONS, 3, 79), (AUDIT, 4, 40)],
    ids=called,
)
def test_audit_mode_does_not_know_of_shards(kind, case, devices, rows):
    """A1, A13: in float64 the shards' sums round to the bits of the dense call, in JAX and in
    PyTorch."""
    p = build(case, 7)
    got = sharded(p, kind, mesh_of(tp=devices), rows, audit=True)
    for backend in ("jax", "torch"):
        pytest.importorskip(backend)
        dense = dense_of(p, kind, backend, audit=True)
        for name, x in got.items():
            # Counts are int32 in JAX, int64 in PyTorch.
            want = np.asarray(getattr(dense, name)).astype(x.dtype)
            assert not failures(check("A1", x, want, quantity=name, backend=backend))


# ---------------------------------------------------------------------------------
# The compiled program


def test_chunks_do_not_show_over_shards():
    """A10, of the parity run's calls."""
    calls = parity_shards.chunked_calls("jax", 7)
    findings = Findings(("jax",))
    parity_shards.chunked(findings, "jax", calls, run_calls("jax", calls))
    assert findings.measurements
    assert not failures(findings.measurements)


@KINDS
@pytest.mark.parametrize("chunks", [1, 8, 64])
def test_collectives_and_buffers(kind, chunks):
    """D7, M6, M16: one MAX, one packed SUM, one SUM of d hidden whatever the
    chunks, none of them in a loop; no buffer of [N, V / P]."""
    tokens, width, columns = 4096, 24, 512
    mesh = mesh_of(tp=4)

    def abstract(spec, *shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    leaves = (abstract(P(), tokens, width), abstract(P("tp"), 2048, width), abstract(P("tp"), 2048))
    rest = {"labels": abstract(P(), tokens, dtype="int32")}
    rest["upstream"] = abstract(P(), *(() if kind == "nll" else (3, tokens)))
    options = {"max_chunk_bytes": tokens // chunks * columns * 4}
    spread = jax.shard_map(
        partial(value, kind, "tp", options), mesh=mesh,
        in_specs=((P(), P("tp"), P("tp")), P()), out_specs=P(),
    )  # fmt: skip
    step = jax.jit(jax.value_and_grad(spread, has_aux=True))
    text = step.lower(leaves, rest).compile().as_text()
    # The predicted class is one number more a token and device.
    packed = "f32[8,4096]" if kind == "nll" else "f32[4,4096]"
    expected = (("add", packed), ("add", "f32[4096,24]"), ("maximum", "f32[4096]"))
    assert collectives(text) == sorted((*one, False) for one in expected)
    if chunks > 1:
        assert max(entries(text)) <= tokens * columns // 8


@pytest.mark.parametrize("check_vma", [True, False])
def test_d_hidden_is_summed_once_with_sequence_parallelism(check_vma):
    """A5, M9: hidden states in slices of the sequence over the vocabulary's own axis,
    gathered before the head. Catches: a sum of ours on top of the one that undoes the gather."""
    p, mesh = build(replace(EVEN, tokens=220), 7), mesh_of(tp=4)
    (leaves, rest), (leaf_specs, specs) = arguments(p, "nll", mesh, "tp", 156)
    body = partial(value, "nll", "tp", keywords(p, "nll", 39, True))

    def gathering(leaves, rest):
        hidden = jax.lax.all_gather(leaves[0], "tp", axis=0, tiled=True)
        return body((hidden, *leaves[1:]), rest)

    spread = jax.shard_map(
        gathering, mesh=mesh, in_specs=((P("tp"), *leaf_specs[1:]), specs), out_specs=P(),
        check_vma=check_vma,
    )  # fmt: skip
    leaves = (jax.device_put(p.hidden, NamedSharding(mesh, P("tp"))), *leaves[1:])
    step = jax.jit(jax.value_and_grad(spread, has_aux=True))
    (_, out), gradients = step(leaves, rest)
    hold(p, "nll", {k: whole(x) for k, x in (out | dict(zip(GRADIENTS, gradients))).items()})
    text = step.lower(leaves, rest).compile().as_text()
    assert not [c for c in collectives(text) if c.kind == "add" and "f32[220,24]" in c.types]


@pytest.mark.parametrize("check_vma", [True, False])
def test_statistics_in_every_chunk_spare_a_gemm(monkeypatch, check_vma):
    """A2, A5, A6, D7: the plan's other choice, one MAX and one SUM in the loop and three
    GEMMs. Catches: statistics of other tokens, a loss that varies by type, as many exchanges as a
    device has chunks of valid tokens."""
    monkeypatch.setitem(plan.EXCHANGE_FLOPS, "cpu", 0.0)
    jax.clear_caches()
    p, mesh = build(OPTIONS, 7), mesh_of(tp=4)
    got = sharded(p, "nll", mesh, 40, check_vma=check_vma)
    hold(p, "nll", got)
    inputs, specs = arguments(p, "nll", mesh, "tp", 160)
    body = partial(value, "nll", PaddedVocab("tp", V), keywords(p, "nll", 40, True))
    spread = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    step = jax.jit(jax.value_and_grad(spread, has_aux=True))
    text = step.lower(*inputs).compile().as_text()
    jax.clear_caches()
    assert [c.kind for c in collectives(text) if c.looped] == ["add", "maximum"]
    assert trip_counts(text) == [4]


GSPMD = (
    ("nll", {"tp": 4}, AxisType.Auto),
    ("logprobs", {"tp": 4}, AxisType.Auto),
    ("nll", {"data": 2, "tp": 2}, AxisType.Auto),
    ("logprobs", {"data": 2, "tp": 2}, AxisType.Explicit),
)


@pytest.mark.parametrize(("kind", "axes", "types"), GSPMD, ids=str)
def test_a_sharded_head_outside_shard_map(kind, axes, types):
    """A2, A5, A6, D7: GSPMD given a head sharded over its vocabulary. Catches: a compiler that
    gathers or sums logits. With Explicit axes we place the call ourselves, but for `auto_axes`."""
    p = build(replace(EVEN, tokens=220), 7)
    mesh = mesh_of(types, **axes)
    inputs, _ = arguments(p, kind, mesh, "tp", 156, "data" if "data" in axes else None)
    body = partial(value, kind, None, keywords(p, kind, 156, True))
    if types is AxisType.Explicit:
        body = jax.sharding.auto_axes(body, out_sharding=NamedSharding(mesh, P()))
    step = jax.jit(jax.value_and_grad(body, has_aux=True)).lower(*inputs).compile()
    (_, out), gradients = step(*inputs)
    got = {name: whole(x) for name, x in (out | dict(zip(GRADIENTS, gradients))).items()}
    hold(p, kind, got)
    found = collectives(step.as_text())
    shard = 64 * 156 // axes["tp"]
    assert any(one.looped for one in found)  # what every chunk has to sum: rows of it
    assert max(size for one in found for size in entries(one.types)) < shard


# ---------------------------------------------------------------------------------
# Processes, and what is refused


def process(rank: int, world: int, folder: str, port: str) -> dict[str, Any]:
    """One of two processes, with two of the four devices."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=world, process_id=rank)
    # No NaN: `device_put` asserts that the processes' arrays are equal.
    found = {
        kind: sharded(build(OPTIONS, 7), kind, mesh_of(tp=4), 40, fill=(np.inf,))
        for kind in ("nll", "logprobs")
    }
    jax.distributed.shutdown()
    return found


def test_two_processes():
    """A2, A5, A6, A13: a vocabulary over the devices of two processes, the same on both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    flags = "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=2"
    ranks = launch(process, 2, port, seconds=600, environment={"XLA_FLAGS": flags})
    for kind in ("nll", "logprobs"):
        found = [rank[kind] for rank in ranks]
        got = {name: same_on_all_ranks([x[name] for x in found]) for name in found[0]}
        hold(build(OPTIONS, 7), kind, got)


EIGHT = """
from helpers.vocab_shards_jax import mesh_of, sharded
from test_vocab_parallel_jax import OPTIONS, build, hold
for kind in ("nll", "logprobs"):
    hold(build(OPTIONS, 7), kind, sharded(build(OPTIONS, 7), kind, mesh_of(tp=8), 20))
print("held")
"""


def test_eight_devices():
    """A2, A5, A6, A13: JAX counts its host devices once, so eight need a process of their own."""
    flags = "--xla_allow_excess_precision=false --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-c", EIGHT],
        env={**os.environ, "XLA_FLAGS": flags},
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "held\n", done.stderr


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


# What devices must have alike, as device 1 gets it: where its arrays are, and what is done to them.
DIFFERENT = {
    "slices of the sequence": (P("tp"), lambda x, y, t, rank: (x, y, t)),
    "labels": (P(), lambda x, y, t, rank: (x, (y + rank) % 20, t)),
    "which labels count": (P(), lambda x, y, t, rank: (x, jnp.where(y == rank, -100, y), t)),
    "hidden": (P(), lambda x, y, t, rank: (jnp.roll(x, rank, 0), y, t)),
    "temperature": (P(), lambda x, y, t, rank: (x, y, t + 0.1 * rank.astype(t.dtype))),
}


@KINDS
@pytest.mark.parametrize("check_vma", [True, False])
def test_what_differs_between_devices_is_nan(kind, check_vma):
    """A13. Catches: a gather forgotten under sequence parallelism, labels of another batch. What
    was gathered, and varies by type, or was rounded once more, is right."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (64, 16)), jax.random.normal(keys[1], (20, 16))
    y, t = jax.random.randint(keys[2], (64,), 0, 20), jnp.linspace(0.5, 2.0, 64)
    mesh = mesh_of(AxisType.Auto, tp=2)

    def of(change, spec):
        def call(x, w, y, t):
            x, y, t = change(x, y, t, jax.lax.axis_index("tp"))
            options = {"temperature": t, "vocab_parallel": "tp"}
            if kind == "nll":
                value = chunked_nll(x, w, y, **options).loss
            else:
                value = -chunked_logprobs(x, w, y, **options).logprobs.mean()
            return vary(value[None], frozenset({"tp"} if check_vma else ()))

        specs = (spec, P("tp"), spec, spec)
        run = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P("tp"), check_vma=check_vma)
        first, second = jax.jit(run)(x, w, y, t)
        assert first == second or np.isnan([first, second]).all()
        return float(first)

    for name, (spec, change) in DIFFERENT.items():
        assert np.isnan(of(change, spec)), name

    def gathered(x, y, t, rank):
        return (jax.lax.all_gather(one, "tp", tiled=True) for one in (x, y, t))

    def rounded(x, y, t, rank):
        return jnp.where(rank == 0, x, x.astype(jnp.bfloat16).astype(x.dtype)), y, t

    dense = chunked_nll(x, w, y, temperature=t).loss
    scale = np.float64(1.0)
    assert not failures(check("A2", of(gathered, P("tp")), np.float64(dense), magnitude=scale))
    assert np.isfinite(of(rounded, P()))


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
    hold(p, kind, {"d_hidden": hidden, "correct": got["correct"]})
