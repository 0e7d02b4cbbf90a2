"""Class probabilities as labels on real ranks: a head that is sharded, along each route, and
mistakes on some of the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.refused import said_on_ranks
from xentlib.labels import SoftLabels
from xentlib.shards import VocabShard
from xentlib.tools.harness.ranks import start_gloo
from xentlib.torch import chunked_nll, vocab_parallel_logprobs

N, H, V, K = 29, 15, 421, 5
HOW: dict[str, Any] = {"label_smoothing": 0.1, "reduction": "sum", "max_chunk_bytes": 4 * 16 * V}


def arrays(world: int) -> dict[str, Any]:
    """Of each rank's tokens, and the head."""
    torch.manual_seed(3)
    ids = torch.rand(world, N, V).argsort(-1)[..., :K]
    ids[:, ::3, 2] = -1
    return {
        "hidden": torch.randn(world, N, H),
        "weight": torch.randn(V, H) / 2,
        "bias": torch.randn(V),
        "ids": ids,
        "probs": torch.randn(world, N, K).softmax(-1),
        "where": torch.rand(world, N) > 0.2,
        "weights": torch.rand(V) + 0.5,
    }


def dense(ids: Tensor, probs: Tensor) -> Tensor:
    """Of all classes."""
    there = torch.where(ids >= 0, probs, 0.0)
    return torch.zeros(*ids.shape[:-1], V).scatter_add_(-1, ids.clamp(min=0), there)


def parts(rank: int, world: int) -> slice:
    """Rows of a rank: uneven, none of the second."""
    sizes = [128 if k != 1 else 0 for k in range(world - 1)]
    sizes.append(V - sum(sizes))
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def results(out: Any, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    assert hidden.grad is not None
    return [out.logprobs.detach(), hidden.grad, weight]


def of_rank(rank: int, world: int, folder: str, _: list[Any]) -> list[Any]:
    """Outputs and gradients, along each route by its name."""
    start_gloo(rank, world, folder)
    return [{name: route(rank, world) for name, route in ROUTES.items()}]


def whole(rank: int, world: int) -> list[Tensor]:
    """One process with the head, and the tokens of all ranks: what is right."""
    x = arrays(world)
    hidden, weight = x["hidden"].requires_grad_(), x["weight"].requires_grad_()
    labels = SoftLabels(x["ids"], x["probs"])
    more = {"where": x["where"], "class_weights": x["weights"], "outputs": ("logprobs",)}
    out = chunked_nll(hidden, weight, labels, bias=x["bias"], **more, **HOW)
    out.loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return [out.logprobs[rank].detach(), hidden.grad[rank], weight.grad]


def own(x: dict[str, Any], rank: int) -> tuple[Tensor, SoftLabels[Tensor], dict[str, Any]]:
    labels = SoftLabels(x["ids"][rank], x["probs"][rank])
    more = {"where": x["where"][rank], "class_weights": x["weights"], "outputs": ("logprobs",)}
    return x["hidden"][rank].requires_grad_(), labels, more


def tokens_parallel(rank: int, world: int) -> list[Tensor]:
    x, rows = arrays(world), parts(rank, world)
    hidden, labels, more = own(x, rank)
    weight = x["weight"][rows].requires_grad_()
    over = VocabShard.of_ranks(rows.stop - rows.start, dist.group.WORLD)
    more |= {"vocab_parallel": over, "tokens_parallel": dist.group.WORLD}
    out = chunked_nll(hidden, weight, labels, bias=x["bias"][rows], **more, **HOW)
    out.loss.backward()
    return results(out, hidden, every(weight, rank, world))


def every(weight: Tensor, rank: int, world: int) -> Tensor:
    """Gradients of all shards."""
    rows = [parts(k, world) for k in range(world)]
    gathered = [torch.zeros(V, H) for _ in range(world)]
    padded, shard = torch.zeros(V, H), rows[rank]
    assert weight.grad is not None
    padded[: shard.stop - shard.start] = weight.grad
    dist.all_gather(gathered, padded)
    return torch.cat([g[: r.stop - r.start] for g, r in zip(gathered, rows, strict=True)])


def shards(kind: str) -> Any:
    """The tokens of the first rank on all: probabilities of all classes, of which each rank has its
    columns, or of a few. Each rank's tokens in turn, as `whole` has them."""

    def run(rank: int, world: int) -> list[Tensor]:
        x, rows = arrays(world), parts(rank, world)
        over = VocabShard.of_ranks(rows.stop - rows.start, dist.group.WORLD)
        weight, local = x["weight"][rows].requires_grad_(), None
        for k in range(world):
            hidden, labels, more = own(x, k)
            probs: Any = labels if kind == "few" else dense(*labels)[:, rows].contiguous()
            out = chunked_nll(
                hidden, weight, probs, bias=x["bias"][rows], vocab_parallel=over, **more, **HOW
            )
            out.loss.backward()
            if k == rank:
                local = out, hidden
            of_logits(x, k, rows, over, probs, labels)
        assert local is not None
        return results(*local, every(weight, rank, world))

    return run


def of_logits(
    x: dict[str, Any], k: int, rows: slice, over: VocabShard, probs: Any, labels: Any
) -> None:
    """Given logits over shards have the values and gradients that they have without."""
    logits = x["hidden"][k].detach() @ x["weight"].detach().T
    outcomes = []
    for z, q, how in (
        (logits, dense(*labels), {}),
        (logits[:, rows].contiguous(), probs, {"vocab_parallel": over}),
    ):
        leaf = z.clone().requires_grad_()
        out = vocab_parallel_logprobs(leaf, q, where=x["where"][k], entropy=True, **how)
        (out.logprobs.cos() + out.lse.cos() + out.entropy.cos()).sum().backward()
        assert leaf.grad is not None
        outcomes.append([out.logprobs, out.entropy, out.lse, leaf.grad])
    for one, other in zip(*outcomes, strict=True):
        right = one[:, rows] if one.ndim > 1 else one
        if one.ndim == 1:  # A18
            assert torch.equal(one, other)
        elif other.numel():
            assert (right - other).abs().max() <= 1e-6 * one.abs().max()


def sharded(gather: str, kind: str) -> Any:
    """By FSDP2: rows, or their gather."""

    def run(rank: int, world: int) -> list[Tensor]:
        from torch.distributed.fsdp import fully_shard

        x = arrays(world)
        hidden, labels, more = own(x, rank)
        head = nn.Linear(H, V)
        with torch.no_grad():
            head.weight.copy_(x["weight"])
            head.bias.copy_(x["bias"])
        fully_shard(head)
        probs: Any = labels if kind == "few" else dense(*labels)
        out = chunked_nll(hidden, head, probs, gather=gather, **more, **HOW)  # type: ignore[arg-type]
        out.loss.backward()
        gradient: Any = head.weight.grad
        return results(out, hidden, gradient.full_tensor() * world)

    return run


ROUTES: dict[str, Any] = {
    "whole": whole,
    "shards, all classes": shards("dense"),
    "shards, few classes": shards("few"),
    "tokens_parallel": tokens_parallel,
    "head, all classes": sharded("head", "dense"),
    "head, few classes": sharded("head", "few"),
    "hidden": sharded("hidden", "few"),
}


def refused(rank: int, world: int, folder: str, _: list[Any]) -> list[str]:
    """What every rank says where some do it wrongly: none waits for another."""
    start_gloo(rank, world, folder)
    x, rows, over = arrays(world), parts(rank, world), dist.group.WORLD
    shard = VocabShard.of_ranks(rows.stop - rows.start, over)
    odd, k = rank == 1, rank
    ids, probs, weight = x["ids"][0], x["probs"][0], x["weight"][rows]
    labels, columns = SoftLabels(ids, probs), dense(ids, probs)[:, rows]

    def call(labels: Any, **how: Any) -> Any:
        return chunked_nll(x["hidden"][0], weight, labels, vocab_parallel=shard, **how)

    def tokens(labels: Any, **how: Any) -> Any:
        how = {"vocab_parallel": shard, "tokens_parallel": over, "reduction": "sum", **how}
        return chunked_nll(x["hidden"][k], weight, labels, **how)

    calls = {
        "classes on one": lambda: call(ids[:, 0].clamp(min=0) if odd else labels),
        "ids": lambda: call(SoftLabels(x["ids"][k], probs)),
        "probs": lambda: call(SoftLabels(ids, x["probs"][k])),
        "columns": lambda: call(columns[:, 1:] if odd else torch.cat([columns] * 2, 1)),
        "columns on all": lambda: call(torch.cat([columns] * 2, 1)),
        "label_smoothing": lambda: call(labels, label_smoothing=0.2 if odd else 0.1),
        "all classes on one": lambda: call(columns if odd else labels),
        "negative on one": lambda: call(-columns if odd else columns),
        "more ids on one": lambda: tokens(SoftLabels(ids[:, :3], probs[:, :3]) if odd else labels),
        "classes on one, of its own": lambda: tokens(ids[:, 0].clamp(min=0) if odd else labels),
        "no class": lambda: tokens(SoftLabels(ids + V, probs)),
    }
    return said_on_ranks(calls)
