"""Steps 5 and 6 of `xentlib.nll` per token, in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from xentlib.algebra import Algebra


def cast(x: Tensor, like: Tensor) -> Tensor:
    return x.to(like.dtype)


ALGEBRA = Algebra(torch, torch.exp, cast, lambda x: x)
