"""A model put on ranks as torchtitan does it, from torch's own APIs, and one step of it.

Shapes: B rows of a batch, L tokens of a row, V vocabulary, H hidden width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from helpers.wide import Wide
from xentlib import VocabShard
from xentlib.torch.integrations.torchtitan import HeadLoss

V, H, B, L = 101, 15, 2, 12
CHUNK = 8 * V * 4  # bytes of 8 tokens' logits
BATCHES = 2  # of micro-batches, or of ranks


Logits = partial(Wide, V, BATCHES * B * L)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)
        self.up, self.down = nn.Linear(H, 2 * H, bias=False), nn.Linear(2 * H, H, bias=False)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Decoder(nn.Module):
    """Parts that a pipeline stage does not have are None; with `_skip_lm_head`, hidden states."""

    _skip_lm_head = False

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding: Any = nn.Embedding(V, H)
        self.layers = nn.ModuleDict({str(k): Block() for k in range(2)})
        self.norm: Any = nn.RMSNorm(H)
        self.lm_head: Any = nn.Linear(H, V, bias=False)
        if tied:
            self.lm_head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        x = x if self.norm is None else self.norm(x)
        return x if self.lm_head is None or self._skip_lm_head else self.lm_head(x)


def batches() -> list[tuple[Any, Any]]:
    """Ids and labels with very uneven numbers of valid tokens."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for k in range(BATCHES):
        ids = torch.randint(V, (B, L), generator=generator)
        labels = ids.roll(-1, 1)
        labels[:, -1] = -100
        labels[0, 3 + k :] = -100
        labels[1, : 8 * k] = -100
        found.append((ids, labels))
    return found


TOKENS = torch.tensor(sum(int((labels != -100).sum()) for _, labels in batches()))


def parallel(model: Any, mesh: Any, *, sequence: bool) -> None:
    """Tensor parallelism, with `sequence` between the layers as well; logits stay sharded."""
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {
        "lm_head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    }
    if sequence:
        rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
        plan |= {"embedding": rows, "norm": SequenceParallel()}
    for name in model.layers:
        plan[f"layers.{name}.up"] = ColwiseParallel(input_layouts=between)
        plan[f"layers.{name}.down"] = RowwiseParallel(output_layouts=between)
        if sequence:
            plan[f"layers.{name}.norm"] = SequenceParallel()
    parallelize_module(model, mesh, plan)


def shard(
    model: Any,
    mesh: Any,
    *,
    tied: bool = False,
    resharded: bool = False,
    alone: bool = False,
    divide: float | None = 1.0,
) -> None:
    """FSDP2 that sums: the last norm and the head, with a tied embedding, in one group, which with
    `resharded` is sharded again when the loss is taken; or the head `alone`."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    group = [model.lm_head]
    if not alone:
        group = [model.norm, *group, *([model.embedding] if tied else [])]
    fully_shard(group, mesh=mesh, reshard_after_forward=resharded)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if divide is not None:
                module.set_gradient_divide_factor(divide)
            module.set_force_sum_reduction_for_comms(True)  # all that gloo can do


def gradients(named: dict[str, Any]) -> dict[str, Any]:
    def whole(g: Any) -> Any:
        return g.full_tensor() if hasattr(g, "full_tensor") else g

    return {name: whole(p.grad).numpy() for name, p in named.items()}


def head_loss(model: Any, **options: Any) -> HeadLoss:
    loss_fn = HeadLoss(max_chunk_bytes=CHUNK, **options)
    loss_fn.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    return loss_fn


def hooks_of(model: Any) -> list[Any]:
    return [[*m._forward_pre_hooks, *m._forward_hooks] for m in model.modules()]


def step(model: Any, mine: list[tuple[Any, Any]], **options: Any) -> tuple[float, dict[str, Any]]:
    """Loss of some micro-batches and the gradients that they leave."""
    loss_fn, total = head_loss(model, **options), 0.0
    named = dict(model.named_parameters())
    before = hooks_of(model)
    for ids, labels in mine:
        loss, metrics = loss_fn(model(ids), labels, TOKENS, positions=None)
        assert metrics == {}
        loss.backward()
        total += loss.item()
        assert hooks_of(model) == before
    return total, gradients(named)


def pipeline(rank: int) -> tuple[float, dict[str, Any]]:
    """A stage a rank, a layer each; the loss on the last one."""
    model = Decoder()
    if rank == 0:
        model.norm = model.lm_head = None
        del model.layers["1"]
    else:
        model.embedding = None
        del model.layers["0"]
    loss_fn = head_loss(model) if rank else None

    def scalar(pred: Any, labels: Any) -> Any:
        return loss_fn(pred, labels, TOKENS)[0]  # type: ignore[misc]

    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, BATCHES, loss_fn=scalar, scale_grads=False)
    ids, labels = (torch.cat(x) for x in zip(*batches(), strict=True))
    losses: list[Any] = []
    if rank == 0:
        schedule.step(ids)
    else:
        schedule.step(target=labels, losses=losses)
    total = float(sum(x.item() for x in losses))
    return total, gradients(dict(model.named_parameters()))


def alone_in_a_pipeline(group: Any) -> None:
    """One stage of one rank."""
    model = Decoder()
    loss_fn = head_loss(model)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, BATCHES, loss_fn=lambda *x: loss_fn(*x, TOKENS)[0])
    ids, labels = (torch.cat(x) for x in zip(*batches(), strict=True))
    schedule.step(ids, target=labels, losses=[])


def sharded_rows(rank: int) -> tuple[float, dict[str, Any]]:
    """A head of plain rows behind a region that adds up gradients, as torchtitan's `spmd_types`."""
    import torch.distributed._functional_collectives as collectives

    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            return collectives.all_reduce(g, "sum", dist.group.WORLD).wait()

    model = Decoder()
    rows = model.lm_head.weight.detach().tensor_split(2)[rank].clone()
    model.lm_head = nn.Linear(H, len(rows), bias=False)
    model.lm_head.weight = nn.Parameter(rows)
    norm, model.norm = model.norm, nn.Identity()
    model.norm = nn.Sequential()
    model.norm.forward = lambda x: Copied.apply(norm(x))  # type: ignore[method-assign]
    model.norm.inner = norm
    shard = VocabShard.of_ranks(len(rows), dist.group.WORLD)
    options = {"vocab_parallel": shard, "reduce_hidden_grad": False}
    total, found = step(model, batches(), **options)
    found["norm.weight"] = found.pop("norm.inner.weight")
    found.pop("lm_head.weight")
    return total, found
