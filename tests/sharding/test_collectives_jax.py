"""`count_collectives` in JAX against programs whose collectives are known, and against the text of
programs that a CPU does not make."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from xentlib import collectives as spec
from xentlib.budgets import check_budget
from xentlib.collectives import Collective
from xentlib.contract import failures

jax = pytest.importorskip("jax")
pytestmark = pytest.mark.jax

import jax.numpy as jnp  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from helpers.mesh_jax import mesh_of  # noqa: E402
from xentlib.jax import count_collectives  # noqa: E402
from xentlib.jax.collectives import operations  # noqa: E402

FOUR = [(i, (i + 1) % 4) for i in range(4)]


def spread(body, **how):
    """`body` on each device's [4, 8] of an array."""
    specs = {"in_specs": P("d"), "out_specs": P("d"), "check_vma": False} | how
    return jax.jit(jax.shard_map(body, mesh=mesh_of(d=4), **specs))


def in_a_loop(x):
    return lax.fori_loop(0, 3, lambda _, carry: 0.5 * lax.psum(carry, "d"), x)


# A float32 [4, 8] on each device is 128 bytes, [16, 8] is 512.
KNOWN = {
    "psum": (lambda x: lax.psum(x, "d"), [Collective("all_reduce", 128)]),
    "pmax": (lambda x: lax.pmax(x, "d"), [Collective("all_reduce", 128)]),
    "two in one": (
        lambda x: jnp.concatenate([lax.psum(x, "d"), lax.psum(2 * x[:1], "d")]),
        [Collective("all_reduce", 160)],
    ),
    "all_gather": (
        lambda x: lax.all_gather(x, "d", tiled=True),
        [Collective("all_gather", 512)],
    ),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "d", tiled=True),
        [Collective("reduce_scatter", 128)],
    ),
    "all_to_all": (
        lambda x: lax.all_to_all(x, "d", 0, 1, tiled=True),
        [Collective("all_to_all", 128)],
    ),
    "ppermute": (lambda x: lax.ppermute(x, "d", FOUR), [Collective("permute", 128)]),
    "bool": (
        lambda x: lax.all_gather(x > 0, "d", tiled=True),
        [Collective("all_gather", 128)],
    ),
    "loop": (in_a_loop, [Collective("all_reduce", 128, looped=True)]),
    "in and out": (
        lambda x: in_a_loop(lax.all_gather(x, "d", tiled=True)),
        [Collective("all_gather", 512), Collective("all_reduce", 512, looped=True)],
    ),
    "none": (lambda x: x + 1, []),
}


@pytest.fixture
def x():
    return jax.device_put(
        jnp.arange(128, dtype=jnp.float32).reshape(16, 8),
        jax.sharding.NamedSharding(mesh_of(d=4), P("d")),
    )


@pytest.mark.parametrize("name", KNOWN)
def test_known_programs(name, x):
    """D7: kind, bytes and loop of each; a program run twice counts once. Catches: operand bytes
    for an all-gather, result bytes for a reduce-scatter, one operand of several."""
    body, want = KNOWN[name]
    step = spread(body)
    with count_collectives() as count:
        first = step(x)
        second = step(x)
    assert np.array_equal(first, second)
    assert sorted(count.found) == sorted(want)
    assert count.bytes() == sum(one.bytes for one in want)
    assert len(count.looped()) == sum(one.looped for one in want)


def test_what_a_block_counts(x):
    """A program from before the block counts when the block runs it, and not when it does not; a
    function that is gone before the block ends counts, and so does one that is only compiled."""
    step, other = spread(KNOWN["psum"][0]), spread(KNOWN["all_gather"][0])
    step(x), other(x)
    ahead = other.lower(x).compile()  # is alive
    with count_collectives() as count:
        assert len(count) == 0
        step(x)
    assert count.counts() == {"all_reduce": 1}
    with count_collectives() as count:
        spread(KNOWN["ppermute"][0])(x)
        other.lower(x).compile()
        jax.clear_caches()
    assert count.counts() == {"all_gather": 1, "permute": 1}
    step(x)
    assert count.counts() == {"all_gather": 1, "permute": 1}
    ahead(x)


def test_an_exception_leaves_no_listener(x):
    """The count is there, and what follows is not counted."""
    block = count_collectives()
    count = block.__enter__()
    spread(KNOWN["psum"][0])(x)
    assert not block.__exit__(RuntimeError, RuntimeError("stop"), None)
    del block
    jax.clear_caches()
    alive = jax.devices()[0].client.live_executables
    before = len(alive())
    spread(KNOWN["all_gather"][0])(x)
    assert count.counts() == {"all_reduce": 1}
    jax.clear_caches()
    assert len(alive()) <= before  # a listener would have kept them


def test_the_docstring_is_the_definition_s():
    assert inspect.getdoc(count_collectives) == inspect.getdoc(spec.count_collectives)


# As XLA prints them for accelerators: asynchronous pairs, whose first half has a tuple of operands
# and results, and comments in long tuples.
ELSEWHERE = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %x = bf16[4,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %ag = (bf16[4,8]{1,0:T(8,128)}, bf16[16,8]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}
  %done = bf16[16,8]{1,0} all-gather-done(%ag)
}

ENTRY %main (x: f32[16,8]) -> f32[4,8] {
  %x.1 = f32[16,8]{1,0} parameter(0)
  %y.1 = f32[4]{0} fusion(%x.1), kind=kLoop, calls=%fused
  %ar = f32[16,8]{1,0} all-reduce-start(%x.1), replica_groups=[1,4]<=[4], to_apply=%add
  %ar.1 = f32[16,8]{1,0} all-reduce-done(%ar)
  %two = (f32[16,8]{1,0}, /*index=1*/f32[4]{0}) all-reduce-start(%x.1, %y.1), to_apply=%add
  %two.1 = (f32[16,8]{1,0}, f32[4]{0}) all-reduce-done(%two)
  %rs = ((f32[16,8]{1,0}), f32[4,8]{1,0}) reduce-scatter-start(%x.1), to_apply=%add
  %rs.1 = f32[4,8]{1,0} reduce-scatter-done(%rs)
  %many = ((f32[4]{0}, s4[3]{0}), (f32[16]{0}, s4[12]{0})) all-gather-start(%y.1, %z)
  %cp = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%y.1)
  %cb = f32[4]{0} collective-broadcast(%y.1), replica_groups={}
  %loop = (s32[], bf16[4,8]) while(%t), condition=%stop, body=%body
  ROOT %out = f32[4,8]{1,0} reduce-scatter(%x.1), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""


def test_asynchronous_ones_count_once():
    """Catches: a pair that counts twice, operands added to results, a layout taken for a block."""
    found = [(x.opcode, x.reduces, x.bytes, x.looped) for x in operations(ELSEWHERE)]
    assert found == [
        ("all-gather", "", 256, True),
        ("all-reduce", "add", 512, False),
        ("all-reduce", "add", 528, False),
        ("reduce-scatter", "add", 512, False),
        ("all-gather", "", 70, False),
        ("collective-permute", "", 16, False),
        ("collective-broadcast", "", 16, False),
        ("reduce-scatter", "add", 512, False),
    ]


def test_a_count_is_held_to_the_budget(x):
    """A15: `counts()` is what `check_budget` takes."""
    with count_collectives() as count:
        spread(lambda x: lax.psum_scatter(lax.all_gather(x, "d", tiled=True), "d", tiled=True))(x)
    assert not failures(check_budget("JAX, data axis", [{}], [count.counts()]))
    assert failures(check_budget("plain", [{}], [count.counts()]))
