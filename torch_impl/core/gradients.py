"""Gradient accumulators and their products: steps 7 and 8 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.algebra import Coefficients
from xentlib.torch.core.device import device_info
from xentlib.torch.core.gemm import add_rows_, addmm_, gemm_precision, mm, storage_dtype
from xentlib.torch.core.kernels import Kernels, LogitsBlock
from xentlib.torch.core.lora import LowSums
from xentlib.torch.core.spread import Sending
from xentlib.torch.core.vocab import VocabParallel
from xentlib.torch.core.walk import Chunk, Walk

# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11
BIAS = 2  # of the gradients, the one that comes from no product


def power_of_two(gemm_dtype: torch.dtype, factors: Tensor) -> Tensor | None:
    """Exponent that brings float16 dz of these factors to where float16 has digits."""
    if gemm_dtype != torch.float16:
        return None
    largest = factors.abs().amax() if factors.numel() else factors.sum()
    return FP16_EXPONENT - torch.frexp(largest).exponent


def order_in_chunks(walk: Walk, y_M: Tensor) -> Tensor:
    """[M]: the computed tokens of each chunk sorted by label, those of a label as they come."""
    chunk_M = torch.arange(y_M.shape[0], device=y_M.device) // walk.plan.chunk_tokens
    return torch.sort(chunk_M * (walk.local_size + 1) + y_M, stable=True).indices


def needs_transpose(transposed: bool, device: torch.device) -> bool:
    """Whether d weight of an [H, V] head is summed in that layout, not in [V, H].

    CUDA's `index_put_`, which adds the targets' rows, copies a sum with gaps there and back: at
    Llama-3's head 8.4 GB a chunk, which take as long as three quarters of a product. There the sum
    is [V, H] and the gradient is turned once, as it is rounded.
    """
    return transposed and not device_info(device).ordered_put


class Gradients(NamedTuple):
    """Accumulators in the compute dtype; empty where not wanted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    low_in: Tensor
    low_out: Tensor


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype and without gaps, in one pass; itself where nothing changes."""
    if x.is_contiguous():
        return x.to(dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


class GradientSums:
    """d hidden, d weight, d bias and those of a low-rank part out of one dz after the other."""

    def __init__(
        self, walk: Walk, needs: list[bool], rows: int, hidden: Tensor | None = None
    ) -> None:
        """`hidden`: a sum that d hidden is added to, of other rows of the head."""
        self.added = hidden is not None
        self.walk, self.needs, self.padding = walk, needs, rows - walk.local_size
        self.needs_transpose = needs_transpose(walk.transposed, walk.hidden.device)
        shape = (walk.local_size, walk.hidden_size)
        shape = shape[::-1] if self.needs_transpose else shape
        num_tokens = walk.hidden.shape[0]
        if hidden is None:
            hidden = torch.zeros(num_tokens if needs[0] else 0, walk.hidden_size, **walk.like)
        self.hidden = hidden
        self.weight = torch.empty(shape if needs[1] else (0, 0), **walk.like)
        self.bias = torch.zeros(walk.local_size if needs[2] else 0, **walk.like)
        self.low = None if walk.low is None else LowSums(walk.low, needs[3], needs[4], walk.made)
        self.summing: Any = None
        self.returning: tuple[Sending, int] | None = None  # d hidden of the chunk before
        self.weight_VH = self.weight.T if self.needs_transpose else self.weight
        self.dz_TV = walk.logits_TV
        store = storage_dtype(walk.gemm_dtype, walk.compute_dtype, walk.hidden.device)
        if store != walk.compute_dtype:
            # dz of 16 bits lies over the last part of the row of logits that it is made from.
            low_TL, columns = walk.buffer_TL.view(store), walk.buffer_TL.shape[1]
            start = low_TL.shape[1] - columns
            self.dz_TV = low_TL[:, start : start + walk.width]
        self.dz_y_T = torch.empty(walk.plan.chunk_tokens, **walk.like)
        places = walk.tokens.places(0, walk.tokens.computed)
        self.targets_M = walk.tokens.labels[places]
        self.order_M: Tensor | None = None
        if walk.made.sorted_targets:
            # A token that is masked has no target: of many, one program would walk over all.
            valid_M = walk.tokens.valid[places]
            self.targets_M = torch.where(valid_M, self.targets_M, walk.local_size)
            if needs[1] or needs[4]:
                self.order_M = order_in_chunks(walk, self.targets_M)

    def passes(self, exponent: Tensor | None) -> Iterator[tuple[Walk, GradientSums]]:
        """Walks over the head, with the sums of each: one."""
        yield self.walk, self

    def into(self, rows: LogitsBlock) -> Tensor | None:
        """Where dz of a block goes; None: in place of its logits."""
        if self.dz_TV is self.walk.logits_TV:
            return None
        return self.dz_TV[rows.span, : self.walk.local_size]

    def take(self, rows: LogitsBlock, kernels: Kernels, lse_B: Tensor, of: Coefficients) -> None:
        """Steps 6 and 7 for a block: dz of the rest in place of the logits, that of the target
        beside it, both rounded to the GEMM dtype."""
        gemm_dtype, need_bias = self.walk.gemm_dtype, self.needs[2] and bool(self.walk.local_size)
        dz_y_B, part_V = kernels.dz(
            rows,
            lse_B,
            of,
            into_BV=self.into(rows),
            round_to=gemm_dtype,
            column_sums=need_bias,
        )
        if part_V is not None:
            # A block's sums first: one after the other, 6,250 terms of one label err by 30 u.
            add_rows_(part_V, self._columns(rows.places), dz_y_B)
            self.bias.add_(part_V)
        self.dz_y_T[rows.span] = dz_y_B.to(gemm_dtype)

    def _columns(self, index: slice | Tensor) -> Tensor:
        """The targets' rows of the head; 0 for those of other ranks, whose terms are 0."""
        labels = self.walk.tokens.labels[index]
        owned = self.walk.tokens.owned
        return labels if owned is None else torch.where(owned[index], labels, 0)

    def add(self, chunk: Chunk) -> None:
        """Gradient GEMMs of the rest, then the target's terms: they are most of both gradients,
        and every small term that a GEMM adds after one is rounded at its size (tau of d hidden 4.8
        against 1.5, of d weight on real text 9.6 against 1.5)."""
        walk, size = self.walk, chunk.size
        self._take_back()  # before there is another one of its size
        if not any(need for k, need in enumerate(self.needs) if k != BIAS):
            return
        if not walk.local_size:
            if self.needs[0] and walk.spread is not None:
                self._send_back(walk.buffer_TL.new_zeros(size, walk.hidden_size), chunk)
            return
        z_TV, x_TH, padded = chunk.z_TV, chunk.x_TH, chunk.z_TV.shape[0]
        dz_TV = self.dz_TV[:padded, : walk.local_size]
        if padded > size:
            dz_TV[size:].zero_()
        rows = walk.tokens.places(chunk.start, chunk.start + size)
        dz_y_T, y_T = self.dz_y_T[:size], self.targets_M[chunk.start : chunk.start + size]
        low, activations = self.low, chunk.low
        if low is not None and activations is not None and (self.needs[0] or self.needs[3]):
            du_TR = low.backprop_lora(dz_TV, dz_y_T, y_T)
        if self.needs[0]:
            direct = isinstance(rows, slice) and padded == size
            direct = direct and walk.spread is None and not self.added
            dx_TH = self.hidden[rows] if direct else z_TV.new_empty(padded, walk.hidden_size)
            with gemm_precision(walk.gemm_dtype, z_TV.device):
                mm(dz_TV, walk.operand_VH, out=dx_TH)
            if low is not None and activations is not None:
                low.add_to_hidden(dx_TH, du_TR, activations)
            walk.made.add_to_hidden(dx_TH[:size], dz_y_T, walk.operand_VH, y_T)
            if walk.spread is not None:
                self._send_back(dx_TH, chunk)  # meanwhile, d weight of this chunk
            elif self.added:
                self.hidden[rows] += dx_TH[:size]
            elif not direct:
                self.hidden[rows] = dx_TH[:size]
            if chunk.start + size == walk.tokens.computed:
                self._start_sum()  # meanwhile, d weight of this chunk
        order_T = None if self.order_M is None else self.order_M[chunk.start :][:size]
        if self.needs[1]:
            left, right = (x_TH.T, dz_TV) if self.needs_transpose else (dz_TV.T, x_TH)
            with gemm_precision(walk.gemm_dtype, z_TV.device):
                addmm_(self.weight, left, right, first=chunk.start == 0)
            walk.made.add_to_weight(self.weight_VH, dz_y_T, x_TH[:size], y_T, order_T, chunk.start)
        if low is not None and activations is not None:
            if self.needs[3]:
                low.add_to_a(du_TR, activations)
            if self.needs[4]:
                low.add_to_b(dz_TV, dz_y_T, y_T, order_T, chunk.start, activations)

    def _send_back(self, dx_TH: Tensor, chunk: Chunk) -> None:
        """d hidden of a chunk, to the ranks whose tokens they are."""
        if self.walk.spread is not None:
            self.returning = self.walk.spread.send_back(dx_TH), chunk.start

    def _take_back(self) -> None:
        """What has come of the chunk before."""
        if self.returning is not None and self.walk.spread is not None:
            self.walk.spread.take_back(self.walk.own, *self.returning, self.hidden)
        self.returning = None

    def _start_sum(self) -> None:
        """Once a call, on every rank, whatever it has computed."""
        wanted = self.needs[0] and self.walk.reduce_hidden and self.walk.spread is None
        parallel = self.walk.parallel
        if wanted and isinstance(parallel, VocabParallel) and self.summing is None:
            self.summing = parallel.start_sum(self.hidden)

    def complete(self) -> None:
        """Of no token the sums are 0."""
        if self.needs[1] and self.walk.tokens.computed == 0:
            self.weight_VH.zero_()

    def finish(self, exponent: Tensor | None) -> Gradients:
        """The sums, d hidden over all shards, with the power of two taken out again."""
        self.complete()
        self._start_sum()
        self._take_back()
        if self.summing is not None:
            self.summing.wait()
        if self.padding:
            corner = (0, self.padding) if self.needs_transpose else (0, 0, 0, self.padding)
            self.weight = (
                torch.nn.functional.pad(self.weight, corner) if self.needs[1] else self.weight
            )
            self.bias = torch.nn.functional.pad(self.bias, (0, self.padding * self.needs[2]))
        low_in, low_out = (self.bias.new_empty(0, 0) for _ in range(2))
        if self.low is not None:
            low_in, low_out = self.low.a, self.low.b
            if self.needs[3] and isinstance(self.walk.parallel, VocabParallel):
                self.walk.parallel.start_sum(low_in).wait()
            if self.padding and self.needs[4]:
                low_out = torch.nn.functional.pad(low_out, (0, 0, 0, self.padding))
        again = self.walk.transposed and not self.needs_transpose
        weight = self.weight.T if again else self.weight
        found = Gradients(self.hidden, weight, self.bias, low_in, low_out)
        if exponent is not None:
            for accumulator in found:
                accumulator.copy_(torch.ldexp(accumulator, -exponent))
        return found
