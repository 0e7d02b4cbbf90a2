"""Blocks of classes of a head that are small enough for a test, in PyTorch."""

from __future__ import annotations

import pytest

__all__ = ["WHOLE", "torch_blocks"]
WHOLE = 1 << 20


def torch_blocks(patch: pytest.MonkeyPatch, classes: int, tokens: int | None = None) -> None:
    """So many classes in a block from now on, and tokens in a group, as many as were if None."""
    for module in ("blocks", "loop"):
        patch.setattr(f"xentlib.torch.core.{module}.BLOCK_CLASSES", classes)
    if tokens is not None:
        patch.setattr("xentlib.torch.core.blocks.GROUP_TOKENS", tokens)
