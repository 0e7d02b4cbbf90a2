"""Steps 1 and 2 of `xentlib.nll` where the logits are there already.

Shapes: N tokens, C columns, B rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from xentlib.plan import block_bytes, block_tokens
from xentlib.torch.core.device import chunk_bytes
from xentlib.torch.core.kernels import Kernels, LogitsBlock, LogitTransform, kernels_for
from xentlib.torch.core.logits import block_at
from xentlib.torch.core.tokens import LocalVocab, select_tokens
from xentlib.torch.core.vocab import ShardedVocab
from xentlib.torch.operators import LogitsCall

# What a SUM over shards has of a token, whatever the options: the target's logit, a count, the
# softmax's sum, that of the entropy and that of label smoothing.
SUM_ROWS = 5


class GivenLogits:
    """Blocks of rows of the logits."""

    gathered = False  # tokens are the same on every rank

    def __init__(self, call: LogitsCall) -> None:
        logits, compute_dtype = call.logits, call.compute_dtype
        self.logits, self.temperature, self.compute_dtype = logits, call.temperature, compute_dtype
        self.labels, self.ignore_index = call.labels, call.ignore_index
        self.scalars = call.scalars
        self.like: dict[str, Any] = {"dtype": compute_dtype, "device": logits.device}
        self.vocab = LocalVocab(logits.shape[1])
        if call.shard is not None:
            columns = logits.shape[1]
            self.vocab = ShardedVocab(call.group, call.shard, columns, self.like, sum_rows=SUM_ROWS)
        self.local_size = self.vocab.local_size
        self.tokens = select_tokens(
            call.labels, call.where, call.ignore_index, self.vocab, logits.device
        )
        self.class_weights: Tensor | None = None  # which a head alone takes
        self.own_weights: Tensor | None = None
        self.made = kernels_for(logits.device, compute_dtype, call.scalars)
        self.width = self.local_size + (self.vocab.sharded and self.made.spare_column)
        self.shape = LogitTransform(self.local_size, scalars=call.scalars)
        self.block_rows = block_tokens(
            min(chunk_bytes(call.chunk_bytes, logits.device), block_bytes(logits.device.type)),
            self.width,
            compute_dtype.itemsize,
        )

    def check_consistent(self) -> None:
        """Before a forward over shards: what every rank must have the same."""
        if isinstance(self.vocab, ShardedVocab) and not self.vocab.verified:
            # Of a rank of padding, that: it tells it from the whole vocabulary on each rank.
            rows, consistency = self.logits[:3, : self.local_size or None], self.vocab.consistency
            consistency.begin("vocab_parallel_logprobs", rows, self.labels, self.tokens.valid)
            consistency.per_token("temperature", self.temperature, self.logits.shape[0])
            consistency.scalars(self.scalars, "vocab_parallel_logprobs")

    def kernels(self) -> Kernels:
        """For all of the blocks."""
        device, size = self.logits.device, min(self.block_rows, self.tokens.computed)
        return self.made(size, self.width, self.compute_dtype, device, self.shape)

    def blocks(self) -> Iterator[LogitsBlock]:
        """All in one buffer, and rows that do not count are 0; the logits themselves, where kernels
        only read them."""
        tokens = self.tokens
        if self.made.whole_chunks:
            if tokens.computed:
                places = tokens.places(0, tokens.computed)
                z_MV = self.logits[places, : self.local_size]
                z_MV = z_MV if z_MV.stride(1) == 1 else z_MV.contiguous()
                span = slice(0, tokens.computed)
                yield block_at(tokens, self.temperature, span, places, z_MV, self.compute_dtype)
            return
        copied_BV = torch.empty(min(self.block_rows, tokens.computed), self.width, **self.like)
        for start in range(0, tokens.computed, self.block_rows):
            stop = min(start + self.block_rows, tokens.computed)
            places = tokens.places(start, stop)
            z_BV = copied_BV[: stop - start]
            z_BV[:, : self.local_size] = self.logits[places, : self.local_size]
            if not tokens.packed:
                z_BV.masked_fill_(~tokens.valid[places, None], 0.0)
            z_BV[:, self.local_size :] = -torch.inf
            span = slice(start, stop)
            yield block_at(tokens, self.temperature, span, places, z_BV, self.compute_dtype)
