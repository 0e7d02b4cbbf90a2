"""Where the head lives, in PyTorch: the rows of a vocabulary that this rank holds.

Shapes: N tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from xentlib import head as spec
from xentlib.checks import (
    check_group,
    check_not_whole,
    check_placement,
    check_replicated,
    check_shard,
    refuse_dtensor,
)
from xentlib.plan import PaddedVocab, VocabShard, shard_of
from xentlib.torch import fsdp2, zero3
from xentlib.torch.softmax import RestStats, below, exp_difference

__all__ = [
    "Local",
    "VocabParallel",
    "find_group",
    "gather_head",
    "local_columns",
    "local_rows",
    "replicated",
    "vocab_parallel_of",
    "with_whole_head",
]

F = TypeVar("F", bound=Callable[..., Any])

# The shard of each head that was asked for, by the tensor itself: heads of one size on this rank
# may have other sizes on another, and a rank that remembers must not meet one that asks.
KNOWN: Any = WeakIdKeyDictionary()


def find_group(parallel: Any, name: str = "vocab_parallel") -> dist.ProcessGroup:
    """The process group of a ProcessGroup or of a one-dimensional DeviceMesh."""
    mesh_type = getattr(getattr(dist, "device_mesh", None), "DeviceMesh", ())
    if isinstance(parallel, mesh_type) and parallel.ndim == 1:
        parallel = parallel.get_group()
    if not isinstance(parallel, dist.ProcessGroup):
        check_group(parallel, name)
    found: dist.ProcessGroup = parallel
    return found


def unpadded(parallel: Any) -> tuple[dist.ProcessGroup, int | None]:
    """The group, and the number of classes where it was declared."""
    if isinstance(parallel, PaddedVocab):
        return find_group(parallel.over), parallel.vocab_size
    return find_group(parallel), None


def gathered(row: list[Any] | Tensor, group: dist.ProcessGroup, like: Tensor) -> list[list[float]]:
    """Everybody's row of numbers, in rank order, with one collective."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = torch.zeros(world, len(row), dtype=torch.float64, device=like.device)
    rows[rank] = torch.as_tensor(row, dtype=torch.float64, device=like.device)
    dist.all_reduce(rows, group=group)
    found: list[list[float]] = rows.tolist()
    return found


def find_shard(holder: Tensor, rows: int, group_name: str, vocab_size: int | None) -> VocabShard:
    """Where this rank's rows begin: from the sizes of all shards, exchanged once for a `holder`."""
    known, key = KNOWN.get(holder), (group_name, rows, vocab_size)
    if known is not None and known[0] == key:
        shard: VocabShard = known[1]
        return shard
    group = group_named(group_name)
    sizes = tuple(int(size) for (size,) in gathered([rows], group, holder))
    shard = shard_of(sizes, dist.get_rank(group), vocab_size)
    KNOWN[holder] = (key, shard)
    return shard


def find_columns(logits: Tensor, group_name: str, vocab_size: int | None) -> VocabShard:
    """Where this rank's columns begin, by one exchange: logits are new in every step, and ranks
    that remember must not meet ranks that ask."""
    group = group_named(group_name)
    row = logits[:1].double() if logits.numel() else logits.new_zeros(1, 1, dtype=torch.float64)
    sums = torch.stack([row.sum(), row.min(), row.max()]).tolist()
    found = gathered([logits.shape[1], *sums], group, logits)
    sizes = tuple(int(x[0]) for x in found)
    if vocab_size is None:
        check_not_whole(sizes, [x[1:] for x in found])
    return shard_of(sizes, dist.get_rank(group), vocab_size)


@torch.library.custom_op(
    "xentlib::vocab_shard",
    mutates_args=(),
    schema="(Tensor holder, bool logits, SymInt rows, str group, SymInt? vocab_size) -> Tensor",
)
def shard_op(holder: Tensor, logits: bool, rows: int, group: str, vocab_size: int | None) -> Tensor:
    """`find_shard` or `find_columns` as one operator, opaque to the compiler: start, stop, V."""
    if logits:
        shard = find_columns(holder, group, vocab_size)
    else:
        shard = find_shard(holder, rows, group, vocab_size)
    return numbers_of(shard)


@shard_op.register_fake
def _(holder: Tensor, logits: bool, rows: int, group: str, vocab_size: int | None) -> Tensor:
    return torch.empty(3, dtype=torch.int64, device="cpu")


def numbers_of(shard: VocabShard) -> Tensor:
    numbers = [shard.start, shard.stop, shard.vocab_size]
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


class VocabParallel:
    """The collectives of a call: one MAX, one packed SUM, one SUM of d hidden."""

    def __init__(self, group: dist.ProcessGroup, shard: VocabShard) -> None:
        self.group, self.shard = group, shard

    def combine(self, z_y: Tensor, owned: Tensor, rest: RestStats) -> tuple[Tensor, RestStats]:
        """Target's logit and statistics of the rest over all shards: [N] each, on every rank."""
        none = rest.ones == 0
        m_local = torch.where(none, -torch.inf, rest.m)
        m = m_local.clone()
        dist.all_reduce(m, dist.ReduceOp.MAX, group=self.group)
        m = torch.where(m == -torch.inf, 0.0, m)
        top = m_local == m
        scale = torch.where(none, 0.0, exp_difference(rest.m, m))
        total = rest.ones + rest.s
        packed = [
            torch.where(owned, z_y, 0.0),
            torch.where(top, rest.ones, 0.0),
            torch.where(top, rest.s, scale * total),
        ]
        if rest.sum_ed is not None:
            packed.append(scale * (rest.sum_ed + below(rest, m) * total))
        if rest.sum_d is not None:
            columns = self.shard.size - owned.to(z_y.dtype)
            packed.append(rest.sum_d + columns * (rest.m - m))
        sums = torch.stack(packed)
        dist.all_reduce(sums, group=self.group)
        z_y, ones, s, *more = sums
        sum_ed = more.pop(0) if rest.sum_ed is not None else None
        sum_d = more.pop(0) if rest.sum_d is not None else None
        return z_y, RestStats(m, ones, s, sum_ed, sum_d)

    def start_sum(self, x: Tensor) -> Any:
        """Work to wait for."""
        return dist.all_reduce(x, group=self.group, async_op=True)


def group_named(name: str) -> dist.ProcessGroup:
    """From its name, which is what an operator may take."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    found: dist.ProcessGroup = resolve(name)
    return found


def vocab_parallel_of(group: str, shard: Tensor | None) -> VocabParallel | None:
    """From what an operator may take as arguments; None without a group."""
    return None if shard is None else VocabParallel(group_named(group), VocabShard(*shard.tolist()))


class Local(NamedTuple):
    """Group and shard as an operator takes them; ("", None) for a whole vocabulary."""

    group: str
    shard: Tensor | None  # [3] start, stop, V; on the CPU


def local_rows(
    weight: Tensor, bias: Tensor | None, parallel: Any, layout: str
) -> tuple[Tensor, Tensor | None, Local]:
    """This rank's rows of the head as plain tensors, and where they belong."""
    whole = Local("", None)
    if weight.ndim != 2:  # refused where shapes are checked
        return weight, bias, whole
    if parallel is None:
        for name, x in (("weight", weight), ("bias", bias)):
            if is_dtensor(x):
                refuse_dtensor(name, tuple(x.placements))
        return weight, bias, whole
    axis = 0 if layout == "VH" else 1
    group, vocab_size = unpadded(parallel)
    name, ranks = group.group_name, dist.get_world_size(group)
    if is_dtensor(bias):
        bias = local_part("bias", bias, 0)
    if is_dtensor(weight):
        # A DTensor is cut as torch.chunk cuts: nothing to exchange.
        classes = weight.shape[axis]
        columns = -(-classes // ranks)
        sizes = tuple(max(0, min(columns, classes - k * columns)) for k in range(ranks))
        shard = shard_of(sizes, dist.get_rank(group), vocab_size)
        return local_part("weight", weight, axis), bias, Local(name, numbers_of(shard))
    shard_numbers = shard_op(weight, False, weight.shape[axis], name, vocab_size)
    return weight, bias, Local(name, shard_numbers)


def local_part(name: str, x: Any, axis: int) -> Tensor:
    """Of a DTensor that is cut along the vocabulary."""
    cut = x.device_mesh.ndim == 1 and x.placements[0].is_shard(axis)
    check_placement(name, cut, axis, tuple(x.placements))
    part: Tensor = x.to_local()
    return part


def with_whole_head(*, recompute: bool) -> Callable[[F], F]:
    """For a function of (hidden, weight, labels, *, bias, ...): the head may be in pieces.

    `recompute`: its backward reads the head's values again.
    """

    def wrap(function: F) -> F:
        @wraps(function)
        def call(hidden: Any, weight: Any, labels: Any, *, bias: Any = None, **options: Any) -> Any:
            heads = zero3.sharded(weight, bias)
            if heads:

                def whole() -> Any:
                    return function(hidden, weight, labels, bias=bias, **options)

                return zero3.call_with_head(heads, hidden, whole, recompute=recompute)
            owner = owner_of(weight)
            if owner is None:
                return function(hidden, weight, labels, bias=bias, **options)
            return fsdp2.call_with_head(
                owner,
                hidden,
                weight,
                bias,
                lambda h, w, b: function(h, w, labels, bias=b, **options),
                recompute=recompute,
            )

        return cast(F, call)

    return wrap


@contextmanager
def gather_head(
    weight: Tensor, bias: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor | None]]:
    heads, owner = zero3.sharded(weight, bias), owner_of(weight)
    if heads:
        weight, bias = zero3.copies(heads, weight, bias)
    elif owner is not None:
        whole, bias = fsdp2.copies(owner, weight, bias)
        assert whole is not None
        weight = whole
    elif is_dtensor(weight):
        refuse_dtensor("weight", tuple(weight.placements))
    yield weight, bias


gather_head.__doc__ = spec.gather_head.__doc__


def owner_of(weight: Any) -> fsdp2.Owner | None:
    """The `fully_shard` that keeps a head in pieces, if one does."""
    return fsdp2.find_owner(weight) if is_dtensor(weight) else None


def local_columns(logits: Tensor, parallel: Any, shard: VocabShard | None) -> Local:
    """Where this rank's columns [N, C] belong."""
    if parallel is None:
        return Local("", None)
    group, vocab_size = unpadded(parallel)
    if shard is not None:
        check_shard(shard, logits.shape[1])
        return Local(group.group_name, numbers_of(shard))
    columns, name = logits.shape[1], group.group_name
    return Local(name, shard_op(logits.detach(), True, columns, name, vocab_size))


def is_dtensor(x: Any) -> TypeGuard[Any]:
    """Without loading what nobody has loaded: that takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def replicated(name: str, x: Any) -> Any:
    """A DTensor that every rank has whole, as the tensor that it is; a plain one as it comes."""
    if not is_dtensor(x):
        return x
    check_replicated(name, all(p.is_replicate() for p in x.placements), tuple(x.placements))
    return x.to_local()
