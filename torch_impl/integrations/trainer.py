"""The `Trainer` of transformers: every k steps a step is computed a second time."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from xentlib.torch.crosscheck import CrossCheck
from xentlib.torch.hooks import LOSS_HOOKS

__all__ = ["CrossCheckCallback"]


class CrossCheckCallback(TrainerCallback):
    """`CrossCheck` around the steps of `Trainer`. A callback.

        Trainer(patch(model), arguments, train_dataset=data, callbacks=[CrossCheckCallback(100)])

    Every micro-batch of a checked step is checked, on every rank its own. What was measured is
    logged with `Trainer`'s own numbers, as `crosscheck/loss ULP` and so on.

    Args:
        every: as in `CrossCheck`.
        options: the others of `CrossCheck`.

    Attributes:
        check: the `CrossCheck`, with its `results`.

    Raises:
        CrossCheckError: in the first step, which is checked, no call of `chunked_nll` was seen: the
            model is not patched, or compiled as a whole, or the trainer is one of TRL's, whose head
            is `chunked_logprobs`.

    Numerics: those of `CrossCheck`.
    """

    def __init__(self, every: int, **options: Any) -> None:
        self.check = CrossCheck(every, **options)
        self.logged = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for observer in [*LOSS_HOOKS]:  # of a run that ended in the middle of a checked step
            observer.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = self.check.begin(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.check.end(self.step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kw: Any
    ) -> None:
        new, self.logged = self.check.results[self.logged :], len(self.check.results)
        for result in new:
            worst = {f"crosscheck/{name}": value for name, value in result.worst.items()}
            for into in (logs, state.log_history[-1] if state.log_history else None):
                if into is not None:
                    into.update(worst)
