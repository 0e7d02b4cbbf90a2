"""`vocab_parallel_logprobs` with the vocabulary spread over real gloo ranks: the dense answer, the
collectives it takes, DTensors, and what is refused.

Shapes: N tokens, V classes, C columns of a rank, padding included.
"""

from __future__ import annotations

import re
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from helpers.given_logits import RUN, VALUES, Call, V, hold_given, in_torch, make, same_bits
from helpers.given_shards import CASES, WHOLE, Layout, laid_out, of_dense, without_padding
from helpers.ranks import launch
from xentlib.shards import PaddedVocab, VocabShard
from xentlib.tools.harness.ranks import DEVICE

LAYOUTS: list[Layout] = [
    ((157, 0),),
    ((79, 0), (78, 0)),
    ((157, 0), (0, 0)),
    ((80, 0), (77, 3)),
    ((100, 0), (7, 0), (50, 0)),
    ((100, 0), (57, 43), (0, 100)),  # the last rank holds padding alone
    ((60, 4), (40, 0), (57, 7)),  # padding that PaddedVocab cannot declare
    ((40, 0), (39, 0), (39, 0), (39, 0)),
    ((53, 0), (53, 0), (51, 0), (0, 0)),
]


def on_ranks(rank: int, world: int) -> list[list[dict[str, Any]]]:
    """Every layout that has this rank."""
    import torch

    groups = [torch.distributed.new_group(list(range(size))) for size in range(1, world + 1)]
    return [on_rank(rank, groups[len(x) - 1], x) if rank < len(x) else [] for x in LAYOUTS]


def on_rank(rank: int, group: Any, layout: Layout) -> list[dict[str, Any]]:
    """Every case, the shards exchanged where that can be, and declared."""
    ends = list(accumulate(size for size, _ in layout))
    widths = [size + padding for size, padding in layout]
    start, stop = list(pairwise(accumulate(widths, initial=0)))[rank]
    shard = VocabShard(ends[rank] - layout[rank][0], ends[rank], V, layout[rank][1])
    spread = [{"vocab_parallel": group, "shard": shard}]
    if laid_out(np.zeros((1, V)), layout)[1][:V].all():
        over: Any = VocabShard.of_ranks(widths[rank], group, V)
        if len(set(widths)) == 1:
            over = group if sum(widths) == V else PaddedVocab(group, V)
        spread.append({"vocab_parallel": over})
    found = []
    for case in CASES.values():
        call = make(**case)
        local = np.ascontiguousarray(laid_out(call.logits, layout)[0][..., start:stop])
        found += [in_torch(call, logits=local, max_chunk_bytes=7000, **how) for how in spread]
    return found


@pytest.fixture(scope="module")
def on_each_rank() -> list[list[list[dict[str, Any]]]]:
    """One start of four ranks for all layouts."""
    pytest.importorskip("torch")
    return launch(4, on_ranks)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_give_the_dense_answer(on_each_rank: Any, layout: Layout) -> None:
    """A13, M8, M9: every rank has the values' bits, and the gradient of its own columns.
    Catches: equal offsets, padding in the softmax, a shard that does not own losing gradient."""
    ranks = [found[LAYOUTS.index(layout)] for found in on_each_rank[: len(layout)]]
    ways = len(ranks[0]) // len(CASES)
    for index, results in enumerate(zip(*ranks, strict=True)):
        call = make(**list(CASES.values())[index // ways])
        d_logits = np.concatenate([x.pop("d_logits") for x in results], axis=-1)
        for other in results:
            same_bits(other, results[0], "A13")
        got = without_padding(results[0] | {"d_logits": d_logits}, laid_out(call.logits, layout)[1])
        of_dense(call, got, in_torch)


def counted(rank: int, world: int) -> list[tuple[int, ...]]:
    """Collectives of forward and backward, with a shard and without, by chunks and valid tokens."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import vocab_parallel_logprobs

    found = []
    for shard in (None, VocabShard(70 * rank, 70 * rank + 70, 140)):
        # The profiler takes as long as there are chunks, 300 of 300 tokens: 31 s, 13 s.
        for budget, valid in ((None, 24), (1, 24), (1, 0)):
            x = torch.randn(24, 70, requires_grad=True)
            y = torch.where(torch.arange(24) < valid, torch.arange(24) % 140, -100)
            counts = []
            with profile(activities=[ProfilerActivity.CPU]) as part:
                out = vocab_parallel_logprobs(
                    x, y, entropy=True, max_chunk_bytes=budget, shard=shard,
                    vocab_parallel=torch.distributed.group.WORLD,
                )  # fmt: skip
            counts.append(part)
            with profile(activities=[ProfilerActivity.CPU]) as part:
                (out.logprobs.sum() + out.entropy.sum() + out.lse.sum()).backward()
            counts.append(part)
            found.append(
                tuple(
                    sum(e.count for e in c.key_averages() if e.key.startswith("c10d::"))
                    for c in counts
                )
            )
    return found


@pytest.mark.slow
@pytest.mark.torch
def test_collectives_on_ranks() -> None:
    """One MAX and one packed SUM, with a declared shard or without; none in the backward; the same
    whatever is valid. Catches: one a chunk (SkyRL, NeMo-RL), an exchange of sizes beside them."""
    pytest.importorskip("torch")
    for found in launch(2, counted):
        assert found == [(2, 0)] * 6


def refused(rank: int, world: int) -> list[str]:
    import torch

    from xentlib.torch import vocab_parallel_logprobs

    group = torch.distributed.group.WORLD
    torch.manual_seed(0)  # the same logits on both ranks
    x, y = torch.randn(6, 10), torch.arange(6)
    own = x + rank
    half = VocabShard(5 * rank, 5 * rank + 5, 10)
    said = []
    for logits, labels, parallel, shard in (
        (x, y, group, None),
        (x, y, group, half),
        (x, y, PaddedVocab(group, 10), None),
        (own, y, PaddedVocab(group, 21), None),
        (own, y, group, VocabShard(5, 4, 10, 11)),
        (own, y + 15, group, None),
        (own, y + 8, group, VocabShard(5 * rank, 5 * rank + 5, 10, 5)),
        (own, y + 12, PaddedVocab(group, 17), None),
        (own, y, "tp", None),
    ):
        try:
            vocab_parallel_logprobs(logits, labels, vocab_parallel=parallel, shard=shard)
            said.append("nothing")
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


SAID = (
    WHOLE,
    r"`shard` must describe the 10 columns of `logits`; got 5 classes and 0 of padding",
    WHOLE,
    r"`vocab_parallel` must spread 21 classes over its ranks; got shards of \(10, 10\), 20 in all",
    r"`shard` must have 0 <= start <= stop <= vocab_size and padding >= 0",
    r"`labels` must lie in \[0, 20\) or equal `ignore_index` \(-100\); got 20",
    r"`labels` must lie in \[0, 10\) or equal `ignore_index` \(-100\); got 10",
    r"`labels` must lie in \[0, 17\) or equal `ignore_index` \(-100\); got 17",
    r"`vocab_parallel` must be a ProcessGroup or a one-dimensional DeviceMesh; got str",
)


@pytest.mark.torch
def test_what_ranks_refuse() -> None:
    """M9, M11: full logits as a shard give + log P elsewhere; a label of V would match a
    padded column. Every rank refuses, so none waits for another."""
    pytest.importorskip("torch")
    for said in launch(2, refused):
        for text, pattern in zip(said, SAID, strict=True):
            assert re.search(pattern, text), text


@pytest.mark.parametrize("logits", [(4, 10), (4, 0)])
def test_what_needs_no_ranks_to_be_refused(backend: str, logits: tuple[int, int]) -> None:
    """D12, M9, M11: a shard without its group; no columns; a label outside the vocabulary."""
    call = Call(np.zeros(logits, np.float32), np.full(4, 10, np.int32), np.zeros((3, 4)))
    with pytest.raises(ValueError, match=r"`shard` must come with `vocab_parallel`; got VocabSh"):
        RUN[backend](call, shard=VocabShard(0, 10, 20))
    text = r"must lie in \[0, 10\).*got 10" if logits[1] else r"`logits` must have at least one"
    with pytest.raises(ValueError, match=text):
        RUN[backend](call)


def dtensors(rank: int, world: int) -> list[Any]:
    """Gradient and values of DTensor logits, by how they are placed and what is said of them; the
    sentence where they are refused."""
    import torch
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from xentlib.torch import vocab_parallel_logprobs

    flat = torch.distributed.init_device_mesh(DEVICE, (world,))
    grid = torch.distributed.init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    pair = torch.distributed.new_group([0, 1])
    call = make(shape=(3, 7))
    labels, given = torch.tensor(call.labels), torch.tensor(call.upstream)
    found: dict[str, Any] = {}

    def run(name: str, mesh: Any, placements: Any, labels: Any = labels, **how: Any) -> None:
        whole = torch.tensor(call.logits)
        logits = distribute_tensor(whole, mesh, placements).requires_grad_()
        try:
            out = vocab_parallel_logprobs(logits, labels, entropy=True, **how)
            torch.autograd.backward(list(out[:3]), list(given))
        except ValueError as error:
            found[name] = str(error)
            return
        found[name] = dict(zip(VALUES, (x.detach().cpu().numpy() for x in out)))
        found[name]["d_logits"] = logits.grad.full_tensor().cpu().numpy()

    run("alone", flat, [Shard(2)])
    run("from the end", flat, [Shard(-1)])
    run("with the mesh", flat, [Shard(-1)], vocab_parallel=flat)
    run("with the group", flat, [Shard(-1)], vocab_parallel=torch.distributed.group.WORLD)
    run("replicated", flat, [Replicate()])
    run("replicated labels", flat, [Shard(-1)], distribute_tensor(labels, flat, [Replicate()]))
    run("of a grid", grid["tp"], [Shard(-1)])
    run("replicated over the group", flat, [Replicate()], vocab_parallel=flat)
    run("tokens", flat, [Shard(0)])
    run("tokens over the group", flat, [Shard(0)], vocab_parallel=flat)
    run("a grid", grid, [Replicate(), Shard(-1)])
    run("other ranks", flat, [Shard(-1)], vocab_parallel=pair if rank < 2 else grid["tp"])
    run("sliced labels", flat, [Shard(-1)], distribute_tensor(labels, flat, [Shard(0)]))

    def compiled(x: Any) -> Any:
        return vocab_parallel_logprobs(x, labels).logprobs.sum()

    logits = distribute_tensor(torch.tensor(call.logits), flat, [Shard(-1)]).requires_grad_()
    fast = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(f(logits), logits)[0].to_local() for f in (fast, compiled))
    assert torch.equal(got, want)
    return [found]


@pytest.mark.slow
@pytest.mark.torch
def test_dtensors() -> None:
    """A13: sharded over its classes a DTensor needs no other argument, as torchtitan passes one;
    V no multiple of the ranks. Otherwise the sentence says what to pass."""
    pytest.importorskip("torch")
    call = make(shape=(3, 7))
    said = {
        "replicated over the group": "must be a DTensor sharded over its classes, the last dimens",
        "tokens": "of whole rows, where each rank has tokens of its own",
        "tokens over the group": "`logits.to_local()`",
        "a grid": r"with `vocab_parallel=mesh['name']`",
        "other ranks": "must hold the ranks of the mesh that `logits` is on, [0, 1, 2, 3]; got [",
        "sliced labels": "`labels` must be whole on every rank",
    }
    for (found,) in launch(4, dtensors):
        for name, value in found.items():
            if name in said:
                assert said[name] in value, (name, value)
            else:
                assert isinstance(value, dict), (name, value)
                hold_given(call, value)
