"""Leaves of a call of `chunked_nll` in PyTorch, its gradients, and how they are compared.

Shapes: N tokens, V vocabulary, H hidden width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from helpers.held import hold_gradients
from xentlib.contract import check, failures
from xentlib.tools.harness.device import numpy_of, on_torch
from xentlib.tools.harness.problems import Case, Problem, build
from xentlib.torch import chunked_nll
from xentlib.ulp import bits_unequal

OUTPUTS = ("logprobs", "entropy", "lse", "correct")

CASE = Case("behaviour", 61, 24, 157, ignored=0.2, confident=0.3)
CHUNKED = {"max_chunk_bytes": 16 * 157 * 4}  # 16 rows a chunk: four chunks, the last one ragged


def tensors(case: Case = CASE, *, dtype=None, seed=3) -> tuple[dict, Problem]:
    """Leaves hidden, weight and bias, labels, and the problem they came from."""
    p = build(case, seed)
    named = {"hidden": p.hidden, "weight": p.weight, "bias": p.bias, "labels": p.labels}
    leaves = {k: on_torch(v) for k, v in named.items() if v is not None}
    for name, leaf in leaves.items():
        if name != "labels":
            leaves[name] = leaf.to(dtype or leaf.dtype).requires_grad_()
    return leaves, p


def bits(x) -> np.ndarray:
    x = x.detach().contiguous()
    return numpy_of(x.view(torch.int16) if x.dtype == torch.bfloat16 else x)


def same(a, b) -> bool:
    return a.dtype == b.dtype and bits_unequal(bits(a), bits(b)) == 0


def loss_and_gradients(leaves: dict, upstream: float, function=chunked_nll, **options) -> list:
    """Loss and gradients of the leaves that want one."""
    wanted = [x for x in leaves.values() if x.requires_grad]
    out = function(**leaves, **CHUNKED, **options)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    return [loss, *torch.autograd.grad(loss, wanted, torch.tensor(upstream, dtype=loss.dtype))]


def hold_leaves(p: Problem, loss: Any, named: dict) -> None:
    """A2, A5 and A6 for what came out of a wrapper."""
    o = p.reference()
    assert failures(check("A2", numpy_of(loss), o.loss, magnitude=o.loss_magnitude)) == []
    hold_gradients(o, {name: numpy_of(x) for name, x in named.items()})
