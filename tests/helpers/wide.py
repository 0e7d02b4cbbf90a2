"""Results of PyTorch's operators that are as large as all logits."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Wide"]


class Wide(TorchDispatchMode):
    """How many results are [.., classes] of at least so many tokens."""

    def __init__(self, classes: int, tokens: int) -> None:
        super().__init__()
        self.classes, self.tokens, self.seen = classes, tokens, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == self.classes:
                self.seen += x.numel() >= self.tokens * self.classes
        return out
