"""MaxText's loss on a mesh: xentlib's `vocab_tiling_nnx_loss` in place of MaxText's.

    python examples/maxtext_style.py
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/maxtext_style.py

The model has the parts of MaxText's that the loss reads; MaxText itself is not needed. `XLA_FLAGS`
makes four devices of a CPU. Needs `pip install 'xentlib[flax]'`. The lines to add or to change end
in `# xentlib`.
"""

from types import SimpleNamespace

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

from xentlib.jax.integrations.maxtext import vocab_tiling_nnx_loss  # xentlib

VOCAB, LENGTH, BATCH, STEPS, AXES = 512, 64, 8, 10, ("data", "fsdp", "tensor")
RULES = (("activation_embed_and_logits_batch", ("data", "fsdp")), ("vocab", ("tensor",)))
CONFIG = SimpleNamespace(logits_via_embedding=False, enable_dropout=False, logical_axis_rules=RULES)
CONFIG.z_loss_multiplier = 1e-4


class Transformer(nnx.Module):
    def __init__(self, mesh, rngs):
        self.mesh, self.token_embedder = mesh, nnx.Embed(VOCAB, 64, rngs=rngs)
        self.decoder = decoder = nnx.Module()
        decoder.decoder_norm, decoder.dropout = nnx.RMSNorm(64, rngs=rngs), nnx.Dropout(0.0)
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), (None, "tensor"))
        decoder.logits_dense = nnx.Linear(64, VOCAB, use_bias=False, kernel_init=init, rngs=rngs)
        decoder.logits_dense.quant, decoder.logits_dense.dtype = None, np.float32

    def __call__(self, ids):
        return self.token_embedder(ids)  # hidden states: the loss has the last norm and the head


@nnx.jit
def train_step(model, optimizer, data):
    def mean_loss(model):
        loss, _ = vocab_tiling_nnx_loss(model, model(data["inputs"]), data, CONFIG, True)  # xentlib
        return loss / (data["targets_segmentation"] != 0).sum()

    loss, grads = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, grads)
    return loss


mesh = jax.make_mesh((1, 1, jax.device_count()), AXES, axis_types=(AxisType.Auto,) * 3)
with jax.set_mesh(mesh):
    model = Transformer(mesh, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    for step in range(STEPS):
        # Rows of tokens that go up by 3; a segmentation of 0 is padding.
        rng = np.random.default_rng(step)
        ids = (rng.integers(VOCAB, size=(BATCH, 1)) + 3 * np.arange(LENGTH + 1)) % VOCAB
        segments = (np.arange(LENGTH) < rng.integers(2, LENGTH, size=(BATCH, 1))).astype(int)
        data = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "targets_segmentation": segments}
        loss = train_step(model, optimizer, data)
        print(f"step {step}   loss {loss:.3f}")
