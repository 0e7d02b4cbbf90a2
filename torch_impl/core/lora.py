"""The low-rank part of a head, u B.T with u = s x A.T: of logits, and of gradients.

Shapes: N tokens, V vocabulary, H hidden width, R rank, T tokens of a chunk, P parts of an operand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from xentlib.torch.core.gemm import addmm_, gemm_precision, power_of_two, storage_dtype
from xentlib.torch.core.kernels import Kernels, TargetTerms
from xentlib.torch.operators import HeadCall

# Of 8 bits or more each: what float32 has.
PARTS = 3
# Where the largest entry of an operand is put before it is cut into parts of float16, whose
# smallest step is 2^-24: entries of LoRA's B, which begins at 0, had 3 digits.
FP16_EXPONENT = 14


class Parts(NamedTuple):
    """[N, P R] side by side in the dtype of a GEMM, whose sum is an operand [N, R]."""

    tensor: Tensor
    exponent: Tensor | None  # they are this power of two too large

    def whole(self, product: Tensor, rank: int) -> Tensor:
        """[M, R] of the product [M, P R] of something with the parts."""
        if product.shape[1] > rank:
            product = product.view(product.shape[0], -1, rank).sum(1)
        return product if self.exponent is None else torch.ldexp(product, -self.exponent)


def parts_of(x: Tensor, exact: torch.dtype, dtype: torch.dtype) -> Parts:
    """`x` in the compute dtype, whose values are those of dtype `exact`, for products with dz in
    `dtype`: a copy of dz in float32 would be as large as a chunk."""
    if dtype in (x.dtype, exact):
        return Parts(x.to(dtype), None)
    exponent = power_of_two(dtype, x, FP16_EXPONENT)
    if exponent is not None:
        x = torch.ldexp(x, exponent)
    parts = []
    for _ in range(PARTS):
        parts.append(x.to(dtype))
        x = x - parts[-1].to(x.dtype)
    return Parts(torch.cat(parts, 1), exponent)


class LoraActivations(NamedTuple):
    """Of a chunk's tokens."""

    x_TH: Tensor  # what A multiplies, in the compute dtype
    keep_TH: Tensor | None
    u_TR: Tensor


class LowRank:
    """A and B of a walk, in the compute dtype; their products are never below it."""

    def __init__(self, call: HeadCall, local_size: int) -> None:
        assert call.low_in is not None
        assert call.low_out is not None
        self.dtype, device = call.compute_dtype, call.hidden.device
        self.device, self.scale = device, call.low_scale
        self.a_RH = call.low_in.to(self.dtype)
        self.b_VR = call.low_out[:local_size].to(self.dtype)
        self.exact = call.low_out.dtype
        self.dz_dtype = storage_dtype(call.gemm_dtype, self.dtype, device)

    def precision(self) -> Any:
        return gemm_precision(self.dtype, self.device)

    def activations(self, x_TH: Tensor, keep_TH: Tensor | None) -> LoraActivations:
        """Of a chunk; the mask is of its tokens, without those that fill it."""
        x_TH = x_TH.to(self.dtype)
        if keep_TH is not None:
            fill = x_TH.shape[0] - keep_TH.shape[0]
            keep_TH = torch.nn.functional.pad(keep_TH, (0, 0, 0, fill))
            x_TH = torch.where(keep_TH, x_TH, 0.0)
        u_TR = x_TH.new_empty(x_TH.shape[0], self.a_RH.shape[0])
        with self.precision():
            addmm_(u_TR, x_TH, self.a_RH.T, first=True)
        return LoraActivations(x_TH, keep_TH, u_TR.mul_(self.scale))

    def add_logits(self, z_TV: Tensor, activations: LoraActivations) -> None:
        with self.precision():
            addmm_(z_TV, activations.u_TR, self.b_VR.T, first=False)


class LowSums:
    """d A and d B out of one dz after the other, and what d hidden has of it."""

    def __init__(self, low: LowRank, need_a: bool, need_b: bool, kernel_cls: type[Kernels]) -> None:
        self.low, self.need_a, self.need_b, self.kernel_cls = low, need_a, need_b, kernel_cls
        self.a = torch.zeros_like(low.a_RH) if need_a else low.a_RH.new_zeros(0, 0)
        self.b = torch.zeros_like(low.b_VR) if need_b else low.b_VR.new_zeros(0, 0)
        self.parts = parts_of(low.b_VR, low.exact, low.dz_dtype)

    def backprop_lora(self, dz_TV: Tensor, terms: TargetTerms) -> Tensor:
        """[T, R]: s dz B, the target's terms last."""
        low, rank = self.low, self.low.a_RH.shape[0]
        product = torch.empty(
            dz_TV.shape[0], self.parts.tensor.shape[1], dtype=low.dtype, device=low.device
        )
        with low.precision():
            addmm_(product, dz_TV, self.parts.tensor, first=True)
        du_TR = self.parts.whole(product, rank)
        self.kernel_cls.add_to_hidden(du_TR[: terms.dz_y_B.shape[0]], terms, low.b_VR)
        return du_TR.mul_(low.scale)

    def add_to_hidden(self, dx_TH: Tensor, du_TR: Tensor, activations: LoraActivations) -> None:
        with self.low.precision():
            if activations.keep_TH is None:
                addmm_(dx_TH, du_TR, self.low.a_RH, first=False)
                return
            part_TH = torch.empty_like(dx_TH)
            addmm_(part_TH, du_TR, self.low.a_RH, first=True)
        dx_TH += torch.where(activations.keep_TH, part_TH, 0.0)

    def add_to_a(self, du_TR: Tensor, activations: LoraActivations) -> None:
        with self.low.precision():
            addmm_(self.a, du_TR.T, activations.x_TH, first=False)

    def add_to_b(self, dz_TV: Tensor, terms: TargetTerms, activations: LoraActivations) -> None:
        low, u_TR = self.low, activations.u_TR
        parts = parts_of(u_TR, u_TR.dtype, low.dz_dtype)
        product = self.b.new_empty(dz_TV.shape[1], parts.tensor.shape[1])
        with low.precision():
            addmm_(product, dz_TV.T, parts.tensor, first=True)
        self.b += parts.whole(product, u_TR.shape[1])
        self.kernel_cls.add_to_weight(self.b, terms, u_TR[: terms.dz_y_B.shape[0]])
