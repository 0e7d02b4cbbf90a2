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
from xentlib.tools.parity.training.loop import (
    DISTILLATION,
    AdamW,
    HeadStep,
    HeadWindow,
    Record,
    Teacher,
)
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
            setattr(self, name, nnx.Param(jnp.array(_turned(name, value))))
        self.sizes, self.names = sizes, tuple(weights)

    def __call__(self, tokens: jax.Array, segments: jax.Array) -> jax.Array:
        weights = {name: getattr(self, name)[...] for name in self.names}
        hidden: jax.Array = hidden_states(OPERATORS, weights, self.sizes, tokens, segments)
        return hidden

    def arrays(self) -> Weights:
        """As they were given."""
        return {n: np.asarray(_turned(n, getattr(self, n)[...])) for n in self.names}


def _turned(name: str, value: Any) -> Any:
    """A kernel from [out, in], as weights are kept, to [in, out], or back."""
    return value.T if value.ndim == 2 and name not in ("embedding", "head") else value


def train(
    windows: Sequence[TextWindow],
    weights: Weights,
    sizes: ModelSizes,
    teacher: Teacher | None,
    adamw: AdamW,
    record: Record,
) -> Weights:
    model = LanguageModel(sizes, weights)
    above = LanguageModel(*teacher) if teacher else None
    adam = optax.adamw(adamw.lr, *adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay)
    inner = optax.chain(optax.GradientTransformation(lambda p: p, _keep), adam)
    optimizer = nnx.Optimizer(model, xj.token_normalized(inner), wrt=nnx.Param)

    @nnx.jit
    def micro_batch(
        model: LanguageModel, above: Any, optimizer: Any, arrays: Any, is_last: Any
    ) -> Any:
        tokens, segments, labels = arrays
        labels = xj.next_token_labels(labels, segment_ids=segments)
        taught = (above(tokens, segments), above.head[...]) if above else ()

        def loss_sum_of(model: LanguageModel) -> Any:
            hidden = model(tokens, segments)
            output = _loss_sum(hidden, model.head[...], labels, *taught)
            return output.loss, (output.num_tokens, hidden)

        gradient_of = nnx.value_and_grad(loss_sum_of, has_aux=True)
        (loss_sum, (count, hidden)), gradients = gradient_of(model)
        optimizer.update(model, gradients, token_count=count, is_last=is_last)
        return loss_sum, count, (hidden, labels, *taught[:1])

    with jax.default_matmul_precision("highest"):
        for text in windows:
            head = np.asarray(model.head[...])
            loss_sum, count, taken = 0.0, 0, []
            micro_batches = list(zip(text.tokens, text.segments, text.labels, strict=True))
            for m, arrays in enumerate(micro_batches):
                is_last = jnp.bool_(m == len(micro_batches) - 1)
                part, tokens, of_head = micro_batch(model, above, optimizer, arrays, is_last)
                loss_sum, count = loss_sum + float(part), count + int(tokens)
                taken.append(of_head)
            gradient = nnx.to_pure_dict(optimizer.opt_state.inner[0])["head"]
            record(loss_sum / count, count, taken, head, gradient)
    return model.arrays()


def _loss_sum(hidden: Any, head: Any, labels: Any, *taught: Any) -> Any:
    if not taught:
        return xj.chunked_nll(hidden, head, labels, reduction="sum")
    how: dict[str, Any] = {"labels": labels, "reduction": "sum", **DISTILLATION}
    return xj.chunked_divergence(hidden, head, xj.TeacherHead(*taught), **how)


def _keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """An optax transformation whose state is the gradient that it has seen last."""
    return updates, updates


def head_window(at: HeadStep) -> HeadWindow:
    with jax.default_matmul_precision("highest"):
        batches = (at.hidden, at.labels, *at.taught[:1])
        stats, gradient = _head_scan()(at.head, batches, *at.taught[1:])
    return HeadWindow(float(stats.loss), int(stats.num_tokens), np.asarray(gradient))


@cache
def _head_scan() -> Any:
    """Compiled once for each number of micro-batches."""

    def scan(head: Any, batches: Any, *taught: Any) -> Any:
        def sum_and_count(head: Any, batch: Any) -> Any:
            hidden, labels, *states = batch
            output = _loss_sum(hidden, head, labels, *states, *taught)
            return output.loss, output.num_tokens

        return xj.accumulate_grads(sum_and_count, head, batches)

    return jax.jit(scan)
