"""What all ranks of a sharded vocabulary must have the same, in a few numbers that travel with the
first MAX of a call.

Shapes: N tokens, E numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from xentlib.arguments import SCALARS, Scalars
from xentlib.plan.shards import ROOM

FUNCTIONS = (
    "chunked_nll",
    "chunked_logprobs",
    "the backward of chunked_logprobs",
    "vocab_parallel_logprobs",
)
# Sums with random signs, each in units of the root of its sum of squares: those of other tokens
# differ by about 1.4, those of one tensor in two roundings of bfloat16 by 0.004.
SIGNS, SIGNED_TOLERANCE = 4, 0.1
# Of plain sums and of numbers that each rank computes for itself.
TOLERANCE = 1e-5


class RankConsistency:
    """Numbers by name that every rank must have alike, and by how much they may differ."""

    def __init__(self, like: dict[str, Any]) -> None:
        self.like = like
        self.names: list[str] = []
        self.values: list[Tensor] = []  # [] or [some] each
        self.tolerances: list[Tensor] = []

    def begin(self, function: str, rows: Tensor, labels: Tensor, valid: Tensor) -> None:
        """Of every call: which function it is, some rows of a head or of logits [any, any], labels,
        and which tokens count. Rows that are the same on every rank are the whole vocabulary's."""
        self.exact("function", float(FUNCTIONS.index(function)))
        x = torch.nan_to_num(rows.detach().to(**self.like))
        x = x if x.numel() else x.new_zeros(1, 1)
        for number in (x.sum(), x.amin(), x.amax()):
            self.exact("rows", number)
        self.labels(labels.long(), valid)

    def exact(self, name: str, value: float | Tensor) -> None:
        value = self._tensor(value)
        self._add(name, value, torch.zeros_like(value))

    def scalars(self, scalars: Scalars, function: str) -> None:
        """Those that the function has."""
        for name in SCALARS[function]:
            self.exact(name, getattr(scalars, name) or 0.0)

    def close(self, name: str, value: Tensor | float | None) -> None:
        """A number that each rank has computed for itself; None is 1."""
        x = torch.nan_to_num(self._tensor(1.0 if value is None else value))
        self._add(name, x, TOLERANCE * x.abs())

    def per_token(self, name: str, value: Tensor | None, count: int) -> None:
        """One number for all of `count` tokens or for each, computed by each rank; None is 1."""
        x = torch.ones((), **self.like) if value is None else value.detach().to(**self.like)
        x = torch.nan_to_num(x).expand(count)
        signed = (signs(count, x, SIGNS) * x).sum(1)
        self._add(name, x.sum(), TOLERANCE * x.abs().sum())
        self._add(name, signed, (SIGNED_TOLERANCE * x.norm()).expand(SIGNS))

    def per_class(self, name: str, value: Tensor | None) -> None:
        """One number for each class of the vocabulary; None is 0. The sum alone is the same of
        weights that each rank has normalised."""
        x = torch.zeros(1, **self.like) if value is None else value.detach().to(**self.like)
        x = torch.nan_to_num(x)
        self._add(name, (factors(x.shape[0], x) * x).sum(), TOLERANCE * x.norm())

    def labels(self, labels: Tensor, valid: Tensor) -> None:
        """Their hash, and which tokens count."""
        mixed = torch.where(valid, labels, -1) * 0x9E3779B1 + mix(labels.shape[0], labels)
        mixed = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
        # 24 bits, which float32 holds exactly.
        self.exact("labels", ((mixed ^ (mixed >> 12)) & 0xFFFFFF).sum() & 0xFFFFFF)

    def tokens(self, name: str, x_NH: Tensor, valid: Tensor) -> None:
        """Rows of the valid tokens."""
        x_NH = x_NH.detach()
        signs_SN = torch.where(valid, signs(x_NH.shape[0], x_NH, SIGNS), 0)
        sums_SH = torch.nan_to_num((signs_SN @ x_NH).to(**self.like))
        across_H = signs(x_NH.shape[1], sums_SH)[0]
        self._add(name, (sums_SH * across_H).sum(1), SIGNED_TOLERANCE * sums_SH.norm(dim=1))

    def _tensor(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(**self.like)
        return torch.full((), value, **self.like)

    def _add(self, name: str, value: Tensor, tolerance: Tensor) -> None:
        self.names += [name] * value.numel()
        self.values.append(value.reshape(-1))
        self.tolerances.append(tolerance.reshape(-1))

    def packed(self) -> Tensor:
        """[3 ROOM], as many for every call: their maximum over the ranks says whether they are the
        same."""
        values = torch.zeros(3, ROOM, **self.like)
        own = torch.cat(self.values)
        values[0, : len(own)] = own
        values[1] = -values[0]
        values[2, : len(own)] = torch.cat(self.tolerances)
        return values.view(-1)

    def broken(self, largest: Tensor) -> Tensor:
        """[E] of the maximum over the ranks: those that are not the same."""
        high, low, tolerance = largest.view(3, -1)[:, : len(self.names)]
        broken: Tensor = high + low > tolerance
        return broken


def mix(count: int, like: Tensor) -> Tensor:
    index = torch.arange(count, dtype=torch.int64, device=like.device)
    return (index * 0x85EBCA77) ^ ((index * 0xC2B2AE3D) >> 13)


def signs(count: int, like: Tensor, number: int = 1) -> Tensor:
    """[number, count] of 1 and -1."""
    bits = mix(count, like) >> torch.arange(7, 7 + number, device=like.device)[:, None]
    return (1 - 2 * (bits & 1)).to(like.dtype)


def factors(count: int, like: Tensor) -> Tensor:
    """[count] of either sign, from 0.5 to 1, hardly two alike: of signs alone every second pair of
    entries could change places unseen."""
    bits = (mix(count, like) >> 7) & 0xFFFF
    return (signs(count, like)[0] * (0.5 + (bits >> 1) * 2.0**-16)).to(like.dtype)
