"""Calls whose collectives are counted, under real wrappers: what runs on a rank for row A15."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from xentlib.budgets import BUDGETS
from xentlib.plan import VocabShard
from xentlib.tools.harness.ranks import WORLD, start_gloo

# 2048 tokens are 1, 7 or 64 chunks to the one: of 2048, 320, which is a multiple of 64, and 32. Of
# 255 classes four ranks have 64, or 63, which are 1, 7 or 64 blocks.
N, V, H = 2048, 255, 16
LOW = ", low rank"  # what the name of a head with a low-rank part goes on with
DIVISIBLE = 256  # classes that JAX spreads over four devices, as whole arrays


class Count(NamedTuple):
    """A call whose collectives are counted."""

    budget: str  # of `BUDGETS`
    chunks: int
    valid: tuple[int, ...]  # tokens, of each rank

    @property
    def head(self) -> str:
        """Where it is, and what travels."""
        return self.budget.removesuffix(", recompute")

    @property
    def function(self) -> str:
        return "chunked_logprobs" if self.budget.endswith("recompute") else "chunked_nll"

    @property
    def text(self) -> str:
        parts = "blocks" if self.head == "stream" else "chunks"
        return f"{self.function}, {self.chunks} {parts}, valid tokens {self.valid}"

    @property
    def rounds(self) -> int:
        """Of what travels in them."""
        budget = BUDGETS[self.budget]
        return self.chunks if budget.each or budget.each_backward else 0

    @property
    def chunk_bytes(self) -> int:
        """`max_chunk_bytes` of so many chunks, or blocks."""
        if self.head == "stream":
            each = -(-V // WORLD)
            rows = -(-each // self.chunks)
            return rows * 8 * 4 * WORLD * H  # a budget has room for eight arrays of a block
        tokens = -(-N // self.chunks)
        multiple = 64 if tokens > 64 else 8
        # Logits of a token on a rank: a vocabulary shard has a spare column, and where tokens meet
        # a chunk has those of all ranks.
        columns = {
            "vocabulary shard": -(-V // WORLD) + 1,
            "FSDP2, vocabulary shard": -(-V // 2) + 1,
            "tokens over the ranks": WORLD * (-(-V // WORLD) + 1),
            "rows over nodes": 2 * (2 * -(-V // WORLD) + 1),
            "JAX, hidden route": DIVISIBLE,
        }.get(self.head.split(LOW)[0], V)
        return -(-tokens // multiple) * multiple * columns * 4


# `gather=` of the heads under FSDP2 that stay where they are.
ROUTES = {"tokens over the ranks": "hidden", "rows over nodes": "hidden", "stream": "stream"}
Phases = tuple[dict[str, int], dict[str, int]]


def torch_rank(rank: int, world: int, folder: str, counts: list[Count]) -> list[Phases]:
    start_gloo(rank, world, folder)
    from torch import distributed as dist

    counted = [_counted(count, rank, *_kept(count.head)) for count in counts]
    dist.destroy_process_group()
    return counted


def jax_rank(rank: int, world: int, folder: str, counts: list[Count]) -> list[Phases]:
    return [_program(count) for count in counts]


def _program(count: Count) -> Phases:
    """Tokens and the head over one mesh axis, as arrays whose types say so: its width where it is
    gathered, its rows where they stay."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    import xentlib.jax as ours

    mesh = jax.make_mesh((WORLD,), ("data",), axis_types=(AxisType.Explicit,))
    tokens = np.arange(N)
    labels = np.concatenate([np.where(tokens < valid, tokens % V, -100) for valid in count.valid])
    stays = count.head == "JAX, hidden route"
    classes, spec = (DIVISIBLE, P("data")) if stays else (V, P(None, "data"))
    options: dict[str, Any] = {"gather": "hidden"} if stays else {}
    arrays = (
        (np.ones((WORLD * N, H), np.float32), P("data")),
        (np.ones((classes, H), np.float32), spec),
        (labels.astype(np.int32), P("data")),
    )
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in arrays]
    function, options["max_chunk_bytes"] = getattr(ours, count.function), count.chunk_bytes

    def loss(hidden: Any, weight: Any, labels: Any) -> Any:
        return jnp.sum(function(hidden, weight, labels, **options)[0])

    with jax.set_mesh(mesh), ours.count_collectives() as counted:
        jax.block_until_ready(jax.jit(jax.grad(loss, argnums=(0, 1)))(*placed))
    # What is in a loop is sent in every iteration, and a program of one chunk has none.
    sent, looped = counted.counts(), counted.looped()
    for one in looped:
        sent[one.kind] += count.chunks - 1
    if looped and not stays:
        sent["other"] = sent.get("other", 0) + len(looped)  # sums of a loop are not the compiler's
    return {}, sent


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
    counted = []
    for count in counts:
        net = _net(V)
        engine = deepspeed.initialize(model=net, config=config, model_parameters=net.parameters())[
            0
        ]
        counted.append(_counted(count, rank, engine, net.head, {}, engine.backward))
        engine.destroy()
    torch.distributed.destroy_process_group()
    return counted


def _net(rows: int) -> Any:
    """A module that holds a head, and hands on what it is given."""
    import torch

    net = torch.nn.Identity()
    torch.manual_seed(0)
    net.head = torch.nn.Linear(H, rows, bias=False)
    return net


def _kept(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """What is called before the head, the head, and arguments of the function."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from xentlib.torch import LowRankHead, NLLHead

    if kind == "vocabulary shard" or LOW in kind:
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        rows = len(range(V)[rank::world])
        net, group = _net(rows), torch.distributed.group.WORLD
        if LOW not in kind:
            return net, net.head, {"vocab_parallel": VocabShard.of_ranks(rows, group)}
        a, b = (torch.ones(shape, requires_grad=True) for shape in ((2, H), (rows, 2)))
        keep = torch.ones(N, H, dtype=torch.bool) if kind.endswith("mask") else None
        low = LowRankHead(net.head.weight.detach(), a, b, keep=keep)
        return net, SimpleNamespace(weight=low), {"vocab_parallel": group, "tokens_parallel": group}
    net = _net(V)
    if kind == "plain":
        return net, net.head, {}
    if kind == "DDP":
        return torch.nn.parallel.DistributedDataParallel(net), net.head, {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    more: dict[str, Any] = {}
    if kind in ROUTES:
        more = {"gather": ROUTES[kind]}
    if kind == "rows over nodes":
        more["tokens_parallel"] = mesh
    if kind in ("FSDP2", "FSDP2, NLLHead", "FSDP2, prefetched", *ROUTES):
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
    torch.manual_seed(0)  # ranks that share a vocabulary share their tokens
    for _ in range(2):  # the second is counted
        hidden = net(torch.randn(N, H, requires_grad=True))
        with ours.count_collectives() as forward:
            weight = () if is_function else (head.weight,)
            out = function(hidden, *weight, labels, max_chunk_bytes=count.chunk_bytes, **more)
            loss = out[0].sum()
        with ours.count_collectives() as after:
            loss.backward() if backward is None else backward(loss)
    return forward.counts(), after.counts()
