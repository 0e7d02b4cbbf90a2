"""Steps 2 to 7 of `xentlib.divergence`: chunks of a student's logits, and of a teacher's beside
them.

Shapes: N tokens, V vocabulary, T tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xentlib.jax.core.algebra import exp
from xentlib.jax.core.kernels import Logits, is_target
from xentlib.jax.core.layout import of_width, per_token, sums_by_blocks, width
from xentlib.jax.core.logits import Chunk, ChunkedLogits, logits_of
from xentlib.jax.core.stats import stats_of
from xentlib.jax.core.vocab import sum_blocks
from xentlib.math.divergence import KINDS, DzTerms, Kind, PairSums
from xentlib.math.softmax import TokenStats, WantedStats


class PairTerms(NamedTuple):
    """Of a chunk, class by class, what dz is made of."""

    p_TV: jax.Array
    a_TV: jax.Array
    student: Logits  # whole, the target's column too
    p_labels: jax.Array | None  # of the student at temperature 1, where the divergence has another


class ChunkValues(NamedTuple):
    """Of the tokens of a chunk."""

    loss: jax.Array
    z_term: jax.Array  # what z-loss is of it
    per_token: tuple[jax.Array, ...]  # four outputs
    labels: jax.Array  # their log-probabilities
    known: tuple[jax.Array, ...]  # lse of both, delta and the labels' lse
    dz: DzTerms
    total: jax.Array  # of p
    terms: PairTerms


class PairedLogits(NamedTuple):
    """A student's logits and a teacher's, and the divergence between them."""

    student: ChunkedLogits
    teacher: ChunkedLogits
    kind: Kind

    @classmethod
    def of(cls, student: ChunkedLogits, teacher: ChunkedLogits, kind: str) -> PairedLogits:
        beta = student.options.scalars.beta
        return cls(student, teacher, KINDS[kind](jnp, exp, 0.0 if beta is None else beta))

    @property
    def tempered_nll(self) -> bool:
        """Whether the NLL term has other logits than the divergence, which are divided by a
        temperature."""
        scalars, temperature = self.student.options.scalars, self.student.arrays.temperature
        return bool(scalars.nll_weight) and temperature is not None

    def untempered(self, chunk: Chunk, lse: Any = None) -> tuple[TokenStats | None, Any]:
        """Statistics and p of the student's logits before their temperature; not the statistics,
        where lse is known."""
        if not self.tempered_nll:
            return None, None
        block, head, stats = chunk.block._replace(temperature_T=None), self.student, None
        if lse is None:
            z_y, blocks, left = head.kernels.stats(block, WantedStats())
            stats = stats_of(head, chunk.rows_T, z_y, blocks)
            lse = stats.lse
        else:
            left = head.kernels.prepare(block)
        return stats, self.kind.exp(restored(chunk, left).z_TV - per_token(lse))

    def values(self, chunk: Chunk, wanted: tuple[WantedStats, WantedStats]) -> ChunkValues:
        """Steps 3 to 5."""
        untempered, p_labels = self.untempered(chunk)
        chunks, heads = (chunk, self.teacher_chunk(chunk)), (self.student, self.teacher)
        stats, logits = [], []
        for head, part, want in zip(heads, chunks, wanted, strict=True):
            z_y, blocks, left = head.kernels.stats(part.block, want)
            stats.append(stats_of(head, part.rows_T, z_y, blocks))
            logits.append(restored(part, left))
        lse, kind = [x.lse for x in stats], self.kind
        delta = jnp.zeros_like(lse[0])
        if kind.twice:
            delta = kind.delta(*self.summed(kind.first_sums(*self.ratio(logits, lse))))
        known = [*lse, delta] if kind.twice else lse
        p_TV, a_TV, terms = kind.terms(*self.ratio(logits, known))
        sums = PairSums(*self.summed(terms))
        value, dz = kind.from_sums(sums)
        pair_terms, labels = PairTerms(p_TV, a_TV, logits[0], p_labels), untempered or stats[0]
        one, other = stats
        per_token = (value, one.logprob, one.entropy, other.entropy)
        statistics = (one.lse, other.lse, delta, labels.lse)
        none = jnp.zeros_like(value)
        logprob = labels.logprob
        return ChunkValues(value, none, per_token, logprob, statistics, dz, sums.total, pair_terms)

    def recompute(self, chunk: Chunk, known: list[jax.Array]) -> PairTerms:
        """Steps 3 and 4 once more, from lse of both, delta and the labels' lse [T]."""
        _, p_labels = self.untempered(chunk, known[3])
        logits = [
            restored(part, head.kernels.prepare(part.block))
            for head, part in ((self.student, chunk), (self.teacher, self.teacher_chunk(chunk)))
        ]
        p_TV, a_TV, _ = self.kind.terms(*self.ratio(logits, known[: 2 + self.kind.twice]))
        return PairTerms(p_TV, a_TV, logits[0], p_labels)

    def teacher_chunk(self, chunk: Chunk) -> Chunk:
        """The teacher's logits of the same tokens."""
        return logits_of(self.teacher, chunk.start // self.student.chunk_rows)

    def ratio(self, logits: list[Logits], known: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        sizes = [width(x.z_TV) for x in logits]  # zeros may fill either head up
        padded = [of_width(x.z_TV, max(sizes), -jnp.inf) for x in logits]
        w_TV, x_TV = self.kind.ratio(*padded, *map(per_token, known))
        return of_width(w_TV, sizes[0], 0.0), of_width(x_TV, sizes[0], 0.0)

    def summed(self, terms: Any) -> list[Any]:
        """[T] of each over all classes."""
        sums = jnp.stack([x.T for x in sums_by_blocks([x for x in terms if x is not None])])
        rows = iter(sum_blocks(self.student.options.axis, sums))
        return [None if x is None else next(rows) for x in terms]

    def dz(self, chunk: Chunk, terms: PairTerms, dz: DzTerms, target: Any = None) -> jax.Array:
        """Step 6, `dz` with the factor of each token; `target` [T] is added in the target's column,
        and `-target` times the labels' p in all, where these are of other logits."""
        gain, shift = map(per_token, dz)
        dz_TV: jax.Array = gain * terms.a_TV + shift * terms.p_TV
        if target is None:
            return dz_TV
        if terms.p_labels is not None:
            dz_TV = dz_TV - per_token(target) * terms.p_labels
        return dz_TV + jnp.where(is_target(chunk.block, dz_TV), per_token(target), 0.0)


def restored(chunk: Chunk, logits: Logits) -> Logits:
    """With the target's logit in its column again."""
    own_TV = is_target(chunk.block, logits.z_TV)
    return logits._replace(z_TV=jnp.where(own_TV, per_token(logits.z_y), logits.z_TV))
