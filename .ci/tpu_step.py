"""A whole training step for TPUs that are not there: memory of a device, and collectives.

    python .ci/tpu_step.py [--topology v5p:2x2x1] [--mesh fsdp] [--loss xentlib] [--out FILE]

A Llama of Flax NNX with AdamW, parameters in float32 and products in bfloat16, its layers in one
`lax.scan` under `jax.checkpoint`; the loss by xentlib's `NLLHead`, or by optax on full float32
logits. 8,192 tokens a chip, in rows of 2,048. `examples/flax_tpu.py` is a step of the same parts
that a user can copy. Nothing runs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tpu import GIB, Instruction, Program

from xentlib.jax import NLLHead

LENGTH, ROWS, QUERIES = 2048, 4, 256  # rows of a chip
AXES = ("data", "fsdp", "tensor")
TOKENS = ("data", "fsdp")
MESHES = {
    "v5p:2x2x1": {"data and fsdp": (2, 2, 1), "fsdp and tensor": (1, 2, 2)},
    "v5e:2x4": {"data and fsdp": (2, 4, 1), "fsdp and tensor": (1, 4, 2)},
}


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    vocab: int = 128_256


MODELS = {
    "v5p:2x2x1": Size(32, 4096, 32, 8, 14_336),  # Llama-3 8B
    "v5e:2x4": Size(16, 2048, 32, 8, 8192),  # Llama-3.2 1B, with a head of its own
}


class FullLogits(nnx.Linear):
    """Float32 logits and optax's loss."""

    def __call__(self, x: Any, labels: Any) -> Any:  # type: ignore[override]
        kernel = self.kernel[...].astype(x.dtype)
        logits = jnp.matmul(x, kernel, preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Llama(nnx.Module):
    def __init__(self, size: Size, loss: str, rngs: nnx.Rngs) -> None:
        def drawn(*axes: str | None) -> Any:
            return nnx.with_partitioning(nnx.initializers.normal(0.02), axes)

        def stack(n: int, m: int, *axes: str | None) -> nnx.Param[Any]:
            return nnx.Param(drawn(None, *axes)(rngs(), (size.layers, n, m), jnp.float32))

        self.size, width = size, size.width
        per_head = width // size.heads
        qkv = (size.heads + 2 * size.kv_heads) * per_head
        self.embedding = nnx.Embed(
            size.vocab, width, embedding_init=drawn("tensor", "fsdp"), rngs=rngs
        )
        self.qkv = stack(width, qkv, "fsdp", "tensor")
        self.out = stack(width, width, "tensor", "fsdp")
        self.gate = stack(width, size.inner, "fsdp", "tensor")
        self.up = stack(width, size.inner, "fsdp", "tensor")
        self.down = stack(size.inner, width, "tensor", "fsdp")
        self.norms = nnx.Param(jnp.ones((size.layers, 2, width)))
        self.norm = nnx.Param(jnp.ones(width))
        kind: Any = FullLogits if loss == "optax" else nnx.Linear
        self.head = kind(
            width, size.vocab, use_bias=False, dtype=jnp.bfloat16,
            kernel_init=drawn("fsdp", "tensor"), rngs=rngs,
        )  # fmt: skip
        if loss == "xentlib":
            self.head = NLLHead.from_linear(self.head, tokens=TOKENS)

    def __call__(self, ids: Any, labels: Any) -> Any:
        layers = [self.qkv, self.out, self.gate, self.up, self.down, self.norms]
        weights = [x[...].astype(jnp.bfloat16) for x in layers]
        x = spread(self.embedding.embedding[...].astype(jnp.bfloat16)[ids])
        x, _ = jax.lax.scan(jax.checkpoint(self.layer), x, weights)
        loss = self.head(rms(x, self.norm[...]), labels)
        return getattr(loss, "loss", loss)

    def layer(self, x: Any, weights: Any) -> Any:
        qkv, out, gate, up, down, norms = weights
        rows, length, width = x.shape
        heads, kv = self.size.heads, self.size.kv_heads
        y = (rms(x, norms[0]) @ qkv).reshape(rows, length, heads + 2 * kv, width // heads)
        q, k, v = turned(y[:, :, :heads]), turned(y[:, :, heads:-kv]), y[:, :, -kv:]
        x = spread(x + attention(q, k, v).reshape(x.shape) @ out)
        y = rms(x, norms[1])
        return spread(x + (jax.nn.silu(y @ gate) * (y @ up)) @ down), None


def spread(x: Any) -> Any:
    return jax.lax.with_sharding_constraint(x, P(TOKENS))


def rms(x: Any, scale: Any) -> Any:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def turned(x: Any) -> Any:
    """By rotary embeddings."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q: Any, k: Any, v: Any) -> Any:
    """In blocks of queries: all scores of a layer would take more memory than the head does."""
    length = q.shape[1]

    @jax.checkpoint
    def block(x: Any) -> Any:
        q, at = x
        mask = jnp.arange(length) <= at + jnp.arange(QUERIES)[:, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask[None, None])

    blocks = jnp.moveaxis(q.reshape(q.shape[0], -1, QUERIES, *q.shape[2:]), 1, 0)
    attended = jax.lax.map(block, (blocks, jnp.arange(0, length, QUERIES)))
    return jnp.moveaxis(attended, 0, 1).reshape(q.shape)


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: Llama, optimizer: Any, ids: Any, labels: Any) -> Any:
    loss, grads = nnx.value_and_grad(lambda model: model(ids, labels))(model)
    optimizer.update(model, grads)
    return loss


def compiled(topology: str, shape: tuple[int, ...], loss: str) -> Any:
    devices = topologies.get_topology_desc(topology, "tpu").devices
    mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)

    def create() -> Any:
        model = Llama(MODELS[topology], loss, nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.Param)

    with jax.set_mesh(mesh):
        model, optimizer = nnx.eval_shape(create)
        rows = NamedSharding(mesh, P(TOKENS))
        batch = jax.ShapeDtypeStruct((ROWS * len(devices), LENGTH), jnp.int32, sharding=rows)
        return train_step.lower(model, optimizer, batch, batch).compile()


# --- read ----------------------------------------------------------------------------------------

CALLED = re.compile(r"(?:calls|body|to_apply|called_computations)=\{?%([\w.\-]+)")
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def read(program: Any) -> dict[str, Any]:
    memory, text = program.memory_analysis(), Program(program.as_text())
    looped = {x.name for block in text.loops for x in inside(text, block)}
    found: dict[str, list[float]] = {}
    for one in (x for block in text.blocks.values() for x in block):
        kind = one.opcode.removesuffix("-start")
        if kind in KINDS and one.results:
            where = "in a loop" if one.name in looped else "once"
            row = found.setdefault(f"{kind}, {where}", [0, 0.0])
            row[0] += 1
            row[1] += max(x.bytes for x in one.results) / GIB
    return {
        "live_gib": round(memory.peak_memory_in_bytes / GIB, 2),
        "state_gib": round(memory.argument_size_in_bytes / GIB, 2),
        "temporary_gib": round(memory.temp_size_in_bytes / GIB, 2),
        "collectives": {k: [int(n), round(x, 3)] for k, (n, x) in sorted(found.items())},
    }


def inside(text: Program, block: list[Instruction]) -> list[Instruction]:
    """Instructions of a block and of all that it calls."""
    called = [text.blocks[name] for x in block for name in CALLED.findall(x.rest)]
    return [*block, *(x for one in called for x in inside(text, one))]


def main() -> int:
    new = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    new.add_argument("--topology", nargs="*", choices=MESHES, default=list(MESHES))
    new.add_argument("--loss", nargs="*", default=["xentlib", "optax"])
    new.add_argument("--mesh", nargs="*", default=["data and fsdp", "fsdp and tensor"])
    new.add_argument("--out", type=Path, help="a table that it is added to")
    new.add_argument("--text", type=Path)
    args = new.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    table = json.loads(args.out.read_text()) if args.out and args.out.is_file() else {}
    for topology in args.topology:
        for label in args.mesh:
            for loss in args.loss:
                start = time.process_time()
                program = compiled(topology, MESHES[topology][label], loss)
                seconds = round(time.process_time() - start, 1)
                if args.text:
                    args.text.with_suffix("." + loss).write_text(program.as_text())
                row = {"processor_s": seconds, **read(program)}
                key = f"{topology}, {label}, {loss}"
                print(key, json.dumps(row), flush=True)
                table.setdefault("steps", {})[key] = row
                if args.out:
                    args.out.write_text(json.dumps(table, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
