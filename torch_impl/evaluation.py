"""The mean loss of an evaluation in PyTorch: two float64 numbers, summed over ranks at the end."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.checks.validators import plain
from xentlib.checks.window import WINDOWS, check_one_loss
from xentlib.results import is_loss_output
from xentlib.torch.core.device import onto
from xentlib.torch.micro_batch import loss_and_count
from xentlib.torch.placement.rows import find_group


class Evaluation:
    """The mean loss a token of any number of batches, on any number of ranks. No gradients.

        evaluation = Evaluation()
        for batch in batches:                                       # none at all, on some ranks
            out = chunked_nll(hidden_of(batch), head, batch["labels"], reduction="sum")
            evaluation = evaluation.add(out)
        loss = evaluation.mean_loss()                               # on every rank
        perplexity = exp(loss)

    `add(loss=None, num_tokens=None, *, loss_sum=None, loss_mean=None)` returns the evaluation with
    one more batch. `loss` is an `NLLOutput` of `reduction="sum"`, which has its count and says
    whether it was divided. One number, [] float32 or float64, may be either: pass `loss_sum`, the
    sum over valid tokens, or `loss_mean`, their mean, with `num_tokens`, their number or their
    weight. It communicates nothing. In PyTorch it adds in place too, and `out.loss` of a sum says
    by itself what it is.

    `mean_loss(data_parallel=None)` is the mean over all batches of all ranks, [], the same on each,
    NaN where there is no token at all. One collective, which every rank enters. `data_parallel`
    says over whom: in PyTorch a ProcessGroup or a one-dimensional DeviceMesh, None for all ranks of
    `torch.distributed`, if it is initialised; in JAX names of mesh axes inside `shard_map`, None
    for all of them. Ranks that hold copies of others' tokens may take part, if each is there as
    often.

    The loss is averaged as it is: where a call has `z_loss` or `label_smoothing` their terms are in
    it, and exp of the mean is no perplexity. Evaluate with a call that has neither.

    It needs no model and no wrapper. Where a forward gathers parameters (FSDP2, ZeRO-3) every rank
    has to run as many: give those that have done a batch whose labels are all ignored.

    In JAX it is a pytree of two arrays, for `jit`, for a host loop, or as the carry of a scan; a
    carry inside `shard_map(check_vma=True)` begins as `jax.lax.pcast(Evaluation(), axis,
    to="varying")`.

    Raises:
        ValueError: a loss that `chunked_nll` has divided, or that is not one number; one without
            its count, or of which nobody says whether it is a sum; an output in which its mean was
            put in place of its sum, where both can be read; a count that its loss cannot
            have, where reading costs nothing. Whether `loss_sum` of other code is a sum cannot be
            checked.
        TypeError: a loss or a count of fewer than 32 bits.

    Numerics: sums in float64 in PyTorch; in JAX in float32 with what each addition has lost beside
    it, so that the error does not grow with the number of batches. NaN and inf show.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None  # of losses and of tokens, where the first loss was

    def add(
        self,
        loss: Any = None,
        num_tokens: Any = None,
        *,
        loss_sum: Any = None,
        loss_mean: Any = None,
    ) -> Evaluation:
        named = {"loss": loss, "loss_sum": loss_sum, "loss_mean": loss_mean}
        name = check_one_loss([name for name, x in named.items() if x is not None])
        loss = plain(named[name])
        if isinstance(loss, (int, float)):
            loss = torch.tensor(loss, dtype=torch.float64)
        counted, mean = loss_and_count(loss, num_tokens), name == "loss_mean"
        counted.check_sum("Pass reduction='sum' to it.", normalized=mean)
        counted.check_count()
        if mean:
            counted.check_mean()
        exact = counted.origin is not None and counted.origin.exact
        WINDOWS.require("named", name != "loss" or is_loss_output(loss) or exact)
        device = counted.loss.device if self.sums is None else self.sums.device
        pair = [onto(x.detach(), device).double() for x in (counted.loss, counted.weight)]
        if mean:  # of no token it may be NaN
            pair[0] = torch.where(pair[1] == 0, 0.0, pair[0] * pair[1])
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
        return sums[0] / sums[1]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """That a group's collectives are on: an accelerator's, where it has one."""
    # A build for CUDA names it on a machine without, and gloo takes its tensors.
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None or all(x.type != kind.type for x in group._device_types):
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index())
