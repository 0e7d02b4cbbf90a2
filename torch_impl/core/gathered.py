"""All-gathers hidden states of the ranks of a sharded vocabulary chunk by chunk; reduce-scatters
their gradients.

All tokens stand chunk by chunk, in a chunk rank by rank. Every rank has as many of them as the
longest, its own first, the rest masked, so that all ranks make the same collectives.

Shapes: N tokens of this rank, R ranks, L tokens of the longest rank, filled to whole chunks, S
tokens of a rank in a chunk, T = R S tokens of a chunk, M = R L tokens in all, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.checks.shards import SHARDS
from xentlib.plan import ChunkPlan, spread_tokens
from xentlib.torch.core.consistency import (
    Agreed,
    PendingCollective,
    Terms,
    all_gather,
    digest,
    filled,
    group_named,
    start_all_gather,
    start_reduce_scatter,
)
from xentlib.torch.core.device import host_readable
from xentlib.torch.core.kernels import kernels_for
from xentlib.torch.core.tokens import LocalTokens, LocalVocab, plan_of, select_tokens
from xentlib.torch.operators import HeadCall


class GatheredTokens(LocalTokens):
    """Chunks of the tokens of all ranks that share the vocabulary."""

    gathered = True

    def __init__(self, call: HeadCall, vocab: LocalVocab, agreed: Agreed, terms: Terms) -> None:
        super().__init__(call, vocab, d_entropy=any(agreed.d_entropy))
        self.vocab, layout = vocab, call.rows
        self.group = group_named(layout.over or layout.group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        # Of rows that the caller has cut, copies of a token add up in their gradient; a wrapper's
        # mean over ranks takes that back.
        self.alike = torch.arange(self.ranks)[None] if layout.alike is None else layout.alike
        caller_cut = layout.route == "tokens" or layout.alike is not None
        self.may_be_copies = caller_cut and self.alike.shape[1] > 1 and any(terms.needs[1:])
        self.may_be_copies = self.may_be_copies and host_readable(call.hidden)
        self.longest = max(agreed.tokens)
        # A number per token that travels where any rank has it.
        if self.temperature is None and any(agreed.temperature):
            self.temperature = call.hidden.new_ones(1, dtype=call.compute_dtype)
        kernel_cls = kernels_for(call.hidden.device, call.compute_dtype, call.scalars)
        columns = vocab.largest + kernel_cls.spare_column  # of all ranks: they have the same chunks
        whole = plan_of(call, self.ranks * self.longest, columns, min(agreed.budget))
        self.per_chunk, self.length = spread_tokens(whole.chunk_tokens, self.ranks, self.longest)
        tokens, in_chunk = self.ranks * self.length, self.ranks * self.per_chunk
        self.whole = replace(whole, num_tokens=tokens, chunk_tokens=in_chunk)
        self.returning: tuple[PendingCollective, int] | None = None  # d hidden of a chunk

    def plan(self, columns: int, row_bytes: int) -> ChunkPlan:
        """Of as many tokens of every rank in each chunk."""
        return self.whole

    def exchange(self, *per_token: Tensor) -> tuple[Tensor, ...]:
        """What is needed of a token beside its hidden states, in one all-gather."""
        call, count = self.call, self.local_tokens.valid.shape[0]
        numbers = [x.expand(count) for x in rows_of(per_token)]
        if self.temperature is not None:
            numbers.append(self.temperature.to(call.compute_dtype).expand(count))
        if call.rows.shards:
            numbers.append(digest(call.hidden).to(call.compute_dtype))
        labels = torch.where(self.local_tokens.valid, self.labels.long(), call.ignore_index)
        ids = [] if self.ids is None else list(self.ids.long().T)
        self.labels, *numbers = self._of_all_ranks([labels, *ids], numbers)
        if self.ids is not None:
            # There may be none: of `top_k` alone.
            none = self.labels.new_empty(len(self.labels), 0)
            self.ids = torch.cat([none, *(x[:, None] for x in numbers[: len(ids)])], 1)
            numbers = numbers[len(ids) :]
        if call.rows.shards:
            self.digest = numbers.pop()
        if self.temperature is not None:
            # Of a token that fills a chunk it is 0, and nothing may be divided by that.
            temperature = numbers.pop()
            self.temperature = torch.where(temperature == 0, 1.0, temperature)
        select_args = self.labels, None, call.ignore_index, self.vocab, call.hidden.device, self.ids
        # Tokens that are not valid stay, so that chunks are the same on all ranks.
        self.all = select_tokens(*select_args)._replace(rows=None, packed=False)
        if call.rows.shards:
            self.factors = torch.stack(numbers) if numbers else None
        left = iter(numbers)
        return tuple(
            torch.stack([next(left) for _ in x]) if x.ndim == 2 else next(left) for x in per_token
        )

    def _of_all_ranks(self, classes: list[Tensor], numbers: list[Tensor]) -> list[Tensor]:
        """[M]: classes, and numbers per token in the compute dtype, of every rank's tokens."""
        whole = [self._filled(x, self.call.ignore_index) for x in classes]
        whole += [self._filled(x, 0) for x in numbers]
        packed = [_bytes(x) for x in whole]
        sent = torch.cat(packed, dim=1).contiguous()
        gathered = all_gather(sent, self.group)
        self.may_be_copies = self.may_be_copies and self._same_of_all(gathered)
        sizes = [x.shape[1] for x in packed]
        in_chunks = []
        for part, x in zip(gathered.split(sizes, dim=1), whole, strict=True):
            gathered = part.reshape(-1).view(x.dtype).view(self.ranks, self.length)
            parts = [x.reshape(-1) for x in gathered.split(self.per_chunk, dim=1)]
            in_chunks.append(torch.cat(parts))
        return in_chunks

    def local(self, values: Tensor) -> Tensor:
        """[..., N] of this rank, of [..., M]; 0 for tokens that were not computed."""
        leading = values.shape[:-1]
        sizes = [len(x) for x in torch.empty(self.length).split(self.per_chunk)]
        chunks = values.split([self.ranks * size for size in sizes], dim=-1)
        parts = [
            x.reshape(*leading, self.ranks, size)[..., self.rank, :]
            for x, size in zip(chunks, sizes, strict=True)
        ]
        count = self.local_tokens.computed
        result = values.new_zeros(*leading, self.local_tokens.valid.shape[0])
        result[..., self.local_tokens.token_index(0, count)] = torch.cat(parts, -1)[..., :count]
        return result

    def _filled(self, x_N: Tensor, value: int) -> Tensor:
        """[L]: of the computed tokens, and a value beyond them."""
        whole = x_N.new_full((self.length,), value)
        whole[: self.local_tokens.computed] = x_N[
            self.local_tokens.token_index(0, self.local_tokens.computed)
        ]
        return whole

    def chunks(self, plan: ChunkPlan) -> Iterator[tuple[Tensor, Tensor | None]]:
        """In the dtype of the products; the next chunk travels while one is computed."""
        pending: list[PendingCollective] | None = None
        for start in range(0, self.length, self.per_chunk):
            x_TH, *bits = [x.wait() for x in (self._start(start) if pending is None else pending)]
            if start == 0 and self.may_be_copies and self._same_of_all(x_TH):
                SHARDS.refuse("copies", ranks=self.alike.shape[1])
            following = start + self.per_chunk
            pending = self._start(following) if following < self.length else None
            yield x_TH, _unpacked(bits[0], x_TH.shape[1]) if bits else None
            del x_TH, bits

    def _same_of_all(self, gathered: Tensor) -> bool:
        """Whether what was gathered is the same of every rank that would count it again."""
        gathered = gathered.view(self.ranks, -1)[self.alike]
        return bool((gathered == gathered[:, :1]).all())

    def _start(self, start: int) -> list[PendingCollective]:
        size, local = min(self.per_chunk, self.length - start), self.local_tokens
        token_index = local.token_index(start, max(start, min(start + size, local.computed)))
        x_SH = self.hidden[token_index]
        if not local.packed:
            x_SH = torch.where(local.valid[token_index, None], x_SH, 0.0)
        # Rounded to the dtype of the products first: what travels loses nothing.
        sent_SH = x_SH.new_zeros(size, x_SH.shape[1], dtype=self.call.gemm_dtype)
        sent_SH[: x_SH.shape[0]] = x_SH
        if self.keep is None:
            return [start_all_gather(sent_SH, self.group)]
        bits = _packed(self.keep[token_index])
        return [start_all_gather(x, self.group) for x in (sent_SH, filled(bits, size))]

    def view(self, d_hidden: Tensor, start: int, size: int) -> Tensor | None:
        return None

    def put(self, d_hidden: Tensor, dx_TH: Tensor, start: int, size: int, *, add: bool) -> None:
        """To the ranks whose tokens they are, summed over the shards in the compute dtype: rounded
        parts would leave 60 % of bfloat16 entries as their sum rounds, at 4 ranks (row A7)."""
        self.returning = start_reduce_scatter(dx_TH, self.group), start

    def wait(self, d_hidden: Tensor) -> None:
        if self.returning is None:
            return
        pending, start = self.returning
        dx_SH, low = pending.wait(), start // self.ranks
        high = max(low, min(low + self.per_chunk, self.local_tokens.computed))
        if high > low:
            d_hidden[self.local_tokens.token_index(low, high)] = dx_SH[: high - low]
        self.returning = None


def rows_of(per_token: Sequence[Tensor]) -> list[Tensor]:
    """Each [N] of them, of those that are [K, N]."""
    return [row for x in per_token for row in (x if x.ndim == 2 else (x,))]


def _packed(mask: Tensor) -> Tensor:
    """[n, ceil(H / 8)] bytes of a mask [n, H]."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits: Tensor = padded.unflatten(1, (-1, 8)) << shifts
    return bits.sum(2, dtype=torch.uint8)


def _unpacked(bits: Tensor, width: int) -> Tensor:
    """The mask [n, H] again."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, :width]


def _bytes(x: Tensor) -> Tensor:
    """[n, itemsize]"""
    return x.contiguous().view(-1, 1).view(torch.uint8)
