"""What several of PyTorch's steps begin with."""

from __future__ import annotations

from typing import Any

import torch

IGNORE = -100


def flat(micro_batches: Any) -> Any:
    x = torch.cat([b["hidden"].flatten(0, 1) for b in micro_batches])
    return x, torch.cat([b["targets"].flatten() for b in micro_batches])


def mean_of(head: Any, micro_batches: Any, loss_of: Any) -> Any:
    """`loss_of(hidden [N, H], labels [N], valid tokens)`, and its backward."""
    x, y = flat(micro_batches)
    loss = loss_of(x, y, (y != IGNORE).sum())
    loss.backward()
    return loss
