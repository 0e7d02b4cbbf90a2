"""Real ranks: gloo processes for PyTorch, host devices of one process for JAX, started for a whole
list of things to do; and calls over shards of a vocabulary, of which each has one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.processes import RanksFailed, RanksLate, launch
from xentlib.shards import PaddedVocab, VocabShard
from xentlib.tools.harness.backends import (
    Outcome,
    run,
    run_divergence,
    run_given,
    run_given_pair,
    run_logprobs,
)
from xentlib.tools.harness.problems import Problem, Upstream
from xentlib.ulp import bits_unequal

Array = npt.NDArray[Any]
WORLD = 4
# Of PyTorch's ranks
DEVICE = os.environ.get("XENTLIB_DEVICE", "cpu")
SECONDS = 600  # that ranks may go without progress; on two idle cores the longest take 30 in all
# Of a collective: a rank that waits for a slow one must not give up before `launch` does.
GLOO_LIMIT = timedelta(days=1)
# What takes seconds to import. JAX is not to be forked; it has one process anyway.
PRELOADED = ("torch", "torch._dynamo", "torch.distributed.fsdp", "xentlib.torch")

RUN: dict[str, Callable[..., Outcome]] = {
    "chunked_nll": run,
    "chunked_logprobs": run_logprobs,
    "vocab_parallel_logprobs": run_given,
    "chunked_divergence": run_divergence,
    "vocab_parallel_divergence": run_given_pair,
}


def run_ranks(
    backend: str,
    work: Callable[..., list[Any]],
    items: Sequence[Any],
    world: int,
    slowness: float = 1.0,
    *,
    devices: int = WORLD,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> list[list[Any]]:
    """`work(rank, world, folder, items)` of each rank, a process with so many devices of JAX;
    `backend` is for what is said.

    Raises:
        RuntimeError: a rank failed, or all made no progress for `SECONDS` times `slowness`, at
            least once.
    """
    limit = SECONDS * max(slowness, 1.0)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    try:
        return launch(
            work,
            world,
            list(items),
            seconds=limit,
            preload=() if backend == "jax" else PRELOADED,
            environment={"XLA_FLAGS": flags.strip(), **environment},
        )
    except (RanksFailed, RanksLate) as error:
        count, outputs = len(error.outputs), "\n".join(error.outputs)
        if isinstance(error, RanksLate):
            why = f"{error.why}, which is the limit at this machine's speed"
            raise RuntimeError(f"{count} of {world} {backend} ranks {why}\n{outputs}") from None
        last = next((x for x in reversed(error.outputs[0].splitlines()) if x.strip()), "no word")
        raise RuntimeError(f"{count} {backend} ranks failed, one with {last}\n{outputs}") from None


def start_gloo(rank: int, world: int, folder: str) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=GLOO_LIMIT,
    )
    # One for all ranks, which gloo can share and NCCL cannot; an emulated one is not of ranks
    if DEVICE != "cpu" and torch.cuda.is_available():
        torch.set_default_device(torch.device(DEVICE, 0))
        torch.zeros(1)  # a mesh leaves a device alone that is in use


# --- calls over shards ----------------------------------------------------------------------------


class ShardedCall(NamedTuple):
    """One call over shards of these sizes. JAX's devices hold as many rows each: there the sizes
    but the last ones must be equal, and the head is padded."""

    function: str  # of `RUN`
    problem: Problem
    sizes: tuple[int, ...]
    upstream: Upstream | None = None
    audit: bool = False
    chunk_tokens: int | None = None

    @property
    def along(self) -> dict[str, int]:
        """The dimension of the vocabulary, of what has one."""
        return {"d_weight": self.problem.vocab_axis, "d_bias": 0, "d_logits": 1}

    def run(self, backend: str, **how: Any) -> Outcome:
        """The call on one process, which has the whole vocabulary or is given its part of it."""
        upstream = () if self.upstream is None else (self.upstream,)
        how = {"audit": self.audit, "chunk_tokens": self.chunk_tokens, **how}
        return RUN[self.function](backend, self.problem, *upstream, **how)

    def over(
        self, vocab_parallel: Any, change: Callable[[Array, int], Array], **options: Any
    ) -> ShardedCall:
        """The call with the vocabulary's dimension of its head changed."""
        problem, teacher = self.problem, self.problem.teacher
        if teacher is not None:
            of_head: dict[str, Any] = {
                "weight": change(teacher.weight, int(teacher.weight_layout == "HV"))
            }
            of_head["bias"] = None if teacher.bias is None else change(teacher.bias, 0)
            teacher = teacher._replace(**of_head)
        soft = problem.soft
        return self._replace(
            problem=problem.changed(
                teacher=teacher,
                soft=change(soft, 1) if isinstance(soft, np.ndarray) else soft,
                weight=change(problem.weight, problem.vocab_axis),
                bias=None if problem.bias is None else change(problem.bias, 0),
                options={**problem.options, "vocab_parallel": vocab_parallel, **options},
            )
        )


class Sharded(NamedTuple):
    """What rank 0 got, the gradients of all shards put together, and how many entries of what must
    be the same everywhere differ on another rank (in JAX the types say so)."""

    outcome: Outcome
    unequal: int | None


def run_calls(backend: str, calls: Sequence[ShardedCall], slowness: float = 1.0) -> list[Sharded]:
    """Every call through ranks of `backend`: four, or as many as the most shards of a call."""
    world = max([WORLD, *(len(call.sizes) for call in calls)])
    if backend == "jax":
        return list(run_ranks(backend, jax_rank, calls, 1, slowness, devices=world)[0])
    of_ranks = run_ranks(backend, torch_rank, calls, world, slowness)
    return [_merged(call, [rank[k] for rank in of_ranks]) for k, call in enumerate(calls)]


def _merged(call: ShardedCall, parts: list[Outcome]) -> Sharded:
    first, *others = (part.by_name() for part in parts[: len(call.sizes)])
    unequal, whole = 0, dict(first)
    for name, value in first.items():
        of_others = [other[name] for other in others]
        if name in call.along:
            whole[name] = np.concatenate([value, *of_others], axis=call.along[name])
        else:
            unequal += sum(bits_unequal(other, value) for other in of_others)
    return Sharded(Outcome(**whole), unequal)


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
        start, options = sum(call.sizes[:rank]), {}
        if call.chunk_tokens is not None:  # the same on every rank, whatever rows it has
            itemsize = 8 if call.audit or call.problem.hidden.dtype == np.float64 else 4
            heads = 1 if call.problem.teacher is None else 2
            options["max_chunk_bytes"] = heads * call.chunk_tokens * max(call.sizes) * itemsize
        over: Any = groups[len(call.sizes)]
        if len(set(call.sizes)) > 1:
            over = VocabShard.of_ranks(call.sizes[rank], over)

        def shard(x: Array, axis: int, start: int = start, size: int = call.sizes[rank]) -> Array:
            return _part(x, axis, start, start + size)

        results.append(call.over(over, shard, **options).run("torch", chunk_tokens=None))
    dist.destroy_process_group()
    return results


def _part(x: Array, axis: int, start: int, stop: int) -> Array:
    return np.ascontiguousarray(np.take(x, range(start, stop), axis=axis))


def jax_rank(rank: int, world: int, folder: str, calls: list[ShardedCall]) -> list[Any]:
    return [_jax_call(call) for call in calls]


def _jax_call(call: ShardedCall) -> Sharded:
    import jax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    ranks, classes = len(call.sizes), sum(call.sizes)
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("vocab",))

    def padded(x: Array, axis: int) -> Array:
        # Rows that would show: no class may look like them.
        shape = [*x.shape]
        shape[axis] = ranks * max(call.sizes) - classes
        return np.concatenate([x, np.full(shape, 3.0, x.dtype)], axis=axis)

    def wrap(function: Any, leaves: int) -> Any:
        of_weight = P(*[None] * call.problem.vocab_axis, "vocab")
        specs: Any = (P(), of_weight, P("vocab")) if leaves > 1 else P(None, "vocab")
        if call.function == "vocab_parallel_divergence":
            specs = (P(None, "vocab"),) * 2
        elif call.problem.teacher is not None:  # its weight is the last leaf
            specs = (*specs, P("vocab"))
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P()))

    outcome = call.over(PaddedVocab("vocab", classes), padded).run("jax", wrap=wrap)
    there = outcome.by_name()
    cut = {n: _part(there[n], axis, 0, classes) for n, axis in call.along.items() if n in there}
    return Sharded(outcome._replace(**cut), None)
