"""Ranks whose tokens meet one head, and that differ in what is their own: shards, numbers of
tokens, temperatures, what a loss is made of. All are right, against one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from helpers.collected import collected
from helpers.ranks import launch
from xentlib.contract import check, failures

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from helpers.routed import as_on_a_device  # noqa: E402
from xentlib.tools.harness.ranks import DEVICE  # noqa: E402

H = 3
# Rows and tokens of each rank, bytes of a chunk: each rank's own rows give other chunks.
UNEVEN = {
    "an empty shard": ((0, 6, 63), (200, 150, 90), 20_000),
    "one large shard": ((300, 50, 50), (130, 1, 200), 100_000),
    "as it comes": ((3000, 500, 500), (2000, 2000, 2000), None),
}
WAYS: dict[str, dict[str, Any]] = {
    "nll": {},
    "nll, softcap": {"softcap": 5.0},
    "logprobs": {},
    # Of rank 0 alone, whose temperature is 1, and of the others
    "logprobs, temperatures": {"temperature": (1.0, 0.7, 1.3)},
    "logprobs, entropy of one": {"entropy": True},
}


WITHOUT = 0  # the rank that has tokens none of which count
UPSTREAM = 3.0


def of_no_token(rank: int, *, differs: bool = False) -> tuple[Any, Any]:
    """d hidden and d weight of this rank where one's loss, of no token, has another upstream
    gradient than the others', and those of one process. `differs`: so has one with tokens."""
    from xentlib.torch import chunked_nll

    draw, group = torch.Generator(DEVICE).manual_seed(3), torch.distributed.group.WORLD
    hidden, head = (torch.randn(n, H, generator=draw) for n in (12, 18))
    labels = torch.randint(18, (12,), generator=draw)
    labels[4 * WITHOUT :][:4] = -100
    x, w = (t.split(n)[rank].clone().requires_grad_() for t, n in ((hidden, 4), (head, 6)))
    more: dict[str, Any] = {"reduction": "sum", "compute_dtype": "float64"}
    spread: dict[str, Any] = {"vocab_parallel": group, "tokens_parallel": group}
    out = chunked_nll(x, w, labels.split(4)[rank], **spread, **more)
    (out.loss * (7.0 if rank == WITHOUT else UPSTREAM + (differs and rank == 2))).backward()
    hidden.requires_grad_(), head.requires_grad_()
    (chunked_nll(hidden, head, labels, **more).loss * UPSTREAM).backward()
    want = hidden.grad.split(4)[rank], head.grad.split(6)[rank]
    return [x.grad.cpu().numpy(), w.grad.cpu().numpy()], [x.cpu().numpy() for x in want]


def on_rank(rank: int, world: int, calls: list[tuple[str, str]]) -> dict[Any, tuple[Any, Any]]:
    group = torch.distributed.group.WORLD
    upstream = {"read": of_no_token(rank)}
    with as_on_a_device():
        upstream["not read"] = of_no_token(rank)
        upstream["not read, differs"] = of_no_token(rank, differs=True)
    return upstream | {(name, way): result(rank, way, *UNEVEN[name], group) for name, way in calls}


def result(
    rank: int,
    way: str,
    sizes: tuple[int, ...],
    tokens: tuple[int, ...],
    chunk_bytes: int | None,
    group: Any,
) -> tuple[Any, Any]:
    """d hidden of this rank's tokens and d weight of its rows, from the ranks and from one."""
    from xentlib.torch import chunked_logprobs, chunked_nll

    draw = torch.Generator(DEVICE).manual_seed(sum(sizes))
    options = {"max_chunk_bytes": chunk_bytes, "compute_dtype": "float64", **WAYS[way]}
    temperatures = options.pop("temperature", None)
    hidden, head = (torch.randn(sum(n), H, generator=draw) for n in (tokens, sizes))
    labels = torch.randint(sum(sizes), (sum(tokens),), generator=draw)
    upstream = torch.randn(2, sum(tokens), generator=draw)
    # Only rank 1's loss has entropies in it.
    of_rank = torch.repeat_interleave(torch.arange(3), torch.tensor(tokens))
    upstream[1] *= of_rank == 1

    def gradients(x: Any, w: Any, y: Any, g: Any, *, entropies: bool, **more: Any) -> Any:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        if way.startswith("nll"):
            loss = chunked_nll(x, w, y, reduction="sum", **options, **more).loss
        else:
            out = chunked_logprobs(x, w, y, **options, **more)
            loss = (out.logprobs * g[0]).sum()
            if entropies and out.entropy is not None:
                loss = loss + (out.entropy * g[1]).sum()
        loss.backward()
        return x.grad, w.grad

    mine = [
        x.split(tokens, dim=-1 if x is upstream else 0)[rank] for x in (hidden, labels, upstream)
    ]
    more: dict[str, Any] = {"vocab_parallel": group, "tokens_parallel": group}
    if temperatures is not None:
        more["temperature"] = temperatures[rank]
    rows = head.split(sizes)[rank]
    got = gradients(mine[0], rows, *mine[1:], entropies=rank == 1, **more)
    more = {}
    if temperatures is not None:
        more["temperature"] = torch.tensor(temperatures, dtype=torch.float64)[of_rank]
    d_hidden, d_weight = gradients(hidden, head, labels, upstream, entropies=True, **more)
    want = d_hidden.split(tokens)[rank], d_weight.split(sizes)[rank]
    return [x.cpu().numpy() for x in got], [x.cpu().numpy() for x in want]


@pytest.fixture(scope="module")
def found(request: Any) -> list[Any]:
    return launch(3, on_rank, collected(request, product(UNEVEN, WAYS)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_differ_in_what_is_their_own(found: Any, name: str, way: str) -> None:
    """A1. Catches: chunks that each rank plans from its own rows; a temperature that travels from
    some ranks alone; entropies of another rank's loss that this rank's rows do not hear of."""
    for ranks in found:
        for got, want in zip(*ranks[name, way], strict=True):
            assert np.isfinite(want).all()
            assert not failures(check("A1", got, want))


@pytest.mark.parametrize("way", ["read", "not read"])
def test_the_upstream_gradient_is_that_of_ranks_with_tokens(found: Any, way: str) -> None:
    """A1. Catches: a rank without tokens that has a say in it; that of the first rank alone."""
    for ranks in found:
        for got, want in zip(*ranks[way], strict=True):
            assert not failures(check("A1", got, want))


def test_upstream_gradients_that_differ_unread_are_nan(found: Any) -> None:
    """D7: of the head, on every rank."""
    for ranks in found:
        assert np.isnan(ranks["not read, differs"][0][1]).all()
