"""Steps 2 to 7 of `xentlib.divergence`: blocks of a student's logits, and of a teacher's beside
them.

Shapes: N tokens, V vocabulary, B rows of a block, U tokens of a unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.checks.divergence import check_vocabulary, of_teacher
from xentlib.math.divergence import KINDS, NEAR, TERMS, DzTerms, Kind, Near0, PairSums
from xentlib.math.softmax import BlockStats, NonTargetStats, TargetInfo, TokenStats, WantedStats
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.core.device import chunk_bytes
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.kernels import LogitsBlock, LogitTransform
from xentlib.torch.core.logits import Chunk, ChunkedLogits, block_at
from xentlib.torch.core.precomputed import PrecomputedLogits
from xentlib.torch.operators import HeadCall

Pair = tuple[LogitsBlock, LogitsBlock]  # of the student and of the teacher, the same tokens
KernelPair = tuple[Eager, Eager]  # who computes on each


class InPlace(Kind):
    """With the longest steps in the memory that they began with: a new array costs a CPU as much as
    two operations on it."""

    def series(self, x: Tensor) -> Tensor:
        """`Kind.series`."""
        terms = TERMS[x.dtype.itemsize]
        total = x * (1.0 / math.factorial(terms + 1))
        total.add_(1.0 / math.factorial(terms))
        for k in range(terms - 1, 1, -1):
            total.mul_(x).add_(1.0 / math.factorial(k))
        return total.mul_(x).mul_(x)

    def near0(self, x: Tensor) -> Near0:
        """`Kind.near0`."""
        near = x.clamp(min=NEAR)
        rest = x.sub_(near)
        phi = self.series(near)
        t, e = near + phi, self.exp(rest)
        less, grown = e - 1.0, t + 1.0
        psi = (near * t).sub_(phi)
        psi.addcmul_(grown, near.sub_(1.0).mul_(less).addcmul_(e, rest))
        more = less.mul_(grown)
        t.add_(more)
        return Near0(grown.mul_(e), t, phi.add_(more.sub_(rest)), psi)


IN_PLACE = {name: type(name, (InPlace, kind), {}) for name, kind in KINDS.items()}


class Unit(NamedTuple):
    """Blocks whose statistics are made together."""

    pairs: list[Pair]

    @property
    def token_index(self) -> slice | Tensor:
        """Of its tokens within the N."""
        token_index: list[Any] = [rows.token_index for rows, _ in self.pairs]
        if isinstance(token_index[0], slice):
            return slice(token_index[0].start, token_index[-1].stop)
        return torch.cat(token_index)

    def parts(self) -> Iterator[tuple[LogitsBlock, LogitsBlock, slice]]:
        """Each pair of blocks, and where its tokens are in the unit."""
        first = self.pairs[0][0].span.start
        for rows, teacher in self.pairs:
            yield rows, teacher, slice(rows.span.start - first, rows.span.stop - first)


class LogitsTeacher:
    """A teacher's precomputed logits [N, C], in the blocks of the student's."""

    gathered = False

    def __init__(
        self, logits: Tensor, temperature: Tensor | None, student: ChunkedLogits | PrecomputedLogits
    ) -> None:
        self.logits, self.temperature, self.student = logits, temperature, student
        self.vocab, self.tokens, self.classes = student.vocab, student.tokens, logits.shape[1]
        self.shape = LogitTransform(student.local_size)

    def chunks(self) -> Iterator[None]:
        return itertools.repeat(None)

    def kernels(self) -> Any:
        """As the student's."""
        student = self.student
        device, size = self.logits.device, max(1, min(student.block_rows, student.tokens.computed))
        return student.kernel_cls(size, student.width, student.compute_dtype, device, self.shape)

    def pairs(self, rows_of: Iterator[LogitsBlock], chunk: Any) -> Iterator[Pair]:
        student, size = self.student, self.student.local_size
        for rows in rows_of:
            own_BV = self.logits[rows.token_index, :size]
            if student.kernel_cls.whole_chunks:  # whose kernels only read them
                z_BV = own_BV if own_BV.stride(1) == 1 else own_BV.contiguous()
            else:
                z_BV = torch.empty_like(rows.z_BV)
                z_BV[:, : own_BV.shape[1]] = own_BV
                z_BV[:, size:] = -torch.inf
            of = (self.temperature, rows.span, rows.token_index, z_BV, student.compute_dtype)
            yield rows, block_at(student.tokens, *of)


class HeadTeacher:
    """A teacher's head, in the chunks and blocks of the student's."""

    def __init__(self, logits: ChunkedLogits) -> None:
        self.logits, self.vocab, self.kernels = logits, logits.vocab, logits.kernels
        self.tokens, self.gathered = logits.tokens, logits.gathered
        self.classes = logits.local_size

    def chunks(self) -> Iterator[Chunk]:
        return self.logits.chunks()

    def pairs(self, rows_of: Iterator[LogitsBlock], chunk: Any) -> Iterator[Pair]:
        return zip(rows_of, self.logits.blocks(chunk), strict=True)


Teacher = LogitsTeacher | HeadTeacher


class UnitValues(NamedTuple):
    """Of the tokens of a unit."""

    loss: Tensor
    z_term: Tensor  # what z-loss is of it
    per_token: tuple[Tensor, ...]  # four outputs
    labels: Tensor  # their log-probabilities
    p_labels: list[Tensor]  # p of the logits that these are of, where they are others
    known: tuple[Tensor, ...]  # lse of both, delta and the labels' lse
    dz: DzTerms
    total: Tensor  # of p


class PairedLogits:
    """A student's logits and a teacher's, and the divergence between them."""

    def __init__(
        self, student: Any, teacher: Teacher, pairs: Any, wanted: Sequence[WantedStats] = ()
    ) -> None:
        """`wanted` of the student and of the teacher."""
        self.student, self.teacher, self.kind = student, teacher, pairs
        self.wanted = wanted or (WantedStats(), WantedStats())
        self.columns = slice(0, student.local_size)

    def chunks(self) -> Iterator[Any]:
        """The student's; the teacher's of the same tokens is computed with it."""
        for chunk, teacher_chunk in zip(self.student.chunks(), self.teacher.chunks()):
            self.teacher_chunk = teacher_chunk
            yield chunk

    def blocks(self, chunk: Any) -> Iterator[Unit]:
        """Of one block each, which is in a CPU's cache from its product on."""
        pairs = self.teacher.pairs(self.student.blocks(chunk), self.teacher_chunk)
        yield from (Unit([pair]) for pair in pairs)

    def units(self, chunk: Any) -> Iterator[Unit]:
        """Those of a chunk at once where shards exchange statistics."""
        if self.student.vocab.sharded:
            yield Unit([pair for unit in self.blocks(chunk) for pair in unit.pairs])
        else:
            yield from self.blocks(chunk)

    def kernels(self) -> KernelPair:
        """With their scratch; given up before a GEMM."""
        kernels: Any = (self.student.kernels(), self.teacher.kernels())
        self.kind = replace(self.kind, exp=kernels[0].exp)
        pair_kernels: KernelPair = kernels
        return pair_kernels

    def untempered(
        self, unit: Unit, kernels: KernelPair, lse: Tensor | None = None
    ) -> tuple[TokenStats | None, list[Tensor]]:
        """Statistics and p [B, V] of the student at temperature 1, for the NLL term; the logits are
        divided by the temperature afterwards. No statistics where lse is known."""
        students, stats, p = [rows for rows, _ in unit.pairs], None, []
        temperatures = [rows.temperature_B for rows in students]
        for rows in students:
            rows.temperature_B = None
        if lse is None:
            student_args = (students, kernels[0], WantedStats())
            stats = stats_of(self.student, *student_args, learns=True)
            lse = stats.lse
        else:
            for rows in students:
                restore(rows, kernels[0].prepare(rows, derivative=True))
        for (rows, _, at), temperature_B in zip(unit.parts(), temperatures, strict=True):
            assert temperature_B is not None
            p.append(kernels[0].exp(rows.z_BV[:, self.columns] - lse[at, None]))
            rows.z_BV.div_(temperature_B[:, None])
            rows.temperature_B = temperature_B
        return stats, p

    def check_classes(self) -> None:
        """All ranks of a sharded vocabulary know by now that they have as many: logits have columns
        for the padding of a shard too, as its rows are."""
        stored, student = isinstance(self.teacher, LogitsTeacher), self.student
        size = student.local_rows if stored else student.local_size
        check_vocabulary(size, self.teacher.classes, sharded=student.vocab.sharded)

    def values(self, unit: Unit, kernels: KernelPair, *, tempered_nll: bool = False) -> UnitValues:
        """Steps 2 to 5. a is then in place of the student's logits, p in place of the teacher's.
        `tempered_nll`: a loss of the labels is of other logits, without their temperature."""
        untempered, p_labels = self.untempered(unit, kernels) if tempered_nll else (None, [])
        students, teachers = zip(*unit.pairs)
        of_own, of_other = zip(kernels, self.wanted)
        stats = [stats_of(self.student, students, *of_own, learns=True)]
        self.check_classes()
        with of_teacher():
            stats.append(stats_of(self.teacher, teachers, *of_other, learns=False))
        lse, kind = [x.lse for x in stats], self.kind
        delta = torch.zeros_like(lse[0])
        if kind.twice:
            first = (kind.first_sums(*self.ratio(part, lse)) for part in unit.parts())
            delta = kind.delta(*self.summed([self.sums(x, kernels[0]) for x in first]))
        known = [*lse, delta] if kind.twice else lse
        terms = (self.put_terms(part, known) for part in unit.parts())
        sums = kind.named(self.summed([self.sums(x, kernels[0]) for x in terms]))
        value, dz = kind.from_sums(sums)
        labels = untempered or stats[0]
        student, other = stats
        per_token = value, student.logprob, student.entropy, other.entropy
        return UnitValues(
            value,
            torch.zeros_like(value),
            per_token,
            labels.logprob,
            p_labels,
            (student.lse, other.lse, delta, labels.lse),
            dz,
            sums.total,
        )

    def recompute(
        self, unit: Unit, kernels: KernelPair, known_4N: Tensor, *, tempered_nll: bool = False
    ) -> list[Tensor]:
        """Steps 2 to 4 once more, from lse of both, delta and the labels' lse; their p, if those
        are of other logits."""
        *known, lse = known_4N[:, unit.token_index]
        _, p_labels = self.untempered(unit, kernels, lse) if tempered_nll else (None, [])
        for part in unit.parts():
            self.prepare(part, kernels)
            self.put_terms(part, known[: 2 + self.kind.twice])
        return p_labels

    def block_sums(
        self, unit: Unit, kernels: KernelPair, known: Sequence[Tensor], *, first: bool
    ) -> Any:
        """Steps 2 to 4 of a block, from lse of both, and delta: sums [k, blocks, B], of those that
        delta needs if `first`."""
        (part,) = unit.parts()
        self.prepare(part, kernels)
        if first:
            return self.sums(self.kind.first_sums(*self.ratio(part, known)), kernels[0])
        return self.sums(self.put_terms(part, known), kernels[0])

    def prepare(self, part: Any, kernels: KernelPair) -> None:
        """Step 2 of both."""
        for k, (rows, kernel) in enumerate(zip(part, kernels)):
            if rows.fresh:
                restore(rows, kernel.prepare(rows, derivative=not k))

    def ratio(self, part: Any, known: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rows, teacher, at = part
        logits = (x.z_BV[:, self.columns] for x in (rows, teacher))
        ratio: tuple[Tensor, Tensor] = self.kind.ratio(*logits, *(x[at, None] for x in known))
        return ratio

    def put_terms(self, part: Any, known: Sequence[Tensor]) -> PairSums:
        rows, teacher, _ = part
        terms: PairSums
        p_BV, a_BV, terms = self.kind.terms(*self.ratio(part, known))
        rows.z_BV[:, self.columns] = a_BV
        teacher.z_BV[:, self.columns] = p_BV
        return terms

    def sums(self, terms: Sequence[Tensor | None], kernels: Eager) -> Tensor:
        """[k, blocks, B] of k terms [B, V]."""
        there = [x for x in terms if x is not None]
        if not there[0].shape[1]:
            return there[0].new_zeros(len(there), 1, there[0].shape[0])
        return torch.stack([kernels.sums(x) for x in there])

    def summed(self, parts: list[Tensor]) -> Tensor:
        """[k, U] over all classes."""
        sums: Tensor = self.student.vocab.sum_blocks(ALGEBRA, torch.cat(parts, -1))
        return sums

    def write(
        self,
        part: Any,
        dz: DzTerms,
        target: Tensor | None,
        p: Tensor | None,
        kernels: KernelPair,
        sums: Any,
    ) -> None:
        """Steps 6 and 7, into the products that `sums` adds up; arguments as those of `put_dz`."""
        self.put_dz(part, dz, target, p)
        sums.put(part[0], kernels[0])

    def put_dz(
        self, part: Any, dz: DzTerms, target: Tensor | None = None, p: Tensor | None = None
    ) -> None:
        """Step 6, in place of a: `dz` with the factor of each token of the part; `target` [B] is
        added in the target's column, and `-target` times `p` [B, V] in all."""
        rows, teacher, _ = part
        a_BV, p_BV = (x.z_BV[:, self.columns] for x in (rows, teacher))
        a_BV.mul_(dz.gain[:, None]).addcmul_(p_BV, dz.shift[:, None])
        if target is not None and p is not None:
            a_BV.addcmul_(p, target[:, None], value=-1.0)
        if target is not None:
            rows.z_BV.scatter_add_(1, rows.y_B1, target[:, None])


def stats_of(
    part: Any, blocks: Sequence[LogitsBlock], kernels: Eager, wanted: WantedStats, *, learns: bool
) -> TokenStats:
    """Steps 2 to 5 of `xentlib.nll`, of one head's logits; they are whole again afterwards."""
    z_y, together = columns_of_units(part, blocks, kernels, wanted, learns=learns)
    return ALGEBRA.token_stats(z_y, together, part.vocab.size, TargetInfo(z_y, 1.0, 1.0))


def columns_of_units(
    part: Any, blocks: Sequence[LogitsBlock], kernels: Eager, wanted: WantedStats, *, learns: bool
) -> tuple[Tensor, NonTargetStats]:
    """Steps 2 to 4: the target's logit and the statistics of the others, of all shards."""
    columns = [kernels.stats(rows, wanted, dz_follows=learns) for rows in blocks]
    for rows, (z_y, _) in zip(blocks, columns, strict=True):
        restore(rows, z_y)
    z_y = torch.cat([x for x, _ in columns])
    fields = zip(*(x for _, x in columns), strict=True)
    rest = BlockStats(*(None if x[0] is None else torch.cat(x, -1) for x in fields))
    owned = torch.ones_like(z_y, dtype=torch.bool)
    if blocks[0].owned_B is not None:
        owned = torch.cat([x for rows in blocks if (x := rows.owned_B) is not None])
    most = z_y.shape[0] if part.gathered else part.tokens.valid.shape[0]
    combined: tuple[Tensor, NonTargetStats]
    combined = part.vocab.combine(ALGEBRA, z_y, owned, rest, 1.0, most)
    return combined


def restore(rows: LogitsBlock, z_y: Tensor) -> None:
    """The target's logit back into its column."""
    rows.z_BV.scatter_(1, rows.y_B1, z_y[:, None])


def in_halves(call: HeadCall, *, each: bool) -> HeadCall:
    """With half of the budget of a chunk for each of the two. A loss of `each` token sums no d
    weight over chunks: the smaller budget of a wide head costs it nothing."""
    if call.weight is None:
        return call
    row_bytes = 0 if call.rows.group else call.columns * call.compute_dtype.itemsize
    width = call.hidden.shape[1] if each else 0
    budget = chunk_bytes(call.chunk_bytes, call.hidden.device, row_bytes, width)
    return call._replace(chunk_bytes=max(1, budget // 2))
