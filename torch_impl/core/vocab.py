"""A vocabulary over the ranks of a process group: whose classes are where, what all ranks must have
alike, and the sums over them.

Which classes are a rank's own follows from the number of rows of every rank. Those numbers travel
with the statistics of each call, so that no rank ever waits for an exchange that another one, which
remembers, does not make. Until they have come a rank goes by what it remembers, or by shards of one
size; if that was wrong, all ranks learn it from the same numbers, and begin again together.

Shapes: N tokens, R ranks, E numbers that must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from xentlib.algebra import NonTargetStats
from xentlib.arguments import SCALARS, Scalars
from xentlib.checks.call import check_class_weights
from xentlib.checks.shards import check_tiles, refuse_inconsistent, refuse_whole_head
from xentlib.plan import VocabShard, shard_of
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.device import device_info

if TYPE_CHECKING:
    from xentlib.torch.core.class_order import ClassOrder


T = TypeVar("T")

# torch 2.13 has other names for them, and warns of the old ones.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# By process group: the shard of so many rows, and the rows of the largest, as all ranks last knew.
KNOWN: Any = WeakIdKeyDictionary()
# Sums with random signs, each in units of the root of its sum of squares: those of other tokens
# differ by about 1.4, those of one tensor in two roundings of bfloat16 by 0.004.
SIGNS, SIGNED_TOLERANCE = 4, 0.1
# Of plain sums and of numbers that each rank computes for itself.
TOLERANCE = 1e-5


class Resplit(Exception):
    """The shards are not those that this call went by. Never leaves `over_shards`."""


def over_shards(call: Callable[[], T]) -> T:
    """`call()`, again if it found out that it went by wrong shards, which it knows then."""
    try:
        return call()
    except Resplit:
        return call()


def undeclared(vocab_size: int | None) -> Tensor:
    """What an operator takes for a shard that follows from the rows of all ranks."""
    return torch.tensor([-1, -1, -1 if vocab_size is None else vocab_size], device="cpu")


def numbers_of(shard: VocabShard) -> Tensor:
    """What an operator takes for a shard that is declared."""
    return torch.tensor([shard.start, shard.stop, shard.vocab_size], device="cpu")


def group_named(name: str) -> dist.ProcessGroup:
    """From its name, which is what an operator may take."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    found: dist.ProcessGroup = resolve(name)
    return found


def host_readable(x: Tensor) -> bool:
    """Whether the host may look at numbers without waiting for a device."""
    return device_info(x).host_readable


class RankConsistency:
    """Numbers by name that every rank must have alike, and by how much they may differ."""

    def __init__(self, like: dict[str, Any]) -> None:
        self.like = like
        self.names: list[str] = []
        self.values: list[Tensor] = []  # [] or [some] each
        self.tolerances: list[Tensor] = []

    def exact(self, name: str, value: float | Tensor) -> None:
        value = self._tensor(value)
        self._add(name, value, torch.zeros_like(value))

    def scalars(self, scalars: Scalars, function: str) -> None:
        """Those that the function has."""
        for name in SCALARS[function]:
            self.exact(name, getattr(scalars, name) or 0.0)

    def close(self, name: str, value: Tensor | float | None) -> None:
        """A number that each rank has computed for itself; None is 1."""
        x = torch.nan_to_num(self._tensor(1.0 if value is None else value))
        self._add(name, x, TOLERANCE * x.abs())

    def per_token(self, name: str, value: Tensor | None, count: int) -> None:
        """One number for all of `count` tokens or for each, computed by each rank; None is 1."""
        x = torch.ones((), **self.like) if value is None else value.detach().to(**self.like)
        x = torch.nan_to_num(x).expand(count)
        signed = (_signs(count, x, SIGNS) * x).sum(1)
        self._add(name, x.sum(), TOLERANCE * x.abs().sum())
        self._add(name, signed, (SIGNED_TOLERANCE * x.norm()).expand(SIGNS))

    def per_class(self, name: str, value: Tensor | None) -> None:
        """One number for each class of the vocabulary; None is 0. The sum alone is the same of
        weights that each rank has normalised."""
        x = torch.zeros(1, **self.like) if value is None else value.detach().to(**self.like)
        x = torch.nan_to_num(x)
        self._add(name, (_factors(x.shape[0], x) * x).sum(), TOLERANCE * x.norm())

    def labels(self, labels: Tensor, valid: Tensor) -> None:
        """Their hash, and which tokens count."""
        mixed = torch.where(valid, labels, -1) * 0x9E3779B1 + _mix(labels.shape[0], labels)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
        # 24 bits, which float32 holds exactly.
        self.exact("labels", ((mixed ^ (mixed >> 12)) & 0xFFFFFF).sum() & 0xFFFFFF)

    def tokens(self, name: str, x_NH: Tensor, valid: Tensor) -> None:
        """Rows of the valid tokens."""
        x_NH = x_NH.detach()
        signs_SN = torch.where(valid, _signs(x_NH.shape[0], x_NH, SIGNS), 0)
        sums_SH = torch.nan_to_num((signs_SN @ x_NH).to(**self.like))
        across_H = _signs(x_NH.shape[1], sums_SH)[0]
        self._add(name, (sums_SH * across_H).sum(1), SIGNED_TOLERANCE * sums_SH.norm(dim=1))

    def _tensor(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(**self.like)
        return torch.full((), value, **self.like)

    def _add(self, name: str, value: Tensor, tolerance: Tensor) -> None:
        self.names += [name] * value.numel()
        self.values.append(value.reshape(-1))
        self.tolerances.append(tolerance.reshape(-1))

    def packed(self) -> Tensor:
        """[3 E]: their maximum over the ranks says whether they agree."""
        if not self.names:
            return torch.zeros(0, **self.like)
        values = torch.cat(self.values)
        return torch.cat([values, -values, *self.tolerances])

    @staticmethod
    def broken(largest: Tensor) -> Tensor:
        """[E] of the maximum over the ranks: those that do not agree."""
        high, low, tolerance = largest.view(3, -1)
        broken: Tensor = high + low > tolerance
        return broken


def _mix(count: int, like: Tensor) -> Tensor:
    index = torch.arange(count, dtype=torch.int64, device=like.device)
    return (index * 0x85EBCA77) ^ ((index * 0xC2B2AE3D) >> 13)


def _signs(count: int, like: Tensor, number: int = 1) -> Tensor:
    """[number, count] of 1 and -1."""
    bits = _mix(count, like) >> torch.arange(7, 7 + number, device=like.device)[:, None]
    return (1 - 2 * (bits & 1)).to(like.dtype)


def _factors(count: int, like: Tensor) -> Tensor:
    """[count] of either sign, from 0.5 to 1, hardly two alike: of signs alone every second pair of
    entries could change places unseen."""
    bits = (_mix(count, like) >> 7) & 0xFFFF
    return (_signs(count, like)[0] * (0.5 + (bits >> 1) * 2.0**-16)).to(like.dtype)


class VocabParallel:
    """The collectives of a call: one MAX, one packed SUM, one SUM of d hidden. What all ranks must
    have alike, and the sizes of their shards, travel with the first MAX."""

    def __init__(
        self,
        group: str,
        numbers: Tensor,
        rows: int,
        like: dict[str, Any],
        places: ClassOrder | None = None,
    ) -> None:
        """`places`: of classes that do not stand in their order, which a shard counts then."""
        self.group, self.rows, self.places = group_named(group), rows, places
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        start, stop, vocab_size = numbers.tolist()
        self.declared = start >= 0
        self.vocab_size = None if vocab_size < 0 else vocab_size
        known = KNOWN.setdefault(self.group, {}).get((rows, self.vocab_size))
        self.confirmed = known is not None
        self.largest = rows
        self.may_be_whole = not self.declared  # a declared shard says itself what it is
        self.weights: int | None = None  # of classes, their number
        if self.declared:
            self.shard = VocabShard(start, stop, vocab_size)
            self.largest = max(rows, -(-vocab_size // self.ranks))
        elif known is not None:
            self.shard, self.largest = known
        else:
            start = self.rank * rows
            total = max(1, self.ranks * rows) if self.vocab_size is None else self.vocab_size
            start, stop = min(start, total), min(start + rows, total)
            self.shard = VocabShard(start, stop, total, rows - (stop - start))
        self.consistency = RankConsistency(like)
        self.agreed = self.ranks == 1
        self.wrong: Tensor | None = None

    def of_rows(self, some: Tensor) -> None:
        """Some of this rank's rows [any, any], of a head or of logits: alike on every rank, they
        are the whole vocabulary's. Before all other numbers."""
        x = torch.nan_to_num(some.detach().to(**self.consistency.like))
        if not x.numel():
            x = x.new_zeros(1, 1)
        for number in (x.sum(), x.amin(), x.amax()):
            self.consistency.exact("rows", number)

    def own_part(self, weights: Tensor) -> Tensor:
        """Of [V] numbers; of shards that are guessed, as many of any. How many there are is checked
        once all ranks know the shards: a rank that went by a guess would raise alone."""
        shard, self.weights = self.shard, weights.shape[0]
        if self.agreed:  # alone in its group
            check_class_weights(self.weights, shard.vocab_size)
        own = weights[shard.start : shard.stop]
        if self.places is not None:
            own = weights[self.places.to_class(torch.arange(shard.size, device=weights.device))]
        return own if own.shape[0] == shard.size else weights.new_ones(shard.size)

    def to_class(self, columns: Tensor) -> Tensor:
        """Of columns of this rank, as floats; the first of several has the lowest."""
        if self.places is None:
            of_start: Tensor = columns + self.shard.start
            return of_start
        # Where no other class is on this rank a column is any number.
        found = self.places.to_class(columns.long().clamp(0, max(0, self.shard.size - 1)))
        return found.to(columns.dtype)

    def sent(self) -> Tensor:
        """What travels with the first MAX: [3 E] that must agree, [3 R] sizes, whether known."""
        shard, consistency = self.shard, self.consistency
        consistency.exact("shard", float(self.declared))
        consistency.exact("vocab_size", float(self.vocab_size or 0))
        consistency.exact("vocab", float(shard.vocab_size))
        consistency.exact("largest", 0.0 if self.declared else float(self.largest))
        ours = torch.zeros(3 * self.ranks + 1, **consistency.like)
        for k, number in enumerate((self.rows, shard.start, shard.stop)):
            ours[k * self.ranks + self.rank] = number
        ours[-1] = float(self.confirmed or self.declared)
        return torch.cat([consistency.packed(), ours])

    def received(self, largest: Tensor) -> Tensor:
        """Whether ranks disagree, of the maximum over them.

        Where the numbers are read every rank raises, or none: on a CPU, where that is free, and for
        shards that no rank has confirmed.
        """
        names = self.consistency.names
        broken_E = RankConsistency.broken(largest[: 3 * len(names)])
        sizes_3R = largest[3 * len(names) : -1].view(3, -1)
        whole, torn = self._whole(broken_E, sizes_3R[0]), self._torn(sizes_3R)
        counts = [k for k, name in enumerate(names) if name != "rows"]
        wrong = broken_E[counts[0] : counts[-1] + 1].any() | whole | torn
        unread = not host_readable(largest)
        unread = unread and (self.confirmed or self.declared or bool(largest[-1] > 0))
        if not unread and bool(wrong):
            self._refuse(broken_E.tolist(), bool(whole), bool(torn), sizes_3R.long().tolist())
        if not unread and not self.declared:
            self._know(self.shard, sizes_3R[0].long().tolist())
        if self.weights is not None:
            if self.declared or not unread:
                check_class_weights(self.weights, self.shard.vocab_size)
            wrong = wrong | (self.weights != self.shard.vocab_size)
        return wrong

    def _know(self, shard: VocabShard, rows: list[int]) -> None:
        KNOWN[self.group][self.rows, self.vocab_size] = shard, max(rows)

    def _whole(self, broken_E: Tensor, rows_R: Tensor) -> Tensor:
        """Whether each rank has the same rows, which say something, and so those of all classes. As
        many rows as there are classes say nothing: all but one rank's may be padding."""
        if not self.may_be_whole:
            return broken_E.new_zeros(())
        (least,), (largest,) = self.consistency.values[1], self.consistency.values[2]
        alike: Tensor = ~broken_E[:3].any() & (least < largest) & (rows_R == rows_R[0]).all()
        return alike

    def _torn(self, sizes_3R: Tensor) -> Tensor:
        """Whether a class of declared shards is on no rank, or on several; whether others are not
        those that follow from the rows of all ranks."""
        rows_R, start_R, stop_R = sizes_3R
        if not self.declared:
            end_R = rows_R.cumsum(0)
            size = self.vocab_size
            total = rows_R.sum() if size is None else rows_R.new_full((), size)
            other_R = start_R != (end_R - rows_R).clamp(max=total)
            other_R = other_R | (stop_R != end_R.clamp(max=total)) | (rows_R.sum() < total)
            other: Tensor = other_R.any().logical_or(total != self.shard.vocab_size)
            return other
        size_R = stop_R - start_R
        order_R = torch.argsort(start_R + 0.5 * (size_R > 0))
        start_R, size_R = start_R[order_R], size_R[order_R]
        before_R = size_R.cumsum(0) - size_R
        torn: Tensor = ((before_R != start_R) & (size_R > 0)).any()
        return torn.logical_or(size_R.sum() != self.shard.vocab_size)

    def _refuse(self, broken: list[bool], whole: bool, torn: bool, sizes: list[list[int]]) -> None:
        """Raise for what differs, on all ranks alike: for what their arguments say, and for what
        follows from shards once those are known. Where any rank guessed its shard wrongly all go
        again, those that guessed right as well."""
        names = [name for name, bad in zip(self.consistency.names, broken, strict=True) if bad]
        rows, start, stop = sizes
        refuse_inconsistent([name for name in names if name in ("shard", "vocab_size")])
        if whole:
            refuse_whole_head(rows[0], self.ranks)
        if not self.declared and (torn or "vocab" in names or "largest" in names):
            self._know(shard_of(tuple(rows), self.rank, self.vocab_size), rows)
            raise Resplit
        refuse_inconsistent([name for name in names if name != "rows"])
        check_tiles(list(zip(start, stop, strict=True)), self.shard.vocab_size)

    def combine(
        self, z_y: Tensor, owned: Tensor, rest: NonTargetStats, weights: Tensor | float, most: int
    ) -> tuple[Tensor, NonTargetStats]:
        """Target's logit and statistics of the rest over all shards: [N] each, on every rank.

        `weights` is that of the rest's classes, for label smoothing: their number without any.
        `most` tokens is what a chunk may have: the first MAX has room for them, so that ranks whose
        chunks are not the same learn that from each other.
        """
        none = rest.ones == 0
        m_local = torch.where(none, -torch.inf, rest.m)
        count = m_local.shape[0]
        m = m_local.clone()
        if not self.agreed:
            m = torch.cat([m_local, m_local.new_full((most - count,), -torch.inf), self.sent()])
        dist.all_reduce(m, dist.ReduceOp.MAX, group=self.group)
        if not self.agreed:
            self.agreed, self.wrong = True, self.received(m[most:])
        m = m[:count]
        m = torch.where(m == -torch.inf, 0.0, m)
        _, *terms, first = ALGEBRA.relative_to(m, rest, weights)
        packed = [torch.where(owned, z_y, 0.0), *(x for x in terms if x is not None)]
        if first is not None:
            tops = torch.zeros(self.ranks, count, dtype=m.dtype, device=m.device)
            tops[self.rank] = first
            packed += tops
        sums = torch.stack(packed)
        dist.all_reduce(sums, group=self.group)
        z_y, ones, s, *more = sums
        sum_ed = more.pop(0) if rest.sum_ed is not None else None
        sum_d = more.pop(0) if rest.sum_d is not None else None
        first = torch.stack(more).amin(0) if more else None
        if self.wrong is not None:
            z_y = torch.where(self.wrong, torch.nan, z_y)
        return z_y, NonTargetStats(m, ones, s, sum_ed, sum_d, first)

    def start_sum(self, x: Tensor) -> Any:
        """Work to wait for."""
        return dist.all_reduce(x, group=self.group, async_op=True)


def vocab_parallel_of(
    group: str,
    numbers: Tensor | None,
    rows: int,
    like: dict[str, Any],
    places: ClassOrder | None = None,
) -> VocabParallel | None:
    """From what an operator may take as arguments; None without a group."""
    return None if numbers is None else VocabParallel(group, numbers, rows, like, places)


def begin_consistency(
    parallel: VocabParallel, rows: Tensor, labels: Tensor, valid: Tensor
) -> RankConsistency:
    """What all ranks must have alike in every call: some rows, labels, which tokens count."""
    parallel.of_rows(rows)
    parallel.consistency.labels(labels.long(), valid)
    return parallel.consistency
