"""Matrix products with exact operands and a wide accumulator, on the devices torch runs on.

Operands are held in the dtype that the device's GEMM takes: bfloat16 and float16 themselves on
CUDA, where `mm` can return float32; float32 copies of them on CPU, where it cannot. Either way
products are exact and the sum is float32 (float64 in the audit mode).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from xentlib.torch.core.device import device_info

LOW = (torch.bfloat16, torch.float16)
SCRATCH_BYTES = 8 << 20
LINE_BYTES = 16
# MKL adds the terms of a product this narrow one after the other: of 100,000 tokens at H = 8 the
# error of d weight was 76 u of its norm, at H = 1 218 u; 1024 tokens at a time it is 9 u. With an
# accumulator it goes on adding where that ends, 560 u at H = 8 in chunks of 512 tokens: each
# product is made apart from it.
NARROW, NARROW_DEPTH = 16, 1024
# oneDNN 3.10, which PyTorch 2.11 holds, has other kernels for other numbers of rows: in chunks of
# 64 tokens 91 % of the logits had other bits than in one chunk, at H = 512, V = 3000 (row A10).
# There MKL multiplies, at half the speed on an EPYC with AVX-512.
ONEDNN = torch.__version__ >= "2.12"


# float16 has no room for p / N: dz carries a power of two that puts the largest factor here, where
# p is normal down to 2^-24 and dz may still grow 32-fold.
FP16_EXPONENT = 11


def storage_dtype(
    gemm_dtype: torch.dtype, compute_dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Dtype in which operands of `gemm_dtype` values are handed to this device's GEMM."""
    return gemm_dtype if device_info(device).wide_products else compute_dtype


def operand(x: Tensor, gemm_dtype: torch.dtype, compute_dtype: torch.dtype) -> Tensor:
    """`x` rounded to `gemm_dtype`, in the storage dtype; itself where nothing changes."""
    return x.to(gemm_dtype).to(storage_dtype(gemm_dtype, compute_dtype, x.device))


def power_of_two(
    gemm_dtype: torch.dtype, x: Tensor, exponent: int = FP16_EXPONENT
) -> Tensor | None:
    """Exponent that brings float16 numbers of this size to where float16 has digits."""
    if gemm_dtype != torch.float16:
        return None
    largest = x.abs().amax() if x.numel() else x.sum()
    return exponent - torch.frexp(largest).exponent


class Precision:
    """A process-wide switch of float32 products, held by any number of threads that want the same
    and given back, as it was, by the last of them."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.wanted, self.holders = "", 0
        self.before: str | None = None  # what to give back; None where nothing was switched

    @contextmanager
    def hold(self, settings: Any, wanted: str) -> Iterator[None]:
        with self.changed:
            while self.holders and self.wanted != wanted:
                self.changed.wait()
            if not self.holders:
                now = settings.fp32_precision
                same = now == wanted or (wanted == "ieee" and now == "none")
                self.wanted, self.before = wanted, None if same else now
                if not same:
                    settings.fp32_precision = wanted
            self.holders += 1
        try:
            yield
        finally:
            with self.changed:
                self.holders -= 1
                if not self.holders and self.before is not None:
                    settings.fp32_precision = self.before
                self.changed.notify_all()


PRECISION = {"cpu": Precision(), "cuda": Precision()}


@contextmanager
def gemm_precision(gemm_dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """float32 products in float32, whatever the process has chosen for its own; of bfloat16 values
    on the CPU's AMX units.

    `torch.set_float32_matmul_precision("high")`, usual in training scripts, would round float32
    operands to 10 bits on CUDA, "medium" to 7 on CPU. Of bfloat16 values that rounding changes
    none: oneDNN takes AMX and accumulates in float32 (relative error 1.6e-7 against float64). On
    a CPU without AMX the switch changes neither bits nor time, and is left alone; products that it
    does not touch leave it alone everywhere. It is process-wide: float32 products that another
    thread of the process makes meanwhile on AMX are rounded to bfloat16.
    """
    kind = device.type
    if (
        kind not in PRECISION
        or gemm_dtype == torch.float64
        or (kind == "cuda" and gemm_dtype in LOW)
    ):
        yield
        return
    settings: Any = torch.backends.cuda.matmul
    if kind == "cpu":
        settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    on_amx = ONEDNN and kind == "cpu" and gemm_dtype == torch.bfloat16 and has_amx()
    with PRECISION[kind].hold(settings, "bf16" if on_amx else "ieee"):
        yield


def has_amx() -> bool:
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, accumulated and stored in the dtype of `out`."""
    columns, depth = whole_lines(out), whole_lines(a)
    if columns:
        mm(a, b[:, :columns], out[:, :columns])
        mm(a, b[:, columns:], out[:, columns:])
    elif depth:
        mm(a[:, :depth], b[:depth], out)
        addmm_(out, a[:, depth:], b[depth:], first=False)
    elif by_onednn(a, b, out):
        _onednn(a, b, out, Tensor.copy_)
    elif a.dtype in LOW:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out=out)


def addmm_(acc: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """acc += a @ b in the dtype of `acc`; the first product of an accumulator writes it."""
    depth = a.shape[1]
    narrow = device_info(acc).cpu_libraries and min(acc.shape) < NARROW
    if narrow and (depth > NARROW_DEPTH or not (first or by_onednn(a, b, acc))):
        for start in range(0, depth, NARROW_DEPTH):
            part = slice(start, start + NARROW_DEPTH)
            product = torch.empty_like(acc)
            mm(a[:, part], b[part], product)
            acc.copy_(product) if first and start == 0 else acc.add_(product)
        return
    columns, lines = whole_lines(acc), whole_lines(a)
    if first:
        mm(a, b, acc)
    elif columns:
        addmm_(acc[:, :columns], a, b[:, :columns], first=False)
        addmm_(acc[:, columns:], a, b[:, columns:], first=False)
    elif lines:
        addmm_(acc, a[:, :lines], b[:lines], first=False)
        addmm_(acc, a[:, lines:], b[lines:], first=False)
    elif by_onednn(a, b, acc):
        _onednn(a, b, acc, Tensor.add_)
    elif a.dtype in LOW:
        torch.addmm(acc, a, b, out_dtype=acc.dtype, out=acc)
    else:
        acc.addmm_(a, b)


def whole_lines(x: Tensor) -> int:
    """Columns that are whole lines of a GPU's memory, where a product is made of these first and of
    the few others then; 0 where there are no others, or rows begin anywhere.

    cuBLAS has its fast programs for columns that are a multiple of 16 bytes alone, wherever rows
    begin. At V = 50,257, H = 768 an H100 made 4,096 tokens' logits at 71 TFLOP/s and d hidden at
    117, and d weight, for which V is the number of rows, at 450.
    """
    columns, line = x.shape[1], LINE_BYTES // x.element_size()
    aligned = device_info(x).aligned_rows and x.stride(1) == 1 and x.stride(0) % line == 0
    return columns // line * line if aligned and columns % line else 0


def by_onednn(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether a float32 product goes to oneDNN instead of MKL.

    MKL takes AVX2 kernels on processors that are not Intel's: 90 ms at [512, 512] x [512, 32000] on
    an EPYC with AVX-512 where oneDNN needs 42 ms. Where AMX is asked for, `torch.mm` goes to oneDNN
    by itself. The operator falls to a reference kernel, 2000 times slower, where `b`
    has gaps between its rows, and copies an `a` that has, as dz of a vocabulary shard is, or that
    is turned: too much if it is as large as a chunk. How many rows there are must not decide for dz
    that is not turned: rows of d hidden would have other bits in other chunks (row A10).
    """
    mkldnn: Any = torch.backends.mkldnn
    return (
        ONEDNN
        and device_info(a).cpu_libraries
        and a.dtype == torch.float32
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(mkldnn.enabled)
        and mkldnn.matmul.fp32_precision != "bf16"
        and (b.is_contiguous() or b.T.is_contiguous())
        and (a.is_contiguous() or (a.stride(0) == 1 and a.shape[1] < max(out.shape)))
    )


def _onednn(a: Tensor, b: Tensor, out: Tensor, write: Callable[[Tensor, Tensor], Tensor]) -> None:
    """`write` a @ b to `out`, a block of its longer side at a time where that is the longest.

    The operator returns a new tensor. Blocks of SCRATCH_BYTES, with the copy of an operand that a
    block may need, come from the allocator's own pool and are read back from cache: 50 ms for d
    weight of 512 tokens, against 95 ms whole, most of it the first touch of 62 MiB of new pages.
    """
    depth, by_rows = a.shape[1], out.shape[0] > out.shape[1]
    length, width = out.shape if by_rows else out.shape[::-1]
    step = max(1, SCRATCH_BYTES // ((width + depth) * out.element_size()))
    if depth >= length:
        step = max(1, length)
    for start in range(0, length, step):
        part = slice(start, start + step)
        left, right, target = (a[part], b, out[part]) if by_rows else (a, b[:, part], out[:, part])
        if not (right.is_contiguous() or right.T.is_contiguous()):
            right = right.contiguous()
        write(target, torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], ""))


def add_rows_(acc: Tensor, index: Tensor, rows: Tensor) -> None:
    """acc[index[i]] += rows[i], ascending in i: the same bits every time (row A11).

    `index_put_` sorts on CUDA and is atomic on CPU; `index_add_` is the other way round.
    """
    if device_info(acc).ordered_put:
        acc.index_put_((index,), rows, accumulate=True)
    else:
        acc.index_add_(0, index, rows)
