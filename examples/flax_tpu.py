"""Flax NNX on a TPU's mesh: trained there, or compiled for chips that are not there.

    python examples/flax_tpu.py
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TOPOLOGY=v5p:2x2x1 python examples/flax_tpu.py
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/flax_tpu.py

With `TOPOLOGY` it compiles the step for these chips, on any machine with `pip install libtpu`, and
prints the memory of each. `XLA_FLAGS` makes four devices of a CPU. Needs
`pip install 'xentlib[flax]'`. The lines to add or to change end in `# xentlib`.
"""

import os

import jax
import numpy as np
import optax
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xentlib.jax import NLLHead, next_token_labels  # xentlib

VOCAB, LENGTH, BATCH, STEPS, AXES = 512, 64, 8, 10, ("data", "fsdp", "tensor")


class Model(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), ("fsdp", "tensor"))
        self.embedding = nnx.Embed(VOCAB, 64, embedding_init=init, rngs=rngs)
        self.layer = nnx.Linear(64, 64, kernel_init=init, rngs=rngs)
        head = nnx.Linear(64, VOCAB, use_bias=False, kernel_init=init, rngs=rngs)
        self.head = NLLHead.from_linear(head, tokens=("data", "fsdp"))  # xentlib

    def __call__(self, ids, labels):
        return self.head(jax.nn.silu(self.layer(self.embedding(ids))), labels).loss  # xentlib


@nnx.jit(donate_argnums=(0, 1))
def train_step(model, optimizer, ids, labels):
    loss, grads = nnx.value_and_grad(lambda model: model(ids, labels))(model)
    optimizer.update(model, grads)
    return loss


def create():
    model = Model(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


topology = os.environ.get("TOPOLOGY")
devices = topologies.get_topology_desc(topology, "tpu").devices if topology else jax.devices()
shape = (1, max(1, len(devices) // 2), min(2, len(devices)))
mesh = jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)
tokens = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
with jax.set_mesh(mesh):
    model, optimizer = nnx.eval_shape(create) if topology else nnx.jit(create)()
    if topology:
        ids = jax.ShapeDtypeStruct((BATCH, LENGTH), np.int32, sharding=tokens)
        print(train_step.lower(model, optimizer, ids, ids).compile().memory_analysis())
    for step in range(0 if topology else STEPS):
        # Rows of tokens that go up by 3.
        ids = np.random.default_rng(step).integers(VOCAB, size=(BATCH, 1)) + 3 * np.arange(LENGTH)
        batch = jax.device_put((ids % VOCAB, next_token_labels(ids % VOCAB)), tokens)  # xentlib
        print(f"step {step}   loss {train_step(model, optimizer, *batch):.3f}")
