"""Precomputed logits: a head without a weight, whose gradient is that of its logits.

Shapes: N tokens, C columns of this rank, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xentlib.math.softmax import WantedStats
from xentlib.plan import block_bytes, block_tokens
from xentlib.torch.core.device import chunk_bytes
from xentlib.torch.core.gradients import Gradients
from xentlib.torch.core.kernels import DzOutput, Kernels, LogitsBlock, LogitTransform, kernels_for
from xentlib.torch.core.logits import block_at
from xentlib.torch.core.tokens import LocalTokens, LocalVocab
from xentlib.torch.operators import HeadCall


class PrecomputedLogits:
    """What `ChunkedLogits` is of a head: all tokens are one chunk."""

    gathered = False  # tokens are the same on every rank
    ids: Tensor | None
    own_weights: Tensor | None = None  # of classes, which a head alone takes

    def __init__(
        self,
        call: HeadCall,
        chunks_of: LocalTokens,
        vocab: LocalVocab,
        *,
        kernel_cls: type[Kernels] | None = None,
    ) -> None:
        logits, compute_dtype = call.hidden, call.compute_dtype
        self.logits, self.temperature, self.compute_dtype = logits, call.temperature, compute_dtype
        self.labels, self.ids, self.ignore_index = call.labels, call.ids, call.ignore_index
        self.like: dict[str, Any] = {"dtype": compute_dtype, "device": logits.device}
        self.vocab, self.tokens = vocab, chunks_of.all
        self.local_rows, self.local_size = logits.shape[1], vocab.local_size
        self.class_weights: Tensor | None = None
        self.kernel_cls = kernel_cls or kernels_for(logits.device, compute_dtype, call.scalars)
        self.width = self.local_size + (vocab.sharded and self.kernel_cls.spare_column)
        self.shape = LogitTransform(self.local_size, scalars=call.scalars, top_k=call.top_k)
        self.block_rows = block_tokens(
            min(chunk_bytes(call.chunk_bytes, logits.device), block_bytes(logits.device.type)),
            self.width,
            compute_dtype.itemsize,
        )

    def keep_filled(self) -> None:
        """They are there already."""

    def chunks(self) -> Iterator[Any]:
        yield None

    def kernels(self) -> Kernels:
        """For all of the blocks."""
        device, size = self.logits.device, min(self.block_rows, self.tokens.computed)
        return self.kernel_cls(size, self.width, self.compute_dtype, device, self.shape)

    def blocks(self, chunk: None = None) -> Iterator[LogitsBlock]:
        """All in one buffer, and rows that do not count are 0; the logits themselves, where kernels
        only read them, or a copy, where further classes are taken out."""
        tokens, whole = self.tokens, self.kernel_cls.whole_chunks
        copied = not whole or tokens.more is not None
        rows = min(self.block_rows, tokens.computed) if copied else tokens.computed
        copied_BV = torch.empty(0 if whole else rows, self.width, **self.like)
        for start in range(0, tokens.computed, max(1, rows)):
            span = slice(start, min(start + rows, tokens.computed))
            token_index = tokens.token_index(span.start, span.stop)
            if whole:
                z_BV = self.logits[token_index, : self.local_size]
                if copied or z_BV.stride(1) != 1:
                    z_BV = z_BV.clone(memory_format=torch.contiguous_format)
            else:
                z_BV = copied_BV[: span.stop - start]
                z_BV[:, : self.local_size] = self.logits[token_index, : self.local_size]
                if not tokens.packed:
                    z_BV.masked_fill_(~tokens.valid[token_index, None], 0.0)
                z_BV[:, self.local_size :] = -torch.inf
            yield block_at(tokens, self.temperature, span, token_index, z_BV, self.compute_dtype)

    def stats_memory(self, wanted: WantedStats) -> None:
        """As `ChunkedLogits` has it: there are no blocks of classes."""

    def scaled(self, factor_B: Tensor, temperature_B: Tensor | None) -> Tensor:
        """Factors of dz, times d z / d logit where that is one number for a token."""
        return factor_B if temperature_B is None else factor_B / temperature_B.to(factor_B.dtype)


class LogitsRows:
    """What `LocalRows` is of a head."""

    streamed = False

    def __init__(self, call: HeadCall) -> None:
        self.call = call
        self.logits: PrecomputedLogits | None = None

    def blocks(self, loop: Any) -> Iterator[PrecomputedLogits]:
        if self.logits is None:
            self.logits = PrecomputedLogits(
                self.call, loop.chunks_of, loop.vocab, kernel_cls=loop.kernel_cls
            )
        yield self.logits

    def groups(self, loop: Any) -> Iterator[tuple[Any, Iterator[PrecomputedLogits]]]:
        """As `Rows` has them."""
        yield slice(None), self.blocks(loop)

    def sums(self, loop: Any, needs: list[bool]) -> LogitsGradient:
        (logits,) = self.blocks(loop)
        return LogitsGradient(logits)


class LogitsGradient:
    """What `GradientSums` is of a head: every row is written once, in the logits' dtype, its
    target's column with it. It has the strides of the logits, which may be a transposed view."""

    def __init__(self, logits: PrecomputedLogits) -> None:
        self.logits, columns = logits, logits.logits
        whole = logits.tokens.computed == columns.shape[0]
        self.d_logits = torch.empty_like(columns) if whole else torch.zeros_like(columns)
        if logits.local_size < columns.shape[1]:
            self.d_logits[:, logits.local_size :] = 0.0

    def passes(self, exponent: Tensor | None) -> Iterator[tuple[Any, Any]]:
        yield self.logits, self

    def take(self, rows: LogitsBlock, kernels: Kernels, lse_B: Tensor, of: Any) -> None:
        """Steps 6 and 7 for a block."""
        direct = isinstance(rows.token_index, slice) and self.d_logits.stride(1) == 1
        into_BV = None
        if direct and rows.more is None:
            into_BV = self.d_logits[rows.token_index, : self.logits.local_size]
        kernels.dz(rows, lse_B, of, DzOutput(into_BV, with_target=True))
        if into_BV is None:
            self.write(rows)

    def put(self, rows: LogitsBlock, kernels: Any) -> None:
        """Step 7 for a block whose dz, the target's included, is in place of its logits."""
        kernels.chained(rows, torch.zeros_like(rows.z_BV[:, 0]), DzOutput())
        self.write(rows)

    def write(self, rows: LogitsBlock) -> None:
        size = self.logits.local_size
        self.d_logits[rows.token_index, :size] = rows.z_BV[:, :size].to(self.d_logits.dtype)

    def add(self, chunk: None) -> None:
        """There is no product."""

    def finish(self, exponent: Tensor | None) -> Gradients:
        return Gradients(self.d_logits, *(self.d_logits.new_empty(0) for _ in range(4)))
