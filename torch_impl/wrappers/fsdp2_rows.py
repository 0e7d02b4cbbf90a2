"""FSDP2 (`fully_shard`): rows of a head that stay on their ranks, and what is done with their
gradient as the wrapper would do it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.checks.lora import check_low_rank_rows
from xentlib.checks.placement import refuse_nodes
from xentlib.checks.shards import check_sharded_rows, refuse_whole
from xentlib.lora import LowRankHead
from xentlib.torch.array_spec import is_dtensor
from xentlib.torch.core.groups import all_gather_rows
from xentlib.torch.shards import LocalHead, part_of
from xentlib.torch.wrappers.fsdp2 import PARTIAL, Owner, find_owner, never_gathered


def rows_of(
    owner: Owner,
    weight: Any,
    bias: Any,
    layout: str,
    *,
    low: LowRankHead[Any] | None = None,
    mesh: Any = None,
) -> LocalHead:
    """What the wrapper does with a gradient is done with that of the rows: the same division, and
    one sum over replicas where it would sum over them. `mesh`: of the nodes over which rows are
    gathered first, or None."""
    group = owner.group
    info, policy = group.mesh_info, group.mp_policy
    replicas = getattr(info, "replicate_process_group", None)
    over = getattr(info, "shard_process_group", None)
    hooks = {
        "an all-reduce hook": group._all_reduce_hook is not None,
        "a reduce-scatter of its own": type(group._reduce_scatter_comm).__module__
        != type(group).__module__.replace("_param_group", "_collectives"),
    }
    placements, ours = tuple(weight.placements), [] if bias is None else [bias]
    hooked = ", ".join(x for x, there in hooks.items() if there)
    check_sharded_rows(by_rows(owner, weight, *ours), placements, layout, hooked)
    if low is not None:
        check_low_rank_rows(by_rows(owner, low.a, low.b), low.b.shape, weight.shape[0])
    if group.is_unsharded:
        refuse_whole()
    never_gathered(group)
    assert over is not None
    if mesh is not None and replicas is not None:
        refuse_nodes("FSDP2 with replicas")
    shard, among, nodes = part_of(weight.shape[0], over, mesh)

    def local(whole: Any) -> Tensor:
        rows: Tensor = whole.to_local()
        if replicas is not None and rows.requires_grad:
            held = next(p for p in group.fsdp_params if p.sharded_param is whole)
            rows = AllReduceGrad.apply(rows, group, held, replicas)  # type: ignore[no-untyped-call]
        return rows

    head: Any = local(weight)
    if low is not None:
        a = all_gather_rows(local(low.a), low.a.shape[0], over)
        head = low._replace(weight=head, a=a, b=local(low.b))
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
