"""The walk over a head's logits, chunk by chunk: steps 1 and 2 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, M valid tokens, T tokens of a chunk (filled up to
whole rows of a GEMM's tile), B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.plan import block_bytes, pad_columns, pad_rows, plan_chunks
from xentlib.torch.array_spec import dtype_name
from xentlib.torch.core.device import chunk_bytes, device_info
from xentlib.torch.core.gemm import gemm_precision, mm, operand
from xentlib.torch.core.kernels import Kernels, LogitsBlock, LogitTransform, kernels_for
from xentlib.torch.core.lora import LoraActivations, LowRank
from xentlib.torch.core.spread import Spread, Terms
from xentlib.torch.core.tokens import Tokens, select_tokens
from xentlib.torch.core.vocab import begin_consistency, vocab_parallel_of
from xentlib.torch.operators import HeadCall


class Chunk(NamedTuple):
    start: int
    size: int
    x_TH: Tensor  # operand of the GEMMs
    z_TV: Tensor  # logits, and dz in their place
    low: LoraActivations | None  # what the low-rank part of the head has of them


class Walk:
    """Steps 1 and 2: logits of one chunk after the other, in one buffer."""

    def __init__(self, call: HeadCall, terms: Terms, parallel: Any = None) -> None:
        """`parallel`: in place of a group's, which classes the head has."""
        hidden, compute_dtype = call.hidden, call.compute_dtype
        self.ignore_index, class_weights = call.ignore_index, terms.class_weights
        self.reduce_hidden = call.reduce_hidden
        self.hidden, self.transposed = hidden, call.transposed
        self.keep = call.low_keep
        self.gemm_dtype, self.compute_dtype = call.gemm_dtype, compute_dtype
        self.like: dict[str, Any] = {"dtype": compute_dtype, "device": hidden.device}
        rows = call.weight.shape[call.transposed]
        self.spread = Spread(call, terms) if call.route in ("hidden", "tokens") else None
        numbers = call.shard if self.spread is None else self.spread.numbers
        places = None
        if call.nodes is not None and call.shard is not None and self.spread is not None:
            from xentlib.torch.core.class_order import class_order_of

            places = class_order_of(call.nodes, call.shard, self.spread.rank, hidden.device)
        self.places = places
        if parallel is None:
            parallel = vocab_parallel_of(call.group, numbers, rows, self.like, places)
        self.parallel = parallel
        if self.spread is not None and call.shard is not None:
            parallel.may_be_whole = call.shard[0] < 0
        shard = None if self.parallel is None else self.parallel.shard
        # Rows beyond those of the shard are padding.
        all_VH = call.weight.T if call.transposed else call.weight
        weight_VH = all_VH[: shard and shard.size]
        self.local_size, self.hidden_size = weight_VH.shape
        # By which ranks find out that each has the whole head; of a rank of padding, that.
        shown_VH = weight_VH if self.local_size else all_VH
        self.some_rows = shown_VH[:: max(1, (shown_VH.shape[0] - 1) // 2)][:3].clone()
        self.vocab_size = self.local_size if shard is None else shard.vocab_size
        # Of this rank, and of the walk: the same, where tokens are not spread over the ranks.
        self.labels, self.temperature = call.labels, call.temperature
        if self.temperature is None and self.spread is not None and self.spread.tempered:
            self.temperature = torch.ones(1, **self.like)
        self.own = self.tokens = select_tokens(
            call.labels,
            call.where,
            call.ignore_index,
            self.vocab_size,
            shard,
            hidden.device,
            places,
        )
        # Of all classes, and of those here
        self.class_weights: Tensor | None = None
        self.own_weights: Tensor | None = None
        if class_weights is not None:
            self.class_weights = class_weights.to(compute_dtype)
            if self.parallel is None:
                self.own_weights = self.class_weights
            else:
                self.own_weights = self.parallel.own_part(self.class_weights)
        self.made = kernels_for(hidden.device, compute_dtype, call.scalars)
        # A shard's logits may have a spare column, at -inf, for targets that other ranks hold.
        self.width = self.local_size + (shard is not None and self.made.spare_column)
        # Over shards a second chunk may cost an exchange or a GEMM.
        row_bytes = 0 if shard is not None else self.width * compute_dtype.itemsize
        columns, budget = self.width, chunk_bytes(call.chunk_bytes, hidden.device, row_bytes)
        computed = self.tokens.computed
        if self.parallel is not None:  # chunks of the same tokens on all ranks
            columns = max(self.parallel.largest, self.local_size) + self.made.spare_column
        if self.spread is not None:
            columns = self.spread.largest_rows + self.made.spare_column
            budget, computed = self.spread.chunk_bytes, self.spread.ranks * self.spread.longest
        self.plan = plan_chunks(
            computed,
            max(1, columns),  # a rank may have none
            self.hidden_size,
            dtype=dtype_name(call.gemm_dtype),
            compute_dtype=dtype_name(compute_dtype),
            max_chunk_bytes=budget,
        )
        if self.spread is not None:
            self.plan = self.spread.plan(self.plan)
        self.block_rows = self.plan.chunk_tokens
        if not self.made.whole_chunks:
            self.block_rows = self.plan.block_tokens(block_bytes(hidden.device.type))
        self.operand_VH = operand(weight_VH, call.gemm_dtype, compute_dtype)
        self.low = None if call.low_in is None else LowRank(call, self.local_size)
        self.shape = LogitTransform(
            columns=self.local_size,
            bias_V=None if call.bias is None else call.bias[: self.local_size].to(compute_dtype),
            scale=None if call.logit_scale is None else call.logit_scale.to(compute_dtype),
            scalars=call.scalars,
            class_weights_V=self.own_weights,
        )
        rows = pad_rows(self.plan.chunk_tokens) if self.plan.num_tokens else 0
        columns = pad_columns(self.width) if device_info(hidden).aligned_rows else self.width
        self.buffer_TL = torch.empty(rows, columns, **self.like)
        self.logits_TV = self.buffer_TL[:, : self.width]
        self.filled = False

    def meet(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """Numbers [N] of this rank's tokens, as those of the walk's: of all ranks', where tokens
        are spread over them. Before the first chunk; labels and temperature go with them."""
        if self.spread is None:
            return numbers
        assert self.parallel is not None
        count = self.own.valid.shape[0]
        sent = [x.expand(count) for x in numbers]
        if self.temperature is not None:
            sent.append(self.temperature.to(self.compute_dtype).expand(count))
        self.labels, *found = self.spread.of_all(self.own, self.labels, sent)
        if self.temperature is not None:
            # Of a token that fills a chunk it is 0, and nothing may be divided by that.
            found[-1] = torch.where(found[-1] == 0, 1.0, found[-1])
            self.temperature = found.pop()
        tokens = select_tokens(
            self.labels,
            None,
            self.ignore_index,
            self.vocab_size,
            self.parallel.shard,
            self.hidden.device,
            self.places,
        )
        # Tokens that are not valid stay, so that chunks are the same on all ranks.
        self.tokens = tokens._replace(rows=None, packed=False)
        return tuple(found)

    def mine(self, values: Tensor) -> Tensor:
        """[..., N] of this rank's tokens, of values of the walk's."""
        return values if self.spread is None else self.spread.of_own(self.own, values)

    def check_consistent(self, function: str) -> None:
        """Before a forward over shards: what every rank must have alike."""
        if self.parallel is None or self.parallel.agreed:
            return
        consistency = begin_consistency(
            self.parallel, self.some_rows, self.labels, self.tokens.valid
        )
        if self.spread is None:
            consistency.tokens("hidden", self.hidden, self.tokens.valid)
        consistency.exact("max_chunk_bytes", float(self.plan.chunk_tokens))
        consistency.close("logit_scale", self.shape.scale)
        consistency.per_token("temperature", self.temperature, self.tokens.valid.shape[0])
        consistency.scalars(self.shape.scalars, function)
        consistency.exact("reduce_hidden_grad", float(self.reduce_hidden))
        low = self.low
        consistency.exact("the rank of the head", 0.0 if low is None else low.a_RH.shape[0])
        consistency.close("a", None if low is None else low.a_RH.sum())
        consistency.close("scale", None if low is None else low.scale)

    def chunks(self) -> Iterator[Chunk]:
        theirs = None if self.spread is None else self.spread.hidden_of_chunks(self.own)
        for start, stop in self.plan.bounds():
            rows, size = self.tokens.places(start, stop), stop - start
            if theirs is not None:
                x_TH, keep_TH = next(theirs)
            else:
                x_TH, keep_TH = self.hidden[rows], None if self.keep is None else self.keep[rows]
                if not self.tokens.packed:
                    x_TH = torch.where(self.tokens.valid[rows, None], x_TH, 0.0)
            x_TH = operand(x_TH, self.gemm_dtype, self.compute_dtype).contiguous()
            fill = pad_rows(size) - size
            if fill:
                x_TH = torch.cat([x_TH, x_TH.new_zeros(fill, self.hidden_size)])
            z_TV = self.logits_TV[: size + fill]
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
        return self.made(rows, self.width, self.compute_dtype, device, self.shape)

    def blocks(self, chunk: Chunk, *, fresh: bool = True) -> Iterator[LogitsBlock]:
        """Of a chunk; not `fresh` where statistics of its logits have been made in place."""
        for low in range(0, chunk.size, self.block_rows):
            span = slice(low, min(low + self.block_rows, chunk.size))
            places = self.tokens.places(chunk.start + span.start, chunk.start + span.stop)
            z_BV, as_made = chunk.z_TV[span], fresh and not self.filled
            of = (self.tokens, self.temperature, span, places, z_BV, self.compute_dtype)
            yield rows_at(*of, fresh=as_made)

    def scaled(self, factor_B: Tensor, rows: LogitsBlock) -> Tensor:
        """Factors of dz, times d z / d x where that is one number for a token."""
        if self.shape.scale is not None:
            factor_B = factor_B * self.shape.scale
        return factor_B if rows.temperature_B is None else factor_B / rows.temperature_B


def rows_at(
    tokens: Tokens,
    temperature: Tensor | None,
    span: slice,
    places: slice | Tensor,
    z_BV: Tensor,
    dtype: torch.dtype,
    *,
    fresh: bool = True,
) -> LogitsBlock:
    """Logits of some tokens, with what is known of each."""
    temperature_B = None
    if temperature is not None:
        temperature_B = temperature.expand(tokens.valid.shape[0])[places].to(dtype)
    valid_B = None if tokens.packed else tokens.valid[places]
    owned_B = None if tokens.owned is None else tokens.owned[places]
    y_B1 = tokens.labels[places, None]
    return LogitsBlock(span, places, z_BV, y_B1, temperature_B, valid_B, owned_B, fresh)
