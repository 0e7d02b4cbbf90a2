"""Which implementation of the steps computes, where there are several: `XENTLIB_KERNELS`."""

from __future__ import annotations

VARIABLE = "XENTLIB_KERNELS"
CHOICES = ("auto", "eager", "triton")
