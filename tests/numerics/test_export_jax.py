"""Programs of JAX's functions lowered for devices that are not there: GPUs and TPUs, alone and with
the vocabulary over four of them.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

import re
from functools import partial

import pytest

jax = pytest.importorskip("jax")
pytestmark = [pytest.mark.jax, pytest.mark.cpu]

import jax.numpy as jnp  # noqa: E402
from jax import export  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from xentlib.jax import chunked_logprobs, chunked_nll, vocab_parallel_logprobs  # noqa: E402

N, H, V = 200, 24, 156
ROWS = 64  # of a chunk: four of them
OPTIONS = {"softcap": 20.0, "temperature": 1.3}


def nll(hidden, weight, labels, **how):
    return chunked_nll(hidden, weight, labels, z_loss=1e-3, label_smoothing=0.1, **how).loss


def logprobs(hidden, weight, labels, **how):
    out = chunked_logprobs(hidden, weight, labels, entropy=True, **how)
    return (out.logprobs - out.entropy).sum()


def given(hidden, weight, labels, **how):
    logits = hidden @ weight.T
    return vocab_parallel_logprobs(logits, labels, **how).logprobs.sum()


def absent(platform, devices):
    """A mesh of devices that are not there."""
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=None, platform=platform)
    types = (AxisType.Auto,)
    return jax.sharding.AbstractMesh((devices,), ("tp",), types, abstract_device=device)


def over_the_vocabulary(loss, mesh):
    specs = P(), P("tp"), P()

    def step(*arrays, **how):
        part = partial(loss, vocab_parallel="tp", **how)
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=P())(*arrays)

    return step, [NamedSharding(mesh, spec) for spec in specs]


# A function, its options, whether the head is over four devices, and the products of its program:
# of the head, without those of [T, T] that put a label's tokens together on a GPU.
CALLS = {
    "nll": (nll, OPTIONS, False, 3),
    "logprobs": (logprobs, OPTIONS, False, 4),
    "given logits": (given, {}, False, 3),
    "nll over shards": (nll, {}, True, 4),
    "logprobs over shards": (logprobs, {}, True, 4),
}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("name", CALLS)
def test_lowers_for_devices_that_are_not_there(name, platform):
    """Values and gradients in bf16, with one program for the loop; nothing of a CPU's in it: what
    the program is for is known by the mesh of its arguments."""
    loss, options, shards, products = CALLS[name]
    whole = V // 4 if shards else V
    options = options | {"max_chunk_bytes": ROWS * whole * 4}
    mesh = absent(platform, 4 if shards else 1)
    places = (NamedSharding(mesh, P()),) * 3
    if shards:
        loss, places = over_the_vocabulary(loss, mesh)

    def step(hidden, weight, labels):
        return jax.value_and_grad(loss, (0, 1))(hidden, weight, labels, **options)

    shapes = (((N, H), jnp.bfloat16), ((V, H), jnp.bfloat16), ((N,), jnp.int32))
    arguments = [
        jax.ShapeDtypeStruct(*shape, sharding=place)
        for shape, place in zip(shapes, places, strict=True)
    ]
    # A TPU's logits and an [H, V] gradient have a layout that the compiler would not choose.
    unguarded = [export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
    checks = {"disabled_checks": unguarded} if platform == "tpu" else {}
    exported = export.export(jax.jit(step), platforms=[platform], **checks)(*arguments)
    assert exported.platforms == (platform,)
    assert exported.nr_devices == (4 if shards else 1)
    text = exported.mlir_module()
    assert "stablehlo.while" in text
    operands = re.findall(r"stablehlo\.dot_general.* : \((.*?)\) -> tensor<(.*?)>", text)
    filled = whole + (0 if name == "given logits" else -whole % 128)
    columns = f"{filled}|{whole}" if platform == "tpu" else filled
    of_the_head = [
        (sides, result)
        for sides, result in operands
        if re.search(rf"\b({columns})\b", f"{sides} {result}".replace("x", " "))
    ]
    assert len(of_the_head) == products
    # Filled up on the way into products that make logits, and not into those of gradients. A shard
    # has as many columns, filled up, as a chunk has rows.
    if platform == "tpu" and filled > whole and not shards:
        assert sum(f"{filled}x" in f"{x}" for x in of_the_head) == products - 2
    if name != "given logits":
        assert all("f32" in result and "f32" not in sides for sides, result in of_the_head)
    targets = set(re.findall(r"custom_call @(\w+)", text))
    layouts = {"LayoutConstraint"} if platform == "tpu" and name != "given logits" else set()
    assert targets - layouts <= {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}
    assert targets >= layouts
