"""Flax NNX with `Optimizer`, in windows of micro-batches, without logits.

    python examples/flax_nnx.py

A small model with a tied head is trained on rows of uneven lengths. The change of the parameters
under SGD in the first step is compared with full logits on one batch. Ten seconds on two cores;
needs `pip install 'xentlib[flax]'`. Lines marked `# xentlib` are those to add or to
change; `--full-logits` trains with optax's loss of all logits.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.flatten_util import ravel_pytree

from xentlib.jax import chunked_nll, next_token_labels  # xentlib
from xentlib.jax.integrations.flax import Optimizer  # xentlib

HIDDEN, ROWS, ACCUMULATE, RATE = 64, 8, 4, 4.0


class Model(nnx.Module):
    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(vocab, HIDDEN, rngs=rngs)
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Hidden states, for `self.embedding.attend` or `chunked_nll`."""
        x: jax.Array = self.embedding(ids)
        return self.norm(x + self.down(jax.nn.silu(self.up(x)))) / HIDDEN**0.5


def batches(vocab: int, length: int):
    """Windows of micro-batches of tokens and labels [ROWS, length]: few of them long."""
    rng = np.random.default_rng(0)
    while True:
        ids = (rng.integers(vocab, size=(ACCUMULATE, ROWS, 1)) + 3 * np.arange(length)) % vocab
        lengths = 2 + (length - 2) * rng.random((ACCUMULATE, ROWS, 1)) ** 3
        yield ids, np.where(np.arange(length) < lengths - 1, next_token_labels(ids), -100)


def full_sum(model: Model, ids: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sum over tokens and their number, with optax's loss of full logits."""
    valid = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model.embedding.attend(model(ids)), jnp.where(valid, labels, 0)
    )
    return jnp.where(valid, losses, 0.0).sum(), valid.sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    model = Model(options.vocab, nnx.Rngs(0))
    optimizer = Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)  # xentlib

    @nnx.jit
    def micro_step(model, optimizer, ids, labels, is_last):
        def loss_sum(model):
            if options.full_logits:
                return full_sum(model, ids, labels)
            out = chunked_nll(model(ids), model.embedding, labels, reduction="sum")  # xentlib
            return out.loss, out  # xentlib

        (loss, out), grads = nnx.value_and_grad(loss_sum, has_aux=True)(model)
        optimizer.update(model, grads, token_count=out, is_last=is_last)  # xentlib
        return loss, out if options.full_logits else out.num_tokens

    before = nnx.clone(model)
    for step, (ids, labels) in zip(range(options.steps), batches(options.vocab, options.length)):
        losses, counts = [], []
        for k in range(ACCUMULATE):
            batch = jnp.asarray(ids[k]), jnp.asarray(labels[k])
            loss, count = micro_step(model, optimizer, *batch, k == ACCUMULATE - 1)
            losses, counts = [*losses, float(loss)], [*counts, int(count)]
        if step % 3 == 0:
            print(f"step {step:2}   {counts} tokens   loss {sum(losses) / sum(counts):.3f}")
        if step == 0 and not (options.full_logits or options.skip_comparison):
            compare(before, model, ids, labels, sum(losses))


def compare(before: Model, after: Model, ids: np.ndarray, labels: np.ndarray, loss: float) -> None:
    """The first step with that of full logits on one batch."""
    ids, labels = (jnp.asarray(x.reshape(-1, x.shape[-1])) for x in (ids, labels))
    full = nnx.jit(nnx.value_and_grad(full_sum, has_aux=True))
    (want_sum, count), grads = full(before, ids, labels)
    flat = [ravel_pytree(nnx.as_pure(nnx.state(x, nnx.Param)))[0] for x in (after, before, grads)]
    want = -RATE * flat[2] / count
    apart = jnp.linalg.norm(flat[0] - flat[1] - want) / jnp.linalg.norm(want)
    off = abs(loss - want_sum) / want_sum
    print(f"relative distance of the first step to full logits: {max(apart, off):.1e}")
    assert max(apart, off) < 1e-5


if __name__ == "__main__":
    main()
