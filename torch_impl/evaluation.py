"""The mean loss of an evaluation in PyTorch: two float64 numbers, summed over ranks at the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib import evaluation as spec
from xentlib.checks import check_loss_sum, check_token_count, plain
from xentlib.torch.accumulate import known, told
from xentlib.torch.describe import describe
from xentlib.torch.head import find_group

__all__ = ["Evaluation"]


class Evaluation:
    def __init__(self) -> None:
        self.sums: Tensor | None = None  # of losses and of tokens, where the first loss was

    def add(self, loss: Any, num_tokens: Any = None) -> Evaluation:
        loss = plain(loss)
        if isinstance(loss, (int, float)):
            loss = torch.tensor(loss, dtype=torch.float64)
        given = told(loss, num_tokens)
        divided = given.denominator is not None or getattr(
            getattr(given.loss, "grad_fn", None), "divided", False
        )
        check_loss_sum(describe(given.loss), divided, instead="Pass reduction='sum' to it.")
        value, count = known(given.loss), known(given.weight)
        check_token_count("num_tokens", describe(given.weight), count, True, value)
        device = given.loss.device if self.sums is None else self.sums.device
        pair = [x.detach().to(device).double() for x in (given.loss, given.weight)]
        # Not in place: what `torch.inference_mode` has made cannot be written to outside of it.
        self.sums = torch.stack(pair) + (0.0 if self.sums is None else self.sums)
        return self

    def mean_loss(self, data_parallel: Any = None) -> Tensor:
        sums = torch.zeros(2, dtype=torch.float64) if self.sums is None else self.sums
        group: Any = None
        if data_parallel is not None:
            group = find_group(data_parallel, "data_parallel")
        elif dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        if group is not None:
            # On the same device for all: a rank without a batch has none of its own.
            sums = sums.to(device_of(group), copy=True)
            dist.all_reduce(sums, group=group)
        mean: Tensor = sums[0] / sums[1]
        return mean


Evaluation.__doc__ = spec.Evaluation.__doc__


def device_of(group: dist.ProcessGroup) -> torch.device:
    """That a group's collectives are on: an accelerator's, where it has one."""
    # A build for CUDA names it on a machine without, and gloo takes its tensors.
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or all(x.type != kind.type for x in group._device_types):
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())
