"""Blocks of classes of a head that are small enough for a test."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ["WHOLE", "seen_blocks", "small_blocks", "torch_blocks"]
WHOLE = 1 << 20


def torch_blocks(patch: pytest.MonkeyPatch, classes: int, tokens: int | None = None) -> None:
    """So many classes in a block from now on, and tokens in a group, as many as were if None."""
    for module in ("blocks", "loop"):
        patch.setattr(f"xentlib.torch.core.{module}.BLOCK_CLASSES", classes)
    if tokens is not None:
        patch.setattr("xentlib.torch.core.blocks.GROUP_TOKENS", tokens)


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """At most 128 classes in a block, 64 tokens in a group, in both backends."""
    if find_spec("torch"):
        torch_blocks(patch, 128, 64)
    if find_spec("jax"):
        patch.setattr("xentlib.jax.binding.XLA_BLOCK_CLASSES", 128)
        patch.setattr("xentlib.jax.core.logits.GROUP_TOKENS", 64)
        patch.setattr("xentlib.jax.core.blocks.LABEL_GROUP", 8)


def seen_blocks(patch: pytest.MonkeyPatch) -> list[str]:
    """A name for each backward that is traced in blocks, in JAX."""
    from xentlib.jax.losses import loss

    found: list[str] = []
    function = loss.gradients_of_blocks

    def called(*args: Any) -> Any:
        found.append("gradients_of_blocks")
        return function(*args)

    patch.setattr(loss, "gradients_of_blocks", called)
    return found
