"""The loop of every loss: a head's logits chunk by chunk, what an objective computes of them, and
the products of the gradients. It has three parts: whose tokens a chunk has, which rows a block has,
and which classes those are.

Shapes: N tokens, V vocabulary, R values of each token, K numbers of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.plan import BLOCK_CLASSES, schedule
from xentlib.shards import shard_of
from xentlib.torch.core.consistency import Agreed, Terms, group_named, shake_hands
from xentlib.torch.core.gathered import GatheredTokens
from xentlib.torch.core.gradients import Gradients, GradientSums
from xentlib.torch.core.kernels import Kernels
from xentlib.torch.core.logits import Chunk, ChunkedLogits
from xentlib.torch.core.tokens import LocalTokens, LocalVocab, Selected
from xentlib.torch.core.vocab import ShardedVocab, numbers_of
from xentlib.torch.operators import HeadCall


class Sums(Protocol):
    """Gradients of a head of which every block of rows has a pass."""

    def passes(self, exponent: Tensor | None) -> Iterator[tuple[ChunkedLogits, GradientSums]]:
        """Blocks whose chunks are to be added to the sums beside them; `exponent` is the power of
        two that dz carries."""

    def finish(self, exponent: Tensor | None) -> Gradients:
        """Of this rank's tokens and rows, without that power."""


class Rows(Protocol):
    """Rows of the head, in the blocks that tokens meet."""

    streamed: bool  # several blocks, whose statistics all come before the first gradient

    def blocks(self, loop: HeadLoop) -> Iterator[ChunkedLogits]: ...

    def groups(self, loop: HeadLoop) -> Iterator[tuple[Any, Iterator[ChunkedLogits]]]:
        """Tokens whose statistics are made before those of others, and the blocks: all of them."""
        yield slice(None), self.blocks(loop)

    def sums(self, loop: HeadLoop, needs: list[bool]) -> Sums: ...


Parts = tuple[Rows, LocalVocab, LocalTokens]


class LocalRows(Rows):
    """This rank's rows, in one block. They do not hold their loop: a circle of references would
    keep a chunk of logits until Python collects its garbage."""

    streamed = False

    def __init__(self, call: HeadCall) -> None:
        self.call, self.size = call, call.columns
        self.logits: ChunkedLogits | None = None

    def block(self, loop: HeadLoop) -> ChunkedLogits:
        if self.logits is None:
            parts = loop.chunks_of, loop.vocab, loop.class_weights
            self.logits = ChunkedLogits(
                self.call, *parts, kernel_cls=loop.kernel_cls, paired_with=loop.paired_with
            )
            self.call = loop.call  # which does not hold rows that were gathered
        return self.logits

    def blocks(self, loop: HeadLoop) -> Iterator[ChunkedLogits]:
        yield self.block(loop)

    def sums(self, loop: HeadLoop, needs: list[bool]) -> Sums:
        return GradientSums(self.block(loop), needs, self.size)


class HeadLoop:
    """Steps 1 and 2 of a call, of the parts that its route has."""

    def __init__(
        self,
        call: HeadCall,
        terms: Terms,
        *,
        kernel_cls: type[Kernels] | None = None,
        paired_with: ChunkedLogits | None = None,
        in_blocks: bool = False,
    ) -> None:
        """`kernel_cls` and `paired_with` as `ChunkedLogits` has them; `in_blocks`: no dz is made of
        the logits that the statistics are of, so that the head may be read in blocks of classes."""
        self.in_blocks = in_blocks
        self.call, self.terms, route = call, terms, route_of(call)
        self.kernel_cls, self.paired_with = kernel_cls, paired_with
        self.compute_dtype, self.ignore_index = call.compute_dtype, call.ignore_index
        self.like: dict[str, Any] = {"dtype": call.compute_dtype, "device": call.hidden.device}
        # Before ranks go ways of their own
        agreed = shake_hands(call, terms, route) if call.rows.route else None
        weights = terms.class_weights
        self.class_weights = None if weights is None else weights.to(call.compute_dtype)
        parts: Parts = ROUTES[route](self, agreed)
        self.rows, self.vocab, self.chunks_of = parts
        # This rank's tokens, and whether those of other ranks are in a chunk with them
        self.local_tokens, self.gathered = self.chunks_of.local_tokens, self.chunks_of.gathered

    @property
    def tokens(self) -> Selected:
        """Those of the chunks: the same, where tokens do not travel."""
        return self.chunks_of.all

    @property
    def labels(self) -> Tensor:
        return self.chunks_of.labels

    @property
    def ids(self) -> Tensor | None:
        return self.chunks_of.ids

    def blocks(self) -> Iterator[ChunkedLogits]:
        return self.rows.blocks(self)

    def sums(self, needs: list[bool]) -> Sums:
        return self.rows.sums(self, needs)

    def schedule(self, needs: list[bool]) -> str:
        """When gradients may begin, as `xentlib.plan.schedule` has it."""
        if self.rows.streamed:
            return "two passes"
        (logits,) = self.blocks()
        # A softcap's derivative is gone once it has been applied.
        once = any(needs) and self.call.scalars.softcap is None
        platform, sharded = self.call.hidden.device.type, self.vocab.sharded
        return schedule(logits.plan, platform, sharded=sharded, gathered=self.gathered, once=once)

    def check_consistent(self) -> ShardedVocab | None:
        """Before a forward over shards: what every rank must have the same. What a function adds
        goes to the `consistency` of the result; None, where nothing is left to compare."""
        call, vocab, tokens = self.call, self.vocab, self.chunks_of
        if not isinstance(vocab, ShardedVocab) or vocab.verified:
            return None
        consistency, valid = vocab.consistency, self.tokens.valid
        # By which ranks find out that each has the whole head; of a rank of padding, that.
        if call.weight is None:
            columns = call.hidden[:, : vocab.local_size]
            some = call.hidden[:3, : vocab.local_size or None]
            consistency.begin(self.terms.function, some, self.labels, valid)
            consistency.per_token("temperature", call.temperature, valid.shape[0])
            consistency.scalars(call.scalars, self.terms.function)
            consistency.ids(self.ids, valid, call.top_k)
            consistency.exact("entropy", self.terms.outputs)
            consistency.local_softmax(columns, valid, logits=True)
            return vocab
        rows_VH = call.rows_VH[: vocab.local_size or None]
        some = rows_VH[:: max(1, (rows_VH.shape[0] - 1) // 2)][:3]
        consistency.begin(self.terms.function, some, self.labels, valid)
        if not self.gathered:
            consistency.tokens("hidden", call.hidden, valid)
        if tokens.digest is not None:
            consistency.digests("hidden", torch.where(valid, tokens.digest, 0.0))
        if tokens.factors is not None:
            first_N, *more = tokens.factors
            consistency.per_token("token_weights", first_N, valid.shape[0])
            if more:  # probabilities of a teacher's classes, or of labels
                consistency.probs(torch.stack(more, 1), valid)
        chunks = 0 if self.rows.streamed else next(iter(self.blocks())).plan.chunk_tokens
        consistency.exact("max_chunk_bytes", float(chunks))
        consistency.close("logit_scale", call.logit_scale)
        consistency.per_token("temperature", tokens.temperature, valid.shape[0])
        consistency.scalars(call.scalars, self.terms.function)
        consistency.ids(self.ids, valid, call.top_k)
        consistency.exact("kind", self.terms.kind)
        consistency.exact("the classes of the teacher", self.terms.more_classes)
        consistency.exact("reduce_hidden_grad", float(call.reduce_hidden))
        low = call.low_in
        consistency.exact("the rank of the head", 0.0 if low is None else low.shape[0])
        consistency.close("a", None if low is None else low.sum())
        consistency.close("scale", None if low is None else call.low_scale)
        return vocab


class Out(NamedTuple):
    """Where a step writes, in one pass over rows of the head."""

    values: Tensor  # [R, N] of all tokens of the chunks
    factor: Tensor  # [N] or [K, N] of dz, with the power of two
    sums: GradientSums
    needs_dz: bool


class Objective:
    """Steps 3 to 7 of a loss, or of a backward that computes the logits again.

    A unit is what has its statistics at once: a block, or all blocks of a chunk where shards
    exchange them.
    """

    num_values = 0  # R, of which the loss is the first
    values: Tensor | None = None  # [R, N], where all statistics come before the first gradient
    logits: ChunkedLogits

    def start(self, logits: ChunkedLogits) -> None:
        """Of a pass over rows of the head."""
        self.logits = logits

    def chunks(self) -> Iterator[Chunk]:
        return self.logits.chunks()

    def kernels(self) -> Any:
        """With their scratch, for a chunk."""
        return self.logits.kernels()

    def units(self, chunk: Chunk) -> Iterator[Any]:
        """Of a chunk, whose statistics have been exchanged where all its blocks' are at once."""
        return self.logits.blocks(chunk)

    def step(self, unit: Any, kernels: Any, out: Out) -> None:
        """Values of a unit's tokens into `out.values`, dz into `out.sums`."""
        raise NotImplementedError


def run(
    loop: HeadLoop,
    objective: Objective,
    factor: Tensor,
    needs: list[bool],
    exponent: Tensor | None,
) -> tuple[Tensor, Gradients]:
    """Values [R, N], and gradients in the compute dtype; `exponent` is the power of two that
    `factor` carries."""
    sums, values, needs_dz = loop.sums(needs), objective.values, any(needs)
    known = values is not None
    if values is None:
        values = torch.zeros(objective.num_values, factor.shape[-1], **loop.like)
    for logits, block_sums in sums.passes(exponent) if needs_dz or not known else ():
        objective.start(logits)
        out = Out(values, factor, block_sums, needs_dz)
        for chunk in objective.chunks():
            units = objective.units(chunk)
            kernels = objective.kernels()  # not beside the scratch of a chunk's statistics
            for unit in units:
                objective.step(unit, kernels, out)
            del kernels  # whose scratch the products' own takes the place of
            block_sums.add(chunk)
    return values, sums.finish(exponent)


def not_gathered(loop: HeadLoop, agreed: Agreed | None) -> Parts:
    """The head of one rank or, over shards, tokens that all ranks have the same."""
    call, rows = loop.call, LocalRows(loop.call)
    vocab = LocalVocab(rows.size)
    if call.rows.group:
        # Of a loss: label smoothing, and the most probable class of each rank.
        group = group_named(call.rows.group)
        more_rows = 1 + dist.get_world_size(group) if loop.terms.of_loss else 0
        vocab = ShardedVocab(call.rows, rows.size, loop.like, more_rows=more_rows)
    tokens = LocalTokens(call, vocab, d_entropy=loop.terms.d_entropy)
    # Adapters have all classes at once; of each block there would be `top_k` candidates.
    whole = call.low_in is not None or call.top_k
    if loop.in_blocks and not whole and (vocab.sharded or rows.size > BLOCK_CLASSES):
        from xentlib.torch.core.blocks import LocalBlocks

        return LocalBlocks(call, vocab), vocab, tokens
    return rows, vocab, tokens


def precomputed_logits(loop: HeadLoop, agreed: Agreed | None) -> Parts:
    """Of a head without a weight."""
    from xentlib.torch.core.precomputed import LogitsRows

    call, columns = loop.call, loop.call.columns
    vocab = LocalVocab(columns)
    if call.rows.group:
        vocab = ShardedVocab(call.rows, columns, loop.like, more_rows=1)  # label smoothing
    rows: Any = LogitsRows(call)
    return rows, vocab, LocalTokens(call, vocab, d_entropy=loop.terms.d_entropy)


def gathered_hidden(loop: HeadLoop, agreed: Agreed) -> Parts:
    """Each rank's tokens meet the rows of all ranks: hidden states travel. Ranks of tensor
    parallelism have the same tokens, or, of sequences that are spread over them, each its own."""
    call, rows, shard = loop.call, LocalRows(loop.call), loop.call.rows.shard
    assert shard is not None
    undeclared, largest = int(shard[0]) < 0, max(agreed.rows)
    if undeclared:
        rank, classes = dist.get_rank(group_named(call.rows.group)), int(shard[2])
        shard = numbers_of(shard_of(tuple(agreed.rows), rank, None if classes < 0 else classes))
    shard = torch.cat([shard[:3], shard.new_tensor([largest])])
    layout = call.rows._replace(shard=shard)
    vocab = ShardedVocab(layout, rows.size, loop.like, may_be_whole=layout.route == "tokens")
    return rows, vocab, GatheredTokens(call, vocab, agreed, loop.terms)


def gathered_in_nodes(loop: HeadLoop, agreed: Agreed) -> Parts:
    """Rows are gathered over nodes first, hidden states in each node."""
    from xentlib.torch.core.rows import NodeRows

    call, rows = loop.call, NodeRows(loop.call)
    vocab = ShardedVocab(call.rows, rows.size, loop.like, order=rows.order)
    ranks = ranks_within(group_named(call.rows.group), group_named(call.rows.every))
    return rows, vocab, GatheredTokens(call, vocab, agreed.of(ranks), loop.terms)


def streamed_rows(loop: HeadLoop, agreed: Agreed) -> Parts:
    """Rows of all ranks pass by each rank's tokens, some at a time."""
    from xentlib.torch.core.rows import StreamedRows

    call, layout = loop.call, loop.call.rows
    group = group_named(layout.group)
    if layout.every:
        agreed = agreed.of(ranks_within(group, group_named(layout.every)))
    rows = StreamedRows(call, loop.class_weights, max(1, *agreed.rows), min(agreed.budget))
    vocab = LocalVocab(rows.vocab_size)
    if layout.shards:  # rows of this shard, of which other ranks have others
        shards = layout._replace(group=layout.shards)
        more_rows = 1 + dist.get_world_size(group_named(layout.shards)) if loop.terms.of_loss else 0
        vocab = ShardedVocab(shards, sum(agreed.rows), loop.like, more_rows=more_rows)
    return rows, vocab, LocalTokens(call, vocab, d_entropy=loop.terms.d_entropy)


def ranks_within(group: dist.ProcessGroup, every: dist.ProcessGroup) -> list[int]:
    return [dist.get_group_rank(every, x) for x in dist.get_process_group_ranks(group)]


# What travels in a call: a new route is a new row.
ROUTES: dict[str, Any] = {
    "": not_gathered,
    "logits": precomputed_logits,
    "hidden": gathered_hidden,
    "nodes": gathered_in_nodes,
    "stream": streamed_rows,
}


def route_of(call: HeadCall) -> str:
    """What travels; "tokens" are hidden states too."""
    if call.weight is None:
        return "logits"
    if call.rows.nodes is not None:
        return "nodes"
    return "hidden" if call.rows.route == "tokens" else call.rows.route
