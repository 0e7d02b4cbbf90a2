"""A vocabulary in shards: which classes this rank has, and how many all ranks have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from xentlib.checks.validators import check_shards

__all__ = ["PaddedVocab", "VocabShard", "shard_of"]


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
