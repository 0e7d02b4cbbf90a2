"""A vocabulary in shards: which classes each rank has, and when the ranks meet.

Shapes: V vocabulary, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from xentlib.checks.shards import check_shards
from xentlib.plan.chunks import ROW_MULTIPLE, ChunkPlan, pad_rows


@dataclass(frozen=True, slots=True)
class VocabShard:
    """One rank's part of a vocabulary: classes `start` to `stop` of `vocab_size`.

    `padding` more columns (rows of a head) follow them that are no classes. In JAX `start` and
    `stop` may be arrays, made from the axis index.
    """

    start: Any
    stop: Any
    vocab_size: int
    padding: Any = 0

    @property
    def size(self) -> Any:
        return self.stop - self.start


class PaddedVocab(NamedTuple):
    """For `vocab_parallel`: what it takes otherwise, and how many classes the shards hold in all.

    Rows of the head, or columns of the logits, beyond `vocab_size` in rank order are padding:
    whatever they hold, NaN included, they take no part in the softmax, label smoothing does not
    count them, their gradient is 0.
    """

    over: Any
    vocab_size: int


def shard_of(sizes: tuple[int, ...], rank: int, vocab_size: int | None = None) -> VocabShard:
    """The shard of `rank` from every rank's size, in rank order; a size may be 0.

    Offsets come from the sizes: rank times the local size is wrong wherever V is no multiple of P.
    What lies beyond `vocab_size` is padding.
    """
    if vocab_size is None:
        vocab_size = sum(sizes)
    check_shards(sizes, vocab_size)
    start = min(sum(sizes[:rank]), vocab_size)
    stop = min(start + sizes[rank], vocab_size)
    return VocabShard(start, stop, vocab_size, sizes[rank] - (stop - start))


def spread_tokens(chunk_tokens: int, ranks: int, longest: int) -> tuple[int, int]:
    """Tokens of each rank in a chunk, the last one ragged, and of each rank in all: as many as the
    longest has, in whole rows of a GEMM's tile (row A10).

    Args:
        chunk_tokens: of a chunk that does not know of ranks.
        ranks: whose tokens meet.
        longest: tokens of the rank with most.
    """
    most = max(ROW_MULTIPLE, chunk_tokens // ranks // ROW_MULTIPLE * ROW_MULTIPLE)
    length = pad_rows(longest)
    return max(ROW_MULTIPLE, min(most, length)), length


def stream_rows(rows: int, hidden_size: int, ranks: int, budget: int) -> int:
    """Rows of each rank in a block of a head that passes by; blocks are of one size, or nearly so.

    Beside a chunk of logits there are up to eight arrays of a block: two that travel, one that is
    multiplied, the sum of its d weight, one that leaves, and copies. Together they fit the budget.

    Args:
        rows: of every rank, ceil(V / ranks).
        hidden_size: H.
        ranks: that share the head.
        budget: bytes of a chunk's logits.
    """
    most = max(1, min(rows, budget // (8 * 4 * max(1, ranks * hidden_size))))
    blocks = max(1, -(-rows // most))
    return max(1, -(-rows // blocks))


# FLOP of a chunk's logits from which a second computation costs more than the two exchanges that
# spare it. Two of gloo between processes of one machine: 2 ms, 2e8 FLOP of a core; of NCCL: 50 us,
# 4e10 FLOP of an H100. Several times that, since ranks that meet more often wait more often.
EXCHANGE_FLOPS = {"cpu": 1e9, "accelerator": 2e11}


def exchanges_per_chunk(plan: ChunkPlan, platform: str) -> bool:
    """How `chunked_nll` over vocabulary shards learns each token's lse before it differentiates.

    True: ranks exchange statistics in every chunk, two collectives each, and the logits are
    computed once (three GEMMs). False: two collectives in all, whatever the number of chunks, and
    the logits are computed twice (four GEMMs). One chunk needs neither. In PyTorch a softcap makes
    it four GEMMs and two collectives always: its derivative is gone once it has been applied.

    Args:
        plan: of the call, from `plan_chunks` with this rank's rows of the head.
        platform: "cpu" or another.
    """
    flops = 2.0 * plan.chunk_tokens * plan.vocab_size * plan.hidden_size
    least = EXCHANGE_FLOPS["cpu" if platform == "cpu" else "accelerator"]
    return plan.num_chunks > 1 and flops >= least
