"""Vocabularies spread over ranks: `vocab_parallel=` against the dense answer, with real gloo ranks.

Every rank runs a whole list of calls in one process group, so that each world starts once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from vocab_shards import CASES, V, held, same_on_all_ranks, vocab_axis
from xentlib.contract import check, failures
from xentlib.parity.backends import PerToken, run, run_logprobs
from xentlib.parity.problem import Problem, build, upstream_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# Sizes of the shards: even or not, a last one empty.
SPLITS = {
    1: [(157,)],
    2: [(79, 78), (100, 57), (157, 0)],
    3: [(53, 52, 52), (79, 78, 0)],
    4: [(40, 39, 39, 39), (53, 53, 51, 0)],
}
CHUNK = {"max_chunk_bytes": 16 * V * 4}


def launch(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(rank, world, *arguments)` on ranks that share a gloo group; what each returned."""
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    port = 29500 + (os.getpid() * 7 + world) % 2000
    ranks = [
        context.Process(target=enter, args=(rank, world, port, queue, work, arguments))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    found = dict(queue.get() for _ in ranks)
    for process in ranks:
        process.join()
    errors = [value for value in found.values() if isinstance(value, str)]
    assert not errors, "\n".join(errors)
    return [found[rank] for rank in range(world)]


def enter(rank: int, world: int, port: int, queue: Any, work: Any, arguments: Any) -> None:
    import traceback

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    try:
        queue.put((rank, work(rank, world, *arguments)))
    except Exception:  # noqa: BLE001 - whatever it is, the parent must hear of it
        queue.put((rank, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        torch.distributed.destroy_process_group()


def part_of(x: Any, axis: int, sizes: tuple[int, ...], rank: int) -> Any:
    start, stop = list(pairwise(accumulate(sizes, initial=0)))[rank]
    return None if x is None else np.ascontiguousarray(np.take(x, range(start, stop), axis=axis))


def tensors(problem: Problem, sizes: tuple[int, ...], rank: int) -> tuple[list[Any], Any]:
    """Leaves hidden, this rank's weight and bias; and a function that makes tensors."""
    from xentlib.interop import to_torch

    def cross(x: Any) -> Any:
        return to_torch(x, copy=True) if isinstance(x, np.ndarray) else x

    axis = vocab_axis(problem.options)
    arrays = (
        problem.hidden,
        part_of(problem.weight, axis, sizes, rank),
        part_of(problem.bias, 0, sizes, rank),
    )
    leaves = [cross(x) for x in arrays]
    for leaf in leaves:
        if leaf is not None:
            leaf.requires_grad_()
    return leaves, cross


def calls(rank: int, world: int, sizes: tuple[int, ...], audit: bool) -> list[dict[str, Any]]:
    """Both functions, of every case, over this rank's shard, in one chunk and in several."""
    from xentlib.torch import chunked_logprobs, chunked_nll

    group = torch.distributed.group.WORLD
    mode = {"compute_dtype": "float64"} if audit else {}
    found = []
    for case in CASES:
        problem = build(case, 7)
        for cut in ({}, CHUNK):
            leaves, cross = tensors(problem, sizes, rank)
            common = {"bias": leaves[2], "where": cross(problem.where), **mode, **cut}
            labels = cross(problem.labels)
            options = {name: cross(value) for name, value in problem.options.items()}
            out = chunked_nll(
                leaves[0], leaves[1], labels, token_weights=cross(problem.token_weights),
                vocab_parallel=group, outputs=("logprobs", "entropy", "lse", "correct"),
                **common, **options,
            )  # fmt: skip
            out.loss.backward(torch.tensor(problem.upstream, dtype=out.loss.dtype))
            nll = [x.detach().numpy() for x in out] + [numpy_of(x) for x in leaves]

            leaves, cross = tensors(problem, sizes, rank)
            common["bias"] = leaves[2]
            options = {name: cross(value) for name, value in problem.per_token_options.items()}
            per_token = chunked_logprobs(
                leaves[0], leaves[1], labels, entropy=True, vocab_parallel=group, **common,
                **options,
            )  # fmt: skip
            given = [cross(g).to(x.dtype) for g, x in zip(upstream_of(problem, 5), per_token)]
            torch.autograd.backward(per_token[:3], given)
            kept = [x.detach().numpy() for x in per_token] + [numpy_of(x) for x in leaves]
            found.append({"nll": nll, "logprobs": kept})
    return found


def numpy_of(leaf: Any) -> Any:
    if leaf is None:
        return None
    from xentlib.interop import to_numpy

    return np.array(to_numpy(leaf.grad))


def whole(parts: list[Any], axis: int) -> Any:
    return None if parts[0] is None else np.concatenate(parts, axis=axis)


SETUPS = [(world, sizes) for world, splits in SPLITS.items() for sizes in splits]


@pytest.mark.parametrize(("world", "sizes"), SETUPS, ids=str)
def test_shards_give_the_dense_answer(world: int, sizes: tuple[int, ...]) -> None:
    """A13 (ANCHORS 4.8, 4.9): d hidden is summed once, on every rank the same bits; label
    smoothing, z-loss, softcap, bias, temperature and entropy mean what they mean densely."""
    ranks = launch(world, calls, sizes, False)
    items = [(case, cut) for case in CASES for cut in ("one chunk", "several")]
    for index, (case, _) in enumerate(items):
        problem = build(case, 7)
        axis = vocab_axis(problem.options)
        upstream, low = upstream_of(problem, 5), case.dtype == "bfloat16"
        rounding = {"dz_dtype": "bfloat16" if low else "float64"}
        dense, dense_tokens = run("torch", problem), run_logprobs("torch", problem, upstream)
        for kind, one, reference in (
            ("nll", dense, problem.reference(**rounding)),
            ("logprobs", dense_tokens, problem.per_token_reference(upstream, **rounding)),
        ):
            results = [rank[index][kind] for rank in ranks]
            names = type(one)._fields
            for name, *values in zip(names, *results, strict=True):
                if name in ("d_weight", "d_bias"):
                    got = whole(values, axis if name == "d_weight" else 0)
                else:
                    got = same_on_all_ranks(values)
                held(name, got, getattr(one, name), reference, low=low, world=world)


@pytest.mark.parametrize(("world", "sizes"), [(2, (79, 78)), (3, (79, 78, 0))], ids=str)
def test_audit_mode_does_not_know_of_shards(world: int, sizes: tuple[int, ...]) -> None:
    """A13, A1: in float64 the shards' sums round to the dense answer's bits."""
    ranks = launch(world, calls, sizes, True)
    items = [case for case in CASES for _ in range(2)]
    for index, case in enumerate(items):
        problem = build(case, 7)
        axis = vocab_axis(problem.options)
        upstream = upstream_of(problem, 5)
        for kind, one in (
            ("nll", run("torch", problem, audit=True)),
            ("logprobs", run_logprobs("torch", problem, upstream, audit=True)),
        ):
            results = [rank[index][kind] for rank in ranks]
            for name, *values in zip(type(one)._fields, *results, strict=True):
                got = values[0]
                if name in ("d_weight", "d_bias"):
                    got = whole(values, axis if name == "d_weight" else 0)
                if got is not None:
                    dense = np.asarray(getattr(one, name))
                    assert not failures(check("A1", np.asarray(got), dense, quantity=name))


COLLECTIVES = ("c10d::allreduce_", "c10d::_allgather_base_", "c10d::allgather_")


def counted(rank: int, world: int, function: str) -> list[tuple[Any, ...]]:
    """Collectives of forward and backward, by chunks and by valid tokens."""
    from torch.profiler import ProfilerActivity, profile

    from xentlib import torch as ours

    group = torch.distributed.group.WORLD
    weight = torch.nn.Parameter(torch.randn(V // world, 24))
    found = []
    for chunks in (1, 8, 64):
        for valid in (0, 1, 512):
            hidden = torch.randn(512, 24, requires_grad=True)
            labels = torch.where(torch.arange(512) < valid, torch.arange(512) % V % 150, -100)
            budget = 512 // chunks * (V // world + 1) * 4
            with profile(activities=[ProfilerActivity.CPU]) as forward:
                call = getattr(ours, function)
                out = call(hidden, weight, labels, vocab_parallel=group, max_chunk_bytes=budget)
            with profile(activities=[ProfilerActivity.CPU]) as backward:
                (out.loss if function == "chunked_nll" else out.logprobs.sum()).backward()
            counts = [
                sum(e.count for e in part.key_averages() if e.key in COLLECTIVES)
                for part in (forward, backward)
            ]
            zero = valid > 0 or not (hidden.grad.any() or weight.grad.any())
            found.append((chunks, valid, *counts, zero))
            weight.grad = None
    return found


@pytest.mark.parametrize("function", ["chunked_nll", "chunked_logprobs"])
def test_collectives_do_not_count_chunks_or_tokens(function: str) -> None:
    """SPEC 6, A15, ANCHORS 4.5, 4.6: one MAX, one packed SUM, one SUM of d hidden; one exchange of
    the shards' sizes for a head, once."""
    for found in launch(2, counted, function):
        expected = (3, 0) if function == "chunked_nll" else (2, 1)
        for index, (chunks, valid, forward, backward, zero) in enumerate(found):
            first = index == 0  # the sizes are exchanged with the first call
            assert (forward - first, backward) == expected, (chunks, valid)
            assert zero, "no valid token, no gradient"


def refusals(rank: int, world: int) -> list[str]:
    from xentlib.torch import chunked_nll

    group = torch.distributed.group.WORLD
    mesh = torch.distributed.init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    hidden, weight = torch.randn(8, 4), torch.randn(10, 4)
    labels = torch.full((8,), 20)
    said = []
    for parallel in (group, mesh, "tp"):
        try:
            chunked_nll(hidden, weight, labels, vocab_parallel=parallel)
        except (ValueError, TypeError) as error:
            said.append(str(error))
    labels = torch.arange(8)
    dense = chunked_nll(hidden, weight, labels, vocab_parallel=mesh["tp"]).loss
    again = chunked_nll(hidden, weight, labels, vocab_parallel=group).loss
    return [*said, str(bool(dense == again))]


def test_bad_calls_say_so() -> None:
    """A label outside the whole vocabulary (not the shard) raises on every rank; a mesh must be
    one-dimensional; a submesh is as good as its group."""
    for label, mesh, name, same in launch(2, refusals):
        assert "`labels` must lie in [0, 20)" in label
        assert "`vocab_parallel` must be a one-dimensional DeviceMesh; got 2" in mesh
        assert "`vocab_parallel` must be a ProcessGroup" in name
        assert same == "True"


def dtensor(rank: int, world: int) -> list[Any]:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from xentlib.torch import chunked_nll

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    problem = build(CASES[0], 7)
    hidden = torch.tensor(problem.hidden, requires_grad=True)
    weight = torch.nn.Parameter(distribute_tensor(torch.tensor(problem.weight), mesh, [Shard(0)]))
    bias = part_of(problem.bias, 0, (79, 78), rank)
    loss = chunked_nll(
        hidden, weight, torch.tensor(problem.labels), bias=torch.tensor(bias), vocab_parallel=mesh
    ).loss
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    return [loss.detach().numpy(), hidden.grad.numpy(), weight.grad.full_tensor().numpy()]


def test_a_dtensor_head() -> None:
    """ANCHORS 4.8: a head sharded on its vocabulary as a DTensor, V not divisible by P."""
    problem = build(CASES[0], 7).changed(upstream=1.0)
    reference = problem.reference()
    for loss, d_hidden, d_weight in launch(2, dtensor):
        scale = reference.loss_magnitude
        assert not failures(check("A2", loss, reference.loss, magnitude=scale))
        assert not failures(check("A5", d_hidden, reference.d_hidden, reference.bound_hidden))
        assert not failures(check("A6", d_weight, reference.d_weight, reference.bound_weight))


assert PerToken  # the fields' order is that of the results above
