"""A15: what a call sends, wherever its head lives, counted on real ranks under real wrappers."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from xentlib.budgets import BUDGETS, budget_entries, check_budget
from xentlib.shards import VocabShard
from xentlib.tools.harness.cases import Extent
from xentlib.tools.harness.findings import Findings
from xentlib.tools.harness.ranks import WORLD, run_ranks, start_gloo
from xentlib.tools.parity.on_ranks import OnRanks

# 2048 tokens are 1, 7 or 64 chunks to the one: of 2048, 320, which is a multiple of 64, and 32. Of
# 255 classes four ranks have 64, or 63, which are 1, 7 or 64 blocks.
N, V, H = 2048, 255, 16
LOW = ", low rank"  # what the name of a head with a low-rank part goes on with
RECOMPUTE = ", recompute"  # what that of a head whose logits the backward makes again ends with
CLASSES = ", classes"  # before it, of a call with `kept` and `ids`
DIVISIBLE = 256  # classes that JAX spreads over four devices, as whole arrays
CHUNKS = (1, 7, 64)
FEW_CHUNKS = (1, 7)
# The valid tokens of each rank: ranks that share a vocabulary share their tokens, and nodes have as
# many chunks as each other.
UNEVEN = ((0, 1, N, N),)
TOKENS: dict[str, tuple[tuple[int, ...], ...]] = {
    "FSDP2, vocabulary shard": ((0, 0, N, N), (1, 1, N, N)),
    "vocabulary shard": ((0,) * WORLD, (1,) * WORLD, (N,) * WORLD),
    "rows over nodes": ((0, N, N, 1),),
}


# Every head that has a budget, by what runs it: PyTorch where its name begins with none of these.
RUN_BY = {"ZeRO-3": "zero", "JAX": "jax"}
HEADS = {
    runs: {
        name: TOKENS.get(name.removesuffix(RECOMPUTE).removesuffix(CLASSES), UNEVEN)
        for name in BUDGETS
        if RUN_BY.get(name.split(",", maxsplit=1)[0], "torch") == runs
    }
    for runs in ("torch", "zero", "jax")
}


class Count(NamedTuple):
    """A call whose collectives are counted."""

    budget: str  # of `BUDGETS`
    chunks: int
    valid: tuple[int, ...]  # tokens, of each rank

    @property
    def head(self) -> str:
        """Where it is, and what travels."""
        return self.budget.removesuffix(RECOMPUTE).removesuffix(CLASSES)

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


def counts_of(runs: str, suite: str) -> list[Count]:
    """Every head, in 1 and 7 chunks, or in 7 alone; in the full suite in 64 too."""
    chunks = {"quick": FEW_CHUNKS[1:], "standard": FEW_CHUNKS, "full": CHUNKS}[suite]
    return [
        Count(budget, number, valid)
        for number in chunks
        for budget, tokens in HEADS[runs].items()
        for valid in tokens
    ]


def launch(backend: str, extent: Extent, slowness: float) -> dict[str, Any]:
    """Of each run of the backend's; in the full suite ZeRO-3 has one where DeepSpeed is installed,
    which compiles an operator the first time."""
    environments: dict[str, dict[str, str]] = {backend: {}}
    if backend == "torch" and extent.suite == "full" and find_spec("deepspeed"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        # DeepSpeed looks for ninja, which is beside the interpreter.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "DS_ACCELERATOR": "cpu"}
        environments["zero"] = {"PATH": path, **where}
    work = {"torch": torch_rank, "zero": zero_rank, "jax": jax_rank}
    return {
        runs: run_ranks(
            *(runs, work[runs], counts_of(runs, extent.suite)),
            *(1 if runs == "jax" else WORLD, slowness),
            environment=environment,
        )
        for runs, environment in environments.items()
    }


def measure(findings: Findings, extent: Extent, of_backends: dict[str, dict[str, Any]]) -> None:
    for backend, of_runs in of_backends.items():
        for runs, of_ranks in of_runs.items():
            for k, count in enumerate(counts_of(runs, extent.suite)):
                phases = tuple([rank[k][phase] for rank in of_ranks] for phase in (0, 1))
                findings.measurements += check_budget(
                    count.budget, *phases, rounds=count.rounds, backend=backend, case=count.text
                )
                if count.chunks == 7:
                    _reject(findings, backend, count, *phases)


collectives = OnRanks(launch, measure)


Counts = list[dict[str, int]]  # of each rank


def _reject(
    findings: Findings, backend: str, count: Count, forward: Counts, backward: Counts
) -> None:
    """A14: what regressed heads would have sent."""

    def more(of_ranks: Counts, kind: str, n: int = 1) -> Counts:
        return [{**sent, kind: sent.get(kind, 0) + n} for sent in of_ranks]

    def less(of_ranks: Counts, each: Mapping[str, int]) -> Counts:
        return [{kind: n - each.get(kind, 0) for kind, n in sent.items()} for sent in of_ranks]

    def without(of_ranks: Counts, kinds: Collection[str]) -> Counts:
        return [{kind: n for kind, n in sent.items() if kind not in kinds} for sent in of_ranks]

    allowed = BUDGETS[count.budget]
    reduced = [kind for kind in allowed.backward if kind != "all_gather"]
    wrong = {
        "a gather in each chunk": (more(forward, "all_gather", 6), backward),
        "a gather more": (forward, more(backward, "all_gather")),
        "a rank of its own": (forward[:-1] + more(forward[-1:], "all_reduce"), backward),
    }
    if reduced:
        wrong["no reduction"] = (forward, without(backward, reduced))
        wrong["a second reduction"] = (forward, more(backward, reduced[0]))
    if count.rounds:
        fewer = (less(forward, allowed.each), less(backward, allowed.each_backward))
        wrong["a round less"] = fewer
        unsent = ("reduce_scatter",)
        wrong["nothing sent back"] = (without(forward, unsent), without(backward, unsent))
    entries = {
        name: budget_entries(count.budget, *phases, rounds=count.rounds)
        for name, phases in wrong.items()
    }
    want = next(iter(entries.values()))[1]
    got = {name: pair[0] for name, pair in entries.items()}
    findings.reject("A15", got, want, backend=backend, quantity=f"collectives, {count.budget}")


# --- what runs on a rank -------------------------------------------------------------------------

# `gather=` of the heads under FSDP2 that stay where they are.
ROUTES = {"tokens over the ranks": "hidden", "rows over nodes": "hidden", "stream": "stream"}
Phases = tuple[dict[str, int], dict[str, int]]


def torch_rank(rank: int, world: int, folder: str, counts: list[Count]) -> list[Phases]:
    start_gloo(rank, world, folder)
    from torch import distributed as dist

    counted = [_counted(count, rank, *_placed(count.head)) for count in counts]
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
        how = {"model": net, "config": config, "model_parameters": net.parameters()}
        engine, *_ = deepspeed.initialize(**how)
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


def _placed(kind: str) -> tuple[Any, Any, dict[str, Any]]:
    """What is called before the head, the head, and arguments of the function."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from xentlib.torch import LowRankHead, NLLHead

    if kind == "vocabulary shard" or LOW in kind:
        rows = len(range(V)[torch.distributed.get_rank() :: WORLD])
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
    nodes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    more: dict[str, Any] = {"gather": ROUTES[kind]} if kind in ROUTES else {}
    if kind == "rows over nodes":
        more["tokens_parallel"] = nodes
    if kind == "FSDP2, replicas":
        mesh = nodes
    elif kind == "FSDP2, vocabulary shard":
        mesh, more = nodes["a"], {"vocab_parallel": nodes["b"]}
        piece = distribute_tensor(net.head.weight.data, nodes["b"], [Shard(0)])
        net.head.weight = torch.nn.Parameter(piece)
    else:
        mesh = init_device_mesh("cpu", (WORLD,))
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
    if CLASSES in count.budget:
        kept = (labels.clamp(min=0)[:, None] + torch.arange(5)) % V
        more = {**more, "kept": kept, "ids": kept[:, 2:]}
    if LOW in count.head and count.function == "chunked_nll":  # tokens of each rank's own
        more = {**more, "reduction": "sum"}
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
