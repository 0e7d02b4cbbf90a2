"""What steps on two ranks are made of, right ones and wrong ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F

IGNORE = -100


def world() -> int:
    return dist.get_world_size()


def over_ranks(x: Any, op: Any = dist.ReduceOp.SUM) -> Any:
    x = torch.as_tensor(x).detach().clone()
    dist.all_reduce(x, op)
    return x


def valid(b: Any) -> Any:
    return (b["targets"] != IGNORE).sum()


def own(micro_batches: Any) -> Any:
    return torch.as_tensor(sum(valid(b) for b in micro_batches))


def everywhere(micro_batches: Any) -> Any:
    return over_ranks(own(micro_batches))


def sums(model: Any, b: Any) -> Any:
    logits = model(b["hidden"]).flatten(0, 1)
    return F.cross_entropy(logits, b["targets"].flatten(), reduction="sum")


def ddp(head: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(head)


def fsdp(head: Any) -> Any:
    return torch.distributed.fsdp.fully_shard(head)


def accumulate(model: Any, micro_batches: Any, divisor: Any, sync: Any = None) -> Any:
    """A backward each, reduced where `sync` says so; the loss of this rank."""
    total = torch.zeros(())
    for number, b in enumerate(micro_batches):
        if sync is not None:
            model.require_backward_grad_sync = sync(number)
        loss = sums(model, b) / divisor(b)
        loss.backward()
        total += loss.detach()
    return total


def last(micro_batches: Any) -> Any:
    return lambda number: number == len(micro_batches) - 1


def reduce_by_hand(head: Any, average: bool = False) -> None:
    for p in head.parameters():
        dist.all_reduce(p.grad)
        if average:
            p.grad /= world()


def vocabulary_parallel(head: Any, micro_batches: Any, smoothing: float, local: bool) -> Any:
    """All tokens on all ranks, a shard of the classes on each, gradients gathered at the end."""
    x = torch.cat([b["hidden"].detach().flatten(0, 1) for b in micro_batches])
    y = torch.cat([b["targets"].flatten() for b in micro_batches])
    xs, ys = ([torch.empty_like(t) for _ in range(world())] for t in (x, y))
    dist.all_gather(xs, x)
    dist.all_gather(ys, y)
    x, y = torch.cat(xs), torch.cat(ys)
    x, y = x[y != IGNORE], y[y != IGNORE]
    vocab = head.weight.shape[0]
    start, stop = (vocab * (dist.get_rank() + k) // world() for k in (0, 1))
    z = x @ head.weight.detach()[start:stop].T
    m = over_ranks(z.amax(-1), dist.ReduceOp.MAX)
    lse = m + over_ranks(torch.exp(z - m[:, None]).sum(-1)).log()
    here = (y >= start) & (y < stop)
    of_label = torch.zeros(len(y))
    of_label[here] = z[here, y[here] - start]
    logp = z - lse[:, None]
    mean = logp.mean(-1) if local else over_ranks(logp.sum(-1)) / vocab
    nll = lse - over_ranks(of_label)
    loss = ((1 - smoothing) * nll - smoothing * mean).mean()
    dz = logp.exp() - smoothing / (stop - start if local else vocab)
    dz[here, y[here] - start] -= 1 - smoothing
    full = torch.zeros_like(head.weight)
    full[start:stop] = dz.T @ x / len(y)
    return over_ranks(loss) / world(), over_ranks(full)
