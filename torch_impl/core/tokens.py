"""Step 1 in PyTorch: which tokens count, and where their labels are.

Shapes: N tokens, M valid tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from xentlib.checks.call import check_label_range
from xentlib.plan import VocabShard
from xentlib.torch.core.device import device_info

if TYPE_CHECKING:
    from xentlib.torch.core.class_order import ClassOrder


class Tokens(NamedTuple):
    """Step 1: the tokens that count. Of labels on the CPU only they are computed, since reading
    their number costs no device sync; elsewhere every token is, the rest masked."""

    labels: Tensor  # [N] int64, the target's column; 0 where a label is no class
    targets: Tensor  # [N] int64, its class: the column of a whole vocabulary
    owned: Tensor | None  # [N] the column is on this rank; None: they all are
    valid: Tensor  # [N]
    bad: Tensor  # [N] valid, with a label outside the vocabulary; never of labels on the CPU
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
    device: torch.device,
    places: ClassOrder | None = None,
) -> Tokens:
    """Of a call on `device`. A shard's columns are counted from its start, in the order of classes
    or of `places`; a target elsewhere is in the spare column. Its labels are checked once all ranks
    are known to have the same."""
    valid_N, rows_M = counted(labels, where, ignore_index)
    labels = labels.long()
    in_range_N = (labels >= 0) & (labels < vocab_size)
    bad_N = valid_N & ~in_range_N
    packed = device_info(labels).host_readable
    if shard is None:
        check_labels(labels, bad_N, ignore_index, vocab_size)
    if packed and not device_info(device).host_readable:  # never over shards
        return sent(labels, valid_N, rows_M, device)
    targets_N = labels = torch.where(valid_N & in_range_N, labels, 0)
    owned_N = None
    if shard is not None:
        at_N = labels if places is None else places.of(labels)
        owned_N = (at_N >= shard.start) & (at_N < shard.stop)
        labels = torch.where(owned_N, at_N - shard.start, shard.size)
    return Tokens(labels, targets_N, owned_N, valid_N, bad_N, rows_M, packed)


def counted(
    labels: Tensor, where: Tensor | None, ignore_index: int
) -> tuple[Tensor, Tensor | None]:
    """Which tokens are valid [N], and where those are that are computed [M]; None if all N are."""
    valid_N = labels.long() != ignore_index  # as a uint8, -100 would be 156
    if where is not None:
        valid_N = valid_N & where
    rows_M = valid_N.nonzero()[:, 0] if device_info(labels).host_readable else None
    if rows_M is not None and rows_M.shape[0] == labels.shape[0]:
        rows_M = None
    return valid_N, rows_M


def sent(labels: Tensor, valid: Tensor, rows: Tensor | None, device: torch.device) -> Tokens:
    """What the host has found, in one copy that nobody waits for."""
    parts = [torch.where(valid, labels, -1), *(() if rows is None else (rows,))]
    sizes = [x.shape[0] for x in parts]
    # Pinned, as pageable memory beyond a staging buffer would be waited for.
    packed = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    torch.cat(parts, out=packed)
    labels, *more = packed.to(device, non_blocking=device_info(device).takes_copies).split(sizes)
    valid, targets = labels >= 0, labels.clamp(min=0)
    found = more[0] if more else None
    return Tokens(targets, targets, None, valid, torch.zeros_like(valid), found, True)


def check_labels(labels: Tensor, bad: Tensor, ignore_index: int, vocab_size: int) -> None:
    """Refuse a label outside the vocabulary where it can be read without a device sync."""
    if device_info(labels).host_readable and bad.any():
        check_label_range(int(labels[bad][0]), vocab_size, ignore_index)
