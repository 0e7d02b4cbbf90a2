"""Steps 5 and 6 of `xentlib.nll` per token, in PyTorch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from xentlib.math.softmax import Algebra, BlockStats, BlockSums
from xentlib.plan.split import block_bytes, block_tokens


def cast(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


def as_float32(words_2N: Tensor) -> Tensor:
    """Words of float64, below 2^53, as four of float32 each: the upper 20 bits, and 11, 11, 11."""
    parts, left = [], words_2N * 2.0**-33
    for bits in FLOAT32_BITS:
        left = left * 2.0**bits
        parts.append(left.floor())
        left = left - parts[-1]
    return torch.stack(parts, 1).flatten(0, 1).float()


def as_float64(words_8N: Tensor) -> Tensor:
    """Those words again, of sums over ranks too."""
    words = torch.zeros(2, words_8N.shape[1], dtype=torch.float64, device=words_8N.device)
    parts = words_8N.double().unflatten(0, (2, -1)).unbind(1)
    for part, bits in zip(parts, FLOAT32_BITS, strict=True):
        words = words * 2.0**bits + part
    return words


def parts_of(blocks: BlockStats) -> list[BlockStats]:
    """Each field of `blocks` may be a tuple, of several parts of a vocabulary. One tensor of them
    all would take their memory once more: 20 MiB a number of 4,096 tokens of 150,000 classes."""
    if not isinstance(blocks.m, tuple):
        return [blocks]
    fields = [[None] * len(blocks.m) if x is None else x for x in blocks[:-1]]
    return [BlockStats(*part) for part in zip(*fields, strict=True)]


class InSlices(Algebra):
    """Adds blocks up for some tokens at a time, as beside each of a block's numbers are a dozen,
    and several parts: sums are exact, and whole words of parts are those of all."""

    __slots__ = ()

    def largest(self, blocks: BlockStats) -> Tensor:
        """`Algebra.largest`."""
        largest: Tensor = functools.reduce(torch.maximum, map(super().largest, parts_of(blocks)))
        return largest

    def block_sums(self, m: Tensor, blocks: BlockStats) -> tuple[BlockSums, Tensor | None]:
        """`Algebra.block_sums`."""
        part, *others = parts_of(blocks)
        total, first = self.part_sums(m, part)
        for part in others:
            more, column = self.part_sums(m, part)
            total = BlockSums(*(None if x is None else x + y for x, y in zip(total, more)))
            first = None if first is None or column is None else torch.minimum(first, column)
        return total, first

    def part_sums(self, m: Tensor, blocks: BlockStats) -> tuple[BlockSums, Tensor | None]:
        """`Algebra.block_sums` of one part."""
        count, tokens = blocks.m.shape
        step = block_tokens(block_bytes(m.device.type), count, SUMMING)
        if tokens <= step:
            return super().block_sums(m, blocks)
        parts = []
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            some = [None if x is None else x[:, part] for x in blocks[:-1]]
            parts.append(super().block_sums(m[part], BlockStats(*some)))
        sums, first = zip(*parts, strict=True)
        every = [None if x[0] is None else torch.cat(x, -1) for x in zip(*sums, strict=True)]
        return BlockSums(*every), None if first[0] is None else torch.cat(first)


FLOAT32_BITS = (0, 11, 11, 11)
SUMMING = 48  # bytes of a number of a block while it is added
# In float64, which a vector has two of, not eight: a CPU's operators cost as much as what they do
# to the few numbers of a block.
ALGEBRA = InSlices(torch, torch.exp, cast, lambda x: x, Tensor.double)
