"""Functions of precomputed logits of which a rank has several blocks, in PyTorch: whole and over
shards of no round size, of which one is empty.

Shapes: N tokens, V classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from xentlib import VocabShard
from xentlib.tools.harness.ranks import start_gloo
from xentlib.torch import (
    SoftLabels,
    TeacherLogits,
    vocab_parallel_divergence,
    vocab_parallel_logprobs,
)

N, V = 37, 301
SIZES = (113, 0, 135, 53)  # classes of each rank
ROWS = 5  # of a block, about


def arrays() -> dict[str, Any]:
    """Logits 20 lower than drawn, and a class 6 higher; a third of the tokens do not count. In
    float64, so that a sum of shards rounds to the same float32: with a class 20 higher the gradient
    of a reverse KL has 9 digits fewer there, where all of the probability is."""
    rng = torch.Generator().manual_seed(5)
    drawn = (3.0 * torch.randn(N, V, generator=rng, dtype=torch.float64) - 20.0 for _ in range(2))
    x = dict(zip(("logits", "teacher"), drawn, strict=True))
    x["logits"][:, 200] += 6.0
    x["labels"] = torch.randint(0, V, (N,), generator=rng)
    x["where"] = torch.rand(N, generator=rng) > 0.3
    x["upstream"] = torch.randn(N, generator=rng, dtype=torch.float64)
    x["temperature"] = torch.rand(N, generator=rng, dtype=torch.float64) + 0.5
    x["ids"] = torch.stack([(x["labels"] + 7 * k) % V for k in range(3)], 1)
    return x


Function = Callable[..., Any]  # of arrays, this rank's columns and options; results with gradients


def divergence(kind: str, beta: float | None = None) -> Function:
    def call(x: dict[str, Any], z: Any, part: slice, **how: Any) -> Any:
        teacher = TeacherLogits(x["teacher"][:, part])
        out = vocab_parallel_divergence(z, teacher, kind=kind, beta=beta, **how)  # type: ignore[arg-type]
        return (out.loss,)

    return call


def logprobs(**more: Any) -> Function:
    def call(x: dict[str, Any], z: Any, part: slice, **how: Any) -> Any:
        options = {name: x[name] if value is ... else value for name, value in more.items()}
        out = vocab_parallel_logprobs(z, x["labels"], entropy=True, **options, **how)
        return [y for y in out if y is not None and y.requires_grad]

    return call


def probabilities(x: dict[str, Any], z: Any, part: slice, **how: Any) -> Any:
    labels = x["teacher"].softmax(1)[:, part]
    return vocab_parallel_logprobs(z, labels, entropy=True, **how)[:3]


def few(x: dict[str, Any], z: Any, part: slice, **how: Any) -> Any:
    labels = SoftLabels(x["ids"], torch.full((N, 3), 1 / 3, dtype=torch.float64))
    return vocab_parallel_logprobs(z, labels, entropy=True, **how)[:3]


FUNCTIONS: dict[str, Function] = {
    "forward_kl": divergence("forward_kl"),
    "reverse_kl": divergence("reverse_kl"),
    "jsd": divergence("jsd", 0.3),
    "logprobs": logprobs(label_smoothing=0.1),
    "kept": logprobs(kept=...),
    "ids, top_k": logprobs(ids=..., top_k=2),
    "probabilities": probabilities,
    "few probabilities": few,
}


def computed(name: str, part: slice, **how: Any) -> list[Any]:
    """Results, and the gradient of these columns for random upstream gradients."""
    x = arrays() | {"kept": arrays()["ids"]}
    z = x["logits"][:, part].clone().requires_grad_()
    how |= {"temperature": x["temperature"], "where": x["where"]}
    results = FUNCTIONS[name](x, z, part, max_chunk_bytes=ROWS * 8 * V, **how)
    total = sum(
        ((k + 1) * x["upstream"].view(-1, *[1] * (y.ndim - 1)) * y).sum()
        for k, y in enumerate(results)
    )
    (d_logits,) = torch.autograd.grad(total, z)
    return [*(y.detach().numpy() for y in results), d_logits.numpy()]


def of_rank(rank: int, world: int, folder: str, names: list[str]) -> list[list[Any]]:
    start_gloo(rank, world, folder)
    start = sum(SIZES[:rank])
    shard = VocabShard(start, start + SIZES[rank], V)
    over = {"vocab_parallel": dist.group.WORLD, "shard": shard}
    return [computed(name, slice(shard.start, shard.stop), **over) for name in names]
