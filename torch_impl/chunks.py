"""The walk over a head's logits, chunk by chunk: steps 1, 2, 7 and 8 of `xentlib.nll`.

Shapes: N tokens, V vocabulary, H hidden width, M valid tokens, T tokens of a chunk (filled up to
whole rows of a GEMM's tile), B rows of a block of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.plan import block_bytes, block_tokens, pad_rows, plan_chunks
from xentlib.torch.call import GivenCall, HeadCall
from xentlib.torch.describe import dtype_name
from xentlib.torch.gemm import add_rows_, addmm_, gemm_precision, mm, operand, storage_dtype
from xentlib.torch.labels import check_labels
from xentlib.torch.ranks import Agreement, VocabParallel, vocab_parallel_of
from xentlib.torch.softmax import (
    Block,
    Labelled,
    RestStats,
    TokenStats,
    rest_stats,
    take_target,
    token_stats,
)
from xentlib.torch.tokens import select_tokens

__all__ = [
    "Asked",
    "Chunk",
    "Given",
    "GradientSums",
    "Gradients",
    "Rows",
    "Walk",
    "labelled_at",
    "power_of_two",
]

# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11


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

    def __init__(self, call: HeadCall, class_weights: Tensor | None = None) -> None:
        hidden, compute_dtype = call.hidden, call.compute_dtype
        self.labels, self.ignore_index = call.labels, call.ignore_index
        self.reduce_hidden = call.reduce_hidden
        self.hidden, self.transposed = hidden, call.transposed
        self.gemm_dtype, self.compute_dtype = call.gemm_dtype, compute_dtype
        self.like: dict[str, Any] = {"dtype": compute_dtype, "device": hidden.device}
        rows = call.weight.shape[call.transposed]
        self.parallel = vocab_parallel_of(call.group, call.shard, rows, self.like)
        shard = None if self.parallel is None else self.parallel.shard
        # Rows beyond those of the shard are padding.
        weight_VH = (call.weight.T if call.transposed else call.weight)[: shard and shard.size]
        self.local_size, self.hidden_size = weight_VH.shape
        self.vocab_size = self.local_size if shard is None else shard.vocab_size
        self.tokens = select_tokens(
            call.labels, call.where, call.ignore_index, self.vocab_size, shard
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
        self.block_rows = self.plan.block_tokens(block_bytes(hidden.device.type))
        self.operand_VH = operand(weight_VH, call.gemm_dtype, compute_dtype)
        self.bias_V = None if call.bias is None else call.bias[: self.local_size].to(compute_dtype)
        self.scale = None if call.logit_scale is None else call.logit_scale.to(compute_dtype)
        self.softcap, self.temperature = call.softcap, call.temperature
        rows = pad_rows(self.plan.chunk_tokens) if self.tokens.computed else 0
        self.logits_TV = torch.empty(rows, self.width, **self.like)
        self.filled = False

    def agree(self) -> None:
        """Before a forward over shards: what every rank must have alike."""
        if self.parallel is None or self.parallel.agreed:
            return
        rows = self.operand_VH[:: max(1, (self.local_size - 1) // 2)][:3]
        agreement = begin(self.parallel, rows, self.labels, self.tokens.valid)
        agreement.tokens("hidden", self.hidden, self.tokens.valid)
        agreement.close("logit_scale", self.scale)
        agreement.per_token("temperature", self.temperature, self.hidden.shape[0])
        agreement.exact("softcap", self.softcap or 0.0)
        agreement.exact("reduce_hidden_grad", float(self.reduce_hidden))

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

    def blocks(self, chunk: Chunk, *, jacobian: bool, fresh: bool = True) -> Iterator[Rows]:
        """Logits with bias, scale, softcap and temperature, which they have if not `fresh`; the
        softcap's derivative if wanted."""
        fresh = fresh and not self.filled
        for low in range(0, chunk.size, self.block_rows):
            span = slice(low, min(low + self.block_rows, chunk.size))
            index = self.tokens.places(chunk.start + span.start, chunk.start + span.stop)
            temperature_B = None
            if self.temperature is not None:
                per_token = self.temperature.expand(self.tokens.valid.shape[0])
                temperature_B = per_token[index].to(self.compute_dtype)
            z_BV = chunk.z_TV[span]
            derivative_BV = None
            if fresh:
                shaped_BV = z_BV[:, : self.local_size]
                derivative_BV = self._shape_(shaped_BV, temperature_B, jacobian=jacobian)
            y_B1 = self.tokens.labels[index, None]
            yield Rows(span, index, z_BV, y_B1, temperature_B, derivative_BV, fresh)

    def stats(self, asked: Asked) -> TokenStats:
        """Steps 1 to 5 for all N tokens. A single chunk keeps its logits for the next walk, unless
        that needs a softcap's derivative."""
        sums = StatSums(self, asked)
        for chunk in self.chunks():
            self.add_stats(chunk, sums)
        self.filled = self.plan.num_chunks == 1 and self.softcap is None
        return sums.finish()

    def chunk_stats(self, chunk: Chunk, asked: Asked) -> TokenStats:
        """Steps 3 to 5 for the tokens of one chunk, whose logits stay."""
        sums = StatSums(self, asked, chunk)
        self.add_stats(chunk, sums)
        return sums.finish()

    def add_stats(self, chunk: Chunk, sums: StatSums) -> None:
        block = self.block()
        for rows in self.blocks(chunk, jacobian=False):
            sums.add(rows, block)

    def _shape_(
        self, z_BV: Tensor, temperature_B: Tensor | None, *, jacobian: bool
    ) -> Tensor | None:
        if self.bias_V is not None:
            z_BV.add_(self.bias_V)
        if self.scale is not None:
            z_BV.mul_(self.scale)
        derivative = None
        if self.softcap is not None:
            z_BV.div_(self.softcap)
            if jacobian:
                # sech^2. 1 - tanh^2 cancels where the cap saturates: at a cap of 0.7 and logits of
                # standard deviation 32 it has no digit left. From exp: where a tensor's end fills
                # no vector `torch.cosh` has other bits, so that chunks showed in d hidden (A10).
                e_BV = z_BV.abs().mul_(-2.0).exp_()
                square_BV = (1.0 + e_BV).square_()
                derivative = e_BV.mul_(4.0).div_(square_BV)
            z_BV.tanh_().mul_(self.softcap)
        if temperature_B is not None:
            z_BV.div_(temperature_B[:, None])
        return derivative

    def scaled(self, factor_B: Tensor, rows: Rows) -> Tensor:
        """Factors of dz, times d z / d x where that is one number for a token."""
        if self.scale is not None:
            factor_B = factor_B * self.scale
        return factor_B if rows.temperature_B is None else factor_B / rows.temperature_B


class Given:
    """Steps 1 and 2 where the logits are there already: blocks of rows, copied out of them."""

    def __init__(self, call: GivenCall) -> None:
        logits, compute_dtype = call.logits, call.compute_dtype
        self.logits, self.temperature, self.compute_dtype = logits, call.temperature, compute_dtype
        self.labels, self.ignore_index = call.labels, call.ignore_index
        self.label_smoothing = call.label_smoothing
        self.like: dict[str, Any] = {"dtype": compute_dtype, "device": logits.device}
        self.parallel = vocab_parallel_of(call.group, call.shard, logits.shape[1], self.like)
        part = None if self.parallel is None else self.parallel.shard
        self.local_size = logits.shape[1] if part is None else part.size
        self.vocab_size = self.local_size if part is None else part.vocab_size
        self.tokens = select_tokens(
            call.labels, call.where, call.ignore_index, self.vocab_size, part
        )
        self.class_weights: Tensor | None = None  # which a head alone takes
        self.own_weights: Tensor | None = None
        self.width = self.local_size + (part is not None)
        self.block_rows = block_tokens(
            min(call.chunk_bytes, block_bytes(logits.device.type)),
            self.width,
            compute_dtype.itemsize,
        )

    def agree(self) -> None:
        """As in `Walk`."""
        if self.parallel is not None and not self.parallel.agreed:
            rows = self.logits[:3, : self.local_size]
            agreement = begin(self.parallel, rows, self.labels, self.tokens.valid)
            agreement.per_token("temperature", self.temperature, self.logits.shape[0])
            agreement.exact("label_smoothing", self.label_smoothing)

    def blocks(self, *, diff: bool = True) -> Iterator[tuple[Rows, Block]]:
        tokens, device = self.tokens, self.logits.device
        size = min(self.block_rows, tokens.computed)
        block = Block(size, self.width, self.compute_dtype, device, diff=diff)
        scratch_BV = torch.empty(size, self.width, **self.like)
        for start in range(0, tokens.computed, self.block_rows):
            stop = min(start + self.block_rows, tokens.computed)
            places = tokens.places(start, stop)
            z_BV = scratch_BV[: stop - start]
            z_BV[:, : self.local_size] = self.logits[places, : self.local_size]
            if not tokens.packed:
                z_BV.masked_fill_(~tokens.valid[places, None], 0.0)
            z_BV[:, self.local_size :] = -torch.inf
            temperature_B = None
            if self.temperature is not None:
                temperature_B = self.temperature.expand(tokens.valid.shape[0])[places]
                temperature_B = temperature_B.to(self.compute_dtype)
                z_BV.div_(temperature_B[:, None])
            y_B1 = tokens.labels[places, None]
            yield Rows(slice(start, stop), places, z_BV, y_B1, temperature_B, None, True), block

    def stats(self, asked: Asked) -> TokenStats:
        sums = StatSums(self, asked)
        for rows, block in self.blocks():
            sums.add(rows, block)
        return sums.finish()


def begin(parallel: VocabParallel, rows: Tensor, labels: Tensor, valid: Tensor) -> Agreement:
    parallel.of_rows(rows)
    parallel.agreement.labels(labels.long(), valid)
    return parallel.agreement


class Asked(NamedTuple):
    """Statistics of a call beside those that every call needs."""

    entropy: bool = False
    smoothing: bool = False
    predicted: bool = False


class StatSums:
    """Steps 3 to 5 for all N tokens, or those of a chunk, with one MAX and one packed SUM over a
    vocabulary's shards."""

    def __init__(self, walk: Walk | Given, asked: Asked, chunk: Chunk | None = None) -> None:
        self.walk, self.asked, self.chunk = walk, asked, chunk
        count = walk.tokens.valid.shape[0] if chunk is None else chunk.size
        self.found = torch.zeros(4 + sum(asked), count, **walk.like)

    def add(self, rows: Rows, block: Block) -> None:
        z_y = take_target(rows.z_BV, rows.y_B1)
        rest = rest_stats(
            rows.z_BV,
            rows.y_B1,
            block,
            **self.asked._asdict(),
            columns=self.walk.local_size,
            class_weights_V=self.walk.own_weights,
        )
        places = rows.places if self.chunk is None else rows.span
        self.found[:, places] = torch.stack([z_y, *(x for x in rest if x is not None)])

    def finish(self) -> TokenStats:
        z_y, m, ones, s, *more = self.found
        found = iter(more)
        rest = RestStats(m, ones, s, *(next(found) if wanted else None for wanted in self.asked))
        walk, chunk, parallel = self.walk, self.chunk, self.walk.parallel
        tokens = walk.tokens
        places: slice | Tensor = slice(None)
        if chunk is not None:
            places = tokens.places(chunk.start, chunk.start + chunk.size)
        labelled = labelled_at(walk, places)
        if parallel is not None:
            assert tokens.owned is not None
            owned = tokens.owned[places]
            own: Tensor | float = float(walk.local_size)
            if walk.own_weights is not None:
                own = walk.own_weights.sum()
            others = own - labelled.weight * owned.to(z_y.dtype)
            z_y, rest = parallel.combine(z_y, owned, rest, others)
            check_labels(walk.labels, tokens.bad, walk.ignore_index, walk.vocab_size)
        return token_stats(z_y, rest, walk.vocab_size, labelled)


def labelled_at(walk: Walk | Given, places: slice | Tensor) -> Labelled:
    """Of some tokens."""
    target = walk.tokens.targets[places]
    if walk.class_weights is None:
        return Labelled(target, 1.0, float(walk.vocab_size))
    # Never out of bounds, also while the shards are guessed.
    last = walk.class_weights.shape[0] - 1
    weight = walk.class_weights[target.clamp(max=last)]
    return Labelled(target, weight, walk.class_weights.sum())


class Gradients(NamedTuple):
    """Accumulators in the compute dtype; empty where not wanted."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class GradientSums:
    """Steps 7 and 8: d hidden, d weight and d bias out of one dz after the other."""

    def __init__(self, walk: Walk, needs: list[bool], rows: int) -> None:
        self.walk, self.needs, self.padding = walk, needs, rows - walk.local_size
        shape = (walk.local_size, walk.hidden_size)
        shape = shape[::-1] if walk.transposed else shape
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
            # A block's sums first: one after the other, 6,250 terms of one label err by 30 u.
            part_V = z_BV.sum(0)
            add_rows_(part_V, y_B, dz_y_B)
            self.bias.add_(part_V)
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
        wanted = self.needs[0] and self.walk.reduce_hidden
        if wanted and self.walk.parallel is not None and self.summing is None:
            self.summing = self.walk.parallel.start_sum(self.hidden)

    def finish(self, exponent: Tensor | None) -> Gradients:
        """The sums, d hidden over all shards, with the power of two taken out again."""
        if self.needs[1] and self.walk.tokens.computed == 0:
            self.weight_VH.zero_()
        self._start_sum()
        if self.summing is not None:
            self.summing.wait()
        if self.padding:
            corner = (0, self.padding) if self.walk.transposed else (0, 0, 0, self.padding)
            self.weight = (
                torch.nn.functional.pad(self.weight, corner) if self.needs[1] else self.weight
            )
            self.bias = torch.nn.functional.pad(self.bias, (0, self.padding * self.needs[2]))
        found = Gradients(self.hidden, self.weight, self.bias)
        if exponent is not None:
            for accumulator in found:
                accumulator.copy_(torch.ldexp(accumulator, -exponent))
        return found
