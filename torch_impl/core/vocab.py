"""A vocabulary: which classes this rank's columns are and, where several ranks share it, the sums
over them.

Which classes a rank has is declared, or shards are of one size. The sizes travel with the first MAX
of each call, which verifies them: nothing is remembered, and no rank waits for an exchange that
another one does not make.

Shapes: V vocabulary, N tokens, R ranks, E numbers that must be the same.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.checks.call import check_class_weights
from xentlib.checks.shards import SHARDS, check_tiles, refuse_inconsistent
from xentlib.checks.validators import check_shards
from xentlib.math.softmax import WORD_BITS, Algebra, BlockStats, BlockSums, NonTargetStats
from xentlib.plan import sum_rows
from xentlib.shards import VocabShard
from xentlib.torch.core.algebra import as_float32, as_float64
from xentlib.torch.core.consistency import RankConsistency, group_named
from xentlib.torch.core.device import host_readable
from xentlib.torch.core.tokens import LocalVocab
from xentlib.torch.operators import RowLayout


def numbers_of(shard: VocabShard | None, vocab_size: int | None = None) -> Tensor:
    """What an operator takes for a shard; for one that nobody has declared, of as many of one size
    as there are ranks."""
    numbers = [-1, -1, -1 if vocab_size is None else vocab_size, 0]
    if shard is not None:
        numbers = [shard.start, shard.stop, shard.vocab_size, shard.largest]
    return torch.tensor(numbers, device="cpu")


class ShardedVocab(LocalVocab):
    """The collectives of a call: one MAX, one packed SUM, one SUM of d hidden. What all ranks must
    have the same, and the sizes of their shards, travel with the first MAX."""

    sharded = True

    def __init__(
        self,
        layout: RowLayout,
        rows: int,
        like: dict[str, Any],
        *,
        order: Any = None,
        may_be_whole: bool = True,
        more_rows: int | None = None,
    ) -> None:
        """`may_be_whole`: the caller has cut the rows, and each rank may have the whole vocabulary
        by mistake, declared or not. `more_rows`: what the SUM has of a token in every call of this
        function beside the target's logit, a count and two sums; the options that a call has, if
        None."""
        assert layout.shard is not None
        self.group, self.rows, self.sum_rows = group_named(layout.group), rows, 0
        size = like["dtype"].itemsize
        self.words = len(WORD_BITS[size])
        if more_rows is not None:
            self.sum_rows = sum_rows(size, entropy=True, more=more_rows)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        start, stop, vocab_size, largest = layout.shard.tolist()
        self.declared = start >= 0
        self.vocab_size = None if vocab_size < 0 else vocab_size
        self.may_be_whole = may_be_whole
        self.weights: int | None = None  # of classes, their number
        if self.declared:
            shard = VocabShard(start, stop, vocab_size)
        else:
            total = self.vocab_size or max(1, self.ranks * rows)
            start = min(self.rank * rows, total)
            stop, largest = min(start + rows, total), rows
            shard = VocabShard(start, stop, total, rows - (stop - start))
        super().__init__(shard.vocab_size, shard, order)
        self.largest = largest or max(rows, -(-self.size // self.ranks))
        self.consistency = RankConsistency(like)
        self.verified = self.ranks == 1
        self.wrong: Tensor | None = None

    def own_part(self, weights: Tensor) -> Tensor:
        """As many of any where there are not V numbers: that is refused once all ranks know it. A
        rank whose numbers are others would raise alone."""
        self.weights = weights.shape[0]
        if self.verified:  # alone in its group
            check_class_weights(self.weights, self.size)
        if self.weights != self.size:
            return weights.new_ones(self.local_size)
        return super().own_part(weights)

    def _sent(self) -> Tensor:
        """What travels with the first MAX, as many numbers in every call: those that must be the
        same, and [3, R] sizes."""
        shard, consistency = self.shard, self.consistency
        assert shard is not None
        consistency.exact("shard", float(self.declared))
        consistency.exact("vocab_size", float(self.vocab_size or 0))
        consistency.exact("vocab", float(self.size))
        sizes = torch.zeros(3, self.ranks, **consistency.like)
        for k, number in enumerate((self.rows, shard.start, shard.stop)):
            sizes[k, self.rank] = number
        return torch.cat([consistency.packed(), sizes.view(-1)])

    def _verify(self, largest: Tensor) -> Tensor:
        """Whether ranks differ, of the maximum over them. Where numbers are read, on a CPU, every
        rank raises, or none."""
        names, sizes = self.consistency.names, 3 * self.ranks
        broken_E = self.consistency.broken(largest[:-sizes])
        sizes_3R = largest[-sizes:].view(3, -1)
        whole, torn = self._whole(broken_E, sizes_3R[0]), self._torn(sizes_3R)
        first, last = (names.index(name) for name in ("rows", "labels"))
        wrong = broken_E[:first].any() | broken_E[last:].any() | whole | torn
        readable = host_readable(largest)
        if readable and bool(wrong):
            self._refuse(broken_E.tolist(), bool(whole), sizes_3R.long().tolist())
        if self.weights is not None:
            if readable or self.declared:
                check_class_weights(self.weights, self.size)
            wrong = wrong | (self.weights != self.size)
        return wrong

    def _whole(self, broken_E: Tensor, rows_R: Tensor) -> Tensor:
        """Whether each rank has the same rows, which say something, and so those of all classes. As
        many rows as there are classes say nothing: all but one rank's may be padding."""
        if not self.may_be_whole:
            return broken_E.new_zeros(())
        first = self.consistency.names.index("rows")
        same = ~broken_E[first : first + 3].any()
        (least,), (largest,) = self.consistency.values[first + 1 : first + 3]
        whole: Tensor = same & (least < largest) & (rows_R == rows_R[0]).all()
        return whole

    def _torn(self, sizes_3R: Tensor) -> Tensor:
        """Whether a class of declared shards is on no rank, or on several; whether others are not
        of one size, or too small."""
        rows_R, start_R, stop_R = sizes_3R
        if not self.declared:
            uneven: Tensor = (rows_R != self.rows).any()
            return uneven.logical_or(rows_R.sum() < self.size)
        size_R = stop_R - start_R
        order_R = torch.argsort(start_R + 0.5 * (size_R > 0))
        start_R, size_R = start_R[order_R], size_R[order_R]
        before_R = size_R.cumsum(0) - size_R
        torn: Tensor = ((before_R != start_R) & (size_R > 0)).any()
        return torn.logical_or(size_R.sum() != self.size)

    def _refuse(self, broken: list[bool], whole: bool, sizes: list[list[int]]) -> None:
        """Raise for what differs, on all ranks alike."""
        names = [name for name, bad in zip(self.consistency.names, broken, strict=True) if bad]
        rows, start, stop = sizes
        # What has more numbers on some ranks stands first: those after it are compared with others.
        first = "function", "kept and ids", "top_k", "entropy", "kind", "shard", "vocab_size"
        refuse_inconsistent([name for name in first if name in names])
        if whole:
            SHARDS.refuse("whole_head", vocab_size=rows[0], ranks=self.ranks)
        if not self.declared:
            if len(set(rows)) > 1:
                SHARDS.refuse("uneven", rows=", ".join(map(str, rows)))
            check_shards(rows, self.size)
        refuse_inconsistent([name for name in names if name != "rows"])
        check_tiles(list(zip(start, stop, strict=True)), self.size)

    def combine(
        self,
        algebra: Algebra,
        z_y: Tensor,
        owned: Tensor,
        rest: BlockStats,
        weights: Tensor | float,
        most: int,
    ) -> tuple[Tensor, NonTargetStats]:
        """Target's logit and statistics of the rest over all shards: [N] each, on every rank.

        `weights` is that of the rest's classes, for label smoothing: their number without any.
        `most` tokens is what a chunk may have: the first MAX has room for them, so that ranks whose
        chunks are not the same learn that from each other.
        """
        m_local = algebra.largest(rest)
        count = m_local.shape[0]
        m = m_local.clone()
        if not self.verified:
            m = torch.cat([m_local, m_local.new_full((most - count,), -torch.inf), self._sent()])
        dist.all_reduce(m, dist.ReduceOp.MAX, group=self.group)
        if not self.verified:
            self.verified, self.wrong = True, self._verify(m[most:])
        m = m[:count]
        m = torch.where(m == -torch.inf, 0.0, m)
        terms, first = algebra.block_sums(m, rest)
        low = m.dtype != torch.float64
        packed = [torch.where(owned, z_y, 0.0), terms.ones]
        for words in (terms.s, terms.sum_ed):
            packed += () if words is None else as_float32(words) if low else words
        if rest.sum_d is not None:
            packed.append(algebra.moved(rest.sum_d, weights, m_local, m))
        if first is not None:
            tops = torch.zeros(self.ranks, count, dtype=m.dtype, device=m.device)
            tops[self.rank] = first
            packed += tops
        # On a host ranks whose options differ have raised by now. Elsewhere the SUM has one size
        # for all of a function's calls: theirs are NaN, and none waits.
        if not host_readable(m):
            packed += [torch.zeros_like(m)] * (self.sum_rows - len(packed))
        sums = torch.stack(packed)
        dist.all_reduce(sums, group=self.group)
        z_y, ones, more = sums[0], sums[1], sums[2:]
        of_words, sum_d = [], None
        for x in (terms.s, terms.sum_ed):
            if x is not None:
                words, more = more[: self.words], more[self.words :]
                of_words.append(as_float64(words) if low else words)
        if rest.sum_d is not None:
            sum_d, more = more[0], more[1:]
        first = None if first is None else more[: self.ranks].amin(0)
        if self.wrong is not None:
            z_y = torch.where(self.wrong, torch.nan, z_y)
        return z_y, algebra.from_sums(m, BlockSums(ones, *of_words), first, sum_d)

    def added(self, words: Tensor) -> Tensor:
        """Over all shards."""
        low = self.words > len(words)  # of float64 words, of a call in float32
        sent = as_float32(words) if low else words
        dist.all_reduce(sent, group=self.group)
        return as_float64(sent) if low else sent

    def of_owners(self, values: Tensor) -> Tensor:
        """On every rank: a number and zeros add up exactly."""
        dist.all_reduce(values, group=self.group)
        return values

    def offered(self, top: Tensor, top_k: int) -> Tensor:
        """A shard of fewer columns has no class, -1, in the others' places."""
        _, count, tokens = top.shape
        gathered = top.new_zeros(2, self.ranks, top_k, tokens)
        gathered[0, self.rank, count:] = -1
        gathered[:, self.rank, :count] = top
        return gathered.flatten(1, 2)

    def start_sum(self, x: Tensor) -> Any:
        """Work to wait for."""
        return dist.all_reduce(x, group=self.group, async_op=True)
