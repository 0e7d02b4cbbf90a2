"""A problem whose tokens are spread over ranks that share the head: by `tokens_parallel`, or in a
head under real `fully_shard` that a route of `gather=` leaves sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from helpers.lowrank import LowProblem
from helpers.vocab_shards import same_on_all_ranks, vocab_axis
from xentlib.collectives import CollectiveCount
from xentlib.tools.harness.backends import GRADIENTS
from xentlib.tools.harness.device import numpy_of, on_torch
from xentlib.tools.harness.problems import Problem, Upstream
from xentlib.tools.harness.ranks import DEVICE
from xentlib.torch import LowRankHead, chunked_logprobs, chunked_nll, count_collectives
from xentlib.torch.core.device import KINDS

__all__ = ["Routed", "Routes", "as_on_a_device", "merged", "nodes_of", "on_ranks"]

KEPT: list[Any] = []  # the module of the call that runs
PER_TOKEN = ("where", "token_weights", "temperature")
OUTPUTS = ("logprobs", "entropy", "lse", "correct", "predicted")


class Routed(NamedTuple):
    """One call: `route` is "tokens_parallel", or what `gather` is."""

    route: str
    function: str
    problem: Problem
    tokens: tuple[int, ...]  # of each rank
    rows: tuple[int, ...]  # with "tokens_parallel"
    divisor: float = 1.0
    upstream: Upstream | None = None
    chunk_bytes: int | None = None
    audit: bool = False
    nodes: int = 0  # with "hidden": over which rows are gathered first
    on_device: bool = DEVICE != "cpu"  # as `as_on_a_device` has it
    low: LowProblem | None = None  # A, B and mask of a head that is frozen; its `base` is not asked
    counted: bool = True  # collectives, which takes as long as the rest of the call


class Routes(NamedTuple):
    """What a rank found."""

    values: dict[str, Any]
    gradients: list[Any]
    forward: dict[str, int]  # collectives
    backward: dict[str, int]
    sent: tuple[int, int]  # bytes of them


def as_on_a_device() -> Any:
    """While it lasts no number is read on the host, as on a GPU: tokens that are masked stay."""
    return patch.dict(KINDS, cpu=KINDS["cpu"]._replace(host_readable=False))


def on_ranks(rank: int, world: int, calls: list[Routed]) -> list[Routes | None]:
    torch.set_num_threads(1)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    found: list[Routes | None] = []
    for call in calls:
        here = rank < len(call.tokens)
        with as_on_a_device() if call.on_device else nullcontext():
            found.append(on_rank(rank, groups[len(call.tokens)], call) if here else None)
    return found


def on_rank(rank: int, group: Any, call: Routed) -> Routes:
    p = call.problem
    start = sum(call.tokens[:rank])
    own = slice(start, start + call.tokens[rank])
    options = {**p.per_token_options, "where": p.where}
    if call.upstream is not None:
        options["entropy"] = call.upstream.d_entropy is not None
    if call.function == "chunked_nll":
        options = {**p.options, "where": p.where}
        options |= {"token_weights": p.token_weights, "class_weights": p.class_weights}
        options |= {"outputs": OUTPUTS, "denominator": call.divisor}
    for name in PER_TOKEN:
        if np.ndim(options.get(name)) > 0:
            options[name] = options[name][own]
    options = {name: on_torch(x) for name, x in options.items()}
    options["max_chunk_bytes"] = call.chunk_bytes
    if call.audit:
        options["compute_dtype"] = "float64"
    hidden = p.hidden[own].copy()
    masked = ~p.valid[own]  # whatever is there is not looked at
    hidden[masked] = np.resize([np.nan, np.inf, -np.inf], hidden[masked].shape)
    hidden = on_torch(hidden).requires_grad_()
    weight, bias, *matrices = head = leaves(rank, group, call, options)
    if call.low is not None:
        keep = None if call.low.keep is None else on_torch(call.low.keep[own])
        weight = LowRankHead(weight, *matrices, call.low.scale, keep)
    function: Any = chunked_nll if call.function == "chunked_nll" else chunked_logprobs
    counting = count_collectives if call.counted else _uncounted
    with counting() as forward:
        out = function(hidden, weight, on_torch(p.labels[own]), bias=bias, **options)
    with counting() as backward:
        if call.upstream is None:
            out.loss.backward(torch.tensor(p.upstream, dtype=out.loss.dtype))
        else:
            named = {k.removeprefix("d_"): g for k, g in call.upstream._asdict().items()}
            used = [(getattr(out, k), on_torch(g[own])) for k, g in named.items() if g is not None]
            torch.autograd.backward(*([*x] for x in zip(*used, strict=True)))
    found = [None if x is None else x.grad for x in (hidden, *head)]
    grads = [local(x) for x in found]
    values = {k: None if x is None else numpy_of(x.detach()) for k, x in out._asdict().items()}
    return Routes(
        values,
        [None if x is None else numpy_of(x) for x in grads],
        forward.counts(),
        backward.counts(),
        (forward.bytes(), backward.bytes()),
    )


@contextmanager
def _uncounted() -> Iterator[Any]:
    yield CollectiveCount()


@cache
def nodes_of(nodes: int) -> Any:
    """All ranks, node by node."""
    shape = (nodes, dist.get_world_size() // nodes)
    return torch.distributed.init_device_mesh(DEVICE, shape)


def local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def frozen(*head: Any) -> list[Any]:
    """Where there are adapters."""
    return [None if x is None else x.requires_grad_(False) for x in head]


def leaves(rank: int, group: Any, call: Routed, options: dict[str, Any]) -> list[Any]:
    """The head's parameters on this rank."""
    p = call.problem
    axis = vocab_axis(p.options)
    if call.route == "tokens_parallel":
        start = sum(call.rows[:rank])
        mine = range(start, start + call.rows[rank])
        options |= {"vocab_parallel": group, "tokens_parallel": group}
        bias = None if p.bias is None else p.bias[start : start + len(mine)]
        cut = [on_torch(np.take(p.weight, mine, axis=axis)), on_torch(bias)]
        cut = [None if x is None else x.clone().requires_grad_() for x in cut]
        if call.low is None:
            return cut
        parts = (call.low.a, call.low.b[start : start + len(mine)])
        return [*frozen(*cut), *(on_torch(x).clone().requires_grad_() for x in parts)]
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    weight, bias = on_torch(p.weight), on_torch(p.bias)
    head = torch.nn.Linear(*weight.shape[::-1], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    more = ()
    if call.low is not None:
        frozen(head.weight, head.bias)
        head.a, head.b = (torch.nn.Parameter(on_torch(x)) for x in (call.low.a, call.low.b))
        more = ("a", "b")
    fully_shard(head, mesh=DeviceMesh.from_group(group, DEVICE))
    head.set_gradient_divide_factor(1.0)
    KEPT[:] = [head]  # a parameter does not keep its module, whose shards it then is no longer
    options |= {"gather": call.route}
    if call.nodes:
        options["tokens_parallel"] = nodes_of(call.nodes)
    return [getattr(head, name) for name in ("weight", "bias", *more)]


def merged(call: Routed, parts: list[Routes]) -> dict[str, Any]:
    """Of all ranks: sums, what is per token one after the other, and the head's gradients."""
    found: dict[str, Any] = {}
    for name in parts[0].values:
        every = [part.values[name] for part in parts]
        if name == "denominator" or every[0] is None:
            continue
        found[name] = np.concatenate(every) if np.ndim(every[0]) else sum(every)
    axes = (0, vocab_axis(call.problem.options), 0)
    of_head = zip(*(x.gradients[: len(axes)] for x in parts), strict=True)
    for name, axis, every in zip(GRADIENTS, axes, of_head, strict=True):
        found[name] = None if every[0] is None else np.concatenate(every, axis=axis)
    if call.low is not None:
        of_a, of_b = zip(*(x.gradients[-2:] for x in parts), strict=True)
        whole = call.route == "tokens_parallel"  # each rank has all of A
        found["a"] = same_on_all_ranks(of_a) if whole else np.concatenate(of_a)
        found["b"] = np.concatenate(of_b)
    return found
