"""Lightning's `Trainer`: gradients of the mean over a step's tokens, with automatic optimisation;
and every k steps a step that is computed a second time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.accumulate import UnsupportedWrapperError
from xentlib.torch.core.device import onto
from xentlib.torch.micro_batch import loss_and_count
from xentlib.torch.wrappers import is_a, with_attribute
from xentlib.torch.wrappers.fsdp2 import FSDP2
from xentlib.torch.wrappers.models import detect_wrapper

__all__ = ["CrossCheckCallback", "TokenMean"]

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def base() -> Any:
    """`Callback` of the package that is in use, under either of its two names."""
    loaded = [name for name in PACKAGES if name in sys.modules]
    for name in [*loaded, *PACKAGES]:
        try:
            return import_module(name).Callback
        except ImportError:
            continue
    raise ImportError(
        "`xentlib.torch.integrations.lightning` must find Lightning; got neither `lightning` nor "
        "`pytorch_lightning`. Run: pip install lightning"
    )


class TokenMean(base()):  # type: ignore[misc]
    """Let a step of Lightning be on the mean over all its tokens. A callback.

        class Model(LightningModule):
            def training_step(self, batch, index):
                tokens, labels = batch
                return chunked_nll(self(tokens), self.head, labels, reduction="sum")

        Trainer(accumulate_grad_batches=4, strategy="ddp", callbacks=[TokenMean()]).fit(...)

    Lightning takes the mean of the means of `accumulate_grad_batches` micro-batches, and of ranks,
    which is something else as soon as their numbers of tokens differ. With this callback
    `training_step` returns the sum, and before the optimizer's step, and before
    Lightning clips, finished gradients are multiplied by

        accumulate_grad_batches * (what the strategy divides by) * t / T

    T is the number of tokens in all micro-batches of all ranks, so an epoch's last step may have
    fewer of them. Sums are divided by t, the T of the step before for each micro-batch and rank, so
    that the loss that Lightning shows is of the size of a mean, and gradients do not overflow.

    Of single devices, DDP and `ModelParallelStrategy` (FSDP2), with any precision; what
    scales the loss has undone it by then.

    `training_step` may also return a dict with `loss`, a sum, and `num_tokens`, of other losses;
    whether such a loss is a sum cannot be checked. Its other entries stay.

    Attributes:
        num_tokens: T of the last step, [] float64.
        mean_loss: of the last step, over all ranks and micro-batches, [] float64.

    Raises:
        ValueError: `training_step` returns a loss that was divided, or one without its number of
            tokens.
        UnsupportedWrapperError: a strategy that cannot be read or made up for, manual optimisation,
            an order of callbacks in which another one sees gradients that are not scaled yet.

    Numerics: one collective of two numbers a step, one more before the first; counts are exact up
    to 2^53; gradients are rounded once more. With no valid token in a step its gradients are 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens: Tensor | None = None
        self.mean_loss: Tensor | None = None
        self.replaced = ExitStack()  # of the module
        self.latest: Tensor  # of the last micro-batch: tokens and loss
        self.window_sums: Tensor  # of the window so far

    # Lightning's hooks

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.check_order(trainer, pl_module)
        self.wrapper = strategy_of(trainer, pl_module)
        self.typical: Tensor | None = None  # t
        self.start_over()
        step = pl_module.training_step  # of the class, or compiled, the module's own

        @wraps(step)  # Lightning reads its arguments
        def training_step(*args: Any, **kwargs: Any) -> Any:
            out = step(*args, **kwargs)
            # A validation step may be a call of the training step.
            return self.told_of(out) if trainer.training else out

        wrapped = with_attribute(pl_module, "training_step", training_step)
        self.replaced.enter_context(wrapped)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """After a window's first `training_step`. What was seen before that was never stepped on:
        a module's `optimizer_step` may leave steps out."""
        self.window_sums = self.latest.clone()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if isinstance(self.wrapper, FSDP2):
            self.wrapper.reduced = True
            self.wrapper.check_reduced()
        self.summed(self.window_sums)
        tokens, loss = self.window_sums
        divided = trainer.accumulate_grad_batches * float(self.wrapper.reduction.scale)
        assert self.typical is not None
        some = tokens != 0
        share = torch.where(some, tokens, 1.0)
        self.wrapper.scale_gradients(torch.where(some, divided * self.typical / share, 0.0))
        self.num_tokens, self.mean_loss = tokens, torch.where(some, loss / share, 0.0)
        self.typical = torch.where(some, tokens.abs() / divided, self.typical)
        self.start_over()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.replaced.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    # What they do

    def check_order(self, trainer: Any, module: Any) -> None:
        base_kind = base()

        def has(x: Any, hook: str) -> bool:
            plain = getattr(base_kind if isinstance(x, base_kind) else module_base(x), hook)
            return getattr(getattr(x, hook), "__func__", None) is not plain

        place = trainer.callbacks.index(self)
        for k, callback in enumerate(trainer.callbacks):
            if k < place and isinstance(callback, TokenMean):
                refuse("`TokenMean` must be among the callbacks once; got two. Leave one out.")
            if k < place and has(callback, "on_before_optimizer_step"):
                refuse(
                    f"`TokenMean` must come before callbacks that read or clip gradients; got "
                    f"{type(callback).__name__} with `on_before_optimizer_step` before it. Put "
                    f"`TokenMean()` first in `Trainer(callbacks=[...])`."
                )
        for x in (*trainer.callbacks, module):
            if has(x, "on_after_backward"):
                refuse(
                    f"gradients must be read or clipped in `on_before_optimizer_step`, where "
                    f"`TokenMean` has scaled them; got {type(x).__name__} with "
                    f"`on_after_backward`, which runs before."
                )
        if not module.automatic_optimization:
            refuse(
                f"`automatic_optimization` must be True with `TokenMean`; got a "
                f"{type(module).__name__} that steps by hand. Use `TokenNormalizer` there."
            )

    def start_over(self) -> None:
        self.window_sums = torch.zeros(2, dtype=torch.float64, device=self.wrapper.device)
        self.latest = self.window_sums.clone()

    def summed(self, numbers: Tensor) -> None:
        """Over the ranks that gradients are reduced over."""
        if self.wrapper.group is not None:
            dist.all_reduce(numbers, group=self.wrapper.group)

    def told_of(self, out: Any) -> dict[str, Any]:
        """What Lightning is given for what `training_step` has returned."""
        if out is None:
            raise ValueError(
                "`training_step` must return a loss under `TokenMean`, in every micro-batch of a "
                "window; got None. To leave one out return a sum of 0 that has a gradient, with "
                "`num_tokens` 0."
            )
        entries = dict(out) if isinstance(out, Mapping) else {"loss": out}
        counted = loss_and_count(entries.pop("loss", None), entries.pop("num_tokens", None))
        loss, weight = counted.loss, counted.weight
        counted.check_sum("Pass reduction='sum' to it.")
        if weight is None:
            raise ValueError(
                "`training_step` must return the sum of the losses with its number of tokens under "
                "`TokenMean`; got a loss alone, perhaps a mean. Return the output of "
                "`chunked_nll(..., reduction='sum')` itself, or {'loss': sum, 'num_tokens': n}."
            )
        counted.check_count()
        self.latest = torch.stack(
            [onto(weight, self.wrapper.device).double(), loss.detach().double()]
        )
        self.window_sums += self.latest
        if self.typical is None:  # of the first micro-batch of each rank
            first = self.latest.clone()
            self.summed(first)
            self.typical = (first[0].abs() / self.wrapper.ranks).clamp(min=1.0)
        return {**entries, "loss": loss / self.typical.to(loss.dtype), "num_tokens": weight}


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
        from xentlib.torch.crosscheck import CrossCheck  # a tool, which loads when it is asked for

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


def module_base(module: Any) -> Any:
    """`LightningModule` of the package that a module is of."""
    return next(x for x in type(module).__mro__ if x.__name__ == "LightningModule")


def refuse(why: str) -> None:
    raise UnsupportedWrapperError(why)


def strategy_of(trainer: Any, module: Any) -> Any:
    """How a strategy reduces gradients."""
    strategy = trainer.strategy
    name, model = type(strategy).__name__, strategy.model
    if strategy.handles_gradient_accumulation:
        refuse(
            f"the strategy must let gradients be scaled before the step; got {name}, which steps "
            f"by itself. Use DDPStrategy or ModelParallelStrategy."
        )
    mesh = getattr(strategy, "device_mesh", None)
    if mesh is not None and mesh["tensor_parallel"].size() > 1:
        refuse(
            f"`tensor_parallel_size` must be 1 with `TokenMean`; got "
            f"{mesh['tensor_parallel'].size()}. Use `TokenNormalizer` with manual optimisation."
        )
    # `configure_model` has called `fully_shard`, on the module or inside of it.
    inside = any(is_a("torch.distributed.fsdp", "FSDPModule", x) for x in module.modules())
    wrapper = FSDP2(module, None) if inside else detect_wrapper(model, None, None, None, True)
    if wrapper.reduction.wrapper == "plain" and trainer.world_size > 1:
        refuse(
            f"the strategy must reduce gradients over the {trainer.world_size} ranks in a way that "
            f"can be read; got {name} and a module that nothing wraps. Use DDPStrategy, or call "
            f"`fully_shard` in `configure_model`."
        )
    if wrapper.refusal():
        refuse(f"gradients must be scaled before the step, and {wrapper.refusal()}.")
    return wrapper
