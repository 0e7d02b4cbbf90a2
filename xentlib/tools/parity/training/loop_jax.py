"""The training loop in Flax NNX; `loop_torch.py` is its twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

from xentlib import jax as xj
from xentlib.tools.parity.training.loop import AdamW, Record, head_step
from xentlib.tools.parity.training.model import ModelSizes, Weights
from xentlib.tools.parity.training.model_jax import LanguageModel, build
from xentlib.tools.parity.training.text import TextWindow


def train(
    windows: Sequence[TextWindow], weights: Weights, sizes: ModelSizes, adamw: AdamW, record: Record
) -> None:
    model = build(sizes, weights)
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
        for step, text in enumerate(windows):
            head = np.asarray(model.head[...])
            loss_sum, count, taken = 0.0, 0, []
            micro_batches = list(zip(text.tokens, text.segments, text.labels, strict=True))
            for m, arrays in enumerate(micro_batches):
                last = m == len(micro_batches) - 1
                result = micro_batch(model, optimizer, arrays, jnp.bool_(last))
                loss_sum, count = loss_sum + float(result[0]), count + int(result[1])
                taken.append(result[2])
            loss = loss_sum / count
            gradient = nnx.to_pure_dict(optimizer.opt_state.inner[0])["head"]
            record(loss, count, head_step(step, taken, head, loss, gradient))


def _keep(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
    """An optax transformation whose state is the gradient that it has seen last."""
    return updates, updates
