"""The walk over a head's logits, chunk by chunk: steps 1, 2, 7 and 8 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, M valid tokens, T tokens of a chunk (filled up to
whole rows of a GEMM's tile), B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.checks import check_label_range
from xentlib.plan import (
    CPU_BLOCK_BYTES,
    GPU_BLOCK_BYTES,
    VocabShard,
    pad_rows,
    plan_chunks,
)
from xentlib.torch.describe import HeadCall, dtype_name
from xentlib.torch.gemm import add_rows_, addmm_, gemm_precision, mm, operand, storage_dtype
from xentlib.torch.head import vocab_parallel_of
from xentlib.torch.softmax import Block, RestStats, TokenStats, rest_stats, take_target, token_stats

__all__ = [
    "Chunk",
    "GradientSums",
    "Gradients",
    "Rows",
    "Tokens",
    "Walk",
    "power_of_two",
    "select_tokens",
]

# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11


class Tokens(NamedTuple):
    """Step 1: the tokens that count. On CPU only they are computed, since reading their number
    costs no device sync; elsewhere every token is, the rest masked."""

    labels: Tensor  # [N] int64, the target's column; 0 where a label is no class
    owned: Tensor | None  # [N] the column is on this rank; None: they all are
    valid: Tensor  # [N]
    bad: Tensor  # [N] valid, with a label outside the vocabulary; never on CPU
    rows: Tensor | None  # [M] where the computed tokens are; None if all N are
    packed: bool

    @property
    def computed(self) -> int:
        return self.valid.shape[0] if self.rows is None else self.rows.shape[0]

    def places(self, start: int, stop: int) -> slice | Tensor:
        """Places of the computed tokens from `start` to `stop`."""
        return slice(start, stop) if self.rows is None else self.rows[start:stop]

    def clean(self, values: Tensor) -> Tensor:
        """Values [..., N]: NaN where the label was bad, 0 where the token is not valid."""
        values = torch.where(self.bad, torch.nan, values)
        return torch.where(self.valid, values, 0.0)


def select_tokens(
    labels: Tensor,
    where: Tensor | None,
    ignore_index: int,
    vocab_size: int,
    shard: VocabShard | None,
) -> Tokens:
    """A shard's columns are counted from its start; a target elsewhere is in the spare column."""
    labels = labels.long()
    valid_N = labels != ignore_index
    if where is not None:
        valid_N = valid_N & where
    in_range_N = (labels >= 0) & (labels < vocab_size)
    bad_N = valid_N & ~in_range_N
    packed = labels.device.type == "cpu"
    if packed and bad_N.any():
        check_label_range(int(labels[bad_N][0]), vocab_size, ignore_index)
    rows_M = valid_N.nonzero()[:, 0] if packed else None
    if rows_M is not None and rows_M.shape[0] == labels.shape[0]:
        rows_M = None
    labels = torch.where(valid_N & in_range_N, labels, 0)
    owned_N = None
    if shard is not None:
        owned_N = (labels >= shard.start) & (labels < shard.stop)
        labels = torch.where(owned_N, labels - shard.start, shard.size)
    return Tokens(labels, owned_N, valid_N, bad_N, rows_M, packed)


def power_of_two(gemm_dtype: torch.dtype, factors: Tensor) -> Tensor | None:
    """Exponent that brings float16 dz of these factors to where float16 has digits."""
    if gemm_dtype != torch.float16:
        return None
    largest = factors.abs().amax() if factors.numel() else factors.sum()
    return FP16_EXPONENT - torch.frexp(largest).exponent


class Chunk(NamedTuple):
    start: int
    size: int
    x_TH: Tensor  # operand of the GEMMs
    z_TV: Tensor  # logits, and dz in their place


class Rows(NamedTuple):
    """A block of a chunk, small enough to stay in cache."""

    span: slice  # within the chunk
    places: slice | Tensor  # within the N tokens
    z_BV: Tensor
    y_B1: Tensor
    temperature_B: Tensor | None
    jacobian_BV: Tensor | None  # derivative of the softcap
    fresh: bool  # the target's logit is still in its column


class Walk:
    """Steps 1 and 2: logits of one chunk after the other, in one buffer."""

    def __init__(self, call: HeadCall) -> None:
        hidden, compute_dtype = call.hidden, call.compute_dtype
        self.hidden, self.transposed = hidden, call.transposed
        self.gemm_dtype, self.compute_dtype = call.gemm_dtype, compute_dtype
        self.like: dict[str, Any] = {"dtype": compute_dtype, "device": hidden.device}
        weight_VH = call.weight.T if call.transposed else call.weight
        self.local_size, self.hidden_size = weight_VH.shape
        self.parallel = vocab_parallel_of(call.group, call.shard)
        shard = None if self.parallel is None else self.parallel.shard
        self.vocab_size = self.local_size if shard is None else shard.vocab_size
        self.tokens = select_tokens(
            call.labels, call.where, call.ignore_index, self.vocab_size, shard
        )
        # A shard's logits have a spare column, at -inf, for targets that other ranks hold.
        self.width = self.local_size + (shard is not None)
        self.plan = plan_chunks(
            self.tokens.computed,
            self.width,
            self.hidden_size,
            dtype=dtype_name(call.gemm_dtype),
            compute_dtype=dtype_name(compute_dtype),
            max_chunk_bytes=call.chunk_bytes,
        )
        self.block_rows = self.plan.block_tokens(
            CPU_BLOCK_BYTES if hidden.device.type == "cpu" else GPU_BLOCK_BYTES
        )
        self.operand_VH = operand(weight_VH, call.gemm_dtype, compute_dtype)
        self.bias_V = None if call.bias is None else call.bias.to(compute_dtype)
        self.scale = None if call.logit_scale is None else call.logit_scale.to(compute_dtype)
        self.softcap, self.temperature = call.softcap, call.temperature
        rows = pad_rows(self.plan.chunk_tokens) if self.tokens.computed else 0
        self.logits_TV = torch.empty(rows, self.width, **self.like)
        self.filled = False

    def chunks(self) -> Iterator[Chunk]:
        for start, stop in self.plan.bounds():
            rows, size = self.tokens.places(start, stop), stop - start
            x_TH = self.hidden[rows]
            if not self.tokens.packed:
                x_TH = torch.where(self.tokens.valid[rows, None], x_TH, 0.0)
            x_TH = operand(x_TH, self.gemm_dtype, self.compute_dtype).contiguous()
            fill = pad_rows(size) - size
            if fill:
                x_TH = torch.cat([x_TH, x_TH.new_zeros(fill, self.hidden_size)])
            z_TV = self.logits_TV[: size + fill]
            if not self.filled and self.local_size:
                with gemm_precision(self.gemm_dtype, self.hidden.device):
                    mm(x_TH, self.operand_VH.T, out=z_TV[:, : self.local_size])
            if not self.filled:
                z_TV[:, self.local_size :] = -torch.inf
            yield Chunk(start, size, x_TH, z_TV)

    def block(self) -> Block:
        """Scratch; give it up before a GEMM, whose own takes its place."""
        return Block(self.block_rows, self.width, self.compute_dtype, self.hidden.device)

    def blocks(self, chunk: Chunk, *, jacobian: bool) -> Iterator[Rows]:
        """Logits with bias, scale, softcap and temperature; the softcap's derivative if wanted."""
        for low in range(0, chunk.size, self.block_rows):
            span = slice(low, min(low + self.block_rows, chunk.size))
            index = self.tokens.places(chunk.start + span.start, chunk.start + span.stop)
            temperature_B = None
            if self.temperature is not None:
                per_token = self.temperature.expand(self.tokens.valid.shape[0])
                temperature_B = per_token[index].to(self.compute_dtype)
            z_BV = chunk.z_TV[span]
            derivative_BV = None
            if not self.filled:
                shaped_BV = z_BV[:, : self.local_size]
                derivative_BV = self._shape_(shaped_BV, temperature_B, jacobian=jacobian)
            y_B1 = self.tokens.labels[index, None]
            yield Rows(span, index, z_BV, y_B1, temperature_B, derivative_BV, not self.filled)

    def stats(self, *, entropy: bool, smoothing: bool) -> TokenStats:
        """Steps 1 to 5 for all N tokens, with one MAX and one packed SUM over a vocabulary's
        shards. A single chunk keeps its logits for the next walk, unless that needs a softcap's
        derivative."""
        kept = 4 + entropy + smoothing
        found = torch.zeros(kept, self.tokens.valid.shape[0], **self.like)
        for chunk in self.chunks():
            block = self.block()
            for rows in self.blocks(chunk, jacobian=False):
                z_y = take_target(rows.z_BV, rows.y_B1)
                rest = rest_stats(
                    rows.z_BV,
                    rows.y_B1,
                    block,
                    entropy=entropy,
                    smoothing=smoothing,
                    columns=self.local_size,
                )
                found[:, rows.places] = torch.stack([z_y, *(x for x in rest if x is not None)])
            del block
        z_y, m, ones, s, *more = found
        sum_ed = more.pop(0) if entropy else None
        rest = RestStats(m, ones, s, sum_ed, more.pop(0) if smoothing else None)
        if self.parallel is not None:
            assert self.tokens.owned is not None
            z_y, rest = self.parallel.combine(z_y, self.tokens.owned, rest)
        self.filled = self.plan.num_chunks == 1 and self.softcap is None
        return token_stats(z_y, rest, self.vocab_size)

    def _shape_(
        self, z_BV: Tensor, temperature_B: Tensor | None, *, jacobian: bool
    ) -> Tensor | None:
        if self.bias_V is not None:
            z_BV.add_(self.bias_V)
        if self.scale is not None:
            z_BV.mul_(self.scale)
        derivative = None
        if self.softcap is not None:
            z_BV.div_(self.softcap).tanh_()
            if jacobian:
                one = torch.ones((), dtype=z_BV.dtype, device=z_BV.device)
                derivative = torch.addcmul(one, z_BV, z_BV, value=-1)
            z_BV.mul_(self.softcap)
        if temperature_B is not None:
            z_BV.div_(temperature_B[:, None])
        return derivative

    def scaled(self, factor_B: Tensor, rows: Rows) -> Tensor:
        """Factors of dz, times d z / d x where that is one number for a token."""
        if self.scale is not None:
            factor_B = factor_B * self.scale
        return factor_B if rows.temperature_B is None else factor_B / rows.temperature_B


class Gradients(NamedTuple):
    """Accumulators in the compute dtype; empty where not wanted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class GradientSums:
    """Steps 7 and 8: d hidden, d weight and d bias out of one dz after the other."""

    def __init__(self, walk: Walk, needs: list[bool], shape: torch.Size) -> None:
        self.walk, self.needs = walk, needs
        num_tokens = walk.hidden.shape[0]
        self.hidden = torch.zeros(num_tokens if needs[0] else 0, walk.hidden_size, **walk.like)
        self.weight = torch.empty(shape if needs[1] else (0, 0), **walk.like)
        self.bias = torch.zeros(walk.local_size if needs[2] else 0, **walk.like)
        self.summing: Any = None
        self.weight_VH = self.weight.T if walk.transposed else self.weight
        self.store = storage_dtype(walk.gemm_dtype, walk.compute_dtype, walk.hidden.device)
        self.low_TV = walk.logits_TV
        if self.store != walk.compute_dtype and any(needs):
            self.low_TV = torch.empty_like(walk.logits_TV, dtype=self.store)
        self.dz_y_T = torch.empty(walk.plan.chunk_tokens, **walk.like)

    def block(self, rows: Rows, dz_y_B: Tensor) -> None:
        """Take dz of the rest, in place of the logits with 0 in the target column, and dz of the
        target back through the softcap, mask both, and round them to the GEMM dtype."""
        z_BV, tokens = rows.z_BV[:, : self.walk.local_size], self.walk.tokens
        y_B = self._columns(rows.places)
        if tokens.owned is not None:
            dz_y_B = torch.where(tokens.owned[rows.places], dz_y_B, 0.0)
        if rows.jacobian_BV is not None:
            z_BV.mul_(rows.jacobian_BV)
            if self.walk.local_size:
                dz_y_B = dz_y_B * rows.jacobian_BV.gather(1, y_B[:, None])[:, 0]
        if not tokens.packed:
            z_BV.masked_fill_(~tokens.valid[rows.places, None], 0.0)
            dz_y_B = torch.where(tokens.valid[rows.places], dz_y_B, 0.0)
        if self.needs[2] and self.walk.local_size:
            self.bias.add_(z_BV.sum(0))
            add_rows_(self.bias, y_B, dz_y_B)
        self.dz_y_T[rows.span] = dz_y_B.to(self.walk.gemm_dtype)
        if self.store != self.walk.gemm_dtype:
            z_BV.copy_(z_BV.to(self.walk.gemm_dtype))

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
        if not (self.needs[0] or self.needs[1]) or not walk.local_size:
            return
        z_TV, x_TH, padded = chunk.z_TV, chunk.x_TH, chunk.z_TV.shape[0]
        z_TV[size:].zero_()
        dz_TV = z_TV if self.store == walk.compute_dtype else self.low_TV[:padded].copy_(z_TV)
        dz_TV = dz_TV[:, : walk.local_size]
        rows = walk.tokens.places(chunk.start, chunk.start + size)
        dz_y_T1, y_T = self.dz_y_T[:size, None], self._columns(rows)
        if self.needs[0]:
            direct = isinstance(rows, slice) and padded == size
            dx_TH = self.hidden[rows] if direct else z_TV.new_empty(padded, walk.hidden_size)
            with gemm_precision(walk.gemm_dtype, z_TV.device):
                mm(dz_TV, walk.operand_VH, out=dx_TH)
            dx_TH[:size].addcmul_(dz_y_T1, walk.operand_VH[y_T].to(walk.compute_dtype))
            if not direct:
                self.hidden[rows] = dx_TH[:size]
            if chunk.start + size == walk.tokens.computed:
                self._start_sum()  # meanwhile, d weight of this chunk
        if self.needs[1]:
            left, right = (x_TH.T, dz_TV) if walk.transposed else (dz_TV.T, x_TH)
            with gemm_precision(walk.gemm_dtype, z_TV.device):
                addmm_(self.weight, left, right, first=chunk.start == 0)
            add_rows_(self.weight_VH, y_T, dz_y_T1 * x_TH[:size].to(walk.compute_dtype))

    def _start_sum(self) -> None:
        """Once a call, on every rank, whatever it has computed."""
        if self.needs[0] and self.walk.parallel is not None and self.summing is None:
            self.summing = self.walk.parallel.start_sum(self.hidden)

    def finish(self, exponent: Tensor | None) -> Gradients:
        """The sums, d hidden over all shards, with the power of two taken out again."""
        if self.needs[1] and self.walk.tokens.computed == 0:
            self.weight_VH.zero_()
        self._start_sum()
        if self.summing is not None:
            self.summing.wait()
        found = Gradients(self.hidden, self.weight, self.bias)
        if exponent is not None:
            for accumulator in found:
                accumulator.copy_(torch.ldexp(accumulator, -exponent))
        return found
