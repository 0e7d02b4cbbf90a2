"""Accumulation in Flax NNX: `token_normalized` around an optimizer, in a loop on the host.

    python examples/accumulate_flax.py

A small transformer is trained in windows of four micro-batches, of uneven token counts and one of
them empty, and a last window of two. What every window adds to the parameters is compared with a
step of the same optimizer on the concatenated batch, and so is what `optax.MultiSteps` makes of the
micro-batches' means. It does not step in the short window at all. Ten seconds on two CPU cores;
needs `pip install 'xentlib[flax]'`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jax.flatten_util import ravel_pytree

from xentlib.jax import NLLOutput, chunked_nll, next_token_labels, token_normalized

VOCAB, HIDDEN, HEADS, LENGTH, BATCH = 256, 64, 4, 32, 4
ACCUMULATE, NUMBER = 4, 82  # micro-batches of a window, and of all: 20 windows and one of two


class LanguageModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.norm_attention = nnx.LayerNorm(HIDDEN, rngs=rngs)
        # Without biases: the gradient of the keys' is rounding errors alone, and Adam takes their
        # signs for a direction.
        self.attention = nnx.MultiHeadAttention(
            HEADS, HIDDEN, use_bias=False, decode=False, rngs=rngs
        )
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        small = nnx.initializers.normal(0.02)
        self.head = nnx.Linear(HIDDEN, VOCAB, use_bias=False, kernel_init=small, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Hidden states."""
        x: jax.Array = self.embedding(tokens)
        x = x + self.attention(self.norm_attention(x), mask=nnx.make_causal_mask(tokens))
        x = self.norm(x)
        return x


def windows() -> list[list[tuple[jax.Array, jax.Array]]]:
    """Tokens and labels [BATCH, LENGTH] of micro-batches: one long, two short and one empty."""
    rng = np.random.default_rng(0)
    made = []
    for k in range(NUMBER):
        tokens = jnp.asarray((rng.integers(0, VOCAB, (BATCH, 1)) + 3 * np.arange(LENGTH)) % VOCAB)
        lengths = rng.integers(0, (LENGTH, 8, 4, 0)[k % 4] + 1, (BATCH, 1))
        kept = np.arange(LENGTH) < lengths
        made.append((tokens, jnp.where(kept, next_token_labels(tokens), -100)))
    return [made[k : k + ACCUMULATE] for k in range(0, NUMBER, ACCUMULATE)]


@nnx.jit
def micro_step(
    model: LanguageModel,
    optimizer: nnx.Optimizer[LanguageModel],
    tokens: jax.Array,
    labels: jax.Array,
    is_last: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    def loss_sum(model: LanguageModel) -> tuple[jax.Array, NLLOutput]:
        out = chunked_nll(model(tokens), model.head, labels, reduction="sum")
        return out.loss, out

    (loss, out), grads = nnx.value_and_grad(loss_sum, has_aux=True)(model)
    optimizer.update(model, grads, token_count=out, is_last=is_last)  # a mean is refused
    return loss, out.num_tokens


@nnx.jit
def gradient_of_mean(model: LanguageModel, tokens: jax.Array, labels: jax.Array) -> nnx.State:
    """With full logits, and 0 where no token is valid."""

    def mean(model: LanguageModel) -> jax.Array:
        valid = labels != -100
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model.head(model(tokens)), jnp.where(valid, labels, 0)
        )
        loss: jax.Array = jnp.where(valid, losses, 0.0).sum() / jnp.maximum(valid.sum(), 1)
        return loss

    return nnx.grad(mean)(model)


def parameters(model: LanguageModel) -> nnx.State:
    return nnx.as_pure(nnx.state(model, nnx.Param))


def change(model: LanguageModel, tx, state, batches) -> np.ndarray:
    """What an optimizer that is given the means of these batches adds to the parameters."""
    before = after = parameters(model)
    for tokens, labels in batches:
        grads = nnx.as_pure(gradient_of_mean(model, tokens, labels))
        updates, state = jax.jit(tx.update)(grads, state, before)
        after = optax.apply_updates(after, updates)
    return difference(after, before)


def difference(after: nnx.State, before: nnx.State) -> np.ndarray:
    flat, _ = ravel_pytree(jax.tree.map(jnp.subtract, after, before))
    return np.asarray(flat)


def main() -> None:
    model = LanguageModel(nnx.Rngs(0))
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    optimizer = nnx.Optimizer(model, token_normalized(inner), wrt=nnx.Param)
    multi = optax.MultiSteps(inner, ACCUMULATE).gradient_transformation()
    print("each step's relative distance to that of one batch")

    for step, window in enumerate(windows(), 1):
        before, state = parameters(model), nnx.as_pure(optimizer.opt_state).inner
        want = change(model, inner, state, [[jnp.concatenate(column) for column in zip(*window)]])
        theirs = multi.init(before)._replace(inner_opt_state=state)
        naive = change(model, multi, theirs, window)

        loss_sum, count = 0.0, 0
        for k, (tokens, labels) in enumerate(window, 1):
            loss, n = micro_step(model, optimizer, tokens, labels, k == len(window))
            loss_sum, count = loss_sum + float(loss), count + int(n)
        got = difference(parameters(model), before)
        apart, far = (np.linalg.norm(x - want) / np.linalg.norm(want) for x in (got, naive))
        # Adam's first step is little more than signs, and 6e-6 from that of one batch. Later 5e-7.
        assert apart < 1e-4, f"step {step}: relative distance {apart:.1e} to one batch"
        if step % 5 == 1 or len(window) < ACCUMULATE:
            print(
                f"step {step:2}   {count:3} tokens in {len(window)} micro-batches   "
                f"loss {loss_sum / count:.3f}   token_normalized {apart:.1e}   MultiSteps {far:.1e}"
            )


if __name__ == "__main__":
    main()
