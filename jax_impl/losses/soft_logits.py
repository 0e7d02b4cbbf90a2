"""Logits of a head, or given, and the class probabilities of their tokens beside them: steps 2 to 6
of `xentlib.math.soft_labels`.

Shapes: N tokens, K classes of each, V vocabulary, T tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xentlib.jax.core.algebra import ALGEBRA, exp
from xentlib.jax.core.kernels import Logits
from xentlib.jax.core.layout import (
    at_columns,
    columns_of,
    of_width,
    per_class,
    per_token,
    sums_by_blocks,
    width,
)
from xentlib.jax.core.logits import Chunk, ChunkedLogits, logits_of
from xentlib.jax.core.loop import at_rows
from xentlib.jax.core.stats import over_shards
from xentlib.jax.core.vocab import sum_blocks
from xentlib.jax.losses.pairs import ChunkValues, PairTerms, restored
from xentlib.math.divergence import DzTerms
from xentlib.math.soft_labels import CrossEntropy, Largest, SoftSums
from xentlib.math.softmax import WantedStats


class SoftLogits(NamedTuple):
    """Logits, and in place of a teacher's the probabilities that are their labels: as many columns,
    or [K, M + 1] those of the further classes of each token."""

    student: ChunkedLogits
    teacher: ChunkedLogits | None
    probs: jax.Array | None
    kind: CrossEntropy

    @classmethod
    def of(
        cls, student: ChunkedLogits, teacher: ChunkedLogits | None, probs: jax.Array | None
    ) -> SoftLogits:
        kind = CrossEntropy(jnp, exp, ALGEBRA, student.options.scalars, student.vocab_size)
        return cls(student, teacher, probs, kind)

    @property
    def tempered_nll(self) -> bool:
        """There is no loss of classes beside this one."""
        return False

    def values(self, chunk: Chunk, wanted: tuple[WantedStats, WantedStats]) -> ChunkValues:
        """Steps 3 to 6; dz is made of a - p total, and of p."""
        head = self.student
        block = chunk.block._replace(more=None)
        z_y, blocks, left = head.kernels.stats(block, wanted[0])
        stats = self.kind.stats(*over_shards(head, chunk.rows_T, z_y, blocks))
        terms, sums = self.terms(chunk, restored(chunk, left), stats)
        total, loglik, *q_loglik = self.summed([self.classes(x) for x in sums if x is not None])
        soft_sums = SoftSums(total, loglik, q_loglik[0] if q_loglik else None)
        total, nll, logprobs = self.kind.from_sums(soft_sums)
        loss, z_term, slope = self.kind.regularised(nll, stats)
        dz = DzTerms(-jnp.ones_like(nll), jnp.zeros_like(nll) if slope is None else slope)
        per_token, known = (total, logprobs, stats.entropy, stats.lse), tuple(stats)
        with_slope = self.with_slope(terms, total, stats)
        return ChunkValues(loss, z_term, per_token, logprobs, known, dz, total, with_slope)

    def recompute(self, chunk: Chunk, stats: Largest, total_T: jax.Array) -> PairTerms:
        """The same once more, of what is known of the tokens."""
        left = self.student.kernels.prepare(chunk.block._replace(more=None))
        terms, _ = self.terms(chunk, restored(chunk, left), stats)
        return self.with_slope(terms, total_T, stats)

    def terms(self, chunk: Chunk, logits: Logits, stats: Largest) -> tuple[PairTerms, SoftSums]:
        """p and a, and terms of the sums; NaN of a negative probability."""
        q_TV, weights = self.labels(chunk, logits.z_TV), self.student.shape.class_weights_V
        q_TV = jnp.where(q_TV < 0, jnp.nan, q_TV)
        of, c_TV = beside_classes(stats), None if weights is None else per_class(weights)
        log_p_TV, a_TV = self.kind.log_p(logits.z_TV, of), self.kind.target(q_TV, c_TV)
        q_loglik = None if a_TV is q_TV else q_TV * log_p_TV
        terms = PairTerms(self.kind.exp(log_p_TV), self.classes(a_TV), logits, None)
        return terms, SoftSums(a_TV, a_TV * log_p_TV, q_loglik)

    def with_slope(self, terms: PairTerms, total_T: jax.Array, stats: Largest) -> PairTerms:
        """a - p total in place of a."""
        total = per_token(total_T)
        top_TV = self.kind.at_top(terms.a_TV, total, beside_classes(stats))
        slope_TV = terms.a_TV - total * terms.p_TV
        return terms._replace(a_TV=jnp.where(terms.p_TV > 0.5, top_TV, slope_TV))

    def labels(self, chunk: Chunk, like_TV: jax.Array) -> jax.Array:
        """[T, V] q, filled up as the logits are."""
        if self.teacher is not None:
            labels = logits_of(self.teacher, chunk.start // self.student.chunk_rows)
            q_TV = labels.block.z_TV
            return of_width(q_TV, width(like_TV), 0.0)
        more = chunk.block.more
        assert more is not None
        assert self.probs is not None
        probs_TK = at_rows(self.student, chunk, self.probs).T
        return jnp.zeros_like(like_TV).at[at_columns(more.columns)].add(probs_TK, mode="drop")

    def classes(self, x_TV: jax.Array) -> jax.Array:
        """0 where a column is no class."""
        first = self.student.shape.padded_from
        if first is None:
            return x_TV
        return jnp.where(columns_of(x_TV) < first, x_TV, 0.0)

    def summed(self, terms: list[jax.Array]) -> list[jax.Array]:
        """[T] of each over all classes."""
        sums = jnp.stack([x.T for x in sums_by_blocks(terms)])
        return list(sum_blocks(self.student.options.axis, sums))

    def dz(self, chunk: Chunk, terms: PairTerms, dz: DzTerms, target: Any = None) -> jax.Array:
        """Step 6, `dz` with the factor of each token."""
        gain, shift = map(per_token, dz)
        dz_TV: jax.Array = gain * terms.a_TV + shift * terms.p_TV
        return dz_TV


def beside_classes(stats: Largest) -> Largest:
    """With an axis for classes."""
    return Largest(*map(per_token, stats))
