"""Elementary functions for Triton programs: float32 to about 1 ULP, with the same bits on every
device that has a fused multiply-add, and in Triton's interpreter.

All of them want `enable_fp_fusion=False`: contraction would undo what `two_diff` computes.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
OLD_LAYOUTS = tuple(int(x) for x in triton.__version__.split(".")[:2]) < (3, 7)


@triton.jit
def exp_parts(x):
    """exp(x) = scale (1 + q), scale a power of two and q in [-0.3, 0.42], for -88 <= x <= 88; from
    -87.7 down scale is 0.

    Cody-Waite reduction by log 2 in two parts, then the polynomial of Cephes' expf (degree 6).
    """
    t = tl.fma(x, 1.44269504, 12582912.0)  # round(x / log 2) in the low bits: 1.5 * 2^23
    n = t - 12582912.0
    r = tl.fma(n, -0.6931471824645996, x)
    r = tl.fma(n, 1.904654323148236e-09, r)
    p = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    p = tl.fma(p, r, 8.3334519073e-3)
    p = tl.fma(p, r, 4.1665795894e-2)
    p = tl.fma(p, r, 1.6666665459e-1)
    p = tl.fma(p, r, 5.0000001201e-1)
    q = tl.fma(p * r, r, r)
    # A product and not a sum of bits: the bits of a NaN may be anything.
    scale = ((t.to(tl.int32, bitcast=True) << 23) + 0x3F800000).to(tl.float32, bitcast=True)
    return scale, q


@triton.jit
def exp(x):
    """exp of x <= 88, 1.02 ULP at worst, 0.03 u on average; 0 from -87.7 down, where float32 ends.
    A clamp and an fma, and no comparison: a logit takes two instructions less.

    `tl.exp` and CUDA's expf both end in ex2.approx, whose error PTX bounds by 2^-22; an error of
    that size with one sign in all terms leaves row A3 (2.35 ULP against 2).
    """
    scale, q = exp_parts(tl.maximum(x, -88.0, propagate_nan=tl.PropagateNan.ALL))
    return tl.fma(scale, q, scale)


@triton.jit
def divide(x, divisor, inverse):
    """x / divisor from `inverse` = 1 / divisor rounded, corrected by its remainder, unless that has
    left the range: x may be infinite, or a mask of finfo.min whose quotient is."""
    quotient = x * inverse
    remainder = tl.fma(-quotient, divisor, x)
    corrected = tl.fma(remainder, inverse, quotient)
    return tl.where(tl.abs(remainder) < float("inf"), corrected, quotient)


@triton.jit
def tanh_and_slope(x):
    """tanh(x), 3 ULP at worst, and its derivative 4 e / (1 + e)^2 with e = exp(-2 |x|).

    1 - tanh^2 would cancel where the cap saturates, and 1 - e where it does not: e - 1 is made
    without the 1.
    """
    a = tl.abs(x)
    scale, q = exp_parts(tl.maximum(-2.0 * a, -86.0))
    e = tl.where(a == a, tl.fma(scale, q, scale), a)
    below = tl.fma(scale, q, scale - 1.0)  # e - 1
    inverse = tl.div_rn(1.0, 2.0 + below)
    tanh = tl.where(a == a, -below * inverse, a)
    return tl.where(x < 0, -tanh, tanh), 4.0 * e * (inverse * inverse)


@triton.jit
def two_diff(a, b):
    """a - b, and its rounding error."""
    d = a - b
    back = d - a
    return d, (a - (d - back)) - (b + back)


@triton.jit
def difference_exp(a, b):
    """a - b, and exp of it with the rounding error of the difference put back."""
    d, error = two_diff(a, b)
    # A difference that overflows has no error to put back.
    return d, exp(d) * tl.where(tl.abs(d) < 3e38, 1.0 + error, 1.0)


@triton.jit
def log1p(x):
    """log(1 + x) in float64, from a log alone."""
    u = 1.0 + x
    exact = tl.where(u == 1.0, 1.0, u - 1.0)
    return tl.where(u == 1.0, x, tl.log(u) * (x / exact))


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """`x` rounded to the nearest of `DTYPE`, ties to even, and float32 again."""
    if tl.bfloat16 == DTYPE and INTERPRETED:
        # There `.to(tl.bfloat16)` cuts off (Triton 3.6 to 3.9).
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    elif tl.float32 != DTYPE:
        x = x.to(DTYPE).to(tl.float32)
    return x


@triton.jit
def stored(dz, dz_ptr, ROUND: tl.constexpr):
    """Rounded once, and of the element type that it is stored with."""
    if INTERPRETED or dz_ptr.dtype.element_ty != ROUND:
        dz = round_to(dz, ROUND)
    return dz.to(dz_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["count"])
def scale(x_ptr, by_ptr, out_ptr, count, ROUND: tl.constexpr, IN_PLACE: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """out = x by, rounded once. In place nothing is moved where `by` is 1."""
    by = tl.load(by_ptr)
    if not IN_PLACE or by != 1.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        i = start + tl.arange(0, BLOCK)
        if start + BLOCK <= count:  # without a mask, 128 bits at a time
            tl.store(out_ptr + i, stored(tl.load(x_ptr + i) * by, out_ptr, ROUND))
        else:
            x = tl.load(x_ptr + i, mask=i < count, other=0.0)
            tl.store(out_ptr + i, stored(x * by, out_ptr, ROUND), mask=i < count)
