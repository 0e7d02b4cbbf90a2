"""The model and its training loop in Flax NNX; `in_torch.py` is its twin."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

from xentlib import jax as xj
from xentlib.tools.parity.training.loop import AdamW, HeadStep, HeadWindow, Record
from xentlib.tools.parity.training.model import (
    EPSILON,
    ModelSizes,
    Operators,
    Weights,
    hidden_states,
)
from xentlib.tools.parity.training.text import TextWindow


def _embedding(tokens: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.take(table, tokens, axis=0)


def _norm(x: jax.Array, factors: jax.Array) -> jax.Array:
    mean = jnp.square(x).mean(-1, keepdims=True)
    return x * (jax.lax.rsqrt(mean + EPSILON) * factors)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, mask=mask)


gelu = partial(jax.nn.gelu, approximate=True)
OPERATORS = Operators(jnp, _embedding, jnp.matmul, _norm, gelu, _attention, jnp.split)


class LanguageModel(nnx.Module):
    """With copies of `weights`; kernels are [in, out]."""

    head: nnx.Param[jax.Array]

    def __init__(self, sizes: ModelSizes, weights: Weights) -> None:
        for name, value in weights.items():
            is_kernel = value.ndim == 2 and name not in ("embedding", "head")
            setattr(self, name, nnx.Param(jnp.array(value.T if is_kernel else value)))
        self.sizes, self.names = sizes, tuple(weights)

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        weights = {name: getattr(self, name)[...] for name in self.names}
        hidden: jax.Array = hidden_states(OPERATORS, weights, self.sizes, tokens, segments)
        return hidden


def train(
    windows: Sequence[TextWindow], weights: Weights, sizes: ModelSizes, adamw: AdamW, record: Record
) -> None:
    model = LanguageModel(sizes, weights)
    adam = optax.adamw(adamw.lr, *adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay)
    inner = optax.chain(optax.GradientTransformation(lambda p: p, _keep), adam)
    optimizer = nnx.Optimizer(model, xj.token_normalized(inner), wrt=nnx.Param)

    @nnx.jit
    def micro_batch(model: LanguageModel, optimizer: Any, arrays: Any, is_last: Any) -> Any:
        tokens, segments, labels = arrays
        labels = xj.next_token_labels(labels, segment_ids=segments)

        def loss_sum_of(model: LanguageModel) -> Any:
            hidden = model(tokens, segments)
            output = xj.chunked_nll(hidden, model.head[...], labels, reduction="sum")
            return output.loss, (output.num_tokens, hidden)

        gradient_of = nnx.value_and_grad(loss_sum_of, has_aux=True)
        (loss_sum, (count, hidden)), gradients = gradient_of(model)
        optimizer.update(model, gradients, token_count=count, is_last=is_last)
        return loss_sum, count, (hidden, labels)

    with jax.default_matmul_precision("highest"):
        for text in windows:
            head = np.asarray(model.head[...])
            loss_sum, count, taken = 0.0, 0, []
            micro_batches = list(zip(text.tokens, text.segments, text.labels, strict=True))
            for m, arrays in enumerate(micro_batches):
                is_last = jnp.bool_(m == len(micro_batches) - 1)
                part, tokens, of_head = micro_batch(model, optimizer, arrays, is_last)
                loss_sum, count = loss_sum + float(part), count + int(tokens)
                taken.append(of_head)
            gradient = nnx.to_pure_dict(optimizer.opt_state.inner[0])["head"]
            record(loss_sum / count, count, taken, head, gradient)


def _keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """An optax transformation whose state is the gradient that it has seen last."""
    return updates, updates


def head_window(at: HeadStep) -> HeadWindow:
    with jax.default_matmul_precision("highest"):
        stats, gradient = _head_scan()(at.head, (at.hidden, at.labels))
    return HeadWindow(float(stats.loss), int(stats.num_tokens), np.asarray(gradient))


@cache
def _head_scan() -> Any:
    """Compiled once for each number of micro-batches."""

    def sum_and_count(head: Any, batch: Any) -> Any:
        output = xj.chunked_nll(batch[0], head, batch[1], reduction="sum")
        return output.loss, output.num_tokens

    return jax.jit(lambda head, batches: xj.accumulate_grads(sum_and_count, head, batches))
