"""Tokens that are spread over the ranks of a sharded vocabulary: each chunk holds some of every
rank's, whose hidden states are gathered for it, and whose gradients are scattered again.

Tokens of a walk stand chunk by chunk, in a chunk rank by rank. Every rank has as many of them as
the longest, its own first, the rest masked, so that all ranks make the same collectives.

Shapes: N tokens of this rank, R ranks, L tokens of the longest rank, filled to whole chunks, S
tokens of a rank in a chunk, M = R L tokens of the walk, H hidden width.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from xentlib.checks.call import (
    check_divisor,
    check_divisor_elsewhere,
    check_labels_elsewhere,
)
from xentlib.checks.route import refuse_copies
from xentlib.checks.shards import check_upstream, refuse_inconsistent
from xentlib.plan import ChunkPlan, shard_of, spread_tokens
from xentlib.torch.core.device import chunk_bytes
from xentlib.torch.core.tokens import Tokens, check_labels, counted
from xentlib.torch.core.vocab import (
    gather_into,
    group_named,
    host_readable,
    numbers_of,
    scatter_into,
)
from xentlib.torch.operators import HeadCall

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Numbers of a rank that the others go by, of tokens that travel.
OWN = ("tokens_of_rank", "rows", "budget", "temperature", "d_entropy")
ROUTES = ("hidden", "stream", "nodes")
FUNCTIONS = ("chunked_nll", "chunked_logprobs", "the backward of chunked_logprobs")


class Terms(NamedTuple):
    """What a function brings to its walk, beside the call."""

    function: str = FUNCTIONS[0]
    needs: Sequence[bool] = ()  # gradients that will be asked for
    outputs: float = 0.0  # which of the per-token results are computed, as one number
    class_weights: Tensor | None = None
    d_entropy: bool = False  # this rank's loss is made of entropies
    refused: float | None = None  # the denominator of this rank's tokens, if it is not positive


class Sending(NamedTuple):
    """A collective under way, and the tensors that it works on."""

    work: Any
    result: Tensor
    source: Tensor

    def arrived(self) -> Tensor:
        self.work.wait()
        return self.result


def kind_of(call: HeadCall) -> int:
    """Its dtypes, as a number."""
    return 10 * DTYPES.index(call.compute_dtype) + DTYPES.index(call.gemm_dtype)


def bits_of(x: float) -> int:
    """Of float64, as an integer: what is compared is then the number itself."""
    found: int = struct.unpack("<q", struct.pack("<d", x))[0]
    return found


def shake_hands(
    group: dist.ProcessGroup,
    call: HeadCall,
    terms: Terms,
    route: str,
    *,
    chunk_bytes: int,
    tokens: Tokens | None = None,
    **own: int,
) -> dict[str, list[int]]:
    """Before ranks go ways of their own: numbers of every rank by name. Refuse on all of them what
    must be alike, or they would not make the same collectives, or not add up the same loss; and a
    label of `tokens` that is outside of the vocabulary on any, and a denominator of 0.

    All that decides a collective is in it, and it is as long for every route and function: ranks
    whose calls differ read that, and none waits for the others.
    """
    assert call.shard is not None
    of_hidden, *of_head = (*terms.needs, *[False] * (5 - len(terms.needs)))
    wanted = sum(2**k * bool(need) for k, need in enumerate(of_head))
    together = route == "hidden"  # d hidden is a sum over ranks, and each has its own bias
    is_bad = tokens is not None and host_readable(tokens.bad) and bool(tokens.bad.any())
    alike = {
        "gather": ROUTES.index(route),
        "function": FUNCTIONS.index(terms.function),
        "max_chunk_bytes": chunk_bytes,
        "the width of hidden": call.hidden.shape[1],
        "the dtype of hidden": kind_of(call),
        "keep": int(call.low_keep is not None),
        "ignore_index": call.ignore_index,
        "vocab_size": int(call.shard[2]),
        "bias": 0 if together else int(call.bias is not None),
        "gradient": int(of_hidden) if together else 0,
        "gradient of the head": wanted if together else wanted + 16 * any(terms.needs),
        "class_weights": 0 if terms.class_weights is None else terms.class_weights.shape[0],
        **{name: bits_of(value or 0.0) for name, value in call.scalars._asdict().items()},
        "outputs" if terms.function == FUNCTIONS[0] else "entropy": bits_of(terms.outputs),
    }
    bad = is_bad + 2 * (terms.refused is not None)
    numbers = {"bad": bad, **{name: own.get(name, 0) for name in OWN}}
    ours = torch.tensor(
        [*numbers.values(), *alike.values()], dtype=torch.int64, device=call.hidden.device
    )
    all_RS = ours.new_empty(dist.get_world_size(group), len(ours))
    gather_into(all_RS.view(-1), ours, group=group)
    columns = dict(zip((*numbers, *alike), all_RS.T.tolist(), strict=True))
    differs = [name for name in alike if len(set(columns[name])) > 1]
    refuse_inconsistent([name for name in differs if name in ("gather", "function")])
    if tokens is not None:
        check_labels(call.labels, tokens.bad, call.ignore_index, int(call.shard[2]))
        check_labels_elsewhere([rank for rank, bad in enumerate(columns["bad"]) if bad & 1])
    if terms.refused is not None:
        check_divisor(terms.refused)
    check_divisor_elsewhere([rank for rank, bad in enumerate(columns["bad"]) if bad & 2])
    refuse_inconsistent(differs)
    return columns


class Spread:
    """What the ranks of a call tell each other of their tokens."""

    def __init__(self, call: HeadCall, terms: Terms) -> None:
        self.group = group_named(call.group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        hidden = call.hidden
        self.hidden, self.keep, self.gemm_dtype = hidden, call.low_keep, call.gemm_dtype
        self.ignore_index = call.ignore_index
        _, rows_M = counted(call.labels, call.where, call.ignore_index)
        own = hidden.shape[0] if rows_M is None else rows_M.shape[0]
        columns = shake_hands(
            self.group,
            call,
            terms,
            "hidden",
            chunk_bytes=call.chunk_bytes,
            tokens_of_rank=own,
            rows=call.weight.shape[call.transposed],
            budget=chunk_bytes(call.chunk_bytes, hidden.device),
            temperature=int(call.temperature is not None),
            d_entropy=int(terms.d_entropy),
        )
        rows_R = columns["rows"]
        self.own_count, self.longest = own, max(columns["tokens_of_rank"])
        # Of rows that the caller has cut, copies of a token add up in their gradient; a wrapper's
        # mean over ranks takes that back.
        self.may_be_copies = call.route == "tokens" and self.ranks > 1 and any(terms.needs[1:])
        self.may_be_copies = self.may_be_copies and host_readable(hidden)
        self.largest_rows, self.chunk_bytes = max(rows_R), min(columns["budget"])
        # Numbers per token that travel, and what is made of them, where any rank has them.
        self.tempered, self.d_entropy = any(columns["temperature"]), any(columns["d_entropy"])
        self.numbers = call.shard
        if call.shard is not None and call.shard[0] < 0:
            vocab_size = int(call.shard[2])
            shard = shard_of(tuple(rows_R), self.rank, None if vocab_size < 0 else vocab_size)
            self.numbers = numbers_of(shard)

    def plan(self, whole: ChunkPlan) -> ChunkPlan:
        """Of as many tokens of every rank in each chunk; `whole` does not know of ranks."""
        self.per_chunk, self.length = spread_tokens(whole.chunk_tokens, self.ranks, self.longest)
        return replace(
            whole,
            num_tokens=self.ranks * self.length,
            chunk_tokens=self.ranks * self.per_chunk,
        )

    def of_all(self, own: Tokens, labels: Tensor, numbers: list[Tensor]) -> list[Tensor]:
        """[M]: labels, and numbers per token in the compute dtype, of every rank's tokens."""
        labels = torch.where(own.valid, labels.long(), self.ignore_index)
        filled = [self._filled(own, x, 0) for x in numbers]
        filled = [self._filled(own, labels, self.ignore_index), *filled]
        packed = [_bytes(x) for x in filled]
        ours = torch.cat(packed, dim=1).contiguous()
        theirs = ours.new_empty(self.ranks * ours.shape[0], ours.shape[1])
        gather_into(theirs, ours, group=self.group)
        self.may_be_copies = self.may_be_copies and self._alike(theirs)
        sizes = [x.shape[1] for x in packed]
        found = []
        for part, x in zip(theirs.split(sizes, dim=1), filled, strict=True):
            of_ranks = part.reshape(-1).view(x.dtype).view(self.ranks, self.length)
            found.append(torch.cat([x.reshape(-1) for x in of_ranks.split(self.per_chunk, dim=1)]))
        return found

    def of_own(self, own: Tokens, values: Tensor) -> Tensor:
        """[..., M] of the walk as [..., N] of this rank; 0 for tokens that were not computed."""
        leading = values.shape[:-1]
        sizes = [len(x) for x in torch.empty(self.length).split(self.per_chunk)]
        chunks = values.split([self.ranks * size for size in sizes], dim=-1)
        mine = [
            x.reshape(*leading, self.ranks, size)[..., self.rank, :]
            for x, size in zip(chunks, sizes, strict=True)
        ]
        found = values.new_zeros(*leading, own.valid.shape[0])
        found[..., own.places(0, self.own_count)] = torch.cat(mine, -1)[..., : self.own_count]
        return found

    def _filled(self, own: Tokens, x_N: Tensor, value: int) -> Tensor:
        """[L]: of the computed tokens, and a value beyond them."""
        filled = x_N.new_full((self.length,), value)
        filled[: self.own_count] = x_N[own.places(0, self.own_count)]
        return filled

    def hidden_of_chunks(self, own: Tokens) -> Iterator[tuple[Tensor, Tensor | None]]:
        """[R S, H] of one chunk after the other, in the dtype of the products, and the mask of what
        a low-rank part sees of them; the next one travels while a chunk is computed."""
        coming: list[Sending] | None = None
        for start in range(0, self.length, self.per_chunk):
            x_TH, *bits = [
                x.arrived() for x in (self._start(own, start) if coming is None else coming)
            ]
            if start == 0 and self.may_be_copies and self._alike(x_TH):
                refuse_copies(self.ranks)
            following = start + self.per_chunk
            coming = self._start(own, following) if following < self.length else None
            yield x_TH, _unpacked(bits[0], x_TH.shape[1]) if bits else None
            del x_TH, bits

    def _alike(self, of_all: Tensor) -> bool:
        """Whether what was gathered is the same of every rank."""
        of_ranks = of_all.view(self.ranks, -1)
        return bool((of_ranks == of_ranks[0]).all())

    def _start(self, own: Tokens, start: int) -> list[Sending]:
        size = min(self.per_chunk, self.length - start)
        places = own.places(start, max(start, min(start + size, self.own_count)))
        x_SH = self.hidden[places]
        if not own.packed:
            x_SH = torch.where(own.valid[places, None], x_SH, 0.0)
        # Rounded to the dtype of the products first: what travels loses nothing.
        sent_SH = x_SH.new_zeros(size, x_SH.shape[1], dtype=self.gemm_dtype)
        sent_SH[: x_SH.shape[0]] = x_SH
        if self.keep is None:
            return [self._gathering(sent_SH)]
        bits = _packed(self.keep[places])
        sent_bits = bits.new_zeros(size, bits.shape[1])
        sent_bits[: bits.shape[0]] = bits
        return [self._gathering(sent_SH), self._gathering(sent_bits)]

    def _gathering(self, sent: Tensor) -> Sending:
        """Of every rank's rows, one after the other."""
        result = sent.new_empty(self.ranks * sent.shape[0], sent.shape[1])
        return Sending(gather_into(result, sent, group=self.group, async_op=True), result, sent)

    def send_back(self, dx_TH: Tensor) -> Sending:
        """d hidden of a chunk, summed over the shards in the compute dtype: rounded parts would
        leave 60 % of bfloat16 entries as their sum rounds, at 4 ranks (row A7)."""
        result = dx_TH.new_empty(dx_TH.shape[0] // self.ranks, dx_TH.shape[1])
        work = scatter_into(result, dx_TH, group=self.group, async_op=True)
        return Sending(work, result, dx_TH)

    def take_back(self, own: Tokens, sending: Sending, start: int, into_NH: Tensor) -> None:
        """Of the chunk that begins at token `start` of the walk."""
        found_SH = sending.arrived()
        low = start // self.ranks
        high = max(low, min(low + self.per_chunk, self.own_count))
        if high > low:
            into_NH[own.places(low, high)] = found_SH[: high - low]


def _packed(mask: Tensor) -> Tensor:
    """[n, ceil(H / 8)] bytes of a mask [n, H]."""
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.shape[1] % 8))
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits: Tensor = padded.unflatten(1, (-1, 8)) << places
    return bits.sum(2, dtype=torch.uint8)


def _unpacked(bits: Tensor, width: int) -> Tensor:
    """The mask [n, H] again."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits[:, :, None] >> places) & 1).bool().flatten(1)[:, :width]


def _bytes(x: Tensor) -> Tensor:
    """[n, itemsize]"""
    return x.contiguous().view(-1, 1).view(torch.uint8)


@torch.library.custom_op("xentlib::same_upstream", mutates_args=())
def same_upstream(gradient: Tensor, counts: Tensor, group: str) -> Tensor:
    """The gradient [] that all ranks with tokens that count have alike, of a loss whose head's
    gradient holds all of them by now; 0 where no rank has any, NaN where they differ and cannot be
    read."""
    over = group_named(group)
    ours = torch.stack([gradient, counts.to(gradient.dtype)])
    all_R2 = ours.new_empty(dist.get_world_size(over), 2)
    gather_into(all_R2.view(-1), ours, group=over)
    value_R, counts_R = all_R2[:, 0], all_R2[:, 1] > 0
    high = torch.where(counts_R, value_R, -torch.inf).amax()
    low = torch.where(counts_R, value_R, torch.inf).amin()
    differs = high > low  # False of NaN
    if host_readable(gradient) and differs:
        check_upstream(value_R.tolist())
    return torch.where(counts_R.any(), torch.where(differs, torch.nan, high), 0.0)


@same_upstream.register_fake
def _(gradient: Tensor, counts: Tensor, group: str) -> Tensor:
    return torch.empty_like(gradient)
