"""Flax's optimizer of NNX and its `TrainState`, over windows of token-normalised gradients."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.training import train_state

from xentlib.checks.window import WINDOW_TYPES
from xentlib.jax.accumulate import is_token_normalized, token_normalized

__all__ = ["Optimizer", "TrainState"]


def normalized(tx: Any) -> Any:
    """The optimizer, once: what `token_normalized` has made has options of its own."""
    return tx if is_token_normalized(tx) else token_normalized(tx)


class TrainState(train_state.TrainState):
    """Flax's `TrainState`, whose steps are those of windows of micro-batches. Flax Linen.

        state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))
        state = state.apply_gradients(grads=grads_of_the_sum, token_count=out, is_last=flag)

    params <- params + tx(sum over the window of grads / T), once a window.

    `create` wraps `tx` in `token_normalized`, unless it is one already (pass one for its options).
    optax itself takes no notice of a `token_count` and would step on the sums; so a state that was
    made otherwise, with another `tx`, is refused. `step` counts windows that were stepped on.

    Raises:
        TypeError: `tx` is not token-normalised. Else what `token_normalized` raises.

    Numerics: those of `token_normalized`. The state has a float32 copy of the gradients more.
    """

    @classmethod
    def create(cls, *, apply_fn: Any, params: Any, tx: Any, **kwargs: Any) -> TrainState:
        """As in Flax, with `tx` an optax transformation or `token_normalized(...)`."""
        create: Any = super().create
        state: TrainState = create(apply_fn=apply_fn, params=params, tx=normalized(tx), **kwargs)
        return state

    def apply_gradients(  # type: ignore[override]
        self, *, grads: Any, token_count: Any, is_last: Any = True, **kwargs: Any
    ) -> TrainState:
        """One micro-batch more; at the last one the optimizer steps.

        Args:
            grads: of the micro-batch's sum of losses.
            token_count: the `NLLOutput` of `reduction="sum"` whose loss was differentiated, or a
                count, of all devices.
            is_last: whether the window ends, bool or [] bool; by itself every batch is one.
            kwargs: as in Flax, attributes to replace.
        """
        tx = self.tx
        WINDOW_TYPES.require("token_normalized", is_token_normalized(tx))

        def update(grads: Any, state: Any, params: Any) -> Any:
            return tx.update(grads, state, params, token_count=token_count, is_last=is_last)

        told: Any = self.replace(tx=tx._replace(update=update))
        # Flax's own: it knows of parameters that are overwritten by their gradient (fp8).
        after = train_state.TrainState.apply_gradients(told, grads=grads, **kwargs)
        step = self.step + (after.opt_state.windows - self.opt_state.windows)
        state: TrainState = after.replace(tx=tx, step=step)
        return state


class Optimizer(nnx.Optimizer[Any]):
    """`nnx.Optimizer`, whose steps are those of windows of micro-batches. Flax NNX.

        optimizer = Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
        optimizer.update(model, grads_of_the_sum, token_count=out, is_last=flag)

    params <- params + tx(sum over the window of grads / T), once a window.

    `nnx.Optimizer` with `token_normalized(tx)` is the same where nothing is forgotten. But with
    `tx` alone it hands a `token_count` to optax, which takes no notice of it: the step is that of
    the sum. Here `tx` is wrapped, unless it is a `token_normalized` already, and `token_count` must
    be given. `step` counts windows that were stepped on.

    Raises:
        TypeError: no `token_count`. Else what `token_normalized` raises.

    Numerics: those of `token_normalized`. The state has a float32 copy of the gradients more.
    """

    def __init__(self, model: Any, tx: Any, **kwargs: Any) -> None:
        super().__init__(model, normalized(tx), **kwargs)

    def update(  # type: ignore[override]
        self, model: Any, grads: Any, /, *, token_count: Any, is_last: Any = True, **kwargs: Any
    ) -> Any:
        """One micro-batch more; at the last one the model's parameters are stepped.

        Args:
            model: as in `nnx.Optimizer`.
            grads: of the micro-batch's sum of losses.
            token_count: the `NLLOutput` of `reduction="sum"` whose loss was differentiated, or a
                count, of all devices.
            is_last: whether the window ends, bool or [] bool; by itself every batch is one.
            kwargs: others of `tx.update`.
        """
        step, windows = self.step[...], self.opt_state.windows[...]
        told = {"token_count": token_count, "is_last": is_last}
        updates = super().update(model, grads, **told, **kwargs)
        stepped = self.opt_state.windows[...] - windows
        self.step[...] = step + jnp.asarray(stepped, step.dtype)
        return updates
