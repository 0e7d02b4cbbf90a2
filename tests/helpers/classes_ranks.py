"""Kept sets, several classes a token, the most probable ones and a teacher's on real ranks: a head
that is sharded, along each route, and mistakes on some of the ranks."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.refused import said_on_ranks
from xentlib.contract import check, failures
from xentlib.shards import VocabShard
from xentlib.tools.harness.ranks import DEVICE, start_gloo
from xentlib.torch import (
    TeacherTopK,
    chunked_divergence,
    chunked_logprobs,
    vocab_parallel_logprobs,
)

N, H, V, K = 29, 15, 421, 5
TOP = 45  # more than the columns of a last rank
Arrays = dict[str, Tensor]


def arrays(world: int) -> Arrays:
    """Of each rank's tokens, and the head: integers, so that many logits are equal."""
    torch.manual_seed(3)
    labels = torch.randint(0, V, (world, N))
    kept = torch.rand(world, N, V).argsort(-1)[..., :K]
    kept[..., 1] = labels
    kept[:, ::3] = -1
    labels[:, ::7] = -100
    return {
        "hidden": torch.randn(world, N, H).round(),
        "weight": torch.randn(V, H).round(),
        "labels": labels,
        "kept": kept,
        "ids": torch.randint(-1, V, (world, N, K)),
        "upstream": torch.randn(world, N, K),
    }


def loss(out: Any, upstream: Tensor) -> Tensor:
    """Of every output, each token's with gradients of its own."""
    of_ids = torch.where(out.ids_logprobs.isfinite(), out.ids_logprobs * upstream, 0.0).sum()
    of_top = torch.where(out.top_logprobs.isfinite(), out.top_logprobs, 0.0)
    of_top = (of_top * torch.linspace(-1, 1, TOP)).sum()
    total: Tensor = of_ids + of_top + (out.logprobs * upstream[..., 0]).sum()
    return total + (out.entropy * upstream[..., 1]).sum() + (out.lse * upstream[..., 2]).sum()


def both(hidden: Any, head: Any, given: Arrays, upstream: Tensor, **how: Any) -> list[Tensor]:
    """Values of both functions; the gradients of their losses are in the leaves."""
    out = chunked_logprobs(hidden, head, **given, entropy=True, top_k=TOP, **how)
    loss(out, upstream).backward()
    teacher = TeacherTopK(given["ids"], torch.log_softmax(2 * upstream, -1) - 0.3)
    diverging: dict[str, Any] = {"kind": "jsd", "beta": 0.3, "nll_weight": 0.5, **how}
    of_teacher = chunked_divergence(
        hidden, head, teacher, labels=given["labels"], reduction="none", **diverging
    )
    (of_teacher.loss * upstream[..., 3]).sum().backward()
    return [*results(out), of_teacher.loss.detach()]


def results(out: Any) -> list[Tensor]:
    values = (out.logprobs, out.entropy, out.lse, out.ids_logprobs, out.top_logprobs)
    return [x.detach().nan_to_num(neginf=-99.0) for x in values] + [out.top_ids.float()]


def of_rank(rank: int, world: int, folder: str, items: list[Any]) -> list[Any]:
    """Outputs and gradients along each route by its name."""
    start_gloo(rank, world, folder)
    x = arrays(world)
    return [{name: route(rank, world, x) for name, route in ROUTES.items()}]


def own(x: Arrays, rank: int) -> dict[str, Tensor]:
    return {name: x[name][rank] for name in ("labels", "kept", "ids")}


def whole(rank: int, world: int, x: Arrays) -> list[Tensor]:
    """One process with the head, and the tokens of all ranks: what is right."""
    hidden, weight = x["hidden"].clone().requires_grad_(), x["weight"].clone().requires_grad_()
    given = {name: x[name] for name in ("labels", "kept", "ids")}
    first = [y[rank] for y in both(hidden, weight, given, x["upstream"])]
    assert hidden.grad is not None
    return [*first, hidden.grad[rank], weight.grad]  # type: ignore[list-item]


def rows_of(world: int) -> list[slice]:
    """Uneven, and whole blocks of 128 of the first ranks."""
    ends = [min(128 * k, V) for k in range(world)] + [V]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def every_row(gradient: Tensor, world: int) -> Tensor:
    padded = [torch.zeros(V, H) for _ in range(world)]
    ours = torch.zeros(V, H)
    ours[: len(gradient)] = gradient
    dist.all_gather(padded, ours)
    rows = rows_of(world)
    return torch.cat([g[: r.stop - r.start] for g, r in zip(padded, rows, strict=True)])


def tokens_parallel(rank: int, world: int, x: Arrays) -> list[Tensor]:
    rows = rows_of(world)[rank]
    hidden = x["hidden"][rank].clone().requires_grad_()
    weight = x["weight"][rows].clone().requires_grad_()
    over = VocabShard.of_ranks(rows.stop - rows.start, dist.group.WORLD)
    how: dict[str, Any] = {"vocab_parallel": over, "tokens_parallel": dist.group.WORLD}
    how["max_chunk_bytes"] = world * 16 * 4 * V
    values = both(hidden, weight, own(x, rank), x["upstream"][rank], **how)
    labels = x["labels"][rank]
    alone = chunked_logprobs(hidden.detach(), weight.detach(), labels, top_k=TOP, **how)
    logits = x["hidden"][rank] @ x["weight"].T
    order = logits.argsort(dim=1, descending=True, stable=True)[:, :TOP]
    assert torch.equal(alone.top_ids, torch.where(labels[:, None] == -100, -1, order))
    assert weight.grad is not None
    assert hidden.grad is not None
    return [*values, hidden.grad, every_row(weight.grad, world)]


def same_tokens(rank: int, world: int, x: Arrays) -> list[Tensor]:
    """A vocabulary shard whose ranks have all tokens: of a head, and of its logits."""
    rows = rows_of(world)[rank]
    hidden, weight = x["hidden"].clone().requires_grad_(), x["weight"][rows].clone()
    weight.requires_grad_()
    over = VocabShard.of_ranks(rows.stop - rows.start, dist.group.WORLD)
    given = {name: x[name] for name in ("labels", "kept", "ids")}
    values = both(hidden, weight, given, x["upstream"], vocab_parallel=over)
    logits = hidden.detach() @ weight.detach().T
    of_logits = vocab_parallel_logprobs(
        logits, **given, vocab_parallel=over, entropy=True, top_k=TOP
    )
    for ours, theirs in zip(values, results(of_logits)):
        pair = ours.cpu().numpy(), theirs.double().cpu().numpy()
        assert not failures(check("A9", *pair, metrics=("rho / u",)))
    assert weight.grad is not None
    assert hidden.grad is not None
    first = [y[rank] for y in values]
    return [*first, hidden.grad[rank], every_row(weight.grad, world)]


def sharded(gather: str, nodes: int = 0) -> Any:
    """By FSDP2: its rows, or their gather."""

    def run(rank: int, world: int, x: Arrays) -> list[Tensor]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        head = nn.Linear(H, V, bias=False)
        with torch.no_grad():
            head.weight.copy_(x["weight"])
        fully_shard(head, reshard_after_forward=True)
        hidden = x["hidden"][rank].clone().requires_grad_()
        # Blocks of 32 rows of each rank, or so
        more: dict[str, Any] = {"max_chunk_bytes": 8 * 32 * 4 * world * H}
        if nodes:
            more["tokens_parallel"] = init_device_mesh(DEVICE, (nodes, world // nodes))
        values = both(hidden, head, own(x, rank), x["upstream"][rank], gather=gather, **more)
        assert hidden.grad is not None
        gradient: Any = head.weight.grad
        return [*values, hidden.grad, gradient.full_tensor() * world]

    return run


ROUTES: dict[str, Any] = {
    "whole": whole,
    "same_tokens": same_tokens,
    "tokens_parallel": tokens_parallel,
    "head": sharded("head"),
    "hidden": sharded("hidden"),
    "stream": sharded("stream"),
    "nodes": sharded("hidden", 2),
}


def refused(rank: int, world: int, folder: str, items: list[Any]) -> list[str]:
    """What every rank says where some do it wrongly: none waits for another."""
    from torch.distributed.fsdp import fully_shard

    start_gloo(rank, world, folder)
    x, rows, odd = arrays(world), rows_of(world)[rank], rank == 1
    shard = VocabShard.of_ranks(rows.stop - rows.start, dist.group.WORLD)
    hidden, weight, given = x["hidden"][0], x["weight"][rows], own(x, 0)

    def call(**changes: Any) -> Any:
        return chunked_logprobs(hidden, weight, **{**given, **changes}, vocab_parallel=shard)

    def logits(**changes: Any) -> Any:
        return vocab_parallel_logprobs(
            hidden @ weight.T, **{**given, **changes}, vocab_parallel=shard
        )

    def tokens(**changes: Any) -> Any:
        return call(**changes, tokens_parallel=dist.group.WORLD)

    others, last = x["kept"][0].flip(-1).roll(1, 0), x["ids"][0][:, :-1]
    wrong = torch.where(torch.arange(N)[:, None] == 3, V + odd * 1, x["ids"][0])
    outside = x["kept"][0].clone()
    outside[1] = (given["labels"][1] + 1) % V
    calls = {
        "kept of another rank": lambda: call(kept=others if odd else given["kept"]),
        "ids of another rank": lambda: call(ids=x["ids"][rank]),
        "fewer ids": lambda: call(ids=last if odd else given["ids"]),
        "ids on one": lambda: call(ids=given["ids"] if odd else None),
        "fewer ids, tokens": lambda: tokens(ids=last if odd else given["ids"]),
        "ids of logits": lambda: logits(ids=x["ids"][rank]),
        "kept for ids of logits": lambda: logits(
            kept=None if odd else given["ids"][:, :1] * 0 - 1,
            ids=torch.cat((given["ids"][:, :1] * 0 - 1, given["ids"]), 1) if odd else given["ids"],
        ),
        "fewer top_k": lambda: call(top_k=3 - odd),
        "top_k on one": lambda: call(kept=None, ids=None, top_k=odd * 3),
        "top_k for ids": lambda: call(top_k=odd * K, ids=None if odd else given["ids"]),
        "fewer top_k, tokens": lambda: tokens(top_k=3 - odd),
        "top_k of logits": lambda: logits(top_k=odd * 3),
        "top_k of more than there are": lambda: call(top_k=V + 1),
        "top_k of more than there are, tokens": lambda: tokens(top_k=V + 1),
        "no class": lambda: call(ids=wrong * 0 + V),
        "not kept": lambda: call(kept=outside),
    }
    head = nn.Linear(H, V, bias=False)
    fully_shard(head)

    def stream(**changes: Any) -> Any:
        return chunked_logprobs(hidden, head, **{**given, **changes}, gather="stream")

    few = TeacherTopK(given["ids"], torch.full((N, K), -3.0))
    weighed, lower = 1.0 + odd * torch.arange(N) / N, few.logprobs - 1.0 * odd

    def diverging(teacher: Any = few, **options: Any) -> Any:
        return chunked_divergence(
            hidden, weight, teacher, vocab_parallel=shard, labels=given["labels"], **options
        )

    calls |= {
        "kind of few": lambda: diverging(kind="reverse_kl" if odd else "forward_kl"),
        "beta of few": lambda: diverging(kind="jsd", beta=0.3 if odd else 0.5),
        "tail": lambda: diverging(few._replace(tail="drop" if odd else "class")),
        "nll_weight of few": lambda: diverging(nll_weight=0.5 if odd else 0.25),
        "squared": lambda: diverging(
            few._replace(temperature=2.0), temperature_squared=odd, temperature=2.0
        ),
        "of each": lambda: diverging(reduction="none" if odd else "sum"),
        "token_weights of few": lambda: diverging(token_weights=weighed, reduction="sum"),
        "denominator of few": lambda: diverging(denominator=4.0 + odd),
        "the teacher's logprobs": lambda: diverging(few._replace(logprobs=lower)),
        "fewer top_k, stream": lambda: stream(top_k=3 - odd),
        "no class on one, stream": lambda: stream(ids=given["ids"] + odd * V),
        "denominator of 0 on one, stream": lambda: chunked_divergence(
            hidden, head, few, denominator=1.0 - odd, gather="stream"
        ),
    }
    return said_on_ranks(calls)
