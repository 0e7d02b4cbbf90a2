"""A sharded head and a call of it, in numbers: what the plan of every route reads; and what a
collective sends and takes.

Shapes: N tokens of a rank, V vocabulary, H hidden width, R ranks that share a head's rows, T tokens
of a rank in a chunk, K rows of every rank in a block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from xentlib.checks.call import resolve_dtypes
from xentlib.options import ITEMSIZE
from xentlib.plan.split import (
    BLOCK_CLASSES,
    ChunkPlan,
    default_chunk_bytes,
    pad_rows,
    plan_chunks,
    spread_tokens,
    stream_rows,
)
from xentlib.plan.time import Gpu

# What is computed while a collective is under way: a pass that makes statistics alone, the one that
# makes gradients, and the backward of what is before the head.
STATISTICS, GRADIENTS, TRUNK = "statistics", "gradients", "trunk"


class Rates(NamedTuple):
    """Of one GPU, an H100 or H200 in a node of eight, as it usually is in a run, which is less than
    its peak.

    Attributes:
        gemm: FLOP/s of products in 16 bits.
        node: bytes/s that it receives from the others of its node (NVLink 4).
        network: bytes/s that it receives from other nodes (400 Gbit/s a GPU). A node with fewer
            adapters than GPUs has that much less for each.
        latency: seconds of a collective that moves nothing, and has no step.
        step: seconds of each step of a collective, of which there are more, the more ranks.
        memory: bytes/s of its memory, read and written.
    """

    gemm: float = 650e12
    node: float = 350e9
    network: float = 50e9
    latency: float = 10e-6
    step: float = 2e-6
    memory: float = 2.6e12


@dataclass(frozen=True, slots=True)
class Exchange:
    """Collectives of one kind, and of one purpose, of a call.

    Attributes:
        kind: one of `xentlib.collectives.KINDS`.
        what: is sent.
        count: how many.
        bytes: of all of them, as `count_collectives` counts: the result of an all-gather, what goes
            into a reduce-scatter, the tensor of an all-reduce.
        ranks: that take part.
        nodes: that these ranks are spread over evenly.
        backward: in the backward pass, not in the forward.
        per_sync: only in the micro-batch that reduces gradients, not in each.
        under: what is computed meanwhile: "statistics" or "gradients" of another chunk or block,
            "trunk", the backward of what is before the head; "", nothing.
    """

    kind: str
    what: str
    count: int
    bytes: int
    ranks: int
    nodes: int = 1
    backward: bool = False
    per_sync: bool = False
    under: str = ""

    @property
    def received(self) -> float:
        """Bytes that a rank receives: all but its own part, twice in a ring's all-reduce."""
        return self._times * self.bytes * (self.ranks - 1) / self.ranks

    @property
    def _times(self) -> int:
        return 2 if self.kind == "all_reduce" else 1

    @property
    def steps(self) -> int:
        """Of each, one after the other. An all-gather and a reduce-scatter go around a ring: all
        ranks but one. An all-reduce goes around it twice, or along a chain of a node's ranks and a
        tree of nodes, up and down again; NCCL picks, by the size, and the fewer steps count here:
        those of the tree, which moves as many bytes."""
        if self.kind != "all_reduce":
            return self.ranks - 1
        in_node = self.ranks // self.nodes
        return 2 * min(self.ranks - 1, in_node - 1 + (self.nodes - 1).bit_length())

    def seconds(self, rates: Rates) -> float:
        """What its steps take, and the slower of two paths that carry at the same time: within a
        node each rank receives all but its own part; from other nodes a node's ranks receive what
        the node has not, each its share."""
        in_node = self.ranks // self.nodes
        within = self.received / rates.node if in_node > 1 else 0.0
        missing = self._times * self.bytes * (self.nodes - 1) / self.nodes
        waits = self.count * (rates.latency + rates.step * self.steps)
        return waits + max(within, missing / in_node / rates.network)


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """The arguments of `head_routes`, checked."""

    tokens_per_rank: int
    vocab_size: int
    hidden_size: int
    ranks: int
    replicas: int
    nodes: int
    tensor_parallel: int
    zero3: bool
    bias: bool
    low_rank: int
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
    rates: Rates

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
    def all_ranks(self) -> int:
        """That share the vocabulary."""
        return self.ranks * self.tensor_parallel

    @property
    def classes(self) -> int:
        """Of the head that ranks share: with tensor parallelism a part of the vocabulary."""
        return -(-self.vocab_size // self.tensor_parallel)

    @property
    def rows(self) -> int:
        """That the fullest rank holds; others are filled up to them where they are gathered."""
        return -(-self.classes // self.ranks)

    @property
    def frozen(self) -> bool:
        """Whether adapters have the head's gradient."""
        return self.low_rank > 0

    @property
    def low_entries(self) -> int:
        """Of A, in as many rows on each rank."""
        return -(-self.low_rank // self.ranks) * self.hidden_size

    def held(self, rows: int) -> int:
        """Entries of so many rows of the head, with their bias and those of B."""
        return rows * (self.hidden_size + self.bias + self.low_rank)

    def trained(self, rows: int) -> int:
        """Of these, those that have a gradient."""
        return rows * (self.low_rank or self.hidden_size + self.bias)

    @property
    def gpu(self) -> Gpu:
        return Gpu(self.rates.gemm, self.rates.memory)

    @property
    def on_cpu(self) -> bool:
        return self.platform == "cpu"

    def plan_of_own(self) -> ChunkPlan:
        """A rank's own tokens, the whole head."""
        shared = self.tensor_parallel > 1
        columns = self.classes + (self.on_cpu and shared)
        return self._planned(self.tokens_per_rank, columns, self._budget(local=not shared))

    def plan_of_classes(self) -> ChunkPlan | None:
        """Of a block of classes, which a rank's own tokens pass before the next one; None where
        they pass all classes at once, as they do those of an adapter."""
        twice = self.recompute and not self.low_rank
        if not twice or (self.tensor_parallel == 1 and self.classes <= BLOCK_CLASSES):
            return None
        columns = min(self.classes, BLOCK_CLASSES)
        return self._planned(self.tokens_per_rank, columns, self._budget(local=True))

    def plan_of_shared(self, rows: int, ranks: int) -> ChunkPlan:
        """Tokens of all `ranks`, `rows` of the head: the same T of each rank in a chunk, whole rows
        of a tile (row A10), and no more in all than a sum over them may have (row A6)."""
        columns = rows + (self.on_cpu and ranks > 1)  # one for the targets of other ranks
        plan = self._planned(ranks * self.tokens_per_rank, columns, self._budget(local=False))
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
        return rows, self._planned(self.tokens_per_rank, columns, self._budget(local=False))

    def _planned(self, tokens: int, columns: int, budget: int | None) -> ChunkPlan:
        dtype, compute = resolve_dtypes(self.dtype, self.head_dtype)[:2]
        sizes = tokens, columns, self.hidden_size
        plan = plan_chunks(*sizes, dtype=dtype, compute_dtype=compute, max_chunk_bytes=budget)
        if self.chunk_tokens is None:
            return plan
        return replace(plan, chunk_tokens=min(self.chunk_tokens, pad_rows(tokens)))

    def _budget(self, *, local: bool) -> int | None:
        """None where `plan_chunks` looks at the rows' bytes: of a whole head on a CPU."""
        if self.max_chunk_bytes is not None or (local and self.on_cpu):
            return self.max_chunk_bytes
        return default_chunk_bytes(self.platform)
