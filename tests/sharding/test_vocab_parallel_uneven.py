"""Vocabularies over gloo ranks in shards of any sizes, which `VocabShard.of_ranks` declares: right
whatever heads came before. Undeclared, all ranks refuse them in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.ranks import launch
from helpers.refused import said_by
from xentlib.contract import check, failures
from xentlib.tools.harness.ranks import DEVICE

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

N, H = 31, 4
SMALL = 20 * 4 * 8  # several chunks, not as many for every shard
# Rows of one head after the other, on three ranks that share one group.
HEADS: dict[str, list[tuple[int, ...]]] = {
    "at first": [(12, 8, 5)],
    "the last has all": [(0, 0, 25)],
    "one class more": [(14, 13, 13), (14, 14, 13)],
    "as many rows as classes": [(0, 0, 19), (19, 19, 19)],
    "other shards, other chunks": [(25, 15, 15), (15, 30, 10), (19, 18, 18)],
    "nothing on most ranks": [(0, 7, 1), (0, 6, 29)],
    "one class": [(0, 1, 0), (1, 0, 0)],
}
# Rows of each rank, of which the first are classes.
PADDED = {"one class": 1, "all rows of one rank": 9}
WAYS: dict[str, dict[str, Any]] = {
    "mean, class weights": {"weighed": True},
    "sum": {"reduction": "sum"},
    "recompute": {"weighed": True, "recompute": True, "label_smoothing": 0.1},
    "per token": {"entropy": True},
    "divergence": {"kind": "jsd", "beta": 0.3, "nll_weight": 0.4, "reduction": "none"},
}


def on_heads(
    rank: int, world: int, cases: list[tuple[str, str]]
) -> dict[tuple[str, str], list[tuple[Any, Any]]]:
    """Of each head the results of this rank, and of the whole head in one process."""
    from xentlib import PaddedVocab, VocabShard
    from xentlib.torch.core import blocks, loop

    group = torch.distributed.group.WORLD
    blocks.BLOCK_CLASSES = loop.BLOCK_CLASSES = 12  # of which shards have one, several or none
    torch.use_deterministic_algorithms(True)  # new memory holds NaN: of padding, say
    results = {}
    for name, way in cases:
        if name in HEADS:
            results[name, way] = [
                result(rank, way, sizes, VocabShard.of_ranks(sizes[rank], group))
                for sizes in HEADS[name]
            ]
            continue
        kind, _, of_rank = name.partition(", ")
        rows = PADDED[of_rank]
        padded = PaddedVocab(group, rows)
        over = padded if kind == "padded" else VocabShard.of_ranks(rows, group, rows)
        results[name, way] = [result(rank, way, (rows, 0, 0), over, fill=rows)]
    return results


def result(
    rank: int, way: str, sizes: tuple[int, ...], parallel: Any, fill: int = 0
) -> tuple[Any, Any]:
    """In float64, in whose sums the shards do not show once they are rounded."""
    from xentlib.torch import TeacherHead, chunked_divergence, chunked_logprobs, chunked_nll

    options, total = dict(WAYS[way]), sum(sizes)
    draw = torch.Generator(DEVICE).manual_seed(total)
    hidden, head = (torch.randn(n, H, generator=draw) for n in (N, total))
    labels = torch.randint(total, (N,), generator=draw)
    labels[-1] = total - 1
    weights = torch.rand(total, generator=draw) + 0.1
    states, other, upstream = (torch.randn(x, generator=draw) for x in ((N, 3), (total, 3), (N,)))
    if options.pop("weighed", False):
        options["class_weights"] = weights
    rows, of_teacher = (x.split(sizes)[rank] for x in (head, other))
    if len(rows) < fill:
        rows, of_teacher = (torch.full((fill, n), float("nan")) for n in (H, 3))
    both = []
    for part, beside, more in (
        (rows, of_teacher, {"vocab_parallel": parallel}),
        (head, other, {}),
    ):
        weight, x = part.clone().requires_grad_(), hidden.clone().requires_grad_()
        more |= {"max_chunk_bytes": SMALL, "compute_dtype": "float64", **options}
        if way == "divergence":
            teacher = TeacherHead(states, beside)
            out = chunked_divergence(x, weight, teacher, labels=labels, **more)
            loss = (out.loss * upstream).sum()
        else:
            function = chunked_logprobs if way == "per token" else chunked_nll
            out = function(x, weight, labels, **more)
            loss = out.loss if function is chunked_nll else (out.logprobs - out.entropy).sum()
        loss.backward()
        grad = weight.grad if more.get("vocab_parallel") else weight.grad.split(sizes)[rank]
        assert not grad[sizes[rank] :].any()  # of padding
        both.append([g.cpu().numpy() for g in (loss.detach(), x.grad, grad[: sizes[rank]])])
    return both[0], both[1]


NAMES = [*HEADS, *(f"{kind}, {name}" for kind in ("padded", "declared") for name in PADDED)]


@pytest.fixture(scope="module")
def on_three(request: Any) -> list[Any]:
    """One call after the other, by a way all heads."""
    test = "test_heads_of_any_shards_after_each_other"
    cases = collected(request, [(name, way) for way in WAYS for name in NAMES], test=test)
    return launch(3, on_heads, cases)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_heads_of_any_shards_after_each_other(on_three: Any, name: str, way: str) -> None:
    """A1. Catches: class weights, a label or a shard that is judged by another head's sizes, on
    some ranks alone; chunks of a rank's own size; a head of one class, or whose padding fills the
    other ranks, that is taken for a whole one."""
    for found in on_three:
        for got, want in found[name, way]:
            for one, other in zip(got, want, strict=True):
                assert np.isfinite(other).all()
                assert not failures(check("A1", one, other))


def wrong_calls(rank: int, world: int) -> list[dict[str, str]]:
    """Before any other call, and after those of other heads."""
    from xentlib import PaddedVocab, VocabShard
    from xentlib.torch import chunked_logprobs, chunked_nll, vocab_parallel_logprobs

    group = torch.distributed.group.WORLD
    draw = torch.Generator(DEVICE).manual_seed(0)
    hidden, head = (torch.randn(n, H, generator=draw) for n in (N, 25))
    labels = torch.randint(25, (N,), generator=draw)
    weights = torch.rand(27, generator=draw)

    sizes = (10, 7, 8)
    shard = VocabShard.of_ranks(sizes[rank], group)

    def nll(rows: Any = None, y: Any = labels, parallel: Any = shard, **more: Any) -> Any:
        rows = head.split(sizes)[rank] if rows is None else rows
        return chunked_nll(hidden, rows, y, vocab_parallel=parallel, **more)

    def without_grad() -> Any:
        x, rows = hidden.clone().requires_grad_(), head.split(sizes)[rank]
        with torch.set_grad_enabled(rank != 1):
            return chunked_logprobs(x, rows, labels, vocab_parallel=shard)

    def functions() -> Any:
        rows = head.split(sizes)[rank]
        function = chunked_nll if rank else chunked_logprobs
        return function(hidden, rows, labels, vocab_parallel=shard)

    def columns(shard: Any) -> Any:
        logits = torch.zeros(N, 10)
        return vocab_parallel_logprobs(logits, labels % 20, vocab_parallel=group, shard=shard)

    calls: dict[str, Callable[[], Any]] = {
        "class weights of one class more": lambda: nll(class_weights=weights[:26]),
        "class weights of other lengths": lambda: nll(class_weights=weights[: 25 + rank % 2]),
        "class weights on one rank": lambda: nll(class_weights=weights[:25] if rank else None),
        "a label": lambda: nll(y=torch.where(labels == labels[3], 25, labels)),
        "a whole head": lambda: nll(head, parallel=group),
        "undeclared": lambda: nll(parallel=group),
        "undeclared columns": lambda: vocab_parallel_logprobs(
            torch.zeros(N, sizes[rank]), labels, vocab_parallel=group
        ),
        "declared on one rank": lambda: nll(parallel=group if rank else shard),
        "of another head": lambda: nll(head[: 9 + rank]),
        "a shard alone": lambda: nll(parallel=VocabShard(0, 10, 25)),
        "functions": functions,
        "padding of other vocabularies": lambda: nll(parallel=PaddedVocab(group, 25 - rank % 2)),
        "shards of other vocabularies": lambda: columns(
            VocabShard(10 * rank, 10 * rank + 10, 30 - rank % 2)
            if rank < 2
            else VocabShard(20, 30, 30)
        ),
        "no grad": without_grad,
    }
    found = []
    for before in ((), ((10, 15, 0),), ((25, 7, 1), (10, 2, 8))):
        for of_ranks in before:
            rows = torch.ones(sum(of_ranks), H).split(of_ranks)[rank]
            over = VocabShard.of_ranks(len(rows), group)
            chunked_nll(hidden, rows, labels % 20, vocab_parallel=over)
        found.append(said_by(calls))
    return found


@pytest.fixture(scope="module")
def said() -> list[list[dict[str, str]]]:
    return launch(3, wrong_calls)


SAME = "must be the same on every rank of `vocab_parallel`; got ranks that differ"
SAID = {
    "class weights of one class more": "`class_weights` must have shape (25,), one entry for each",
    "class weights of other lengths": f"`class_weights` {SAME}",
    "class weights on one rank": f"`class_weights` {SAME}",
    "a label": "`labels` must lie in [0, 25)",
    "a whole head": "`vocab_parallel` must come with this rank's part of 25 classes",
    "undeclared": "`vocab_parallel` must come with as many rows (columns of logits) on every rank, "
    "or say how many each has; got 10, 7, 8. Pass `vocab_parallel=VocabShard.of_ranks(rows, group)`"
    ", made once on every rank",
    "undeclared columns": "`vocab_parallel` must come with as many rows (columns of logits) on",
    "declared on one rank": "sizes of shards (`shard=`, `VocabShard.of_ranks`, a DTensor) must be",
    "of another head": "`vocab_parallel` must describe the ",
    "a shard alone": "`vocab_parallel` must say which ranks share the vocabulary; got VocabShard(",
    "functions": "the function must be the same on every rank of the head; got ranks that differ",
    "padding of other vocabularies": f"`vocab_size` {SAME}",
    "shards of other vocabularies": f"`vocab_size` {SAME}",
    "no grad": "`hidden` must require grad on every rank of `vocab_parallel`, or on none",
}


@pytest.mark.parametrize("name", SAID)
def test_a_wrong_call_says_so_whatever_ranks_remember(said: Any, name: str) -> None:
    """Every rank says the same, so that none waits for the others."""
    for after in zip(*said, strict=True):
        if name != "of another head":  # which says how many rows the rank has
            assert len({found[name] for found in after}) == 1, after
        assert after[0][name].startswith(SAID[name]), after[0][name]
