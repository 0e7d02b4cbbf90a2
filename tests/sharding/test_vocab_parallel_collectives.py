"""Vocabularies spread over gloo ranks: the collectives that `vocab_parallel=` takes, and where d
hidden is summed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from helpers.vocab_shards import PLAIN, V
from xentlib import VocabShard
from xentlib.contract import check, failures
from xentlib.tools.harness.problems import Case, Upstream, build
from xentlib.ulp import bits_unequal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


N = 64  # tokens of the counts
COLLECTIVES = ("c10d::allreduce_", "c10d::_allgather_base_", "c10d::allgather_")


def counted(
    rank: int, world: int, function: str, in_every_chunk: bool = False
) -> list[tuple[Any, ...]]:
    """Collectives of forward and backward, by chunks and by valid tokens."""
    from torch.profiler import ProfilerActivity, profile

    from xentlib import torch as ours
    from xentlib.plan import split as sizes

    if in_every_chunk:
        sizes.EXCHANGE_FLOPS["cpu"] = 0.0

    group = torch.distributed.group.WORLD
    weight = torch.nn.Parameter(torch.randn(V // world, 24))
    torch.manual_seed(0)
    found = []
    # The profiler takes as long as there are chunks, of which 8 show as much as 64: 15 s, 9 s.
    for chunks in (1, 4, 8):
        for valid in (0, 1, N):
            hidden = torch.randn(N, 24, requires_grad=True)
            labels = torch.where(torch.arange(N) < valid, 2 * torch.arange(N) % 150, -100)
            budget = N // chunks * (V // world + 1) * 4
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


@pytest.mark.slow
@pytest.mark.parametrize("function", ["chunked_nll", "chunked_logprobs"])
def test_collectives_do_not_count_chunks_or_tokens(function: str) -> None:
    """A15: one MAX, one packed SUM, one SUM of d hidden, in the first call of a head too."""
    for found in launch(2, counted, function):
        expected = (3, 0) if function == "chunked_nll" else (2, 1)
        for chunks, valid, forward, backward, zero in found:
            assert (forward, backward) == expected, (chunks, valid)
            assert zero, "no valid token, no gradient"


@pytest.mark.slow
def test_the_count_sees_collectives_in_every_chunk() -> None:
    """M6: what repeats its collectives for each chunk fails the count above."""
    for found in launch(2, counted, "chunked_nll", True):
        forward = {(chunks, valid): count for chunks, valid, count, *_ in found}
        assert forward[8, N] == 8 * 2 + 1
        assert forward[8, N] > forward[4, N] > forward[4, 1] == 3


def variants(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    """One call with statistics exchanged once, and in every chunk: results, collectives, GEMMs."""
    from torch.profiler import ProfilerActivity, profile

    from xentlib.plan import split as sizes
    from xentlib.torch import chunked_nll

    group, found = torch.distributed.group.WORLD, []
    problem = build(Case("variants", 61, 24, 157, confident=0.3), 3)
    rows = slice(0, 79) if rank == 0 else slice(79, None)
    shard = VocabShard.of_ranks(79 - rank, group)
    for least, block in ((1e9, sizes.CPU_BLOCK_BYTES), (0.0, 8 * 80 * 4)):
        sizes.EXCHANGE_FLOPS["cpu"], sizes.CPU_BLOCK_BYTES = least, block
        hidden = torch.tensor(problem.hidden, requires_grad=True)
        weight = torch.tensor(problem.weight[rows], requires_grad=True)

        def call(hidden: Any = hidden, weight: Any = weight) -> Any:
            return chunked_nll(
                hidden, weight, torch.tensor(problem.labels), vocab_parallel=shard,
                max_chunk_bytes=16 * 80 * 4, outputs=("logprobs", "entropy"), **options,
            )  # fmt: skip

        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            out = call()
        out.loss.backward()
        counts = {e.key: e.count for e in profiler.key_averages()}
        gemms = ("aten::mm", "aten::addmm_", "mkldnn::_linear_pointwise")
        found.append(
            (
                [x.detach().numpy() for x in (out.loss, out.logprobs, out.entropy)]
                + [hidden.grad.numpy(), weight.grad.numpy()],
                sum(counts.get(key, 0) for key in COLLECTIVES),
                sum(counts.get(key, 0) for key in gemms),
            )
        )
    return found


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_statistics_in_every_chunk_spare_a_gemm(softcap: float | None) -> None:
    """D7: the plan's choice between a fourth GEMM and two collectives a chunk changes no
    bit, also where a chunk is two blocks of 8 rows. Catches: statistics of other tokens, a logit
    taken out twice."""
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": softcap}
    for once, each in launch(2, variants, options):
        for got, expected in zip(each[0], once[0], strict=True):
            assert bits_unequal(got, expected) == 0
        chunks = 4  # of 16 tokens; 61 less those ignored
        # d hidden too; and the product of 4 rows whose sums ranks compare
        assert once[1:] == (2 + 1, 4 * chunks + 1)
        assert each[1:] == (once[1:] if softcap else (2 * chunks + 1, 3 * chunks + 1))


# --- where d hidden is summed --------------------------------------------------------------------


def sequence_parallel(rank: int, world: int) -> list[Any]:
    """Hidden states as slices of the sequence, gathered as DTensor gathers."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from xentlib.torch import chunked_nll

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    problem = build(PLAIN, 7)
    weight = distribute_tensor(torch.tensor(problem.weight), mesh, [Shard(0)])
    sliced = distribute_tensor(torch.tensor(problem.hidden), mesh, [Shard(0)]).requires_grad_()
    bias = torch.tensor(problem.bias[:79] if rank == 0 else problem.bias[79:])
    more = {"bias": bias, "vocab_parallel": mesh}
    labels = torch.tensor(problem.labels)
    with pytest.raises(ValueError, match=r"`hidden` must be whole on every rank.*redistribute"):
        chunked_nll(sliced, weight, labels, **more)
    whole = sliced.redistribute(placements=[Replicate()])
    chunked_nll(whole, weight, labels, **more).loss.backward()
    return [sliced.grad.placements[0].is_shard(0), sliced.grad.full_tensor().numpy()]


def test_d_hidden_is_summed_once_with_sequence_parallelism() -> None:
    """M9: what comes back is complete; each rank's slice of it is that rank's gradient."""
    reference = build(PLAIN, 7).changed(upstream=1.0).reference()
    for sliced, d_hidden in launch(2, sequence_parallel):
        assert sliced
        assert not failures(check("A5", d_hidden, reference.d_hidden, reference.bound_hidden))


class Region(torch.autograd.Function):
    """Megatron's regions before the head: the identity, or a gather of the sequence, whose backward
    adds up what the ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Any, gather: bool) -> Any:
        ctx.gather = gather
        if not gather:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, None]:
        total = gradient.clone()
        torch.distributed.all_reduce(total)
        if ctx.gather:
            world = torch.distributed.get_world_size()
            total = total.chunk(world)[torch.distributed.get_rank()]
        return total, None


def regions(rank: int, world: int, function: str) -> list[Any]:
    """d hidden through each kind of model, and where it is summed twice or never."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    import xentlib.torch

    call, group = getattr(xentlib.torch, function), torch.distributed.group.WORLD
    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    problem = build(replace(PLAIN, tokens=60), 7)
    labels, whole = torch.tensor(problem.labels), torch.tensor(problem.hidden)
    mine = slice(0, 79) if rank == 0 else slice(79, None)
    shard = VocabShard.of_ranks(79 - rank, group)
    weight, bias = torch.tensor(problem.weight[mine]), torch.tensor(problem.bias[mine])

    def d_of(leaf: Any, hidden: Any, **options: Any) -> Any:
        out = call(
            hidden, weight, labels, bias=bias, vocab_parallel=shard, max_chunk_bytes=16 * 80 * 4,
            **options,
        )  # fmt: skip
        loss = out.loss if function == "chunked_nll" else -out.logprobs.sum() / (labels >= 0).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient.numpy()

    own = {"reduce_hidden_grad": False}
    copied, sliced = whole.clone().requires_grad_(), whole.chunk(world)[rank].clone()
    sliced.requires_grad_()

    def titan(*grad_placements: Any) -> Any:
        spread = DTensor.from_local(sliced, mesh, [Shard(0)])
        gathered = spread.redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=grad_placements) if grad_placements else gathered

    return [
        d_of(copied, copied),
        d_of(copied, Region.apply(copied, False), **own),
        d_of(sliced, Region.apply(sliced, True), **own),
        d_of(sliced, titan()),
        d_of(sliced, titan(Partial()), **own),
        d_of(copied, Region.apply(copied, False)),  # summed twice
        d_of(copied, copied, **own),  # never
    ]


@pytest.mark.parametrize("function", ["chunked_nll", "chunked_logprobs"])
def test_the_sum_of_d_hidden_is_made_once(function: str) -> None:
    """A5, for models without a region before the head, Megatron's with a copy, with sequence
    parallelism, torchtitan's with a DTensor that takes a slice and with one that adds parts up.
    The docs' table says which of them wants `reduce_hidden_grad=False`."""
    problem = build(replace(PLAIN, tokens=60), 7)
    ones = np.where(problem.valid, -1.0 / problem.valid.sum(), 0.0).astype(np.float32)
    reference: Any = problem.changed(upstream=1.0).reference()
    if function == "chunked_logprobs":
        reference = problem.per_token_reference(Upstream(ones, None, None))
    exact, bound = reference.d_hidden, reference.bound_hidden
    for rank, found in enumerate(launch(2, regions, function)):
        part = slice(30 * rank, 30 * rank + 30)
        for k, got in enumerate(found):
            where = part if k in (2, 3, 4) else slice(None)
            wrong = failures(check("A5", got, exact[where], bound[where]))
            assert bool(wrong) == (k > 4), (k, wrong)


def test_the_sum_is_left_out_over_shards_alone() -> None:
    """Without shards there is none, and in JAX the types say whether there is one."""
    from xentlib.torch import chunked_logprobs, chunked_nll

    hidden, weight, labels = torch.randn(4, 3), torch.randn(5, 3), torch.arange(4)
    for function in (chunked_nll, chunked_logprobs):
        with pytest.raises(
            ValueError, match="`reduce_hidden_grad` must be True without `vocab_par"
        ):
            function(hidden, weight, labels, reduce_hidden_grad=False)
        with pytest.raises(TypeError, match="`reduce_hidden_grad` must be True or False; got 0"):
            function(hidden, weight, labels, reduce_hidden_grad=0)
