"""Step 1 in PyTorch: which tokens count, where their labels are, and whose tokens a chunk has.

Shapes: N tokens, M valid tokens, T tokens of a chunk, H hidden width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.checks.call import CALLS
from xentlib.math.softmax import Algebra, BlockStats, NonTargetStats, TargetInfo
from xentlib.plan import ChunkPlan, plan_chunks
from xentlib.shards import VocabShard
from xentlib.torch.array_spec import dtype_name
from xentlib.torch.core.device import chunk_bytes, device_info
from xentlib.torch.operators import HeadCall


class LocalVocab:
    """Which classes this rank's columns are: all of them, or those of a shard, in the order of
    classes or in one of their own. Nothing is exchanged."""

    sharded = False

    def __init__(self, size: int, shard: VocabShard | None = None, order: Any = None) -> None:
        """`order`: of classes that do not stand in their order, by which a shard is counted then.
        It has `to_place(classes)` and `to_class(columns)`."""
        self.size, self.shard, self.order = size, shard, order
        self.local_size: int = size if shard is None else shard.size
        self.largest = self.local_size

    def own_part(self, weights: Tensor) -> Tensor:
        """Of [V] numbers."""
        if self.order is not None:
            columns = torch.arange(self.local_size, device=weights.device)
            return weights[self.order.to_class(columns)]
        return weights if self.shard is None else weights[self.shard.start : self.shard.stop]

    def to_columns(self, classes: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of classes of any shape, and which of them are on this rank, None for all. A shard's are
        counted from its start, in the order of classes or in its own; what is elsewhere is in the
        spare column."""
        if self.shard is None:
            return classes, None
        columns = classes if self.order is None else self.order.to_place(classes)
        owned = (columns >= self.shard.start) & (columns < self.shard.stop)
        return torch.where(owned, columns - self.shard.start, self.shard.size), owned

    def to_class(self, columns: Tensor) -> Tensor:
        """Of columns of this rank, as floats; the first of several has the lowest."""
        if self.order is not None:
            # Where no other class is on this rank a column is any number.
            index = columns.long().clamp(0, max(0, self.local_size - 1))
            classes: Tensor = self.order.to_class(index)
            return classes.to(columns.dtype)
        return columns if self.shard is None else columns + self.shard.start

    def combine(
        self,
        algebra: Algebra,
        z_y: Tensor,
        owned: Tensor,
        rest: BlockStats,
        weights: Tensor | float,
        most: int,
    ) -> tuple[Tensor, NonTargetStats]:
        """As `ShardedVocab` has it: these are of all classes already."""
        return z_y, algebra.together(rest)

    def sum_blocks(self, algebra: Algebra, sums: Tensor) -> Tensor:
        """[k, N] of sums [k, blocks, N], exactly."""
        total: Tensor = algebra.value(self.added(words_of(algebra, sums)), sums)
        return total.view(len(sums), -1)

    def added(self, words: Tensor) -> Tensor:
        """Over all shards."""
        return words

    def of_owners(self, values: Tensor) -> Tensor:
        """Numbers of which one shard has each, and the others 0."""
        return values

    def offered(self, top: Tensor, top_k: int) -> Tensor:
        """[2, M, tokens]: `top_k` largest of every shard, out of this one's [2, K, tokens], class
        and logit, as numbers of which one shard has each."""
        return top


def words_of(algebra: Algebra, sums: Tensor) -> Tensor:
    """[words, k N] of sums [k, blocks, N]."""
    words: Tensor = algebra.words(sums.transpose(0, 1).flatten(1))
    return words


class FurtherClasses(NamedTuple):
    """Classes of each token whose logits are taken out, as the target's is: [N, K] each."""

    ids: Tensor  # the target's where there is none
    columns: Tensor  # as `Selected.labels`
    owned: Tensor | None

    def at(self, token_index: slice | Tensor) -> FurtherClasses:
        """Of some tokens."""
        owned = None if self.owned is None else self.owned[token_index]
        return FurtherClasses(self.ids[token_index], self.columns[token_index], owned)


class Selected(NamedTuple):
    """Step 1: the tokens that count. Of labels on the CPU only they are computed, since reading
    their number costs no device sync; elsewhere every token is, the rest masked."""

    labels: Tensor  # [N] int64, the target's column; 0 where a label is no class
    targets: Tensor  # [N] int64, its class: the column of a whole vocabulary
    owned: Tensor | None  # [N] the column is on this rank; None: they all are
    valid: Tensor  # [N]
    bad: Tensor  # [N] valid, with a label outside the vocabulary; never of labels on the CPU
    rows: Tensor | None  # [M] where the computed tokens are; None if all N are
    packed: bool
    more: FurtherClasses | None = None

    @property
    def computed(self) -> int:
        return self.valid.shape[0] if self.rows is None else self.rows.shape[0]

    def token_index(self, start: int, stop: int) -> slice | Tensor:
        """Places of the computed tokens from `start` to `stop`."""
        return slice(start, stop) if self.rows is None else self.rows[start:stop]

    def part(self, index: slice | Tensor) -> Selected:
        """Of computed tokens at these places, all of which are computed."""
        labels, targets, valid, bad = (
            x[index] for x in (self.labels, self.targets, self.valid, self.bad)
        )
        owned = None if self.owned is None else self.owned[index]
        more = None if self.more is None else self.more.at(index)
        return Selected(labels, targets, owned, valid, bad, None, self.packed, more)

    def of_columns(self, vocab: LocalVocab) -> Selected:
        """With the columns of a vocabulary."""
        columns, owned = vocab.to_columns(self.targets)
        more = self.more
        if more is not None:
            more = FurtherClasses(more.ids, *vocab.to_columns(more.ids))
        return self._replace(labels=columns, owned=owned, more=more)

    def with_ids(self, ids: Tensor | None, vocab_size: int) -> Selected:
        """With further classes [N, K], -1 for none. One that is no class makes the token bad."""
        if ids is None:
            return self
        ids = ids.long()
        there = (ids >= 0) & (ids < vocab_size)
        wrong = self.valid & bad_ids(ids, vocab_size).any(1)
        ids = torch.where(there, ids, self.targets[:, None])
        return self._replace(more=FurtherClasses(ids, ids, None), bad=self.bad | wrong)

    def clean(self, values: Tensor) -> Tensor:
        """Values [..., N]: NaN where the label was bad, 0 where the token is not valid."""
        values = torch.where(self.bad, torch.nan, values)
        return torch.where(self.valid, values, 0.0)


def select_tokens(
    labels: Tensor,
    where: Tensor | None,
    ignore_index: int,
    vocab: LocalVocab,
    device: torch.device,
    ids: Tensor | None = None,
) -> Selected:
    """Of a call on `device`. Over shards labels are checked once all ranks are known to have the
    same."""
    valid_N, rows_M = counted(labels, where, ignore_index)
    labels = labels.long()
    in_range_N = (labels >= 0) & (labels < vocab.size)
    bad_N = valid_N & ~in_range_N
    packed = device_info(labels).host_readable
    if vocab.shard is None:
        check_labels(labels, bad_N, ignore_index, vocab.size)
        check_ids(ids, valid_N, vocab.size)
    if packed and not device_info(device).host_readable:  # never over shards
        return onto_device(labels, valid_N, rows_M, device).with_ids(ids, vocab.size)
    targets_N = torch.where(valid_N & in_range_N, labels, 0)
    of_labels = Selected(targets_N, targets_N, None, valid_N, bad_N, rows_M, packed)
    return of_labels.with_ids(ids, vocab.size).of_columns(vocab)


def counted(
    labels: Tensor, where: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """Which tokens are valid [N], and where those are that are computed [M]; None if all N are."""
    valid_N = labels.long() != ignore_index  # as a uint8, -100 would be 156
    if where is not None:
        valid_N = valid_N & where
    rows_M = valid_N.nonzero()[:, 0] if device_info(labels).host_readable else None
    if rows_M is not None and rows_M.shape[0] == labels.shape[0]:
        rows_M = None
    return valid_N, rows_M


def onto_device(
    labels: Tensor, valid: Tensor, rows: Tensor | None, device: torch.device
) -> Selected:
    """What the host knows of tokens, in one copy that nobody waits for."""
    parts = [torch.where(valid, labels, -1), *(() if rows is None else (rows,))]
    sizes = [x.shape[0] for x in parts]
    # Pinned, as pageable memory beyond a staging buffer would be waited for.
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    torch.cat(parts, out=packed)
    labels, *more = packed.to(device, non_blocking=device_info(device).takes_copies).split(sizes)
    valid, targets = labels >= 0, labels.clamp(min=0)
    computed = more[0] if more else None
    return Selected(targets, targets, None, valid, torch.zeros_like(valid), computed, True)


def check_labels(labels: Tensor, bad: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Refuse a label outside the vocabulary where it can be read without a device sync."""
    if device_info(labels).host_readable and bad.any():
        offender = int(labels[bad][0])
        CALLS.refuse("labels", offender=offender, ignore_index=ignore_index, vocab_size=vocab_size)


def bad_ids(ids: Tensor, vocab_size: int) -> Tensor:
    """Which of them are neither a class nor -1."""
    return (ids < -1) | (ids >= vocab_size)


def check_ids(ids: Tensor | None, valid: Tensor, vocab_size: int) -> None:
    """Refuse a further class outside the vocabulary where it can be read without a device sync."""
    if ids is None or not device_info(ids).host_readable:
        return
    wrong = bad_ids(ids, vocab_size) & valid.to(ids.device)[:, None]
    if wrong.any():
        CALLS.refuse("ids", offender=int(ids[wrong][0]), vocab_size=vocab_size)


def target_info(part: Any, token_index: slice | Tensor) -> TargetInfo:
    """Of some tokens, of what has a vocabulary, tokens and class weights."""
    target = part.tokens.targets[token_index]
    if part.class_weights is None:
        return TargetInfo(target, 1.0, float(part.vocab.size))
    # Never out of bounds, also where class weights of another length are still to be refused.
    last = part.class_weights.shape[0] - 1
    weight = part.class_weights[target.clamp(max=last)]
    return TargetInfo(target, weight, part.class_weights.sum())


class LocalTokens:
    """Chunks of this rank's own tokens."""

    gathered = False
    # Of gathered tokens that the ranks of tensor parallelism have alike, to be compared: a number
    # that stands for each token's hidden states, and [K, N] what it is multiplied with.
    digest: Tensor | None = None
    factors: Tensor | None = None

    def __init__(self, call: HeadCall, vocab: LocalVocab, *, d_entropy: bool = False) -> None:
        """`d_entropy`: the loss of any rank whose tokens are here uses the entropy."""
        self.d_entropy = d_entropy
        self.call, self.hidden, self.keep = call, call.hidden, call.low_keep
        self.local_tokens = self.all = select_tokens(
            call.labels, call.where, call.ignore_index, vocab, call.hidden.device, call.ids
        )
        self.labels, self.temperature, self.ids = call.labels, call.temperature, call.ids

    def part(self, start: int, stop: int) -> LocalTokens:
        """Those of the computed tokens from `start` to `stop`, one after the other: what chunks of
        a head without an adapter read. Labels as the caller has them may be on the host, where what
        is on the device cannot index them."""
        part, index = copy.copy(self), self.all.token_index(start, stop)
        part.hidden = self.hidden[index]
        if self.temperature is not None:
            part.temperature = self.temperature.expand(self.all.valid.shape[0])[index]
        part.local_tokens = part.all = self.all.part(index)
        return part

    def plan(self, columns: int, row_bytes: int) -> ChunkPlan:
        """Chunks for logits of so many columns; `row_bytes` of one token may have more of them."""
        asked, width = self.call.chunk_bytes, self.hidden.shape[1]
        budget = chunk_bytes(asked, self.hidden.device, row_bytes, width)
        return plan_of(self.call, self.local_tokens.computed, columns, budget)

    def exchange(self, *per_token: Tensor) -> tuple[Tensor, ...]:
        """Numbers [N], or [K, N], of this rank's tokens, as those of all tokens of the chunks.
        Before the first chunk; labels, temperature and further classes go with them."""
        return per_token

    def local(self, values: Tensor) -> Tensor:
        """[..., N] of this rank's tokens, of values of all."""
        return values

    def chunks(self, plan: ChunkPlan) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Hidden states [T, H] of one chunk after the other, 0 where a token does not count, and
        the mask of what LoRA has of them."""
        for start, stop in plan.bounds():
            rows = self.local_tokens.token_index(start, stop)
            x_TH = self.hidden[rows]
            if not self.local_tokens.packed:
                x_TH = torch.where(self.local_tokens.valid[rows, None], x_TH, 0.0)
            yield x_TH, None if self.keep is None else self.keep[rows]

    def view(self, d_hidden: Tensor, start: int, size: int) -> Tensor | None:
        """Where a chunk's d hidden may be written at once, if it may."""
        rows = self.local_tokens.token_index(start, start + size)
        return d_hidden[rows] if isinstance(rows, slice) else None

    def put(self, d_hidden: Tensor, dx_TH: Tensor, start: int, size: int, *, add: bool) -> None:
        """A chunk's d hidden into that of this rank's tokens, or added to it."""
        rows = self.local_tokens.token_index(start, start + size)
        if add and isinstance(rows, slice):
            d_hidden[rows].add_(dx_TH[:size])  # `+=` would copy the sum onto itself
        elif add:
            d_hidden[rows] += dx_TH[:size]
        else:
            d_hidden[rows] = dx_TH[:size]

    def wait(self, d_hidden: Tensor) -> None:
        """For what is under way to `d_hidden`."""


def plan_of(call: HeadCall, computed: int, columns: int, budget: int) -> ChunkPlan:
    return plan_chunks(
        computed,
        max(1, columns),  # a rank may have none
        call.hidden.shape[1],
        dtype=dtype_name(call.gemm_dtype),
        compute_dtype=dtype_name(call.compute_dtype),
        max_chunk_bytes=budget,
    )
