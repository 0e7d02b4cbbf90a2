"""Steps of PyTorch on several ranks for the audit: wrappers, reductions, and what they do wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from helpers.audited_torch import IGNORE, bf16, normalizer, step, total, world
from xentlib.torch import chunked_nll


def of_wrapper(wrap: Any) -> Any:
    """The local sum times the number of ranks over the count of all: the wrapper takes the mean."""

    def run(head: Any, micro_batches: Any) -> Any:
        model = wrap(head)
        count = total(sum((b["targets"] != IGNORE).sum() for b in micro_batches)).item()
        x = torch.cat([b["hidden"] for b in micro_batches])
        y = torch.cat([b["targets"] for b in micro_batches]).flatten()
        loss = F.cross_entropy(model(x).flatten(0, 1), y, reduction="sum") / count
        (world() * loss).backward()
        return total(loss)

    return run


def ddp(head: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(head)


def fsdp2(head: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(head)


def full_tensor(head: Any, micro_batches: Any) -> Any:
    """A head that is gathered past its forward: nothing reduces its gradient."""
    model = fsdp2(head)
    count = total(sum((b["targets"] != IGNORE).sum() for b in micro_batches)).item()
    x = torch.cat([b["hidden"] for b in micro_batches])
    y = torch.cat([b["targets"] for b in micro_batches]).flatten()
    loss = F.cross_entropy((x @ model.weight.full_tensor().T).flatten(0, 1), y, reduction="sum")
    (world() * loss / count).backward()


def sharded_head(head: Any, micro_batches: Any) -> Any:
    """FSDP2's parameter passed as it is."""
    model = fsdp2(head)
    count = total(sum((b["targets"] != IGNORE).sum() for b in micro_batches)).item()
    x = torch.cat([b["hidden"] for b in micro_batches])
    y = torch.cat([b["targets"] for b in micro_batches])
    loss = chunked_nll(x, model.weight, y, denominator=count / world()).loss
    loss.backward()
    return total(loss) / world()


def local_loss(head: Any, micro_batches: Any) -> Any:
    """Right gradients; what is returned is the mean of this rank's tokens, and of another one's
    where it has none NaN."""
    of_wrapper(ddp)(head, micro_batches)
    with torch.no_grad():
        x = torch.cat([b["hidden"] for b in micro_batches])
        y = torch.cat([b["targets"] for b in micro_batches]).flatten()
        return F.cross_entropy(head(x).flatten(0, 1), y)


def own_mean(head: Any, micro_batches: Any) -> Any:
    """The count of all ranks is right, and this rank's loss is divided by its own first."""
    model = ddp(head)
    count = total(sum((b["targets"] != IGNORE).sum() for b in micro_batches)).item()
    x = torch.cat([b["hidden"] for b in micro_batches])
    y = torch.cat([b["targets"] for b in micro_batches]).flatten()
    own = (y != IGNORE).sum()
    log_p = model(x).flatten(0, 1).log_softmax(-1)
    nll = -log_p.gather(1, y.clamp(min=0)[:, None])[:, 0]
    ((nll * (y != IGNORE)).sum() / own * own * world() / count).backward()


ON_RANKS: list[tuple[str, Any, dict[str, Any]]] = [
    ("", step(), {"bias": True}),
    ("", of_wrapper(ddp), {"bias": True}),
    ("", of_wrapper(fsdp2), {}),
    ("", sharded_head, {}),
    ("", normalizer("precount", ddp), {}),
    ("", normalizer("postscale", ddp), {"bias": True}),
    ("", normalizer("precount", fsdp2), {}),
    ("mean of the means of micro-batches", step(divisor="micro-batches"), {}),
    ("mean of the means of ranks", step(divisor="own", reduce="mean"), {}),
    (
        "mean of the means of micro-batches and ranks",
        step(divisor="own micro-batches", reduce="mean"),
        {"bias": True},
    ),
    ("not reduced over ranks", step(reduce=""), {}),
    ("not reduced over ranks", step(divisor="own", reduce=""), {"bias": True}),
    ("reduced twice over ranks", step(reduce="twice"), {}),
    ("off by the number of ranks", step(reduce="mean"), {}),
    ("off by ranks and accumulation steps", step(reduce="mean", factor=1 / 3), {}),
    ("head's gradient is one rank's own", full_tensor, {}),
    ("labels not shifted", step(labels=lambda b: b["labels"]), {}),
    ("logits rounded to 16 bits", step(logits=bf16), {}),
    ("off by the number of ranks and sum and not mean", step(divisor="nothing", reduce="mean"), {}),
    ("", local_loss, {}),
    ("", own_mean, {}),
]
