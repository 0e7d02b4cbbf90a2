"""A language model trained in Flax NNX with `chunked_nll`, and what that saves.

    python examples/train_flax.py

A two-layer transformer learns the Python standard library's own sources, tokenized with a
vocabulary of 16,384 that is trained first. Afterwards the loss head alone is run on one batch of
4096 tokens in two ways, chunked and with full logits, and compared in memory, time and gradients.
Under a minute on two CPU cores; needs `pip install 'xentlib[flax,cli]'`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

from library_text import library_tokens
from xentlib.jax import chunked_nll, next_token_labels

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH = 16_384, 128, 4, 2, 128
STEPS, BATCH = 40, 8  # 1024 tokens a step
COMPARED = 32  # sequences, 4096 tokens, for the comparison
CHUNK = 32 << 20  # bytes of logits that exist at once: 512 tokens
MIB = 1 << 20


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_attention = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_attention(x), mask=mask)
        x = x + self.down(jax.nn.gelu(self.up(self.norm_mlp(x))))
        return x


class LanguageModel(nnx.Module):
    def __init__(self, vocab: int, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(vocab, HIDDEN, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        small = nnx.initializers.normal(0.02)
        self.head = nnx.Linear(HIDDEN, vocab, use_bias=False, kernel_init=small, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Hidden states, not logits: the head is `chunked_nll`'s business."""
        mask = nnx.make_causal_mask(tokens)
        x: jax.Array = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return x


def batches(tokens: np.ndarray, size: int, seed: int) -> Iterator[jax.Array]:
    """[size, LENGTH] excerpts of the text, at random offsets, without end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, tokens.size - LENGTH, size)
        yield jnp.asarray(np.stack([tokens[i : i + LENGTH] for i in starts]))


@nnx.jit
def train_step(
    model: LanguageModel, optimizer: nnx.Optimizer[LanguageModel], batch: jax.Array
) -> jax.Array:
    labels = next_token_labels(batch)

    def loss_of(model: LanguageModel) -> jax.Array:
        kernel = model.head.kernel[...]  # [H, V], taken as it is
        output = chunked_nll(
            model(batch), kernel, labels, weight_layout="HV", max_chunk_bytes=CHUNK
        )
        loss: jax.Array = output.loss
        return loss

    loss: jax.Array
    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


def train(model: LanguageModel, tokens: np.ndarray) -> None:
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    losses = []
    for step, batch in zip(range(1, STEPS + 1), batches(tokens, BATCH, seed=0)):
        loss = train_step(model, optimizer, batch)
        losses.append(float(loss))
        if step == 1 or step % 5 == 0:
            print(f"  step {step:3}   loss {statistics.mean(losses[-5:]):.3f}", flush=True)


# --- chunked against full logits -----------------------------------------------------------------


def chunked(hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    output = chunked_nll(hidden, kernel, labels, weight_layout="HV", max_chunk_bytes=CHUNK)
    loss: jax.Array = output.loss
    return loss


def full_logits(hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
    valid = labels != -100
    losses = optax.softmax_cross_entropy_with_integer_labels(
        hidden @ kernel, jnp.where(valid, labels, 0)
    )
    loss: jax.Array = jnp.where(valid, losses, 0.0).sum() / valid.sum()
    return loss


def in_float64(hidden: jax.Array, kernel: jax.Array, labels: jax.Array) -> list[np.ndarray]:
    """d hidden and d kernel in NumPy, float64, a few sequences at a time."""
    wide = np.asarray(kernel, np.float64)
    count = int((labels != -100).sum())
    d_kernel, d_hidden = np.zeros_like(wide), []
    for x, y in zip(np.asarray(hidden, np.float64), np.asarray(labels), strict=True):
        valid = y != -100
        z = x @ wide
        p = np.exp(z - z.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        p[np.arange(y.size), np.where(valid, y, 0)] -= 1.0
        dz = np.where(valid[:, None], p / count, 0.0)
        d_hidden.append(dz @ wide.T)
        d_kernel += x.T @ dz
    return [np.stack(d_hidden), d_kernel]


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """What the compiled step holds besides its inputs and the gradients it returns."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return int(analysis.temp_size_in_bytes)


def seconds(runs: list[Callable[[], object]], repeats: int = 3) -> list[float]:
    """Median of each, taken in turns so that a slow moment of the machine meets them all."""
    taken: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, taken):
            start = time.perf_counter()
            jax.block_until_ready(run())
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in taken]


def distance(got: jax.Array, want: np.ndarray) -> float:
    """Relative Frobenius error."""
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


def main() -> None:
    tokens = library_tokens(VOCAB)
    print(f"{tokens.size:,} tokens of the standard library's sources, vocabulary {VOCAB:,}")
    model = LanguageModel(VOCAB, nnx.Rngs(0))
    train(model, tokens)

    batch = next(batches(tokens, COMPARED, seed=1))
    labels = next_token_labels(batch)
    inputs = (model(batch), model.head.kernel[...], labels)
    compiled = [
        jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*inputs).compile()
        for loss in (chunked, full_logits)
    ]
    bytes_ours, bytes_theirs = map(temporary_bytes, compiled)
    (_, ours), (_, theirs) = (c(*inputs) for c in compiled)
    truth = in_float64(*inputs)
    time_ours, time_theirs = seconds([lambda: compiled[0](*inputs), lambda: compiled[1](*inputs)])
    print(f"\nloss head alone, {labels.size} tokens, loss and gradients   chunked   full logits")
    row = "temporary memory of the compiled step, MiB"
    print(f"  {row:43}{bytes_ours / MIB:13.0f} {bytes_theirs / MIB:13.0f}")
    print(f"  {'time, s':43}{time_ours:13.2f} {time_theirs:13.2f}")
    for i, name in enumerate(("d hidden", "d weight")):
        row = f"{name}, relative distance to float64"
        print(
            f"  {row:43}{distance(ours[i], truth[i]):13.1e} {distance(theirs[i], truth[i]):13.1e}"
        )
    apart = ", ".join(
        f"{name} {distance(a, np.asarray(b, np.float64)):.1e}"
        for name, a, b in zip(("d hidden", "d weight"), ours, theirs)
    )
    print(f"  chunked from full logits: {apart}")
    print(
        f"saved: {1 - bytes_ours / bytes_theirs:.0%} of the memory, at "
        f"{time_ours / time_theirs:.2f} times the time"
    )


if __name__ == "__main__":
    main()
