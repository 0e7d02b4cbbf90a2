"""A loop in MaxText's style, with `vocab_tiling_nnx_loss` in place of MaxText's, without logits.

    python examples/maxtext_style.py

A small NNX model whose parts are named as in MaxText is trained on packed rows of uneven lengths,
on a mesh of four devices of the host that shards tokens and embedding width over two and the
vocabulary over two, by logical axis rules. The first gradients are compared with full logits. Ten
seconds on two cores; needs `pip install 'xentlib[flax]'`, and not MaxText. Lines marked
`# xentlib` are those to add or to change; `--full-logits` trains with all logits.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from xentlib.jax.integrations.maxtext import vocab_tiling_nnx_loss  # xentlib

HIDDEN, ROWS = 64, 8
CONFIG = SimpleNamespace(  # of MaxText's configuration, what the loss reads
    logits_via_embedding=False,
    final_logits_soft_cap=0.0,
    normalize_embedding_logits=False,
    z_loss_multiplier=1e-4,
    enable_dropout=False,
    logical_axis_rules=(
        ("activation_embed_and_logits_batch", ("data", "fsdp")),
        ("embed_vocab", ("fsdp",)),
        ("vocab", ("tensor",)),
    ),
)


class Dense(nnx.Module):
    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.normal(0.02), ("fsdp", "tensor"))
        self.kernel = nnx.Param(init(rngs.params(), (HIDDEN, vocab)))
        self.bias, self.quant, self.dtype = None, None, jnp.float32


class Decoder(nnx.Module):
    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.decoder_norm = nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.dropout = nnx.Dropout(0.0, rngs=rngs)
        self.logits_dense = Dense(vocab, rngs)


class Transformer(nnx.Module):
    def __init__(self, vocab: int, mesh: jax.sharding.Mesh, rngs: nnx.Rngs) -> None:
        self.mesh = mesh
        self.token_embedder = nnx.Embed(vocab, HIDDEN, rngs=rngs)
        self.decoder = Decoder(vocab, rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x: jax.Array = self.token_embedder(ids)
        return x + jax.nn.silu(self.decoder.layer(x))


def full_logits(model, hidden_states, data, config, is_train):
    """The same pair, from logits [ROWS, length, vocab]."""
    logits = model.decoder.decoder_norm(hidden_states) @ model.decoder.logits_dense.kernel[...]
    lse = jax.nn.logsumexp(logits, -1)
    z_loss = config.z_loss_multiplier * lse**2
    chosen = jnp.take_along_axis(logits, data["targets"][..., None], -1)[..., 0]
    segments = data["targets_segmentation"] != 0
    return ((lse - chosen + z_loss) * segments).sum(), (z_loss * segments).sum()


def batches(vocab: int, length: int, place: NamedSharding):
    """Rows of which few are long; "targets_segmentation" is 0 behind their ends."""
    rng = np.random.default_rng(0)
    while True:
        ids = (rng.integers(vocab, size=(ROWS, 1)) + 3 * np.arange(length + 1)) % vocab
        ends = 2 + (length - 2) * rng.random((ROWS, 1)) ** 3
        segments = (np.arange(length) < ends).astype(np.int32)
        data = {"inputs": ids[:, :-1], "targets": ids[:, 1:], "targets_segmentation": segments}
        yield jax.device_put(data, place)


def gradients(loss, model: Transformer, data: dict[str, jax.Array]):
    """As in MaxText's `train.py`: of the loss's sum over its own count."""

    def loss_fn(model):
        xent_sum, _ = loss(model, model(data["inputs"]), data, CONFIG, True)
        count = jnp.sum(data["targets_segmentation"] != 0)
        return xent_sum / (count + 1e-8), count

    return nnx.value_and_grad(loss_fn, has_aux=True)(model)


def compare(ours, theirs) -> None:
    flat = [ravel_pytree(jax.device_get(nnx.as_pure(x[1])))[0] for x in (ours, theirs)]
    apart = jnp.linalg.norm(flat[0] - flat[1]) / jnp.linalg.norm(flat[1])
    off = abs(ours[0][0] / theirs[0][0] - 1)
    print(f"relative distance of the gradients to full logits: {max(apart, off):.1e}")
    assert max(apart, off) < 1e-5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-logits", action="store_true")
    parser.add_argument("--skip-comparison", action="store_true")  # which makes all logits
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    loss = full_logits if options.full_logits else vocab_tiling_nnx_loss  # xentlib

    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((1, 2, 2), ("data", "fsdp", "tensor"), axis_types=kinds)
    with jax.set_mesh(mesh):
        model = Transformer(options.vocab, mesh, nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def train_step(model, optimizer, data):
            (value, count), grads = gradients(loss, model, data)
            optimizer.update(model, grads)
            return value, count

        place = NamedSharding(mesh, P(("data", "fsdp")))
        for step, data in zip(range(options.steps), batches(options.vocab, options.length, place)):
            if step == 0 and not (options.full_logits or options.skip_comparison):
                jitted = nnx.jit(gradients, static_argnums=0)
                compare(*(jitted(f, model, data) for f in (loss, full_logits)))
            value, count = train_step(model, optimizer, data)
            if step % 3 == 0:
                print(f"step {step:2}   {count:4} tokens   loss {value:.3f}")


if __name__ == "__main__":
    main()
