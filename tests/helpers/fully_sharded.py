"""Models under real `fully_shard` on gloo ranks: how they are wrapped, and what a rank finds."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from helpers.ranks import launch
from helpers.routed import nodes_of
from helpers.wrapped import Setup, batches, model_of, part_of, run
from xentlib.tools.harness.ranks import DEVICE

__all__ = ["Sharded", "on_each_world", "on_rank", "wrapped"]


# Dtypes of parameters and of reductions
POLICIES = {
    "bf16": (torch.bfloat16, torch.float32),
    "bf16 alone": (torch.bfloat16, None),
    "reduced in fp32": (None, torch.float32),
    "fp64": (None, torch.float64),
}


@dataclass(frozen=True)
class Sharded(Setup):
    own: bool = True  # the head by a `fully_shard` of its own, else by the root's
    beside: tuple[str, ...] = ()  # other modules of its `fully_shard`
    wrap: tuple[tuple[str, Any], ...] = ()
    divide: float | None = None
    world: int = 2
    # Or "replicas" of shards, "shards, tp": a vocabulary over ranks too, or of both "all"
    mesh: str = "shards"
    sequence: bool = False  # each rank of "tp" has tokens of its own
    # One of POLICIES, and "offload" to the CPU
    policy: str = ""
    partly: bool = False  # micro-batches but the last are summed over shards, not over replicas
    compiled: bool = False
    nodes: int = 0  # over which rows are gathered before hidden states travel
    budget: tuple[int, int] | None = None  # gathers and scatters of the head, of one micro-batch


def wrapped(setup: Sharded, world: int) -> tuple[Any, Any]:
    """The model under `fully_shard`, and the mesh of its vocabulary."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    names = {"shards": ("x",), "replicas": ("replica", "x"), "shards, tp": ("x", "tp")}
    names["all"] = ("replica", "x", "tp")
    named = names[setup.mesh]
    shape = (*(2,) * (len(named) - 1), world // 2 ** (len(named) - 1))
    mesh = torch.distributed.init_device_mesh(DEVICE, shape, mesh_dim_names=named)
    model, tp = model_of(setup), None
    if named[-1] == "tp":
        mesh, tp = mesh[named[:-1]], mesh["tp"]
        for name, p in list(model.head.named_parameters()):
            cut = distribute_tensor(p.data, tp, [Shard(0)])
            piece = torch.nn.Parameter(cut, p.requires_grad)
            model.head.register_parameter(name, piece)
    how = {"mesh": mesh, **dict(setup.wrap)}
    for policy, dtypes in POLICIES.items():
        if policy in setup.policy.split(", "):
            how["mp_policy"] = MixedPrecisionPolicy(*dtypes)
    if "offload" in setup.policy:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if setup.beside:
        fully_shard([*map(model.get_submodule, setup.beside), model.head], **how)
    elif setup.own:
        fully_shard(model.head, **how)
    fully_shard(model, **how)
    for module in model.modules():
        if setup.divide and hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(setup.divide)
            module.set_force_sum_reduction_for_comms(True)  # all that gloo can do
    return model, tp


def on_each_world(setups: Mapping[str, Sharded]) -> dict[str, list[Any]]:
    """What each rank finds of every setup: one start of each number of ranks."""
    results: dict[str, list[Any]] = {}
    for world in sorted({setup.world for setup in setups.values()}):
        own = {name: setup for name, setup in setups.items() if setup.world == world}
        for name, *ranks in zip(own, *launch(world, on_rank, [*own.values()]), strict=True):
            results[name] = ranks
    return results


def on_rank(rank: int, world: int, setups: list[Sharded]) -> list[Any]:
    from xentlib.torch import count_collectives

    # A program that is compiled anew too often would be run as it is, and nothing be said.
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # of views, of hooks lost
    found = []
    for setup in setups:
        model, tp = wrapped(setup, world)
        more = {} if tp is None else {"vocab_parallel": tp}
        if setup.sequence:
            more["tokens_parallel"] = tp
        if setup.nodes:
            more["tokens_parallel"] = nodes_of(setup.nodes)
        # On one rank, whose rows are not the first: the others have the same collectives.
        compiled = setup.compiled and rank == world - 1
        step_of = torch.compile(run, backend="aot_eager") if compiled else run
        steps, total = batches(setup)
        ranks = world if tp is None else world // tp.size()
        denominator = total / (setup.divide or ranks)
        part = part_of(rank, world)
        if tp is not None and not setup.sequence:  # all of them have the same rows
            part = part_of(rank // tp.size(), ranks)
        for step, (ids, labels) in enumerate(steps):
            last = step == len(steps) - 1
            if setup.partly:
                model.set_requires_all_reduce(last)
            else:
                model.set_requires_gradient_sync(last)
            # The compiler leaves programs alone that a mode watches, and it doubles the seconds.
            with nullcontext() if setup.budget is None else count_collectives() as count:
                step_of(setup, model, ids[part], labels[part], denominator, **more).backward()
        # The trunk is the root's: one gather, one scatter.
        budget = count and (count["all_gather"] - 1, count["reduce_scatter"] - 1)
        grads = {}
        for name, p in model.named_parameters():
            if p.grad is None:
                continue
            if setup.sequence and "head" not in name:  # which sums its own over these ranks
                torch.distributed.all_reduce(p.grad.to_local(), group=tp.get_group())
            grads[name] = p.grad.full_tensor().cpu().numpy()
        found.append((grads, budget))
        with torch.no_grad():  # evaluation: the same loss, nothing left behind
            before = run(setup, model, ids[part], labels[part], denominator, **more)
            after = run(setup, model, ids[part], labels[part], denominator, **more)
        assert torch.equal(before, after)
    return found
