"""Real ranks: gloo processes for PyTorch, host devices of one process for JAX, started for a whole
list of things to do; and calls over shards of a vocabulary.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from xentlib.parity.backends import run, run_given, run_logprobs
from xentlib.parity.problem import Problem, Upstream
from xentlib.parity.summary import duration
from xentlib.plan import PaddedVocab
from xentlib.processes import end_with_parent
from xentlib.ulp import bits_unequal

__all__ = ["WORLD", "Call", "Sharded", "run_calls", "run_ranks", "serve", "start_gloo"]

Array = npt.NDArray[Any]
WORLD = 4
SECONDS = 600  # that ranks may take on two idle cores, where the longest take 30
AFTER_FAILURE = 10  # seconds that the others have, to say what they make of it


class Call(NamedTuple):
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


def run_calls(backend: str, calls: Sequence[Call], slowness: float = 1.0) -> list[Sharded]:
    """Every call through ranks of `backend`."""
    if backend == "jax":
        return list(run_ranks(backend, "ranks", calls, 1, slowness)[0])
    found = run_ranks(backend, "ranks", calls, WORLD, slowness)
    return [_merged(call, [rank[k] for rank in found]) for k, call in enumerate(calls)]


def run_ranks(
    backend: str,
    room: str,
    items: Sequence[Any],
    world: int,
    slowness: float = 1.0,
    **environment: str,
) -> list[list[Any]]:
    """`xentlib.parity.ROOM.BACKEND_rank(folder, rank, world, items)` of each rank, a process.

    Raises:
        RuntimeError: a rank failed, or was not done in `SECONDS` times `slowness`, at least once.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "items").write_bytes(pickle.dumps(list(items)))
        ranks = [_start(backend, room, folder, rank, world, environment) for rank in range(world)]
        limit = SECONDS * max(slowness, 1.0)
        try:
            codes = _wait(ranks, limit)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        said = [Path(folder, f"said{rank}").read_text(errors="replace") for rank in range(world)]
        # The one that failed first says the least of lost connections.
        wrong = [text for code, text in zip(codes, said, strict=True) if code]
        if wrong:
            raise RuntimeError(f"{len(wrong)} {backend} ranks failed:\n" + "\n".join(wrong))
        late = [text for code, text in zip(codes, said, strict=True) if code is None]
        if late:
            raise RuntimeError(
                f"{len(late)} of {world} {backend} ranks were not done in {duration(limit)}, which "
                f"is the limit at this machine's speed\n" + "\n".join(late)
            )
        # Written a moment ago by the processes above.
        return [pickle.loads(Path(folder, f"rank{k}").read_bytes()) for k in range(world)]


def _wait(ranks: list[subprocess.Popen[bytes]], limit: float) -> list[int | None]:
    """Exit codes; None of those that run on at the limit, or after another one has failed."""
    end = time.monotonic() + limit
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            end = min(end, time.monotonic() + AFTER_FAILURE)
        if None not in codes or time.monotonic() > end:
            return codes
        time.sleep(0.1)


def _start(
    backend: str, room: str, folder: str, rank: int, world: int, environment: dict[str, str]
) -> subprocess.Popen[bytes]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={WORLD}"
    program = "from xentlib.parity.ranks import serve; serve()"
    numbers = [str(number) for number in (rank, world, os.getpid())]
    command = [sys.executable, "-c", program, backend, room, folder, *numbers]
    variables = {**os.environ, "XLA_FLAGS": flags.strip(), **environment}
    # A file: a rank that fills a pipe which is not read yet would make the others wait.
    with Path(folder, f"said{rank}").open("wb") as said:
        # DeepSpeed says much; standard output is where the JSON of a parity run goes.
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=variables)


def _merged(call: Call, parts: list[Any]) -> Sharded:
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


def _called(backend: str, call: Call, problem: Problem, wrap: Any = None) -> Any:
    how: dict[str, Any] = {"audit": call.audit, "chunk_tokens": call.chunk_tokens, "wrap": wrap}
    if call.function == "chunked_nll":
        return run(backend, problem, **how)
    assert call.upstream is not None
    runner = run_logprobs if call.function == "chunked_logprobs" else run_given
    return runner(backend, problem, call.upstream, **how)


# --- what runs on a rank -------------------------------------------------------------------------


def start_gloo(folder: str, rank: int, world: int) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )


def torch_rank(folder: str, rank: int, world: int, calls: list[Call]) -> list[Any]:
    from torch import distributed as dist

    start_gloo(folder, rank, world)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, world + 1)}
    found: list[Any] = []
    for call in calls:
        if rank >= len(call.sizes):
            found.append(None)
            continue
        part = _rows(call.problem, partial(_shard, sizes=call.sizes, rank=rank))
        group = groups[len(call.sizes)]
        part = part.changed(options={**part.options, "vocab_parallel": group})
        found.append(_called("torch", call, part))
    dist.destroy_process_group()
    return found


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


def jax_rank(folder: str, rank: int, world: int, calls: list[Call]) -> list[Any]:
    return [_jax_call(call) for call in calls]


def _jax_call(call: Call) -> Sharded:
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


def serve() -> None:
    """Be the rank that the command line names."""
    backend, room, folder, rank, world, parent = sys.argv[1:]
    end_with_parent(int(parent))
    # Written by the process that started this one.
    items = pickle.loads(Path(folder, "items").read_bytes())
    work = getattr(import_module(f"xentlib.parity.{room}"), f"{backend}_rank")
    found = work(folder, int(rank), int(world), items)
    Path(folder, f"rank{rank}").write_bytes(pickle.dumps(found))
