"""Lightning's `Trainer`: every k steps a step is computed a second time."""

from __future__ import annotations

from typing import Any

from xentlib.torch.crosscheck import CrossCheck
from xentlib.torch.integrations.lightning import base

__all__ = ["CrossCheckCallback"]


class CrossCheckCallback(base()):  # type: ignore[misc]
    """`CrossCheck` around the steps of Lightning's `Trainer`. A callback.

        Trainer(callbacks=[CrossCheckCallback(every=100)]).fit(...)

    Every micro-batch of a checked step is checked, on every rank its own, with automatic
    optimisation or without. What was measured is logged, as `crosscheck/loss ULP` and so on.

    Args:
        every: as in `CrossCheck`.
        options: the others of `CrossCheck`.

    Attributes:
        check: the `CrossCheck`, with its `results`.

    Raises:
        CrossCheckError: in the first step, which is checked, no call of `chunked_nll` was seen.

    Numerics: those of `CrossCheck`.
    """

    def __init__(self, every: int, **options: Any) -> None:
        super().__init__()
        self.check = CrossCheck(every, **options)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.step = self.check.begin(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        before = len(self.check.results)
        self.check.end(self.step)
        for result in self.check.results[before:]:
            pl_module.log_dict({f"crosscheck/{k}": x for k, x in result.worst.items()})

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.check.close()
