"""Shards of a vocabulary: their sizes, their classes, and what all ranks must agree on."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, NoReturn

from xentlib.checks.validators import check_number


def check_shards(sizes: Sequence[int], vocab_size: int) -> None:
    """Refuse shards that cannot be those of the vocabulary they claim to be."""
    check_number(
        "vocab_size",
        vocab_size,
        "an integer >= 1, the classes of all shards",
        ok=isinstance(vocab_size, int) and vocab_size >= 1,
    )
    if sum(sizes) < vocab_size:
        raise ValueError(
            f"`vocab_parallel` must spread {vocab_size} classes over its ranks; got shards of "
            f"{tuple(sizes)}, {sum(sizes)} in all. Pass the number of classes that they hold."
        )


def refuse_whole_head(vocab_size: int, ranks: int) -> NoReturn:
    """Of as many classes, on each of several ranks."""
    raise ValueError(
        f"`vocab_parallel` must come with this rank's part of {vocab_size} classes; got all of "
        f"them on each of {ranks} ranks. Pass each rank's own columns, or `vocab_parallel=None`."
    )


def check_tiles(shards: Sequence[tuple[int, int]], vocab_size: int) -> None:
    """Refuse declared shards, (start, stop) of each rank, that do not give every class to one."""
    if len(shards) > 1 and all(shard == (0, vocab_size) for shard in shards):
        refuse_whole_head(vocab_size, len(shards))
    end = 0
    for start, stop in sorted(shard for shard in shards if shard[0] < shard[1]):
        if start != end:
            break
        end = stop
    else:
        if end == vocab_size:
            return
    raise ValueError(
        f"`shard` must give each of {vocab_size} classes to one rank of `vocab_parallel`; got "
        f"classes {', '.join(f'{start} to {stop}' for start, stop in shards)}. Pass "
        f"`VocabShard(start, stop, {vocab_size})` of this rank's own columns."
    )


def check_shard(shard: Any, columns: int) -> None:
    """Refuse a `shard=` that does not describe `columns` columns of logits."""
    start, stop, vocab_size, padding = shard.start, shard.stop, shard.vocab_size, shard.padding
    numbers = [x for x in (start, stop, vocab_size, padding) if isinstance(x, Integral)]
    if len(numbers) < 4:  # made from an axis index: nothing to read
        return
    if not (0 <= start <= stop <= vocab_size and padding >= 0):
        raise ValueError(
            f"`shard` must have 0 <= start <= stop <= vocab_size and padding >= 0; got {shard}. "
            f"Pass the classes of this rank's columns."
        )
    if stop - start + padding != columns:
        raise ValueError(
            f"`shard` must describe the {columns} columns of `logits`; got {stop - start} classes "
            f"and {padding} of padding ({shard}). Pass this rank's columns alone, and declare "
            f"padded ones as `VocabShard(..., padding=...)`."
        )


def check_ranks_known(shard: Any) -> None:
    """Refuse, for `vocab_parallel`, a shard that does not say which ranks have the others."""
    if shard.over is None:
        raise TypeError(
            f"`vocab_parallel` must say which ranks share the vocabulary; got {shard}. Pass "
            f"`VocabShard.of_ranks(rows, group)`, made once, or the group of these ranks."
        )


def check_rows(shard: Any, rows: int) -> None:
    """Refuse a head whose rows are not those that `VocabShard.of_ranks` was told of."""
    if shard.size + shard.padding != rows:
        raise ValueError(
            f"`vocab_parallel` must describe the {rows} rows of `weight`; got a shard of "
            f"{shard.size} classes and {shard.padding} rows of padding. Pass "
            f"`VocabShard.of_ranks(rows, group)` of this head."
        )


def refuse_uneven(rows: Sequence[int]) -> NoReturn:
    """Of ranks that did not say how many rows each has, and have not as many."""
    raise ValueError(
        f"`vocab_parallel` must come with as many rows (columns of logits) on every rank, or say "
        f"how many each has; got {', '.join(map(str, rows))}. Pass "
        f"`vocab_parallel=VocabShard.of_ranks(rows, group)`, made once on every rank, or pad the "
        f"last ones and pass `PaddedVocab(group, vocab_size)`."
    )


def refuse_inconsistent(names: Sequence[str]) -> None:
    """Refuse arguments that differ between the ranks that a vocabulary is spread over."""
    if not names:
        return
    name = names[0]
    what = {
        "gradient of the head": "`weight` and `bias` must require grad on every rank of "
        "`vocab_parallel`, or on none, like `a` and `b` of a `LowRankHead`",
        "gradient": "`hidden` must require grad on every rank of `vocab_parallel`, or on none, "
        "like `a` of a `LowRankHead`",
        "gather": "`gather` and `tokens_parallel` must be the same on every rank of the head",
        "function": "the function must be the same on every rank of the head",
        "shard": "sizes of shards (`shard=`, `VocabShard.of_ranks`, a DTensor) must be declared on "
        "every rank of `vocab_parallel`, or on none",
    }.get(name, f"`{name}` must be the same on every rank of `vocab_parallel`")
    way = "Pass the same to all."
    if name in ("labels", "hidden", "temperature", "token_weights"):
        way = "Pass `tokens_parallel` too where each rank has tokens of its own."
    raise ValueError(f"{what}; got ranks that differ. {way}")


def check_upstream(found: Sequence[float]) -> NoReturn:
    """Refuse gradients of a loss that differ between ranks whose tokens are in one sum."""
    raise ValueError(
        f"the gradient of `loss` must be the same on every rank of `tokens_parallel`, whose tokens "
        f"are in one gradient of the head; got {', '.join(f'{x:g}' for x in found)}. Put what "
        f"differs between ranks into `denominator` or `token_weights`."
    )
