"""Next-token labels in PyTorch, as `xentlib.labels` defines them."""

from __future__ import annotations

import torch
from torch import Tensor

from xentlib import labels as spec
from xentlib.checks import check_next_token_labels
from xentlib.torch.describe import describe

__all__ = ["next_token_labels"]


def next_token_labels(
    labels: Tensor,
    *,
    segment_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    check_next_token_labels(
        describe(labels), describe(segment_ids), describe(cu_seqlens), ignore_index
    )
    shifted = torch.full_like(labels, ignore_index, memory_format=torch.contiguous_format)
    shifted[..., :-1] = labels[..., 1:]
    if segment_ids is not None:
        boundary = segment_ids[..., :-1] != segment_ids[..., 1:]
        shifted[..., :-1].masked_fill_(boundary, ignore_index)
    if cu_seqlens is not None and labels.shape[-1]:
        # An offset of 0 ends an empty document: its "last token" is the row's own last one.
        last = (cu_seqlens.long() - 1) % labels.shape[-1]
        shifted[..., last] = ignore_index
    return shifted


next_token_labels.__doc__ = spec.next_token_labels.__doc__
