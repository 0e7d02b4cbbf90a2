"""Heads that DeepSpeed ZeRO-3 shards: outside a gather, a ZeRO-3 parameter has no elements. This
relies on attributes of DeepSpeed 0.19.8, without which none of it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["call_with_head", "copies", "sharded"]

T = TypeVar("T")


def sharded(*parameters: Any) -> list[Any]:
    """Those that ZeRO-3 keeps, each once; some may be whole now, and sharded in the backward."""
    found: list[Any] = []
    for p in parameters:
        if hasattr(p, "ds_status") and all(p is not q for q in found):
            found.append(p)
    return found


def without_elements(parameters: list[Any]) -> list[Any]:
    return [p for p in parameters if p.ds_status.name != "AVAILABLE"]


def call_with_head(
    heads: list[Any], hidden: Tensor, function: Callable[[], T], *, recompute: bool
) -> T:
    """`function()` with the parameters gathered, once, where they are sharded.

    Their gradients are reduced by DeepSpeed's own hooks, which want a parameter of full shape.
    Unless the backward is a `recompute` it has no use for values: one number, expanded, stands for
    them.
    """
    gathered = without_elements(heads)
    # Activation checkpointing calls this again in the backward: what stands in must stay.
    standing = [p for p in gathered if p.shape == p.ds_shape]
    _gather(gathered)
    try:
        result = function()
    finally:
        _partition(gathered)
        _stand_in(standing)
    outputs = [
        x
        for x in (result if isinstance(result, tuple) else (result,))
        if isinstance(x, Tensor) and x.requires_grad
    ]
    before, after = (_gather, _partition) if recompute else (_stand_in, _empty)
    borrowed: list[Any] = []  # what is sharded when the backward comes: DeepSpeed may gather too

    def prepare(_: Tensor) -> None:
        missing = without_elements(heads)
        before(missing)
        borrowed.extend(missing)
        if not hidden.requires_grad:
            torch.autograd.Variable._execution_engine.queue_callback(give_back)

    def give_back() -> None:
        after(borrowed)
        borrowed.clear()

    for x in outputs:
        x.register_hook(prepare)
    # Gradients of parameters have been accumulated by the time that hidden's own is there.
    if outputs and hidden.requires_grad:
        hidden.register_hook(lambda _: give_back())
    return result


def copies(heads: list[Any], *parameters: Any) -> list[Any]:
    """Whole copies, whose gradients are reduced by DeepSpeed's own hooks."""
    gathered = without_elements(heads)
    _gather(gathered)
    try:
        found = [None if p is None else p.clone() for p in parameters]
    finally:
        _partition(gathered)

    def prepare(_: Tensor) -> None:
        missing = without_elements(heads)
        _stand_in(missing)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _empty(missing))

    for x in found:
        if x is not None and x.requires_grad:
            x.register_hook(prepare)
    return found


def _gather(parameters: list[Any]) -> None:
    missing = without_elements(parameters)
    if missing:
        missing[0].all_gather_coalesced(missing).wait()  # one for weight and bias


def _partition(parameters: list[Any]) -> None:
    here = [p for p in parameters if p.ds_status.name == "AVAILABLE"]
    if here:
        here[0].partition(param_list=here, has_been_updated=False)


def _stand_in(parameters: list[Any]) -> None:
    for p in without_elements(parameters):
        p.data = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.ds_shape)


def _empty(parameters: list[Any]) -> None:
    for p in without_elements(parameters):
        p.data = torch.empty(0, dtype=p.dtype, device=p.device)
