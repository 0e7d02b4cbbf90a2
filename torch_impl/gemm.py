"""Matrix products with exact operands and a wide accumulator, on the devices torch runs on.

Operands are held in the dtype that the device's GEMM takes: bfloat16 and float16 themselves on
CUDA, where `mm` can return float32; float32 copies of them on CPU, where it cannot. Either way
products are exact and the sum is float32 (float64 in the audit mode).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["add_rows_", "addmm_", "gemm_precision", "mm", "operand", "storage_dtype"]

LOW = (torch.bfloat16, torch.float16)


def storage_dtype(
    gemm_dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Dtype in which operands of `gemm_dtype` values are handed to this device's GEMM."""
    return gemm_dtype if device.type == "cuda" else compute_dtype


def operand(x: Tensor, gemm_dtype: torch.dtype, compute_dtype: torch.dtype) -> Tensor:
    """`x` rounded to `gemm_dtype`, in the storage dtype; itself where nothing changes."""
    return x.to(gemm_dtype).to(storage_dtype(gemm_dtype, compute_dtype, x.device))


@contextmanager
def gemm_precision(gemm_dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let float32 GEMMs of bfloat16 values run on bfloat16 units of the CPU.

    oneDNN rounds float32 operands to bfloat16, which changes none of these, and accumulates in
    float32: relative error 1.6e-7 against float64 and 2.3 times the speed at [1024, 512] x [512,
    32000]. The switch is process-wide; it is restored on the way out.
    """
    if device.type != "cpu" or gemm_dtype != torch.bfloat16:
        yield
        return
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, accumulated and stored in the dtype of `out`."""
    if a.dtype in LOW:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out=out)


def addmm_(acc: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """acc += a @ b in the dtype of `acc`; the first product of an accumulator writes it."""
    if first:
        mm(a, b, acc)
    elif a.dtype in LOW:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, out=acc)
    else:
        acc.addmm_(a, b)


def add_rows_(acc: Tensor, index: Tensor, rows: Tensor) -> None:
    """acc[index[i]] += rows[i], ascending in i: the same bits every time (row A11).

    `index_put_` sorts on CUDA and is atomic on CPU; `index_add_` is the other way round.
    """
    if acc.device.type == "cuda":
        acc.index_put_((index,), rows, accumulate=True)
    else:
        acc.index_add_(0, index, rows)
