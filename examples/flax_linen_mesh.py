"""Flax Linen and `TrainState` on a mesh of four devices of the host, without logits.

    python examples/flax_linen_mesh.py

A small model is trained on rows of uneven lengths, in windows of two micro-batches; the mesh's one
axis spreads tokens and shards the head (FSDP). The change of the parameters under SGD in the first
step is compared with full logits on one batch and one device. Ten seconds on two cores; needs
`pip install 'xentlib[flax]'`. Lines marked `# xentlib` are those to add or to
change; `--full-logits` trains with optax's loss of all logits.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib.jax import LinenNLLHead, next_token_labels  # xentlib
from xentlib.jax.integrations.flax import TrainState  # xentlib

HIDDEN, ROWS, ACCUMULATE, RATE = 64, 8, 2, 0.5


class Model(nn.Module):
    """Hidden states of a gated layer, and the head's logits or, with labels, its loss."""

    vocab: int
    tokens: str | None  # the mesh axis that spreads them  # xentlib

    @nn.compact
    def __call__(self, ids, labels=None):
        x = nn.Embed(self.vocab, HIDDEN)(ids)
        x = nn.LayerNorm()(x + nn.Dense(HIDDEN)(jax.nn.silu(nn.Dense(4 * HIDDEN)(x))))
        init = nn.with_partitioning(nn.initializers.normal(0.02), ("data", None))
        sizes = {"use_bias": False, "kernel_init": init, "name": "head"}
        less = {"max_chunk_bytes": 4 << 20}  # the four devices share a host  # xentlib
        head = LinenNLLHead(
            self.vocab, tokens=self.tokens, options=less, **sizes
        )  # xentlib: for nn.Dense
        return head(x) if labels is None else head(x, labels, reduction="sum")  # xentlib


def batches(vocab: int, length: int):
    """Windows of micro-batches of tokens and labels [ROWS, length]: few of them long."""
    rng = np.random.default_rng(0)
    while True:
        ids = (rng.integers(vocab, size=(ACCUMULATE, ROWS, 1)) + 3 * np.arange(length)) % vocab
        lengths = 2 + (length - 2) * rng.random((ACCUMULATE, ROWS, 1)) ** 3
        yield ids, np.where(np.arange(length) < lengths - 1, next_token_labels(ids), -100)


def full_sum(model: Model, params, ids, labels):
    """The sum over tokens and their number, with optax's loss of full logits."""
    valid = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model.apply({"params": params}, ids), jnp.where(valid, labels, 0)
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

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    model = Model(options.vocab, tokens="data")  # xentlib
    ids = jnp.zeros((ROWS, options.length), jnp.int32)
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), ids))["params"]
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), nn.get_partition_spec(boxed))
    make = jax.jit(
        lambda: nn.unbox(model.init(jax.random.key(0), ids))["params"], out_shardings=places
    )
    params = make()
    alone = jax.device_get(params)
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(RATE))  # xentlib

    @jax.jit
    def micro_step(state, ids, labels, is_last):
        def loss_sum(params):
            if options.full_logits:
                return full_sum(model, params, ids, labels)
            out = state.apply_fn({"params": params}, ids, labels)  # xentlib
            return out.loss, out  # xentlib

        (loss, out), grads = jax.value_and_grad(loss_sum, has_aux=True)(state.params)
        count = out if options.full_logits else out.num_tokens
        told = {"token_count": out, "is_last": is_last}  # xentlib
        return state.apply_gradients(grads=grads, **told), loss, count  # xentlib

    spread = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh):
        for step, (ids, labels) in zip(
            range(options.steps), batches(options.vocab, options.length)
        ):
            losses, counts = [], []
            for k in range(ACCUMULATE):
                batch = jax.device_put((ids[k], labels[k]), spread)
                state, loss, count = micro_step(state, *batch, k == ACCUMULATE - 1)
                losses, counts = [*losses, float(loss)], [*counts, int(count)]
            if step % 3 == 0:
                print(f"step {step:2}   {counts} tokens   loss {sum(losses) / sum(counts):.3f}")
            if step == 0 and not (options.full_logits or options.skip_comparison):
                compare(model, alone, jax.device_get(state.params), ids, labels, sum(losses))


def compare(model: Model, before, after, ids, labels, loss_sum: float) -> None:
    """The first step with that of full logits, on one batch and one device."""
    ids, labels = (jnp.asarray(x.reshape(-1, x.shape[-1])) for x in (ids, labels))
    (want_sum, count), grads = jax.jit(
        jax.value_and_grad(lambda p: full_sum(model, p, ids, labels), has_aux=True)
    )(before)
    want = ravel_pytree(jax.tree.map(lambda g: -RATE * g / count, grads))[0]
    got = ravel_pytree(jax.tree.map(jnp.subtract, after, before))[0]
    apart = jnp.linalg.norm(got - want) / jnp.linalg.norm(want)
    off = abs(loss_sum - want_sum) / want_sum
    print(f"relative distance of the first step to full logits: {max(apart, off):.1e}")
    assert max(apart, off) < 1e-5


if __name__ == "__main__":
    main()
