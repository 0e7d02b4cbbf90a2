"""A sharded head and a call of it, in numbers: what the plan of every route reads.

Shapes: N tokens of a rank, V vocabulary, H hidden width, R ranks that share a head's rows, T tokens
of a rank in a chunk, K rows of every rank in a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from xentlib.dtypes import ITEMSIZE, resolve_dtypes
from xentlib.plan.chunks import (
    ChunkPlan,
    default_chunk_bytes,
    pad_rows,
    plan_chunks,
)
from xentlib.plan.shards import spread_tokens, stream_rows


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """The arguments of `head_routes`, checked."""

    tokens_per_rank: int
    vocab_size: int
    hidden_size: int
    ranks: int
    replicas: int
    nodes: int
    dtype: str
    head_dtype: str
    reduce_dtype: str
    param_dtype: str
    micro_batches: int
    kept: bool
    module: bool
    recompute: bool
    options: frozenset[str]
    max_chunk_bytes: int | None
    chunk_tokens: int | None
    block_rows: int | None
    platform: str
    kernels: bool

    @property
    def gemm_dtype(self) -> str:
        return resolve_dtypes(self.dtype, self.head_dtype)[0]

    @property
    def gemm_size(self) -> int:
        return ITEMSIZE[self.gemm_dtype]

    @property
    def size(self) -> int:
        """Of the compute dtype."""
        return ITEMSIZE[resolve_dtypes(self.dtype, self.head_dtype)[1]]

    @property
    def rows(self) -> int:
        """That the fullest rank holds; others are filled up to them where they are gathered."""
        return -(-self.vocab_size // self.ranks)

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    @property
    def rows_of_node(self) -> int:
        """Of the place of a rank in all nodes together."""
        return self.nodes * self.rows

    def plan_of_own(self) -> ChunkPlan:
        """A rank's own tokens, the whole head."""
        return self._planned(self.tokens_per_rank, self.vocab_size, self._budget(own=True))

    def plan_of_shared(self, rows: int, ranks: int) -> ChunkPlan:
        """Tokens of all `ranks`, `rows` of the head: the same T of each rank in a chunk, whole rows
        of a tile (row A10), and no more in all than a sum over them may have (row A6)."""
        columns = rows + (self.on_cpu and ranks > 1)  # one for the targets of other ranks
        plan = self._planned(ranks * self.tokens_per_rank, columns, self._budget(own=False))
        if self.chunk_tokens is not None:
            plan = replace(plan, chunk_tokens=ranks * self.chunk_tokens)
        tokens, length = spread_tokens(plan.chunk_tokens, ranks, self.tokens_per_rank)
        return replace(plan, num_tokens=ranks * length, chunk_tokens=ranks * tokens)

    def plan_of_blocks(self) -> tuple[int, ChunkPlan]:
        """K, and a rank's own tokens over the R K columns of a block."""
        budget = self.max_chunk_bytes or default_chunk_bytes(self.platform)
        rows = self.block_rows or stream_rows(self.rows, self.hidden_size, self.ranks, budget)
        rows = min(rows, self.rows)
        columns = self.ranks * rows + self.on_cpu
        return rows, self._planned(self.tokens_per_rank, columns, self._budget(own=False))

    def _planned(self, tokens: int, columns: int, budget: int | None) -> ChunkPlan:
        dtype, compute = resolve_dtypes(self.dtype, self.head_dtype)[:2]
        plan = plan_chunks(
            tokens,
            columns,
            self.hidden_size,
            dtype=dtype,
            compute_dtype=compute,
            max_chunk_bytes=budget,
        )
        if self.chunk_tokens is None:
            return plan
        return replace(plan, chunk_tokens=min(self.chunk_tokens, pad_rows(tokens)))

    def _budget(self, *, own: bool) -> int | None:
        """None where `plan_chunks` looks at the rows' bytes: of a whole head on a CPU."""
        if self.max_chunk_bytes is not None or (own and self.on_cpu):
            return self.max_chunk_bytes
        return default_chunk_bytes(self.platform)
