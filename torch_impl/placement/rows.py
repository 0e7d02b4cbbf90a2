"""This rank's rows of a head that FSDP2 or ZeRO-3 has sharded, where they stay on their ranks: who
has the others, and what is done with their gradient as the wrapper would do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.arguments import Arguments
from xentlib.checks.lora import LOW_RANK
from xentlib.checks.placement import PLACEMENTS
from xentlib.checks.shards import ROUTES
from xentlib.lora import LowRankHead
from xentlib.plan import VocabShard, shard_of
from xentlib.torch.array_spec import is_dtensor
from xentlib.torch.core.groups import all_gather_rows
from xentlib.torch.core.vocab import numbers_of
from xentlib.torch.head.modules import split_lora
from xentlib.torch.operators import RowLayout
from xentlib.torch.placement.vocab_parallel import chunked, is_device_mesh
from xentlib.torch.wrappers import deepspeed
from xentlib.torch.wrappers.fsdp2 import PARTIAL, Owner, find_owner, never_gathered

R = TypeVar("R")


class Nodes(NamedTuple):
    """Ranks in nodes, where rows are gathered from those at one place of all nodes."""

    parts: list[list[int]]  # of each rank of each node: which part of the head it keeps
    peers: dist.ProcessGroup  # at this rank's place, of all nodes
    every: dist.ProcessGroup  # all of them


class LocalHead(NamedTuple):
    """A placement: this rank's rows, whose gradients are complete."""

    weight: Tensor | LowRankHead[Tensor]
    bias: Tensor | None
    group: dist.ProcessGroup  # the ranks that have the others, once they are gathered over nodes
    shard: VocabShard
    scale: float  # as the wrapper averages over its ranks, or divides by what it was told
    gemm_dtype: torch.dtype | None = None  # of its policy, where that is one of 16 bits
    nodes: Nodes | None = None

    def run(self, function: Callable[..., R], call: Arguments) -> R:
        layout = RowLayout(self.group.group_name, numbers_of(self.shard), self.scale, call.gather)
        if self.nodes is not None:
            parts, peers, every = self.nodes
            parts_GL = torch.tensor(parts, device="cpu")
            layout = layout._replace(nodes=parts_GL, peers=peers.group_name, every=every.group_name)
        call = call._replace(weight=self.weight, bias=self.bias)
        if self.gemm_dtype is None:
            return function(call, layout)
        # The policy's dtype is that of the products; the rows' gradient stays as wide as the rows.
        with torch.autocast(call.hidden.device.type, self.gemm_dtype):
            return function(call, layout)


def zero3_rows(call: Arguments) -> LocalHead:
    """Of a head that DeepSpeed's ZeRO-3 keeps."""
    if call.tokens_parallel is not None:
        PLACEMENTS.refuse("no_nodes", wrapper="ZeRO-3")
    head = (call.weight, call.bias, call.weight_layout, call.gather)
    weight, bias, group = deepspeed.rows_of(*head)
    ranks = dist.get_world_size(group)
    shard = shard_of((weight.shape[0],) * ranks, dist.get_rank(group))
    return LocalHead(weight, bias, group, shard, 1.0 / ranks)


def fsdp2_rows(call: Arguments, owner: Owner) -> LocalHead:
    """Of a head that `fully_shard` shards. What it does with a gradient is done with that of the
    rows: the same division, and one sum over replicas where it would sum over them."""
    plain, lora = split_lora(call)
    weight: Any = plain.weight
    bias: Any = plain.bias
    mesh, group = call.tokens_parallel, owner.group
    info, policy = group.mesh_info, group.mp_policy
    replicas = getattr(info, "replicate_process_group", None)
    over = getattr(info, "shard_process_group", None)
    hooks = {
        "an all-reduce hook": group._all_reduce_hook is not None,
        "a reduce-scatter of its own": type(group._reduce_scatter_comm).__module__
        != type(group).__module__.replace("_param_group", "_collectives"),
    }
    placements, layout = tuple(weight.placements), call.weight_layout
    as_placed = by_rows(owner, weight, *([] if bias is None else [bias])) and layout == "VH"
    ROUTES.require("fully_shard", as_placed, placements=placements, layout=layout)
    hooked = ", ".join(x for x, there in hooks.items() if there)
    ROUTES.require("hooked", not hooked, hooked=hooked)
    if lora is not None:
        LOW_RANK.require("together", by_rows(owner, lora.a, lora.b))
        rows, (*of_b, rank) = weight.shape[0], lora.b.shape
        LOW_RANK.require("b", of_b == [rows], rows=rows, rank=rank, shape=tuple(lora.b.shape))
    ROUTES.require("unsharded", not group.is_unsharded)
    never_gathered(group)
    assert over is not None
    if mesh is not None and replicas is not None:
        PLACEMENTS.refuse("no_nodes", wrapper="FSDP2 with replicas")
    shard, among, nodes = part_of(weight.shape[0], over, mesh)

    def local(whole: Any) -> Tensor:
        rows: Tensor = whole.to_local()
        if replicas is not None and rows.requires_grad:
            held = next(p for p in group.fsdp_params if p.sharded_param is whole)
            rows = AllReduceGrad.apply(rows, group, held, replicas)  # type: ignore[no-untyped-call]
        return rows

    head: Any = local(weight)
    if lora is not None:
        a = all_gather_rows(local(lora.a), lora.a.shape[0], over)
        head = lora._replace(weight=head, a=a, b=local(lora.b))
    narrow = policy.param_dtype in (torch.bfloat16, torch.float16)
    return LocalHead(
        head,
        None if bias is None else local(bias),
        among,
        shard,
        1.0 / (group.gradient_divide_factor or info.mesh.size()),
        policy.param_dtype if narrow else None,
        nodes,
    )


def part_of(
    classes: int, every: dist.ProcessGroup, mesh: Any
) -> tuple[VocabShard, dist.ProcessGroup, Nodes | None]:
    """This rank's rows of a head that a wrapper spreads over `every` rank, and who has the others.

    With `mesh`, of nodes and the ranks of a node: once rows are gathered over nodes.
    """
    sizes, ranks = chunked(classes, dist.get_world_size(every)), dist.get_process_group_ranks(every)
    if mesh is None:
        return shard_of(sizes, dist.get_rank(every)), every, None
    of_mesh, dimensions = is_device_mesh(mesh), getattr(mesh, "ndim", None)
    came = f"one of {dimensions} dimensions" if of_mesh else f"a {type(mesh).__name__}"
    PLACEMENTS.require("nodes", of_mesh and dimensions == 2, came=came)
    part = {rank: part for part, rank in enumerate(ranks)}
    table = mesh.mesh.tolist()
    parts = [[part.get(rank, -1) for rank in node] for node in table]
    # Rows of one rank then come in the order of their classes, those that there are first.
    ascend = all(list(place) == sorted(place) for place in zip(*parts, strict=True))
    same = sorted(part for node in parts for part in node) == list(range(len(ranks)))
    PLACEMENTS.require("nodes_ranks", same and ascend, ranks=ranks, nodes=table)
    if len(parts) == 1:
        return shard_of(sizes, dist.get_rank(every)), every, None
    among = mesh.get_group(1)
    sizes = tuple(sum(sizes[part] for part in place) for place in zip(*parts, strict=True))
    shard = shard_of(sizes, dist.get_rank(among))
    return shard, among, Nodes(parts, mesh.get_group(0), every)


def by_rows(owner: Owner, *head: Any) -> bool:
    """Whether FSDP2 alone shards the parameters of a head, over their rows and in one group."""
    info = owner.group.mesh_info
    return hasattr(info, "shard_process_group") and all(
        is_dtensor(x)
        and find_owner(x) == owner
        and x.placements[-1].is_shard(0)
        and x.device_mesh.ndim == info.mesh.ndim
        for x in head
    )


def ranks_of(owner: Owner) -> int:
    """That share the rows of a head."""
    return dist.get_world_size(owner.group.mesh_info.shard_process_group)


class AllReduceGrad(torch.autograd.Function):
    """Rows as they are; their gradient summed over replicas when FSDP2 would: until then it is
    kept, as `sharded_param.grad` would be summed by nobody."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any, held: Any, replicas: Any) -> Tensor:
        ctx.group, ctx.held, ctx.replicas = group, held, replicas
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        before = getattr(ctx.held, PARTIAL, None)
        if before is not None:
            gradient = before + gradient
        if not (ctx.group.reduce_grads and ctx.group.all_reduce_grads):
            setattr(ctx.held, PARTIAL, gradient)
            return None, None, None, None
        setattr(ctx.held, PARTIAL, None)
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.replicas)
        return gradient, None, None, None
