"""Calls over shards of a vocabulary: gloo ranks in PyTorch, the devices of one process in JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.plan import PaddedVocab, VocabShard
from xentlib.tools.harness.backends import run, run_given, run_logprobs
from xentlib.tools.harness.problems import Problem, Upstream
from xentlib.tools.harness.ranks import WORLD, run_ranks, start_gloo
from xentlib.ulp import bits_unequal

Array = npt.NDArray[Any]


class ShardedCall(NamedTuple):
    """One call over shards of these sizes. JAX's devices hold as many rows each: there the sizes
    but the last ones must be equal, and the head is padded."""

    function: str  # "chunked_nll", "chunked_logprobs" or "vocab_parallel_logprobs"
    problem: Problem
    sizes: tuple[int, ...]
    upstream: Upstream | None = None
    audit: bool = False
    chunk_tokens: int | None = None


class Sharded(NamedTuple):
    """What rank 0 got, the gradients of all shards put together, and how many entries of what must
    be the same everywhere differ on another rank (in JAX the types say so)."""

    outcome: Any  # Outcome, PerToken or GivenLogits
    unequal: int | None


def run_calls(backend: str, calls: Sequence[ShardedCall], slowness: float = 1.0) -> list[Sharded]:
    """Every call through ranks of `backend`."""
    if backend == "jax":
        return list(run_ranks(backend, jax_rank, calls, 1, slowness)[0])
    of_ranks = run_ranks(backend, torch_rank, calls, WORLD, slowness)
    return [_merged(call, [rank[k] for rank in of_ranks]) for k, call in enumerate(calls)]


def _merged(call: ShardedCall, parts: list[Any]) -> Sharded:
    parts = parts[: len(call.sizes)]
    axis = 1 if call.problem.options.get("weight_layout") == "HV" else 0
    along = {"d_weight": axis, "d_bias": 0, "d_logits": 1}
    values, unequal = {}, 0
    for name in parts[0]._fields:
        here = [getattr(part, name) for part in parts]
        values[name] = here[0]
        if here[0] is not None and name in along:
            values[name] = np.concatenate(here, axis=along[name])
        elif here[0] is not None:
            unequal += sum(bits_unequal(other, here[0]) for other in here[1:])
    return Sharded(type(parts[0])(**values), unequal)


def _called(backend: str, call: ShardedCall, problem: Problem, wrap: Any = None) -> Any:
    how: dict[str, Any] = {"audit": call.audit, "chunk_tokens": call.chunk_tokens, "wrap": wrap}
    if call.function == "chunked_nll":
        return run(backend, problem, **how)
    assert call.upstream is not None
    runner = run_logprobs if call.function == "chunked_logprobs" else run_given
    return runner(backend, problem, call.upstream, **how)


# --- what runs on a rank -------------------------------------------------------------------------


def torch_rank(rank: int, world: int, folder: str, calls: list[ShardedCall]) -> list[Any]:
    from torch import distributed as dist

    start_gloo(rank, world, folder)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    results: list[Any] = []
    for call in calls:
        if rank >= len(call.sizes):
            results.append(None)
            continue
        part = _rows(call.problem, partial(_shard, sizes=call.sizes, rank=rank))
        over: Any = groups[len(call.sizes)]
        if len(set(call.sizes)) > 1:
            over = VocabShard.of_ranks(call.sizes[rank], over)
        options = {**part.options, "vocab_parallel": over}
        if call.chunk_tokens is not None:  # the same on every rank, whatever rows it has
            itemsize = 8 if call.audit or part.hidden.dtype == np.float64 else 4
            options["max_chunk_bytes"] = call.chunk_tokens * max(call.sizes) * itemsize
        part = part.changed(options=options)
        results.append(_called("torch", call._replace(chunk_tokens=None), part))
    dist.destroy_process_group()
    return results


def _rows(problem: Problem, change: Callable[[Array, int], Array]) -> Problem:
    """A problem with the vocabulary's dimension of its head changed."""
    axis = 1 if problem.options.get("weight_layout") == "HV" else 0
    bias = None if problem.bias is None else change(problem.bias, 0)
    return problem.changed(weight=change(problem.weight, axis), bias=bias)


def _shard(x: Array, axis: int, sizes: tuple[int, ...], rank: int) -> Array:
    start = sum(sizes[:rank])
    return _part(x, axis, start, start + sizes[rank])


def _part(x: Array, axis: int, start: int, stop: int) -> Array:
    return np.ascontiguousarray(np.take(x, range(start, stop), axis=axis))


def jax_rank(rank: int, world: int, folder: str, calls: list[ShardedCall]) -> list[Any]:
    return [_jax_call(call) for call in calls]


def _jax_call(call: ShardedCall) -> Sharded:
    import jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    ranks, columns = len(call.sizes), max(call.sizes)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("vocab",))
    axis = 1 if call.problem.options.get("weight_layout") == "HV" else 0
    classes = sum(call.sizes)

    def padded(x: Array, axis: int) -> Array:
        # Rows that would show: no class may look like them.
        shape = [*x.shape]
        shape[axis] = ranks * columns - classes
        return np.concatenate([x, np.full(shape, 3.0, x.dtype)], axis=axis)

    problem = _rows(call.problem, padded)
    parallel = PaddedVocab("vocab", classes)
    problem = problem.changed(options={**problem.options, "vocab_parallel": parallel})

    def wrap(function: Any, leaves: int) -> Any:
        specs = (P(), P(*[None] * axis, "vocab"), P("vocab")) if leaves > 1 else P(None, "vocab")
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P()))

    outcome = _called("jax", call, problem, wrap)
    cut = {"d_weight": axis, "d_bias": 0, "d_logits": 1}
    values = {
        name: value if value is None or name not in cut else _part(value, cut[name], 0, classes)
        for name, value in outcome._asdict().items()
    }
    return Sharded(type(outcome)(**values), None)
