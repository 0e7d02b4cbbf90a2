"""Divergences on real ranks: a student and a teacher whose heads are sharded alike, on each route,
and mistakes on some of the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.refused import said_on_ranks
from xentlib.plan import Rates
from xentlib.shards import VocabShard
from xentlib.tools.harness.ranks import DEVICE, start_gloo
from xentlib.torch import (
    TeacherHead,
    TeacherLogits,
    chunked_divergence,
    count_collectives,
    vocab_parallel_divergence,
)
from xentlib.torch.core import blocks, loop

N, H, WIDTH, V = 29, 16, 24, 421


def arrays(world: int) -> dict[str, Tensor]:
    """Hidden states and labels of each rank, and both heads."""
    torch.manual_seed(3)
    labels = torch.randint(0, V, (world, N))
    labels[:, ::7] = -100
    return {
        "hidden": torch.randn(world, N, H),
        "weight": torch.randn(V, H) / 2,
        "of_teacher": torch.randn(world, N, WIDTH),
        "rows": torch.randn(V, WIDTH) / 2,
        "bias": torch.randn(V),
        "labels": labels,
    }


def of_rank(rank: int, world: int, folder: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Outputs and gradients of each case's call, along each route by its name; of a loss of each
    token in blocks of classes, of which both heads have several, where tokens do not travel."""
    blocks.BLOCK_CLASSES = loop.BLOCK_CLASSES = 128
    start_gloo(rank, world, folder)
    return [
        {name: route(rank, world, case) for name, route in routes_of(case).items()}
        for case in cases
    ]


def whole(rank: int, world: int, case: dict[str, Any]) -> list[Tensor]:
    """One process with all heads, and the tokens of all ranks: what is right."""
    x = arrays(world)
    hidden, weight = x["hidden"].requires_grad_(), x["weight"].requires_grad_()
    teacher = TeacherHead(x["of_teacher"], x["rows"], x["bias"])
    out = chunked_divergence(hidden, weight, teacher, labels=x["labels"], **case)
    out.loss.sum().backward()
    assert hidden.grad is not None
    return [out.divergence[rank].detach(), hidden.grad[rank], weight.grad]


def parts(rank: int, world: int) -> slice:
    """Rows of a rank: uneven, and whole blocks of 128 of the first ones."""
    sizes = [128] * (world - 1)
    sizes.append(V - sum(sizes))
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def tokens_parallel(rank: int, world: int, case: dict[str, Any]) -> list[Tensor]:
    x, own = arrays(world), parts(rank, world)
    hidden, weight = x["hidden"][rank].requires_grad_(), x["weight"][own].requires_grad_()
    over = VocabShard.of_ranks(own.stop - own.start, dist.group.WORLD)
    out = chunked_divergence(
        hidden,
        weight,
        TeacherHead(x["of_teacher"][rank], x["rows"][own], x["bias"][own]),
        labels=x["labels"][rank],
        vocab_parallel=over,
        tokens_parallel=dist.group.WORLD,
        max_chunk_bytes=world * 16 * 2 * 4 * V,
        **case,
    )
    out.loss.sum().backward()
    gathered = [torch.zeros(V, H) for _ in range(world)]
    padded = torch.zeros_like(gathered[0])
    padded[: own.stop - own.start] = weight.grad
    dist.all_gather(gathered, padded)
    rows = [parts(k, world) for k in range(world)]
    every = torch.cat([g[: r.stop - r.start] for g, r in zip(gathered, rows, strict=True)])
    return [out.divergence.detach(), hidden.grad, every]


def sharded(gather: str, nodes: int = 0) -> Any:
    """By FSDP2, both heads: rows, or their gather."""

    def run(rank: int, world: int, case: dict[str, Any]) -> list[Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        x = arrays(world)
        # Rows that the student lacks, where it is asked for the first ones.
        size = V + 3 * (case.get("vocab") == "intersect")
        head, other = nn.Linear(H, V, bias=False), nn.Linear(WIDTH, size)
        with torch.no_grad():
            head.weight.copy_(x["weight"])
            other.weight[:V].copy_(x["rows"])
            other.bias[:V].copy_(x["bias"])
        fully_shard(head)
        fully_shard(other)
        hidden = x["hidden"][rank].requires_grad_()
        more: dict[str, Any] = {"tokens_per_rank": N} if gather == "auto" else {}
        if nodes:
            more["tokens_parallel"] = init_device_mesh(DEVICE, (nodes, world // nodes))
        # So small a head is gathered for its latency alone.
        with patch("xentlib.plan.routes.Rates", partial(Rates, latency=0.0)):
            out = chunked_divergence(
                hidden,
                head,
                TeacherHead(x["of_teacher"][rank], other),
                labels=x["labels"][rank],
                gather=gather,  # type: ignore[arg-type]
                **more,
                **case,
            )
        out.loss.sum().backward()
        assert other.weight.grad is None
        gradient: Any = head.weight.grad
        return [out.divergence.detach(), hidden.grad, gradient.full_tensor() * world]

    return run


ROUTES: dict[str, Any] = {
    "whole": whole,
    "tokens_parallel": tokens_parallel,
    "head": sharded("head"),
    "hidden": sharded("hidden"),
    "auto": sharded("auto"),
    "nodes": sharded("hidden", 2),
}


def routes_of(case: dict[str, Any]) -> dict[str, Any]:
    """Those by which a case's heads can be had."""
    whole_heads = ("whole", "head", "auto")
    return {x: y for x, y in ROUTES.items() if case.get("vocab") is None or x in whole_heads}


def refused(rank: int, world: int, folder: str, items: list[Any]) -> list[str]:
    """What every rank says where some do it wrongly: none waits for another."""
    start_gloo(rank, world, folder)
    x, own, over = arrays(world), parts(rank, world), dist.group.WORLD
    shard = VocabShard.of_ranks(own.stop - own.start, over)
    odd = rank == 1
    hidden, weight, rows = x["hidden"][0], x["weight"][own], x["rows"][own]
    teacher = TeacherHead(x["of_teacher"][0], rows, x["bias"][own])

    def call(teacher: Any = teacher, **options: Any) -> Any:
        return chunked_divergence(hidden, weight, teacher, vocab_parallel=shard, **options)

    def given(teacher: Any, **options: Any) -> Any:
        return vocab_parallel_divergence(
            hidden @ weight.T, teacher, vocab_parallel=shard, **options
        )

    logits = TeacherLogits(x["of_teacher"][0] @ rows.T)
    calls = {
        "kind": lambda: call(kind="reverse_kl" if odd else "forward_kl"),
        "beta": lambda: call(kind="jsd", beta=0.3 if odd else 0.5),
        "nll_weight": lambda: call(labels=x["labels"][0], nll_weight=0.5 if odd else 0.25),
        "teacher's hidden": lambda: call(teacher._replace(hidden=x["of_teacher"][rank])),
        "teacher's softcap": lambda: call(teacher._replace(softcap=5.0 if odd else 6.0)),
        "rows": lambda: call(teacher._replace(weight=rows[:-1], bias=None) if odd else teacher),
        "rows on all": lambda: call(teacher._replace(weight=rows[:-1], bias=None)),
        "columns": lambda: call(TeacherLogits(logits.logits[:, :-1]) if odd else logits),
        "kind of given": lambda: given(logits, kind="reverse_kl" if odd else "forward_kl"),
        "another function": lambda: given(logits) if odd else call(logits),
        "intersect": lambda: call(vocab="intersect"),
        "intersect of given": lambda: given(logits, vocab="intersect"),
        "intersect of rows": lambda: sharded("hidden")(rank, world, {"vocab": "intersect"}),
    }
    return said_on_ranks(calls)


def counted(rank: int, world: int, folder: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Of each case's call: the collectives of its forward and of its backward, over shards, where
    tokens travel and by FSDP2; and the chunks of each."""
    start_gloo(rank, world, folder)
    from torch.distributed.fsdp import fully_shard

    results = []
    for case in cases:
        x, own = arrays(world), parts(rank, world)
        over = VocabShard.of_ranks(own.stop - own.start, dist.group.WORLD)
        rows, others = x["weight"][own].requires_grad_(), x["rows"][own]
        head, other = nn.Linear(H, V, bias=False), nn.Linear(WIDTH, V, bias=False)
        fully_shard(head)
        fully_shard(other)
        # Of one rank's tokens, and of all ranks'.
        few, many = (2 * 16 * k * 4 * V for k in (1, world))
        calls: dict[str, Any] = {
            "vocabulary shard": (0, rows, others, {"vocab_parallel": over}, few),
            "tokens over the ranks": (
                *(rank, rows, others),
                {"vocab_parallel": over, "tokens_parallel": dist.group.WORLD},
                many,
            ),
            "FSDP2": (rank, head, other, {}, few),
        }
        found = {}
        for name, (tokens, weight, teacher, how, budget) in calls.items():
            hidden = x["hidden"][tokens].requires_grad_()
            of_teacher = TeacherHead(x["of_teacher"][tokens], teacher)
            options = {"reduction": "sum", **case, **how, "max_chunk_bytes": budget}
            with count_collectives() as forward:
                out = chunked_divergence(hidden, weight, of_teacher, **options)
            with count_collectives() as backward:
                out.loss.sum().backward()
            found[name] = forward.counts(), backward.counts()
        results.append(found)
    return results
