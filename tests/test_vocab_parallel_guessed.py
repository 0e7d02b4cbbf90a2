"""Vocabularies over gloo ranks whose shards nobody has declared: what a rank remembers of other
heads, or guesses, decides nothing. All ranks come back, right or with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from helpers.ranks import launch
from helpers.refused import said_by
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

N, H = 31, 4
SMALL = 20 * 4 * 8  # several chunks, not as many for every shard
# Rows of one head after the other, on three ranks that share one group.
HEADS: dict[str, list[tuple[int, ...]]] = {
    "at first": [(12, 8, 5)],
    "the last has all": [(0, 0, 25)],
    "one class more": [(34, 33, 33), (34, 34, 33)],
    "as many rows as classes": [(0, 0, 31), (31, 31, 31)],
    "other shards, other chunks": [(40, 30, 30), (40, 60, 20), (34, 33, 33)],
    "nothing on most ranks": [(0, 7, 1), (0, 6, 63)],
    "one class": [(0, 1, 0), (1, 0, 0)],
}
# Rows of each rank, of which the first are classes.
PADDED = {"one class": 1, "all rows of one rank": 9}
WAYS: dict[str, dict[str, Any]] = {
    "mean, class weights": {"weighed": True},
    "sum": {"reduction": "sum"},
    "per token": {"entropy": True},
}


def on_heads(rank: int, world: int) -> dict[tuple[str, str], list[tuple[Any, Any]]]:
    """Of each head the results of this rank, and of the whole head in one process."""
    from xentlib import PaddedVocab
    from xentlib.torch.core import vocab

    group = torch.distributed.group.WORLD
    found = {}
    for way in WAYS:
        for name, heads in HEADS.items():
            vocab.KNOWN.pop(group, None)  # as in a new process
            found[name, way] = [result(rank, way, sizes, group) for sizes in heads]
        for name, rows in PADDED.items():
            vocab.KNOWN.pop(group, None)
            padded = result(rank, way, (rows, 0, 0), PaddedVocab(group, rows), fill=rows)
            found[f"padded, {name}", way] = [padded]
    return found


def result(
    rank: int, way: str, sizes: tuple[int, ...], parallel: Any, fill: int = 0
) -> tuple[Any, Any]:
    """In float64, in whose sums the shards do not show once they are rounded."""
    from xentlib.torch import chunked_logprobs, chunked_nll

    options, total = dict(WAYS[way]), sum(sizes)
    draw = torch.Generator().manual_seed(total)
    hidden, head = (torch.randn(n, H, generator=draw) for n in (N, total))
    labels = torch.randint(total, (N,), generator=draw)
    labels[-1] = total - 1
    weights = torch.rand(total, generator=draw) + 0.1
    if options.pop("weighed", False):
        options["class_weights"] = weights
    rows = head.split(sizes)[rank]
    if len(rows) < fill:
        rows = torch.full((fill, H), float("nan"))
    both = []
    for part, more in ((rows, {"vocab_parallel": parallel}), (head, {})):
        weight, x = part.clone().requires_grad_(), hidden.clone().requires_grad_()
        more |= {"max_chunk_bytes": SMALL, "compute_dtype": "float64", **options}
        function = chunked_logprobs if way == "per token" else chunked_nll
        out = function(x, weight, labels, **more)
        loss = out.loss if function is chunked_nll else (out.logprobs - out.entropy).sum()
        loss.backward()
        grad = weight.grad if more.get("vocab_parallel") else weight.grad.split(sizes)[rank]
        both.append([g.numpy() for g in (loss.detach(), x.grad, grad[: sizes[rank]])])
    return both[0], both[1]


@pytest.fixture(scope="module")
def on_three() -> list[Any]:
    return launch(3, on_heads)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [*HEADS, *(f"padded, {name}" for name in PADDED)])
def test_heads_of_any_shards_after_each_other(on_three: Any, name: str, way: str) -> None:
    """A1. Catches: class weights, a label or a shard that is judged by another head's sizes, on
    some ranks alone; a denominator of guessed sizes that is compared; a head of one class, or whose
    padding fills the other ranks, that is taken for a whole one."""
    for found in on_three:
        for got, want in found[name, way]:
            for one, other in zip(got, want, strict=True):
                assert np.isfinite(other).all()
                assert not failures(check("A1", one, other))


def wrong_calls(rank: int, world: int) -> list[dict[str, str]]:
    """With nothing known of shards, and with those of another head."""
    from xentlib import PaddedVocab, VocabShard
    from xentlib.torch import chunked_logprobs, chunked_nll, vocab_parallel_logprobs
    from xentlib.torch.core import vocab

    group = torch.distributed.group.WORLD
    draw = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, H, generator=draw) for n in (N, 25))
    labels = torch.randint(25, (N,), generator=draw)
    weights = torch.rand(27, generator=draw)

    def nll(rows: Any = None, y: Any = labels, parallel: Any = group, **more: Any) -> Any:
        rows = head.split((10, 7, 8))[rank] if rows is None else rows
        return chunked_nll(hidden, rows, y, vocab_parallel=parallel, **more)

    def without_grad() -> Any:
        x = hidden.clone().requires_grad_()
        rows = head.split((10, 7, 8))[rank]
        with torch.set_grad_enabled(rank != 1):
            return chunked_logprobs(x, rows, labels, vocab_parallel=group)

    def columns(shard: Any) -> Any:
        logits = torch.zeros(N, 10)
        return vocab_parallel_logprobs(logits, labels % 20, vocab_parallel=group, shard=shard)

    calls: dict[str, Callable[[], Any]] = {
        "class weights of one class more": lambda: nll(class_weights=weights[:26]),
        "class weights of other lengths": lambda: nll(class_weights=weights[: 25 + rank % 2]),
        "class weights on one rank": lambda: nll(class_weights=weights[:25] if rank else None),
        "a label": lambda: nll(y=torch.where(labels == labels[3], 25, labels)),
        "a whole head": lambda: nll(head),
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
        vocab.KNOWN.pop(group, None)
        for sizes in before:
            chunked_nll(
                hidden, torch.ones(sum(sizes), H).split(sizes)[rank], labels % 20,
                vocab_parallel=group,
            )  # fmt: skip
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
    "padding of other vocabularies": f"`vocab_size` {SAME}",
    "shards of other vocabularies": f"`vocab_size` {SAME}",
    "no grad": "`hidden` must require grad on every rank of `vocab_parallel`, or on none",
}


@pytest.mark.parametrize("name", SAID)
def test_a_wrong_call_says_so_whatever_ranks_remember(said: Any, name: str) -> None:
    """Every rank says the same, so that none waits for the others."""
    for after in zip(*said, strict=True):
        assert len({found[name] for found in after}) == 1, after
        assert after[0][name].startswith(SAID[name]), after[0][name]
