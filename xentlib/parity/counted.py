"""Calls whose collectives are counted, under real wrappers: what runs on a rank for row A15."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xentlib.parity.ranks import WORLD, start_gloo

__all__ = ["Count", "N", "jax_rank", "torch_rank", "zero_rank"]

N, V, H = 448, 257, 16


class Count(NamedTuple):
    """A call whose collectives are counted."""

    budget: str  # of `BUDGETS`
    chunks: int
    valid: tuple[int, ...]  # tokens, of each rank

    @property
    def function(self) -> str:
        return "chunked_logprobs" if self.budget.endswith("recompute") else "chunked_nll"

    @property
    def text(self) -> str:
        return f"{self.function}, {self.chunks} chunks, valid tokens {self.valid}"


Phases = tuple[dict[str, int], dict[str, int]]


def torch_rank(rank: int, world: int, folder: str, counts: list[Count]) -> list[Phases]:
    start_gloo(rank, world, folder)
    from torch import distributed as dist

    found = [_counted(count, rank, *_kept(count.budget)) for count in counts]
    dist.destroy_process_group()
    return found


def jax_rank(rank: int, world: int, folder: str, counts: list[Count]) -> list[Phases]:
    return [_program(count) for count in counts]


def _program(count: Count) -> Phases:
    """Tokens and the head's width over one mesh axis, as arrays whose types say so."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import xentlib.jax as ours

    mesh = jax.make_mesh((WORLD,), ("data",), axis_types=(AxisType.Explicit,))
    tokens = np.arange(N)
    labels = np.concatenate([np.where(tokens < valid, tokens % V, -100) for valid in count.valid])
    arrays = (
        (np.ones((WORLD * N, H), np.float32), P("data")),
        (np.ones((V, H), np.float32), P(None, "data")),
        (labels.astype(np.int32), P("data")),
    )
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays]
    function = getattr(ours, count.function)
    budget = -(-N // count.chunks) * V * 4

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        return jnp.sum(function(hidden, weight, labels, max_chunk_bytes=budget)[0])

    with jax.set_mesh(mesh), ours.count_collectives() as found:
        jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1)))(*placed))
    # What is in a loop is sent in every iteration.
    return {}, found.counts() | ({"other": len(found.looped())} if found.looped() else {})


def zero_rank(rank: int, world: int, folder: str, counts: list[Count]) -> list[Phases]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    # What DeepSpeed compiles, in a minute on busy cores: torch's own folder may hold a lock that a
    # killed process has left, for which every later one waits.
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        # Small parameters are never partitioned by default.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    found = []
    for count in counts:
        net = _net(V)
        engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[
            0
        ]
        found.append(_counted(count, rank, engine, net.head, {}, engine.backward))
        engine.destroy()
    torch.distributed.destroy_process_group()
    return found


def _net(rows: int) -> Any:
    """A module that holds a head, and hands on what it is given."""
    import torch

    net = torch.nn.Identity()
    torch.manual_seed(0)
    net.head = torch.nn.Linear(H, rows, bias=False)
    return net


def _kept(budget: str) -> tuple[Any, Any, dict[str, Any]]:
    """What is called before the head, the head, and arguments of the function."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from xentlib.torch import NLLHead

    kind = budget.removesuffix(", recompute")
    if kind == "vocabulary shard":
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        rows = len(range(V)[rank::world])
        net = _net(rows)
        return net, net.head, {"vocab_parallel": torch.distributed.group.WORLD}
    net = _net(V)
    if kind == "plain":
        return net, net.head, {}
    if kind == "DDP":
        return torch.nn.parallel.DistributedDataParallel(net), net.head, {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    more = {}
    if kind in ("FSDP2", "FSDP2, NLLHead", "FSDP2, prefetched"):
        mesh = init_device_mesh("cpu", (WORLD,))
    elif kind == "FSDP2, vocabulary shard":
        mesh, tp = mesh["a"], mesh["b"]
        piece = distribute_tensor(net.head.weight.data, tp, [Shard(0)])
        net.head.weight = torch.nn.Parameter(piece)
        more = {"vocab_parallel": tp}
    if kind == "FSDP2, NLLHead":
        net.head = NLLHead.from_linear(net.head)
    fully_shard(net.head, mesh=mesh, reshard_after_forward=True)
    if kind == "FSDP2, prefetched":
        fully_shard(net, mesh=mesh).set_modules_to_forward_prefetch([net.head])
    return net, net.head, more


def _counted(
    count: Count,
    rank: int,
    net: Any,
    head: Any,
    more: dict[str, Any],
    backward: Callable[[Any], Any] | None = None,
) -> Phases:
    import torch

    import xentlib.torch as ours

    is_function = isinstance(head, ours.NLLHead)
    function = head if is_function else getattr(ours, count.function)
    tokens = torch.arange(N)
    labels = torch.where(tokens < count.valid[rank], tokens % V, -100)
    budget = -(-N // count.chunks) * V * 4
    torch.manual_seed(0)  # ranks that share a vocabulary share their tokens
    # Once before: the sizes of a vocabulary's shards are exchanged once for a head.
    for _ in range(2):
        hidden = net(torch.randn(N, H, requires_grad=True))
        with ours.count_collectives() as forward:
            weight = () if is_function else (head.weight,)
            out = function(hidden, *weight, labels, max_chunk_bytes=budget, **more)
            loss = out[0].sum()
        with ours.count_collectives() as after:
            loss.backward() if backward is None else backward(loss)
    return forward.counts(), after.counts()
