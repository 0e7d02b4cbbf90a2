"""This rank's part of what a call was given: rows of a head, columns of logits, and the ranks
that hold the others.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from xentlib.arguments import Arguments
from xentlib.checks.placement import PLACEMENTS, check_group
from xentlib.checks.shards import SHARDS, check_shard
from xentlib.checks.validators import plain
from xentlib.lora import LowRankHead
from xentlib.plan import PaddedVocab, VocabShard, shard_of
from xentlib.torch.array_spec import is_dtensor
from xentlib.torch.core.vocab import numbers_of, undeclared
from xentlib.torch.operators import RowLayout


def find_group(parallel: Any, name: str = "vocab_parallel") -> dist.ProcessGroup:
    """The process group of a ProcessGroup or of a one-dimensional DeviceMesh."""
    if is_device_mesh(parallel) and parallel.ndim == 1:
        parallel = parallel.get_group()
    if not isinstance(parallel, dist.ProcessGroup):
        check_group(parallel, name)
    group: dist.ProcessGroup = parallel
    return group


def is_device_mesh(x: Any) -> bool:
    """A PyTorch without distributed support has no such class."""
    return isinstance(x, getattr(getattr(dist, "device_mesh", None), "DeviceMesh", ()))


def unpadded(parallel: Any) -> tuple[dist.ProcessGroup, int | None]:
    """The group, and the number of classes where it was declared."""
    if isinstance(parallel, PaddedVocab):
        return find_group(parallel.over), plain(parallel.vocab_size)
    if isinstance(parallel, VocabShard):
        if parallel.over is None:
            raise TypeError(
                f"`vocab_parallel` must say which ranks share the vocabulary; got {parallel}. Pass "
                f"`VocabShard.of_ranks(rows, group)`, made once, or the group of these ranks."
            )
        return find_group(parallel.over), parallel.vocab_size
    return find_group(parallel), None


def local_head(
    given: Arguments, low: LowRankHead[Tensor] | None
) -> tuple[Arguments, LowRankHead[Tensor] | None, RowLayout]:
    """A call with this rank's rows and with plain tensors in place of DTensors, and where the rows
    belong."""
    parallel = given.vocab_parallel
    weight, bias, local = local_rows(given.weight, given.bias, parallel, given.weight_layout)
    if low is not None:
        low = local_low_rank(low, parallel)
    if given.tokens_parallel is not None and parallel is not None:
        over = unpadded(parallel)[0], find_group(given.tokens_parallel, "tokens_parallel")
        vocab, tokens = map(dist.get_process_group_ranks, over)
        PLACEMENTS.require("same_tokens", vocab == tokens, vocab=vocab, tokens=tokens)
        local = local._replace(route="tokens")
    hidden, labels = replicated("hidden", given.hidden), replicated("labels", given.labels)
    given = given._replace(hidden=hidden, labels=labels, weight=weight, bias=bias)
    return given, low, local


def local_rows(
    weight: Tensor, bias: Tensor | None, parallel: Any, layout: str
) -> tuple[Tensor, Tensor | None, RowLayout]:
    """This rank's rows of the head as plain tensors, and where they belong."""
    whole = RowLayout()
    if weight.ndim != 2:  # refused where shapes are checked
        return weight, bias, whole
    if parallel is None:
        for name, x in (("weight", weight), ("bias", bias)):
            if is_dtensor(x):
                PLACEMENTS.refuse("dtensor", name=name, placements=tuple(x.placements))
        return weight, bias, whole
    axis = 0 if layout == "VH" else 1
    group, vocab_size = unpadded(parallel)
    name, ranks = group.group_name, dist.get_world_size(group)
    if is_dtensor(bias):
        bias = local_part("bias", bias, 0)
    if is_dtensor(weight):
        shard = shard_of(chunked(weight.shape[axis], ranks), dist.get_rank(group), vocab_size)
        return local_part("weight", weight, axis), bias, RowLayout(name, numbers_of(shard))
    if isinstance(parallel, VocabShard):
        rows, size, padding = weight.shape[axis], parallel.size, parallel.padding
        SHARDS.require("rows", size + padding == rows, rows=rows, size=size, padding=padding)
        return weight, bias, RowLayout(name, numbers_of(parallel))
    return weight, bias, RowLayout(name, undeclared(vocab_size))


def local_low_rank(low: LowRankHead[Tensor], parallel: Any) -> LowRankHead[Tensor]:
    """A as every rank has it, and this rank's rows of B, as plain tensors."""
    a, b = replicated("a", low.a), low.b
    if is_dtensor(b):
        if parallel is None:
            PLACEMENTS.refuse("dtensor", name="b", placements=tuple(b.placements))
        b = local_part("b", b, 0)
    return low._replace(a=a, b=b)


def chunked(classes: int, ranks: int) -> tuple[int, ...]:
    """Sizes of a DTensor's shards: it is split as torch.chunk splits."""
    columns = -(-classes // ranks)
    return tuple(max(0, min(columns, classes - k * columns)) for k in range(ranks))


def local_logits(
    logits: Any, parallel: Any, shard: VocabShard | None
) -> tuple[Tensor, Any, VocabShard | None]:
    """This rank's columns as a plain tensor, what they are spread over, and which they are: a
    DTensor says so itself."""
    if not is_dtensor(logits):
        return logits, parallel, shard
    mesh, placements = logits.device_mesh, tuple(logits.placements)
    if parallel is None and all(p.is_replicate() for p in placements):
        return logits.to_local(), None, shard
    first, last = placements[0], logits.ndim - 1
    cut = mesh.ndim == 1 and type(first).__name__ == "Shard" and first.dim % logits.ndim == last
    PLACEMENTS.require("columns", cut, placements=placements)
    group, vocab_size = unpadded(mesh if parallel is None else parallel)
    ranks, others = (dist.get_process_group_ranks(g) for g in (group, mesh.get_group()))
    PLACEMENTS.require("same_ranks", ranks == others, mesh=others, group=ranks)
    if shard is None:
        shard = shard_of(chunked(logits.shape[-1], len(ranks)), dist.get_rank(group), vocab_size)
    return logits.to_local(), group, shard


def local_part(name: str, x: Any, axis: int) -> Tensor:
    """Of a DTensor that is sharded along the vocabulary."""
    cut = x.device_mesh.ndim == 1 and x.placements[0].is_shard(axis)
    placements = tuple(x.placements)
    PLACEMENTS.require("over_vocabulary", cut, name=name, axis=axis, placements=placements)
    part: Tensor = x.to_local()
    return part


def local_columns(logits: Tensor, parallel: Any, shard: VocabShard | None) -> RowLayout:
    """Where this rank's columns [N, C] belong."""
    if parallel is None:
        return RowLayout()
    group, vocab_size = unpadded(parallel)
    if shard is None and isinstance(parallel, VocabShard):
        shard = parallel
    if shard is not None:
        check_shard(shard, logits.shape[1])
        return RowLayout(group.group_name, numbers_of(shard))
    return RowLayout(group.group_name, undeclared(vocab_size))


def replicated(name: str, x: Any) -> Any:
    """A DTensor that every rank has whole, as the tensor that it is; a plain one as it comes."""
    if not is_dtensor(x):
        return x
    placements = tuple(x.placements)
    whole = all(p.is_replicate() for p in placements)
    PLACEMENTS.require("replicated", whole, name=name, placements=placements)
    return x.to_local()
