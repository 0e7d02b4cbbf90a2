"""Vocabularies spread over ranks: `vocab_parallel=` against the dense answer, on gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from helpers.vocab_shards import CASES, V, held
from xentlib.contract import check, failures
from xentlib.parity.backends import run, run_logprobs
from xentlib.parity.findings import Findings
from xentlib.parity.problem import Case, Upstream, build, upstream_of
from xentlib.parity.rows import sharded
from xentlib.parity.shards import Sharded, ShardedCall, run_calls
from xentlib.ulp import bits_unequal

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

# Sizes of the shards: even or not, a last one empty.
SPLITS = {
    1: [(157,)],
    2: [(79, 78), (100, 57), (157, 0)],
    3: [(53, 52, 52), (79, 78, 0)],
    4: [(40, 39, 39, 39), (53, 53, 51, 0)],
}
SETUPS = [(world, sizes) for world, splits in SPLITS.items() for sizes in splits]
AUDITED = [(79, 78), (79, 78, 0)]


@pytest.fixture(scope="module")
def results() -> dict[tuple[Any, ...], Sharded]:
    """Both functions, of every case, over every split, in one chunk and in several; some of them in
    audit mode too. One start of four ranks for all."""
    calls = {}
    for case in CASES:
        problem = build(case, 7)
        for function, upstream in (
            ("chunked_nll", None),
            ("chunked_logprobs", upstream_of(problem, 5)),
        ):
            for chunk in (None, 16):
                for _, sizes in SETUPS:
                    for audit in (False, True)[: 1 + (sizes in AUDITED)]:
                        key = (case.id, function, sizes, chunk, audit)
                        calls[key] = ShardedCall(function, problem, sizes, upstream, audit, chunk)
    return dict(zip(calls, run_calls("torch", list(calls.values()))))


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize(("world", "sizes"), SETUPS, ids=str)
def test_shards_give_the_dense_answer(
    results: Any, world: int, sizes: tuple[int, ...], case: Case, chunk: int | None
) -> None:
    """A13 (M8, M9): d hidden is summed once, on every rank the same bits; label
    smoothing, z-loss, softcap, bias, temperature and entropy mean what they mean densely."""
    problem, low = build(case, 7), case.dtype == "bfloat16"
    upstream, rounding = upstream_of(problem, 5), {"dz_dtype": "bfloat16" if low else "float64"}
    for function, dense, reference in (
        ("chunked_nll", run("torch", problem), problem.reference(**rounding)),
        (
            "chunked_logprobs",
            run_logprobs("torch", problem, upstream),
            problem.per_token_reference(upstream, **rounding),
        ),
    ):
        outcome, unequal = results[case.id, function, sizes, chunk, False]
        assert unequal == 0
        for name in dense._fields:
            got, one = getattr(outcome, name), getattr(dense, name)
            held(name, got, one, reference, low=low, world=world)


def test_chunks_do_not_show_over_shards() -> None:
    """A10. Catches: a matrix product whose library depends on the number of rows in a chunk (47.7 %
    of d hidden had other bits in one chunk than in several)."""
    calls = sharded.chunked_calls("torch", 7)
    findings = Findings(("torch",))
    sharded.chunked(findings, "torch", calls, run_calls("torch", calls))
    assert len(findings.measurements) > 40
    assert not failures(findings.measurements)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("sizes", AUDITED, ids=str)
def test_audit_mode_does_not_know_of_shards(
    results: Any, sizes: tuple[int, ...], case: Case
) -> None:
    """A13, A1: in float64 the shards' sums round to the dense answer's bits."""
    problem = build(case, 7)
    upstream = upstream_of(problem, 5)
    for function, dense in (
        ("chunked_nll", run("torch", problem, audit=True)),
        ("chunked_logprobs", run_logprobs("torch", problem, upstream, audit=True)),
    ):
        for chunk in (None, 16):
            outcome = results[case.id, function, sizes, chunk, True].outcome
            for name, one in dense._asdict().items():
                if one is not None:
                    assert not failures(check("A1", getattr(outcome, name), one, quantity=name))


COLLECTIVES = ("c10d::allreduce_", "c10d::_allgather_base_", "c10d::allgather_")


def counted(
    rank: int, world: int, function: str, in_every_chunk: bool = False
) -> list[tuple[Any, ...]]:
    """Collectives of forward and backward, by chunks and by valid tokens."""
    from torch.profiler import ProfilerActivity, profile

    from xentlib import plan
    from xentlib import torch as ours

    if in_every_chunk:
        plan.EXCHANGE_FLOPS["cpu"] = 0.0

    group = torch.distributed.group.WORLD
    weight = torch.nn.Parameter(torch.randn(V // world, 24))
    torch.manual_seed(0)
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
    """A15: one MAX, one packed SUM, one SUM of d hidden, in the first call of a head too."""
    for found in launch(2, counted, function):
        expected = (3, 0) if function == "chunked_nll" else (2, 1)
        for chunks, valid, forward, backward, zero in found:
            assert (forward, backward) == expected, (chunks, valid)
            assert zero, "no valid token, no gradient"


def test_the_count_sees_collectives_in_every_chunk() -> None:
    """M6: what repeats its collectives for each chunk fails the count above."""
    for found in launch(2, counted, "chunked_nll", True):
        forward = {(chunks, valid): count for chunks, valid, count, *_ in found}
        assert forward[64, 512] == 64 * 2 + 1
        assert forward[64, 512] > forward[8, 512] > forward[8, 1] == 3


def variants(rank: int, world: int, options: dict[str, Any]) -> list[Any]:
    """One call with statistics exchanged once, and in every chunk: results, collectives, GEMMs."""
    from torch.profiler import ProfilerActivity, profile

    from xentlib import plan
    from xentlib.torch import chunked_nll

    group, found = torch.distributed.group.WORLD, []
    problem = build(Case("variants", 61, 24, 157, confident=0.3), 3)
    rows = slice(0, 79) if rank == 0 else slice(79, None)
    for least, block in ((1e9, plan.CPU_BLOCK_BYTES), (0.0, 8 * 80 * 4)):
        plan.EXCHANGE_FLOPS["cpu"], plan.CPU_BLOCK_BYTES = least, block
        hidden = torch.tensor(problem.hidden, requires_grad=True)
        weight = torch.tensor(problem.weight[rows], requires_grad=True)

        def call(hidden: Any = hidden, weight: Any = weight) -> Any:
            return chunked_nll(
                hidden, weight, torch.tensor(problem.labels), vocab_parallel=group,
                max_chunk_bytes=16 * 80 * 4, outputs=("logprobs", "entropy"), **options,
            )  # fmt: skip

        call()  # shards of two sizes are learnt
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


def refusals(rank: int, world: int) -> list[str]:
    from xentlib.torch import chunked_nll

    group = torch.distributed.group.WORLD
    mesh = torch.distributed.init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "tp"))
    weight = torch.randn(10, 4)
    torch.manual_seed(0)
    hidden, labels = torch.randn(8, 4), torch.full((8,), 20)
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


# What ranks must have alike, by the argument that differs on rank 1, and what every rank says.
SAME = "must be the same on every rank of `vocab_parallel`; got ranks that differ"
DIFFERENT = {
    "labels": ("labels", f"`labels` {SAME}. Gather the tokens"),
    "which labels count": ("where", f"`labels` {SAME}"),
    "slices of the sequence": ("hidden", f"`labels` {SAME}. Gather the tokens"),
    "hidden": ("hidden", f"`hidden` {SAME}. Gather the tokens"),
    "temperature": ("temperature", f"`temperature` {SAME}"),
    "temperatures": ("temperature", f"`temperature` {SAME}"),
    "token_weights": ("token_weights", f"`token_weights` {SAME}"),
    "z_loss": ("z_loss", f"`z_loss` {SAME}"),
    "label_smoothing": ("label_smoothing", f"`label_smoothing` {SAME}"),
    "softcap": ("softcap", f"`softcap` {SAME}"),
    "logit_scale": ("logit_scale", f"`logit_scale` {SAME}"),
    "denominator": ("denominator", f"`denominator` {SAME}"),
    "gradient": ("gradient", "`hidden` must require grad on every rank of `vocab_parallel`, or on"),
    "whole head": ("weight", "must come with this rank's part of 157 classes; got all of them on"),
    "whole kernel": ("weight", "must come with this rank's part of 157 classes; got all of them"),
    "label": ("labels", r"`labels` must lie in [0, 157) or equal `ignore_index` (-100); got 157"),
}


def differing(rank: int, world: int, reading: bool) -> list[tuple[str, list[Any]]]:
    """Each of DIFFERENT, through the functions that take it; and what may differ."""
    from xentlib.torch import chunked_logprobs, chunked_nll, ranks

    group, problem = torch.distributed.group.WORLD, build(CASES[0], 7)
    every = {"vocab_parallel": group, "max_chunk_bytes": 16 * 80 * 4}
    hidden, whole = torch.tensor(problem.hidden), torch.tensor(problem.weight)
    labels = torch.tensor(problem.labels)
    mine = whole[:79] if rank == 0 else whole[79:]
    chunked_nll(hidden, mine, labels, **every)  # the shards are learnt
    if not reading:
        ranks.free_to_read = lambda x: False
    tokens = torch.linspace(0.5, 2.0, len(labels))
    differ: dict[str, dict[str, Any]] = {
        "labels": {"labels": labels.roll(rank)},
        "which labels count": {"where": torch.arange(len(labels)) != 3 + 4 * rank},
        "slices of the sequence": {
            "hidden": hidden[30 * rank : 30 * rank + 30],
            "labels": labels[30 * rank : 30 * rank + 30],
        },
        "hidden": {"hidden": hidden.roll(rank, 0)},
        "temperature": {"temperature": 0.7 + 0.1 * rank},
        "temperatures": {"temperature": tokens.roll(20 * rank)},
        "token_weights": {"token_weights": tokens.roll(20 * rank)},
        "z_loss": {"z_loss": 1e-4 * (1 + rank)},
        "label_smoothing": {"label_smoothing": 0.1 + 0.1 * rank},
        "softcap": {"softcap": 5.0 + rank},
        "logit_scale": {"logit_scale": torch.tensor(1.0 + rank / 16)},
        "denominator": {"denominator": 40 + rank},
        "gradient": {"hidden": hidden.clone().requires_grad_(rank == 0)},
        "whole head": {"weight": whole},
        "whole kernel": {"weight": whole.T.contiguous(), "weight_layout": "HV"},
        "label": {"labels": torch.where(torch.arange(len(labels)) == 5, 157, labels)},
    }
    said = []
    assert differ.keys() == DIFFERENT.keys()
    nll_alone = ("token_weights", "z_loss", "label_smoothing", "denominator", "gradient")
    if not reading:
        del differ["gradient"]  # one rank would wait for the other's sum of d hidden
    for name, options in differ.items():
        arguments = {"hidden": hidden, "weight": mine, "labels": labels} | every | options
        found: list[Any] = []
        for function in (chunked_nll, chunked_logprobs)[: 1 if name in nll_alone else 2]:
            try:
                out = function(**arguments)
                found.append(bool(out[0].isnan().any()))
            except ValueError as error:
                found.append(str(error))
        said.append((name, found))
    return said


@pytest.mark.parametrize("reading", [True, False], ids=["read", "not read"])
def test_what_differs_between_ranks_is_refused(reading: bool) -> None:
    """Where the numbers may be read every rank raises the same, else every rank has NaN. Catches: a
    gather forgotten under sequence parallelism, labels of another batch, the whole head on every
    rank (its loss + log P), options of another run."""
    for said in launch(2, differing, reading):
        for name, found in said:
            for one in found:
                # A new head is read everywhere, labels are where they are on a CPU.
                if reading or name in ("whole head", "whole kernel", "label"):
                    assert DIFFERENT[name][1] in one, (name, one)
                else:
                    assert one is True, (name, one)


def not_differing(rank: int, world: int) -> list[float]:
    """What may differ: roundings, what is in rows that do not count, objects that were built anew
    on one rank alone, heads of one size here and of other sizes there."""
    from xentlib.torch import chunked_nll

    group, problem = torch.distributed.group.WORLD, build(CASES[0], 7)
    hidden, whole = torch.tensor(problem.hidden), torch.tensor(problem.weight)
    labels, rows = torch.tensor(problem.labels), torch.tensor(problem.labels)[:, None]
    want = chunked_nll(hidden, whole, labels).loss

    def off(
        size: int,
        *,
        fresh: bool = False,
        hidden: Any = hidden,
        whole: Any = whole,
        want: Any = want,
    ) -> float:
        mine = whole[:size] if rank == 0 else whole[size:]
        weight = torch.nn.Parameter(mine.clone()) if fresh else mine
        loss = chunked_nll(hidden, weight, labels, vocab_parallel=group).loss
        return float((loss - want).abs())

    junk = torch.where(rows == -100, torch.full_like(hidden, 1e3 * rank), hidden)
    low = hidden.bfloat16().float() if rank else hidden
    found = [off(79), off(79, fresh=rank == 0), off(79, hidden=junk), off(100), off(79), off(157)]
    longer = torch.cat([whole, whole[:3] / 2])  # rank 0 has as many rows of it
    found += [off(79, whole=longer, want=chunked_nll(hidden, longer, labels).loss), off(79)]
    return [*found, off(79, hidden=low) > 0]


def test_what_may_differ_between_ranks() -> None:
    """A13. Catches: an exchange of sizes that one rank makes alone, because its parameter is new;
    numbers of tokens that do not count."""
    for *same, rounded in launch(2, not_differing):
        assert max(same) < 2.0**-20
        assert rounded


def padded(rank: int, world: int, layout: str) -> list[Any]:
    """Both functions with a head of 80 rows on each of two ranks, of which 157 are classes; entries
    whose bits NaN, inf and 3 in the other rows change from what zeros give."""
    from xentlib import PaddedVocab
    from xentlib.torch import chunked_logprobs, chunked_nll

    parallel = PaddedVocab(torch.distributed.group.WORLD, V)
    problem, found = build(CASES[0], 7), []
    mine = slice(0, 80) if rank == 0 else slice(80, None)
    for function in (chunked_nll, chunked_logprobs):
        both = []
        for fill in ((0.0, 0.0, 0.0), (np.nan, np.inf, 3.0)):
            rows = np.array(fill[: 3 * rank], np.float32)
            weight = np.concatenate([problem.weight[mine], np.tile(rows[:, None], 24)])
            bias = np.concatenate([problem.bias[mine], rows])
            leaves = [torch.tensor(x, requires_grad=True) for x in (problem.hidden, weight, bias)]
            head = leaves[1] if layout == "VH" else leaves[1].T.contiguous()
            out = function(
                leaves[0], head, torch.tensor(problem.labels), bias=leaves[2],
                vocab_parallel=parallel, max_chunk_bytes=16 * 81 * 4, weight_layout=layout,
            )  # fmt: skip
            (out.loss if function is chunked_nll else -out.logprobs.sum()).backward()
            grads = [leaf.grad.numpy() for leaf in leaves]
            assert not any(g[len(g) - 3 * rank :].any() for g in grads[1:])
            both.append([grads[0], *(g[: len(g) - 3 * rank] for g in grads[1:])])
        found.append([*both[1], sum(map(bits_unequal, *both))])
    return found


@pytest.mark.parametrize("layout", ["VH", "HV"])
def test_declared_padding_is_no_class(layout: str) -> None:
    """M4, M9: rows past the vocabulary have logits as large as any, inf or NaN, and no
    part in it."""
    problem = build(CASES[0], 7)
    ones = np.where(problem.valid, -1.0, 0.0).astype(np.float32)
    references = (
        problem.changed(upstream=1.0).reference(),
        problem.per_token_reference(Upstream(ones, None, None)),
    )
    for found, reference in zip(zip(*launch(2, padded, layout)), references):
        d_hidden = found[0][0]
        assert not any(unequal for *_, unequal in found)
        assert not failures(check("A5", d_hidden, reference.d_hidden, reference.bound_hidden))
        for index, name in ((1, "weight"), (2, "bias")):
            got = np.concatenate([rank[index] for rank in found])
            exact, bound = (getattr(reference, f"{part}_{name}") for part in ("d", "bound"))
            assert not failures(check("A6", got, exact, bound))


def compiled(rank: int, world: int) -> bool:
    from xentlib import VocabShard
    from xentlib.torch import chunked_logprobs, chunked_nll, vocab_parallel_logprobs

    group = torch.distributed.group.WORLD
    hidden, weight = torch.randn(32, 16), torch.randn(10, 16, requires_grad=True)
    torch.distributed.broadcast(hidden, 0)
    labels, logits = torch.arange(32) % 20, torch.randn(32, 10, requires_grad=True)
    shard = VocabShard(10 * rank, 10 * rank + 10, 20)
    steps = (
        lambda x: chunked_nll(hidden, x, labels, vocab_parallel=group).loss,
        lambda x: chunked_logprobs(hidden, x, labels, vocab_parallel=group).lse.sum(),
        lambda x: vocab_parallel_logprobs(x, labels, vocab_parallel=group, shard=shard).lse.sum(),
        lambda x: vocab_parallel_logprobs(x, labels, vocab_parallel=group).logprobs.sum(),
    )
    same = True
    for step, leaf in zip(steps, (weight, weight, logits, logits), strict=True):
        (want,) = torch.autograd.grad(step(leaf), leaf)
        fast = torch.compile(step, fullgraph=True, backend="aot_eager")
        (got,) = torch.autograd.grad(fast(leaf), leaf)
        same &= torch.equal(got, want)
    return same


def test_shards_compile_into_one_graph() -> None:
    """D6: fullgraph, collectives and the exchange of sizes included; the same bits."""
    assert all(launch(2, compiled))


def sequence_parallel(rank: int, world: int) -> list[Any]:
    """Hidden states as slices of the sequence, gathered as DTensor gathers."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from xentlib.torch import chunked_nll

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    problem = build(CASES[0], 7)
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
    reference = build(CASES[0], 7).changed(upstream=1.0).reference()
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
    problem = build(replace(CASES[0], tokens=60), 7)
    labels, whole = torch.tensor(problem.labels), torch.tensor(problem.hidden)
    mine = slice(0, 79) if rank == 0 else slice(79, None)
    weight, bias = torch.tensor(problem.weight[mine]), torch.tensor(problem.bias[mine])

    def d_of(leaf: Any, hidden: Any, **options: Any) -> Any:
        out = call(
            hidden, weight, labels, bias=bias, vocab_parallel=group, max_chunk_bytes=16 * 80 * 4,
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
    problem = build(replace(CASES[0], tokens=60), 7)
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


def dtensor(rank: int, world: int) -> list[Any]:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from xentlib.torch import chunked_nll

    mesh = torch.distributed.init_device_mesh("cpu", (world,))
    problem = build(CASES[0], 7)
    hidden = torch.tensor(problem.hidden, requires_grad=True)
    weight = torch.nn.Parameter(distribute_tensor(torch.tensor(problem.weight), mesh, [Shard(0)]))
    bias = problem.bias[:79] if rank == 0 else problem.bias[79:]
    loss = chunked_nll(
        hidden, weight, torch.tensor(problem.labels), bias=torch.tensor(bias), vocab_parallel=mesh
    ).loss
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    return [loss.detach().numpy(), hidden.grad.numpy(), weight.grad.full_tensor().numpy()]


def test_a_dtensor_head() -> None:
    """M8: a head sharded on its vocabulary as a DTensor, V not divisible by P."""
    problem = build(CASES[0], 7).changed(upstream=1.0)
    reference = problem.reference()
    for loss, d_hidden, d_weight in launch(2, dtensor):
        scale = reference.loss_magnitude
        assert not failures(check("A2", loss, reference.loss, magnitude=scale))
        assert not failures(check("A5", d_hidden, reference.d_hidden, reference.bound_hidden))
        assert not failures(check("A6", d_weight, reference.d_weight, reference.bound_weight))
