"""Logits of a head, chunk by chunk: steps 1 and 2 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk (filled up to whole rows of a
GEMM's tile), B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.math.softmax import BLOCK_COLUMNS, WantedStats
from xentlib.plan import ChunkPlan, block_bytes, pad_columns, pad_rows
from xentlib.torch.core.device import device_info
from xentlib.torch.core.gemm import gemm_precision, mm, operand
from xentlib.torch.core.kernels import Kernels, LogitsBlock, LogitTransform, kernels_for
from xentlib.torch.core.lora import LoraActivations, LowRank
from xentlib.torch.core.tokens import LocalTokens, LocalVocab, Selected
from xentlib.torch.operators import HeadCall


class Chunk(NamedTuple):
    start: int
    size: int
    x_TH: Tensor  # operand of the GEMMs
    z_TV: Tensor  # logits, and dz in their place
    low: LoraActivations | None  # what the low-rank part of the head has of them


@dataclass(slots=True)
class Shared:
    """What blocks of classes of one head have alike, which some tokens pass one after the other."""

    plan: ChunkPlan
    parts: int  # of 128 columns each, of all blocks: those that have statistics of their own
    memory: Tensor | None = None  # of the logits, one block's at a time
    x_TH: Tensor | None = None  # the operand, of tokens that are in one chunk
    # Of kernels that look whether a target is one of their columns:
    targets_N: Tensor | None = None  # in the order of classes, -1 for a token that is masked
    order_M: Tensor | None = None  # of each chunk by target, once a block has needed it


class ChunkedLogits:
    """Steps 1 and 2 of some rows of a head: logits of one chunk after the other, in one buffer."""

    def __init__(
        self,
        call: HeadCall,
        chunks_of: LocalTokens,
        vocab: LocalVocab,
        class_weights: Tensor | None,
        *,
        kernel_cls: type[Kernels] | None = None,
        paired_with: ChunkedLogits | None = None,
        shared: Shared | None = None,
    ) -> None:
        """Of the rows of `call`; `chunks_of` says whose tokens are in a chunk, which have been
        exchanged by now, and `vocab` which classes the rows are. `kernel_cls`: other kernels than
        the device's; `paired_with`: in the same chunks and blocks as those of another head;
        `shared`: with other blocks of classes."""
        hidden, compute_dtype = call.hidden, call.compute_dtype
        self.chunks_of, self.vocab, self.class_weights = chunks_of, vocab, class_weights
        self.shared, self.gathered = shared, chunks_of.gathered
        self.ignore_index, self.transposed = call.ignore_index, call.transposed
        # Where tokens are gathered each rank keeps its own part of d hidden.
        self.sums_hidden = call.reduce_hidden and not chunks_of.gathered
        self.gemm_dtype, self.compute_dtype = call.gemm_dtype, compute_dtype
        self.hidden = hidden
        self.like: dict[str, Any] = {"dtype": compute_dtype, "device": hidden.device}
        self.kernel_cls = kernel_cls or kernels_for(hidden.device, compute_dtype, call.scalars)
        tokens, spare = chunks_of.all, self.kernel_cls.spare_column
        self.looks_for_targets = not (shared is None or spare)
        if shared is None or not self.looks_for_targets:
            self.tokens = tokens.of_columns(vocab)
        else:
            if shared.targets_N is None:
                shared.targets_N = torch.where(tokens.valid, tokens.targets, -1)
            first = 0 if vocab.shard is None else vocab.shard.start
            more = tokens.more
            if more is not None:
                more = more._replace(columns=more.ids - first, owned=None)
            columns_N = shared.targets_N - first
            self.tokens = tokens._replace(labels=columns_N, owned=None, more=more)
        # Rows beyond those of the vocabulary are padding.
        weight_VH = call.rows_VH[: vocab.local_size]
        self.local_rows = call.columns
        self.local_size, self.hidden_size = weight_VH.shape
        self.own_weights = None if class_weights is None else vocab.own_part(class_weights)
        # Of a shard there may be a spare column, at -inf, for targets that other ranks hold.
        whole = vocab.shard is None
        self.width = self.local_size + (not whole and self.kernel_cls.spare_column)
        # Over shards a second chunk may cost an exchange or a GEMM.
        row_bytes = self.width * compute_dtype.itemsize if whole else 0
        columns = self.width
        if not whole:  # chunks of the same tokens on all ranks
            columns = max(vocab.largest, self.local_size) + self.kernel_cls.spare_column
        if shared is not None:
            self.plan = shared.plan
        elif paired_with is not None:
            self.plan = paired_with.plan
        else:
            self.plan = chunks_of.plan(columns, row_bytes)
        self.block_rows = self.plan.chunk_tokens
        if not self.kernel_cls.whole_chunks:
            self.block_rows = self.plan.block_tokens(block_bytes(hidden.device.type))
        if paired_with is not None:
            self.block_rows = paired_with.block_rows
        self.operand_VH = operand(weight_VH, call.gemm_dtype, compute_dtype)
        self.low = None if call.low_in is None else LowRank(call, self.local_size)
        self.shape = LogitTransform(
            columns=self.local_size,
            bias_V=None if call.bias is None else call.bias[: self.local_size].to(compute_dtype),
            scale=None if call.logit_scale is None else call.logit_scale.to(compute_dtype),
            scalars=call.scalars,
            class_weights_V=self.own_weights,
            top_k=call.top_k,
        )
        rows = pad_rows(self.plan.chunk_tokens) if self.plan.num_tokens else 0
        columns = pad_columns(self.width) if device_info(hidden).aligned_rows else self.width
        memory = None if shared is None else shared.memory
        if memory is None:
            memory = torch.empty(rows * columns, **self.like)
        if shared is not None:
            shared.memory = memory
        self.buffer_TL = memory[: rows * columns].view(rows, columns)
        self.logits_TV = self.buffer_TL[:, : self.width]
        self.filled = False
        # Where kernels write statistics of 128 columns: a part of those of all blocks of classes
        self.stats_Nb4: Tensor | None = None

    @property
    def labels(self) -> Tensor:
        return self.chunks_of.labels

    @property
    def ids(self) -> Tensor | None:
        return self.chunks_of.ids

    def stats_memory(self, wanted: WantedStats) -> Tensor | None:
        """[N, parts, 4] for the statistics of all blocks of classes, of kernels that write them
        where they stay; that of a rank without a class is 0."""
        shared, by_index = self.shared, self.tokens.rows is not None
        if shared is None or by_index or not self.looks_for_targets:
            return None
        if wanted.predicted:  # the class of each block's largest stands elsewhere
            return None
        make = torch.empty if self.local_size else torch.zeros
        return make(self.tokens.valid.shape[0], shared.parts, 4, **self.like)

    def keep_filled(self) -> None:
        """After statistics of all tokens: a single chunk keeps its logits for the next pass, unless
        that needs a softcap's derivative."""
        self.filled = self.plan.num_chunks == 1 and self.shape.scalars.softcap is None

    def chunks(self) -> Iterator[Chunk]:
        hidden, shared = self.chunks_of.chunks(self.plan), self.shared
        for start, stop in self.plan.bounds():
            size, keep_TH = stop - start, None
            x_TH = None if shared is None else shared.x_TH
            if x_TH is None:
                x_TH, keep_TH = next(hidden)
                x_TH = operand(x_TH, self.gemm_dtype, self.compute_dtype).contiguous()
                fill = pad_rows(size) - size
                if fill:
                    x_TH = torch.cat([x_TH, x_TH.new_zeros(fill, self.hidden_size)])
                if shared is not None and self.plan.num_chunks == 1:
                    shared.x_TH = x_TH
            z_TV = self.logits_TV[: len(x_TH)]
            activations = None if self.low is None else self.low.activations(x_TH, keep_TH)
            if not self.filled and self.local_size:
                with gemm_precision(self.gemm_dtype, self.hidden.device):
                    mm(x_TH, self.operand_VH.T, out=z_TV[:, : self.local_size])
                if self.low is not None and activations is not None:
                    self.low.add_logits(z_TV[:, : self.local_size], activations)
            if not self.filled and self.width > self.local_size:
                z_TV[:, self.local_size :] = -torch.inf
            yield Chunk(start, size, x_TH, z_TV, activations)

    def kernels(self) -> Kernels:
        """With their scratch; give them up before a GEMM, whose own takes its place."""
        rows, device = self.block_rows, self.hidden.device
        return self.kernel_cls(rows, self.width, self.compute_dtype, device, self.shape)

    def blocks(self, chunk: Chunk, *, fresh: bool = True) -> Iterator[LogitsBlock]:
        """Of a chunk; not `fresh` where statistics of its logits have been made in place."""
        for low in range(0, chunk.size, self.block_rows):
            span = slice(low, min(low + self.block_rows, chunk.size))
            token_index = self.tokens.token_index(chunk.start + span.start, chunk.start + span.stop)
            z_BV, as_made = chunk.z_TV[span], fresh and not self.filled
            of = (
                self.tokens,
                self.chunks_of.temperature,
                span,
                token_index,
                z_BV,
                self.compute_dtype,
            )
            block = block_at(*of, fresh=as_made)
            if self.stats_Nb4 is not None:
                block.stats_Bb4 = self.stats_Nb4[token_index]
            yield block

    def scaled(self, factor_B: Tensor, temperature_B: Tensor | None) -> Tensor:
        """Factors of dz, times d z / d x where that is one number for a token."""
        if self.shape.scale is not None:
            factor_B = factor_B * self.shape.scale
        return factor_B if temperature_B is None else factor_B / temperature_B.to(factor_B.dtype)


def num_parts(columns: int) -> int:
    """Of 128 columns, which have statistics of their own; of no column there is one."""
    return -(-max(1, columns) // BLOCK_COLUMNS)


def block_at(
    tokens: Selected,
    temperature: Tensor | None,
    span: slice,
    token_index: slice | Tensor,
    z_BV: Tensor,
    dtype: torch.dtype,
    *,
    fresh: bool = True,
) -> LogitsBlock:
    """Logits of some tokens, with what is known of each."""
    temperature_B = None
    if temperature is not None:
        temperature_B = temperature.expand(tokens.valid.shape[0])[token_index].to(dtype)
    valid_B = None if tokens.packed else tokens.valid[token_index]
    owned_B = None if tokens.owned is None else tokens.owned[token_index]
    y_B1 = tokens.labels[token_index, None]
    more = None if tokens.more is None else tokens.more.at(token_index)
    return LogitsBlock(span, token_index, z_BV, y_B1, temperature_B, valid_B, owned_B, more, fresh)
