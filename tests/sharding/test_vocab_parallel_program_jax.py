"""Vocabularies spread over devices: the collectives and buffers of compiled programs, and sharded
heads outside of `jax.shard_map`.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from helpers.vocab_shards import V
from xentlib import PaddedVocab
from xentlib.plan import split, sum_rows
from xentlib.tools.harness.backends import GRADIENTS
from xentlib.tools.harness.problems import build

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.hlo import collectives, entries, trip_counts  # noqa: E402
from helpers.mesh_jax import mesh_of  # noqa: E402
from helpers.vocab_shards_jax import (  # noqa: E402
    EVEN,
    KINDS,
    OPTIONS,
    arguments,
    hold_shards,
    keywords,
    sharded,
    value,
    whole,
)


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
    rows = sum_rows(4, entropy=True, more=4 if kind == "nll" else 0)
    packed = f"f32[{rows},4096]"
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
    hold_shards(p, "nll", {k: whole(x) for k, x in (out | dict(zip(GRADIENTS, gradients))).items()})
    text = step.lower(leaves, rest).compile().as_text()
    assert not [c for c in collectives(text) if c.kind == "add" and "f32[220,24]" in c.types]


@pytest.mark.optimized
@pytest.mark.parametrize("check_vma", [True, False])
def test_statistics_in_every_chunk_spare_a_gemm(monkeypatch, check_vma):
    """A2, A5, A6, D7: the plan's other choice, one MAX and one SUM in the loop and three
    GEMMs. Catches: statistics of other tokens, a loss that varies by type, as many exchanges as a
    device has chunks of valid tokens."""
    monkeypatch.setitem(split.EXCHANGE_FLOPS, "cpu", 0.0)
    jax.clear_caches()
    p, mesh = build(OPTIONS, 7), mesh_of(tp=4)
    got = sharded(p, "nll", mesh, 40, check_vma=check_vma)
    hold_shards(p, "nll", got)
    inputs, specs = arguments(p, "nll", mesh, "tp", 160)
    body = partial(value, "nll", PaddedVocab("tp", V), keywords(p, "nll", 40, True))
    spread = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    step = jax.jit(jax.value_and_grad(spread, has_aux=True))
    text = step.lower(*inputs).compile().as_text()
    jax.clear_caches()
    assert [c.kind for c in collectives(text) if c.looped] == ["add", "maximum"]
    assert trip_counts(text) == [3]  # of 104 rows of 40 columns: 4,096 entries


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
    vocab = 1024  # whole blocks of columns on a device: others have neighbours' columns sent
    p = build(replace(EVEN, tokens=220, vocab=vocab), 7)
    mesh = mesh_of(types, **axes)
    inputs, _ = arguments(p, kind, mesh, "tp", vocab, "data" if "data" in axes else None)
    body = partial(value, kind, None, keywords(p, kind, vocab, True))
    if types is AxisType.Explicit:
        body = jax.sharding.auto_axes(body, out_sharding=NamedSharding(mesh, P()))
    step = jax.jit(jax.value_and_grad(body, has_aux=True)).lower(*inputs).compile()
    (_, out), gradients = step(*inputs)
    results = out | dict(zip(GRADIENTS, gradients))
    got = {name: whole(x) for name, x in results.items() if x is not None}
    hold_shards(p, kind, got)
    found = collectives(step.as_text())
    shard = 64 * vocab // axes["tp"]
    assert any(one.looped for one in found)  # what every chunk has to sum: rows of it
    assert max(size for one in found for size in entries(one.types)) < shard
