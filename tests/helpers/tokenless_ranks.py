"""Calls on two ranks of which one has no token of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import xentlib.torch as X
from helpers.tokenless import ALL, V, arrays
from xentlib.shards import VocabShard
from xentlib.tools.harness.ranks import start_gloo

WHOLE = ("weight", "teacher_weight", "low_in", "low_out")


def one_without(rank: int, world: int, folder: str, items: list[list[str]]) -> list[Any]:
    """Of each function: its value, the gradient of this rank's rows, and both with all rows."""
    start_gloo(rank, world, folder)
    return [[of_call(name, rank) for name in names] for names in items]


def of_call(name: str, rank: int) -> list[Tensor]:
    results = []
    sum_only = {"reduction": "sum"} if name not in NOT_REDUCED else {}
    for parallel in (True, False):
        x = {k: torch.from_numpy(v) for k, v in arrays((5,)).items()}
        how: dict[str, Any] = dict(sum_only)
        if parallel:
            if rank:
                x |= {k: v[:0] for k, v in x.items() if k not in WHOLE}
            rows = slice(13) if rank == 0 else slice(13, V)
            x |= {k: x[k][rows].clone() for k in ("weight", "teacher_weight")}
            over = VocabShard.of_ranks(rows.stop - (rows.start or 0), dist.group.WORLD)
            how |= {"vocab_parallel": over, "tokens_parallel": dist.group.WORLD}
        weight = x["weight"].requires_grad_()
        value = ALL[name](X, x, **how).sum()
        value.backward()
        assert weight.grad is not None
        results += [value.detach(), weight.grad]
    return results


NOT_REDUCED = ("logprobs", "ids and top_k", "kept", "divergence of each")
