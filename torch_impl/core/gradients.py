"""Gradient accumulators and their products: steps 7 and 8 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, T tokens of a chunk, B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.checks.shards import SHARDS
from xentlib.math.softmax import Coefficients
from xentlib.plan.split import CPU_ROWS, ChunkPlan
from xentlib.torch.core.consistency import all_gather, group_named
from xentlib.torch.core.device import device_info, host_readable
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.gemm import add_rows_, addmm_, gemm_precision, mm, storage_dtype
from xentlib.torch.core.kernels import DzOutput, Kernels, LogitsBlock, TargetTerms
from xentlib.torch.core.logits import Chunk, ChunkedLogits
from xentlib.torch.core.lora import LowSums
from xentlib.torch.core.vocab import ShardedVocab
from xentlib.torch.operators import HeadCall

BIAS = 2  # of the gradients, the one that comes from no product
# Of a CPU's product for d weight: the default chunk.
WEIGHT_TOKENS = CPU_ROWS


def order_in_chunks(plan: ChunkPlan, y_M: Tensor, labels: int) -> Tensor:
    """[M]: the computed tokens of each chunk sorted by label, those of a label as they come; of so
    many labels."""
    if plan.num_chunks > 1:
        chunk_M = torch.arange(y_M.shape[0], device=y_M.device) // plan.chunk_tokens
        y_M = chunk_M * labels + y_M
    return torch.sort(y_M, stable=True).indices


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


def fake_gradients(
    call: HeadCall, needs: list[bool], dtype: torch.dtype | None = None
) -> Gradients:
    """Shapes and dtypes for a compiler, empty where not needed: of accumulators in a compute dtype,
    or of gradients in those of their inputs."""
    if call.weight is None:  # that of logits has their dtype and strides
        d_logits = torch.empty_like(call.hidden) if needs[0] else call.hidden.new_empty(0)
        return Gradients(d_logits, *(call.hidden.new_empty(0) for _ in range(4)))
    likes = [call.hidden if x is None else x for x in call.leaves]
    hidden, weight, _, low_in, low_out = (x.shape for x in likes)
    shapes = (hidden, weight, (weight[call.transposed],), low_in, low_out)
    empty = ((0, hidden[1]), (0, 0), (0,), (0, 0), (0, 0))
    parts = zip(likes, needs, shapes, empty, strict=True)
    gradients = Gradients(
        *(x.new_empty(a if need else b, dtype=dtype or x.dtype) for x, need, a, b in parts)
    )
    if dtype is None or not call.transposed or needs_transpose(True, call.hidden.device):
        return gradients
    # The sum is [V, H], and turned.
    turned = gradients.weight.new_empty(gradients.weight.shape[::-1]).T
    return gradients._replace(weight=turned)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In this dtype and without gaps, in one pass; itself where nothing changes."""
    if x.is_contiguous():
        return x.to(dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)


def sum_over_shards(call: HeadCall, d_hidden: Tensor) -> None:
    """Of tokens that the ranks of tensor parallelism have alike, where those of others are in a
    chunk with them, or rows pass by."""
    if call.rows.shards and call.reduce_hidden:
        dist.all_reduce(d_hidden, group=group_named(call.rows.shards))


class GradientSums:
    """d hidden, d weight, d bias and those of a low-rank part out of one dz after the other."""

    def __init__(
        self,
        logits: ChunkedLogits,
        needs: list[bool],
        rows: int,
        hidden: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> None:
        """`hidden`: a sum that d hidden is added to, of other rows of the head; `weight`: where
        that of d weight is made."""
        self.added = hidden is not None
        self.logits, self.needs, self.padding = logits, needs, rows - logits.local_size
        self.tokens = logits.chunks_of
        self.needs_transpose = needs_transpose(logits.transposed, logits.hidden.device)
        shape = (logits.local_size, logits.hidden_size)
        shape = shape[::-1] if self.needs_transpose else shape
        num_tokens = logits.hidden.shape[0]
        if hidden is None:
            hidden = torch.zeros(num_tokens if needs[0] else 0, logits.hidden_size, **logits.like)
        self.hidden = hidden
        if weight is None:
            weight = torch.empty(shape if needs[1] else (0, 0), **logits.like)
        self.weight = weight
        bias = torch.zeros if needs[2] else torch.empty
        self.bias = bias(logits.local_size if needs[2] else 0, **logits.like)
        self.low = (
            None
            if logits.low is None
            else LowSums(logits.low, needs[3], needs[4], logits.kernel_cls)
        )
        self.summing: Any = None
        self.weight_VH = self.weight.T if self.needs_transpose else self.weight
        self.dz_TV = logits.logits_TV
        store = storage_dtype(logits.gemm_dtype, logits.compute_dtype, logits.hidden.device)
        if store != logits.compute_dtype:
            # dz of 16 bits lies over the last part of the row of logits that it is made from.
            low_TL, columns = logits.buffer_TL.view(store), logits.buffer_TL.shape[1]
            start = low_TL.shape[1] - columns
            self.dz_TV = low_TL[:, start : start + logits.width]
        self.dz_y_T = torch.empty(logits.plan.chunk_tokens, **logits.like)
        self.apart = True  # dz of the target, which is not in its column
        token_index = logits.tokens.token_index(0, logits.tokens.computed)
        self.targets_M = logits.tokens.labels[token_index]
        self.shared = logits.shared if logits.looks_for_targets else None
        if logits.kernel_cls.sorted_targets and self.shared is None:
            # A token that is masked has no target: of many, one program would add up all.
            valid_M = logits.tokens.valid[token_index]
            self.targets_M = torch.where(valid_M, self.targets_M, logits.local_size)

    @cached_property  # while the device is at the first chunk's products, which do not wait for it
    def order_M(self) -> Tensor | None:
        """For kernels that want `sorted_targets`."""
        logits, shared = self.logits, self.shared
        needed = self.needs[4] or (self.needs[1] and self.apart)
        if not (logits.kernel_cls.sorted_targets and needed):
            return None
        if shared is None or shared.targets_N is None:
            return order_in_chunks(logits.plan, self.targets_M, logits.local_size + 1)
        if shared.order_M is None:
            token_index = logits.tokens.token_index(0, logits.tokens.computed)
            targets_M = shared.targets_N[token_index]
            shared.order_M = order_in_chunks(logits.plan, targets_M + 1, logits.vocab.size + 1)
        return shared.order_M

    def passes(self, exponent: Tensor | None) -> Iterator[tuple[ChunkedLogits, GradientSums]]:
        """Walks over the head, with the sums of each: one."""
        yield self.logits, self

    def output(self, rows: LogitsBlock, *, column_sums: bool = False) -> DzOutput:
        """Where dz of a block goes: in place of its logits, where that is as wide."""
        into_BV = None
        if self.dz_TV is not self.logits.logits_TV:
            into_BV = self.dz_TV[rows.span, : self.logits.local_size]
        dz_y_B = None if column_sums else self.dz_y_T[rows.span]
        return DzOutput(into_BV, self.logits.gemm_dtype, dz_y_B, column_sums=column_sums)

    def take(self, rows: LogitsBlock, kernels: Kernels, lse_B: Tensor, of: Coefficients) -> None:
        """Steps 6 and 7 for a block: dz of the rest in place of the logits, that of the target
        beside it, both rounded to the GEMM dtype."""
        need_bias = self.needs[2] and bool(self.logits.local_size)
        out = self.output(rows, column_sums=need_bias)
        dz_y_B, part_V = kernels.dz(rows, lse_B, of, out)
        if part_V is not None:
            # A block's sums first: one after the other, 6,250 terms of one label err by 30 u.
            # A target of another rank is put into column 0, where its term is 0.
            y_B = rows.y_B1[:, 0]
            if self.logits.vocab.shard is not None:
                y_B = torch.where((y_B >= 0) & (y_B < self.logits.local_size), y_B, 0)
            add_rows_(part_V, y_B, dz_y_B)
            self.bias.add_(part_V)
        if dz_y_B is not out.dz_y_B:
            self.dz_y_T[rows.span] = dz_y_B.to(self.logits.gemm_dtype)

    def put(self, rows: LogitsBlock, kernels: Eager) -> None:
        """Step 7 for a block whose dz is in place of its logits, the target's in its column."""
        none_B = torch.zeros_like(rows.z_BV[:, 0])
        need_bias = self.needs[2] and bool(self.logits.local_size)
        _, part_V = kernels.chained(rows, none_B, self.output(rows, column_sums=need_bias))
        if part_V is not None:
            self.bias.add_(part_V)
        self.in_column(rows)

    def in_column(self, rows: LogitsBlock) -> None:
        """Of a block, dz of the target is: nothing is left to add but to an adapter's sums, whose
        products take the two apart."""
        self.apart = False
        if self.low is not None:
            self.dz_y_T[rows.span] = 0.0

    def add(self, chunk: Chunk) -> None:
        """Gradient GEMMs of the rest, then the target's terms: they are most of both gradients,
        and every small term that a GEMM adds after one is rounded at its size (tau of d hidden 4.8
        against 1.5, of d weight on real text 9.6 against 1.5)."""
        logits, size = self.logits, chunk.size
        self.tokens.wait(self.hidden)  # before there is another one of its size
        if not any(need for k, need in enumerate(self.needs) if k != BIAS):
            return
        if not logits.local_size:
            if self.needs[0] and self.tokens.gathered:
                none_TH = logits.buffer_TL.new_zeros(size, logits.hidden_size)
                self.tokens.put(self.hidden, none_TH, chunk.start, size, add=False)
            return
        z_TV, padded = chunk.z_TV, chunk.z_TV.shape[0]
        dz_TV = self.dz_TV[:padded, : logits.local_size]
        if padded > size:
            dz_TV[size:].zero_()
        y_T = self.targets_M[chunk.start : chunk.start + size]
        order_T = None if self.order_M is None else self.order_M[chunk.start :][:size]
        terms = TargetTerms(self.dz_y_T[:size], y_T, order_T, chunk.start)
        low, activations = self.low, chunk.low
        if low is not None and activations is not None and (self.needs[0] or self.needs[3]):
            du_TR = low.backprop_lora(dz_TV, terms)
        if self.needs[0]:
            view_TH, adds = None, self.added and device_info(z_TV).wide_products
            if padded == size and (adds or not self.added):
                view_TH = self.tokens.view(self.hidden, chunk.start, size)
            dx_TH = z_TV.new_empty(padded, logits.hidden_size) if view_TH is None else view_TH
            with gemm_precision(logits.gemm_dtype, z_TV.device):
                if self.added and view_TH is not None:  # a GPU adds as it stores
                    addmm_(dx_TH, dz_TV, logits.operand_VH, first=False)
                else:
                    mm(dz_TV, logits.operand_VH, out=dx_TH)
            if low is not None and activations is not None:
                low.add_to_hidden(dx_TH, du_TR, activations)
            if self.apart:
                logits.kernel_cls.add_to_hidden(dx_TH[:size], terms, logits.operand_VH)
            if view_TH is None:  # to other ranks meanwhile, with d weight of this chunk
                self.tokens.put(self.hidden, dx_TH, chunk.start, size, add=self.added)
            del dx_TH, view_TH  # not beside the products of d weight
            if chunk.start + size == logits.tokens.computed:
                self._start_sum()  # meanwhile, d weight of this chunk
        if self.needs[1]:
            self._add_to_weight(chunk, dz_TV, terms)
        if low is not None and activations is not None:
            if self.needs[3]:
                low.add_to_a(du_TR, activations)
            if self.needs[4]:
                low.add_to_b(dz_TV, terms, activations)

    def _add_to_weight(self, chunk: Chunk, dz_TV: Tensor, terms: TargetTerms) -> None:
        """On a CPU some tokens at a time, the same whatever the chunk where its tokens are a
        multiple: d weight then does not depend on the chunk."""
        x_TH, logits, padded = chunk.x_TH, self.logits, dz_TV.shape[0]
        split = device_info(dz_TV).cpu_libraries and terms.order_B is None
        step = WEIGHT_TOKENS if split else padded
        for start in range(0, padded, max(1, step)):
            part = slice(start, start + step)
            x, dz, of_part = x_TH[part], dz_TV[part], terms
            if step < padded:
                of_part = terms._replace(dz_y_B=terms.dz_y_B[part], y_B=terms.y_B[part])
            left, right = (x.T, dz) if self.needs_transpose else (dz.T, x)
            with gemm_precision(logits.gemm_dtype, dz_TV.device):
                addmm_(self.weight, left, right, first=chunk.start + start == 0)
            if self.apart:
                logits.kernel_cls.add_to_weight(self.weight_VH, of_part, x[: len(of_part.dz_y_B)])

    def _start_sum(self) -> None:
        """Once a call, on every rank, whatever it has computed."""
        vocab, wanted = self.logits.vocab, self.needs[0] and self.logits.sums_hidden
        if wanted and isinstance(vocab, ShardedVocab) and self.summing is None:
            self.summing = vocab.start_sum(self.hidden)

    def complete(self) -> None:
        """Of no token the sums are 0."""
        if self.needs[1] and self.logits.tokens.computed == 0:
            self.weight_VH.zero_()

    def finish(self, exponent: Tensor | None) -> Gradients:
        """The sums, d hidden over all shards, with the power of two taken out again."""
        self.complete()
        self._start_sum()
        self.tokens.wait(self.hidden)
        if self.summing is not None:
            self.summing.wait()
        if self.needs[0]:
            sum_over_shards(self.tokens.call, self.hidden)
        if self.padding:
            corner = (0, self.padding) if self.needs_transpose else (0, 0, 0, self.padding)
            if self.needs[1]:
                self.weight = torch.nn.functional.pad(self.weight, corner)
            if self.needs[2]:
                self.bias = torch.nn.functional.pad(self.bias, (0, self.padding))
        low_in, low_out = self.bias.new_empty(0, 0), self.bias.new_empty(0, 0)
        if self.low is not None:
            low_in, low_out = self.low.a, self.low.b
            if self.needs[3] and isinstance(self.logits.vocab, ShardedVocab):
                self.logits.vocab.start_sum(low_in).wait()
            if self.padding and self.needs[4]:
                low_out = torch.nn.functional.pad(low_out, (0, 0, 0, self.padding))
        turned = self.logits.transposed and not self.needs_transpose
        weight = self.weight.T if turned else self.weight
        gradients = Gradients(self.hidden, weight, self.bias, low_in, low_out)
        if exponent is not None:
            for accumulator in gradients:
                accumulator.copy_(torch.ldexp(accumulator, -exponent))
        return gradients


@torch.library.custom_op("xentlib::same_upstream", mutates_args=())
def same_upstream(gradient: Tensor, counts: Tensor, group: str) -> Tensor:
    """The gradient [] that all ranks with tokens that count have alike, of a loss whose head's
    gradient holds all of them by now; 0 where no rank has any, NaN where they differ and cannot be
    read."""
    over = group_named(group)
    ours = torch.stack([gradient, counts.to(gradient.dtype)])
    all_R2 = all_gather(ours, over).view(-1, 2)
    value_R, counts_R = all_R2[:, 0], all_R2[:, 1] > 0
    high = torch.where(counts_R, value_R, -torch.inf).amax()
    low = torch.where(counts_R, value_R, torch.inf).amin()
    differs = high > low  # False of NaN
    if host_readable(gradient) and differs:
        SHARDS.refuse("upstream", gradients=", ".join(f"{x:g}" for x in value_R.tolist()))
    return torch.where(counts_R.any(), torch.where(differs, torch.nan, high), 0.0)


@same_upstream.register_fake
def _(gradient: Tensor, counts: Tensor, group: str) -> Tensor:
    return torch.empty_like(gradient)
