"""Flax NNX: xentlib's `Optimizer` in place of `nnx.Optimizer`, and a sum of losses.

    python examples/flax_nnx.py

Each step's gradient is that of the mean over all its tokens, of all micro-batches. Needs
`pip install 'xentlib[flax]'`. The lines to add or to change end in `# xentlib`.
"""

import jax
import numpy as np
import optax
from flax import nnx

from xentlib.jax import chunked_nll, next_token_labels  # xentlib
from xentlib.jax.integrations.flax import Optimizer  # xentlib

VOCAB, LENGTH, BATCH, ACCUMULATE, STEPS = 512, 64, 8, 4, 10


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCAB, 64, rngs=rngs)  # of tokens, and the head
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, ids):
        x = self.embedding(ids)
        return x + self.down(jax.nn.silu(self.up(x)))  # hidden states, without head  # xentlib


@nnx.jit
def micro_step(model, optimizer, ids, labels, is_last):
    def loss_sum(model):
        out = chunked_nll(model(ids), model.embedding, labels, reduction="sum")  # xentlib
        return out.loss, out  # xentlib

    (loss, out), grads = nnx.value_and_grad(loss_sum, has_aux=True)(model)
    optimizer.update(model, grads, token_count=out, is_last=is_last)  # xentlib
    return loss / out.num_tokens


model = Model(nnx.Rngs(0))
optimizer = Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)  # xentlib
for step in range(STEPS):
    # Rows of tokens that go up by 3; the labels are the next tokens, -100 in the padding.
    rng = np.random.default_rng(step)
    ids = (rng.integers(VOCAB, size=(ACCUMULATE, BATCH, 1)) + 3 * np.arange(LENGTH)) % VOCAB
    padding = np.arange(LENGTH) >= rng.integers(2, LENGTH, size=(ACCUMULATE, BATCH, 1))
    labels = next_token_labels(np.where(padding, -100, ids))  # xentlib
    for k in range(ACCUMULATE):
        loss = micro_step(model, optimizer, ids[k], labels[k], k == ACCUMULATE - 1)
    print(f"step {step}   loss of the last micro-batch {loss:.3f}")
