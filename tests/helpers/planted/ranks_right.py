"""Right steps of PyTorch on two ranks, each with micro-batches of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn
import torch.nn.functional as F

from helpers.planted import Table
from helpers.planted.ranks_common import (
    accumulate,
    ddp,
    everywhere,
    fsdp,
    last,
    over_ranks,
    own,
    reduce_by_hand,
    sums,
    vocabulary_parallel,
    world,
)

TABLE = Table()


@TABLE.right("a vocabulary over ranks, gradients gathered", label_smoothing=0.1)
def a_vocabulary_over_ranks(head: Any, micro_batches: Any) -> Any:
    return vocabulary_parallel(head, micro_batches, 0.1, local=False)


@TABLE.right("the local sum times the ranks over the global count, reduced at the last", bias=True)
def no_sync_until_the_last(head: Any, micro_batches: Any) -> Any:
    model, count = ddp(head), everywhere(micro_batches)
    total = torch.zeros(())
    for number, b in enumerate(micro_batches):
        model.require_backward_grad_sync = last(micro_batches)(number)
        loss = sums(model, b) * world() / count
        loss.backward()
        total += loss.detach()
    return over_ranks(total) / world()


@TABLE.right(
    "DDP, and the loss that this rank logs: its own tokens over the global count, times the ranks"
)
def logs_its_own_loss(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches) / world()
    return accumulate(ddp(head), micro_batches, lambda b: count, last(micro_batches))


@TABLE.right("DDP, and the mean of this rank's tokens is what it logs")
def logs_its_own_mean(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches) / world()
    loss = accumulate(ddp(head), micro_batches, lambda b: count, last(micro_batches))
    return loss * count / own(micro_batches)


@TABLE.right(
    "FSDP2's division by the ranks undone afterwards", source="PrimeIntellect-ai/prime-rl#2562"
)
def division_undone(head: Any, micro_batches: Any) -> Any:
    model, count = fsdp(head), everywhere(micro_batches)
    loss = accumulate(model, micro_batches, lambda b: count)
    model.weight.grad *= world()
    return over_ranks(loss)


@TABLE.right("FSDP2 that reduces at the last micro-batch", bias=True)
def fsdp_that_waits(head: Any, micro_batches: Any) -> Any:
    model, count, total = fsdp(head), everywhere(micro_batches), torch.zeros(())
    for number, b in enumerate(micro_batches):
        model.set_requires_gradient_sync(last(micro_batches)(number))
        loss = sums(model, b) * world() / count
        loss.backward()
        total += loss.detach()
    return over_ranks(total) / world()


@TABLE.right(
    "token sums, a sum over ranks, one division at the end", source="NVIDIA/Megatron-LM#673"
)
def divided_after_the_reduction(head: Any, micro_batches: Any) -> Any:
    loss = accumulate(head, micro_batches, lambda b: 1)
    reduce_by_hand(head)
    count = everywhere(micro_batches)
    head.weight.grad /= count
    return over_ranks(loss) / count


@TABLE.right("each rank's mean, weighted by its share times the ranks, under DDP", bias=True)
def weighted_by_its_share(head: Any, micro_batches: Any) -> Any:
    model, x = ddp(head), torch.cat([b["hidden"] for b in micro_batches])
    y = torch.cat([b["targets"] for b in micro_batches]).flatten()
    count = own(micro_batches)
    loss = F.cross_entropy(model(x).flatten(0, 1), y, reduction="sum") / count.clamp(min=1)
    share = count * world() / everywhere(micro_batches)
    (loss * share).backward()
    return over_ranks(loss * share) / world()


@TABLE.right("the global loss by an all_reduce whose backward sums, under DDP's mean")
def global_loss_under_ddp(head: Any, micro_batches: Any) -> Any:
    model, count = ddp(head), everywhere(micro_batches)
    x = torch.cat([b["hidden"] for b in micro_batches])
    y = torch.cat([b["targets"] for b in micro_batches]).flatten()
    loss = F.cross_entropy(model(x).flatten(0, 1), y, reduction="sum") / count
    loss = torch.distributed.nn.all_reduce(loss)
    loss.backward()
    return loss


@TABLE.right("gradients flattened into one buffer in float64 to be reduced", bias=True)
def one_buffer(head: Any, micro_batches: Any) -> Any:
    count = everywhere(micro_batches)
    loss = accumulate(head, micro_batches, lambda b: count)
    params = list(head.parameters())
    buffer = over_ranks(torch.cat([p.grad.flatten() for p in params]).double())
    for p, g in zip(params, buffer.split([p.numel() for p in params])):
        p.grad = g.view_as(p).float()
    return over_ranks(loss)
