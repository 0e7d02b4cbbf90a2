"""A vocabulary in shards: which classes each rank has, and when the ranks meet.

Shapes: V vocabulary, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from xentlib.arguments import Scalars
from xentlib.checks.shards import check_shards
from xentlib.plan.chunks import ROW_MULTIPLE, pad_rows

# What ranks of a vocabulary must have the same travels with the first MAX of a call, which in
# PyTorch has room for so many numbers whatever the function and its options: ranks whose calls
# differ then learn it from a MAX of one size. `chunked_nll` has most, 37 beside the scalar options.
ROOM = 40 + len(Scalars._fields)


@dataclass(frozen=True, slots=True)
class VocabShard:
    """One rank's part of a vocabulary: classes `start` to `stop` of `vocab_size`.

    `padding` more columns (rows of a head) follow them that are no classes. In JAX `start` and
    `stop` may be arrays, made from the axis index. One that `of_ranks` has made also says which
    ranks have the other parts, and can be passed as `vocab_parallel`.
    """

    start: Any
    stop: Any
    vocab_size: int
    padding: Any = 0
    over: Any = None  # the ranks that have the other parts
    largest: int = 0  # rows of the largest part; 0: parts are of one size, but for the last ones

    @classmethod
    def of_ranks(cls, rows: int, over: Any, vocab_size: int | None = None) -> VocabShard:
        """This rank's part, where parts are of any sizes. PyTorch only: in JAX they are of one.

            shard = VocabShard.of_ranks(len(my_rows), group)  # once, at set-up, on every rank
            loss = chunked_nll(hidden, my_rows, labels, vocab_parallel=shard).loss

        Args:
            rows: of this rank's part of the head, or columns of its logits, padding included; may
                be 0.
            over: the ranks that share the vocabulary, a ProcessGroup or a one-dimensional
                DeviceMesh. Parts are in rank order.
            vocab_size: classes of all parts, where the last rows are padding; without it, all rows.

        Raises:
            ValueError: `rows` of all ranks are fewer than `vocab_size`.

        Sends one number of each rank, as an object. Every rank must call it.
        """
        import torch.distributed as dist

        group = over.get_group() if hasattr(over, "get_group") else over
        sizes: list[Any] = [0] * dist.get_world_size(group)
        dist.all_gather_object(sizes, int(rows), group=group)
        shard = shard_of(tuple(sizes), dist.get_rank(group), vocab_size)
        return replace(shard, over=over, largest=max(sizes))

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
