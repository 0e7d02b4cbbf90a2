"""Flax Linen on a mesh that shards tokens and head: `LinenNLLHead` and xentlib's `TrainState`.

    python examples/flax_linen_mesh.py
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/flax_linen_mesh.py

The mesh has the devices that there are; `XLA_FLAGS` of the second line makes four of a CPU. Needs
`pip install 'xentlib[flax]'`. The lines to add or to change end in `# xentlib`.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from xentlib.jax import LinenNLLHead, next_token_labels  # xentlib
from xentlib.jax.integrations.flax import TrainState  # xentlib

VOCAB, LENGTH, BATCH, ACCUMULATE, STEPS = 512, 64, 8, 2, 10


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids, labels):
        x = nn.Embed(VOCAB, 64)(ids)
        x = x + nn.Dense(64)(jax.nn.silu(nn.Dense(256)(x)))
        init = nn.with_partitioning(nn.initializers.normal(0.02), ("data", None))
        head = LinenNLLHead(VOCAB, use_bias=False, kernel_init=init, tokens="data")  # xentlib
        return head(x, labels, reduction="sum")  # xentlib


@jax.jit
def micro_step(state, ids, labels, is_last):
    def loss_sum(params):
        out = state.apply_fn({"params": params}, ids, labels)
        return out.loss, out  # xentlib

    grads, out = jax.grad(loss_sum, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads, token_count=out, is_last=is_last)  # xentlib
    return state, out.loss / out.num_tokens


mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
model, tokens = Model(), NamedSharding(mesh, PartitionSpec("data"))
with jax.set_mesh(mesh):
    ids = jax.device_put(np.zeros((BATCH, LENGTH), int), tokens)
    boxed = jax.jit(model.init)(jax.random.key(0), ids, ids)["params"]
    params = jax.device_put(nn.unbox(boxed), nn.get_sharding(boxed, mesh))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))  # xentlib
    for step in range(STEPS):
        # Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding.
        rng = np.random.default_rng(step)
        ids = (rng.integers(VOCAB, size=(ACCUMULATE, BATCH, 1)) + 3 * np.arange(LENGTH)) % VOCAB
        padding = np.arange(LENGTH) >= rng.integers(2, LENGTH, size=(ACCUMULATE, BATCH, 1))
        labels = next_token_labels(np.where(padding, -100, ids))  # xentlib
        for k in range(ACCUMULATE):
            batch = jax.device_put((ids[k], labels[k]), tokens)
            state, loss = micro_step(state, *batch, k == ACCUMULATE - 1)
        print(f"step {step}   loss of the last micro-batch {loss:.3f}")
