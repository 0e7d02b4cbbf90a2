"""Steps 2 to 7 of `xentlib.nll` for one row of logits, as Triton functions.

Shapes: V columns, L lanes (BLOCK) of a program. A program owns its row: no atomics, no order that
a scheduler could change (row A11), and no row's bits depend on another row (row A10).
"""

from __future__ import annotations

import triton
import triton.language as tl

from xentlib.torch.triton.elementary import (
    INTERPRETED,
    difference_exp,
    divide,
    exp,
    log1p,
    round_to,
    tanh_and_slope,
)

NONE = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Stands for -inf where a product with 0 must stay 0.
FLOOR = tl.constexpr(-1e4)


@triton.jit
def at_columns(ptr, cols, mask):
    """One value a column; 0 where the mask, if there is one, is off."""
    if mask is None:
        return tl.load(ptr + cols)
    else:
        return tl.load(ptr + cols, mask=mask, other=0.0)


@triton.jit
def shape_logits(z, cols, mask, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature):
    """Step 2 of columns `cols`: logits, and the derivative of the softcap."""
    slope = 1.0
    z = z.to(tl.float32)
    if bias_ptr is not None:
        z += at_columns(bias_ptr, cols, mask).to(tl.float32)
    if scale_ptr is not None:
        z *= scale
    if softcap is not None:
        tanh, slope = tanh_and_slope(divide(z, softcap, tl.div_rn(1.0, softcap)))
        z = tanh * softcap
    if temperature_ptr is not None:
        z = divide(z, temperature, tl.div_rn(1.0, temperature))
    return z, slope


@triton.jit
def scan_step(z, cols, m, s, sum_ed, top, ENTROPY: tl.constexpr, PREDICTED: tl.constexpr):
    """One entry a lane. `s` is the lane's sum of exp(z - m) without the 1 of its maximum, so -1 of
    a lane that has seen none; one exp serves the entry or moves the sum to a new maximum."""
    higher = z > m
    d = tl.where(higher, m - z, z - m)
    e = exp(d)
    if ENTROPY:
        bounded = tl.maximum(d, FLOOR)
        moved = e * (sum_ed + bounded * (1.0 + s))
        sum_ed = tl.where(higher, moved, sum_ed + e * bounded)
    if PREDICTED:
        first = (s == -1.0) & (z == m)  # a lane's first, where that is finfo.min
        top = tl.where(higher | first, cols, top)
    s = tl.where(higher, s * e + e, s + e)
    return tl.maximum(m, z), s, sum_ed, top


@triton.jit
def scan_row(
    row_ptr, y, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature, weights_ptr,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 3 and 4: `kernels.NonTargetStats` of the columns other than `y`, sum_d in float64.

    The sum of d is the difference of two sums of logits: in float32 they would cancel where logits
    have a common offset (1e4 in the contract's grid).
    """
    lanes = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LOWEST, tl.float32)
    s = tl.full([BLOCK], -1.0, tl.float32)
    sum_ed = tl.zeros([BLOCK], tl.float32)
    sum_wz = tl.zeros([BLOCK], tl.float64 if SMOOTHING else tl.float32)
    sum_w = tl.zeros([BLOCK], tl.float64 if SMOOTHING else tl.float32)
    top = tl.zeros([BLOCK], tl.int32)
    whole = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        cols = start + lanes
        z = tl.load(row_ptr + cols)
        z, _ = shape_logits(
            z, cols, None, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature
        )
        if SMOOTHING:
            counts = cols != y
            if weights_ptr is not None:
                w = tl.load(weights_ptr + cols)
                sum_wz += tl.where(counts, w.to(tl.float64) * z.to(tl.float64), 0.0)
                sum_w += tl.where(counts, w, 0.0).to(tl.float64)
            else:
                sum_wz += tl.where(counts, z, 0.0).to(tl.float64)
        z = tl.where(cols != y, z, NONE)
        m, s, sum_ed, top = scan_step(z, cols, m, s, sum_ed, top, ENTROPY, PREDICTED)
    if whole < V:
        cols = whole + lanes
        mask = cols < V
        z = tl.load(row_ptr + cols, mask=mask, other=0.0)
        z, _ = shape_logits(
            z, cols, mask, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature
        )
        counts = mask & (cols != y)
        if SMOOTHING:
            if weights_ptr is not None:
                w = tl.load(weights_ptr + cols, mask=mask, other=0.0)
                sum_wz += tl.where(counts, w.to(tl.float64) * z.to(tl.float64), 0.0)
                sum_w += tl.where(counts, w, 0.0).to(tl.float64)
            else:
                sum_wz += tl.where(counts, z, 0.0).to(tl.float64)
        z = tl.where(counts, z, NONE)
        m, s, sum_ed, top = scan_step(z, cols, m, s, sum_ed, top, ENTROPY, PREDICTED)
    # Lanes together. One that has seen nothing adds (1 + s) = 0.
    highest = tl.max(m, 0)
    at_top = (m == highest) & (s != -1.0)
    d, f = difference_exp(m, highest)
    ones = tl.sum(at_top.to(tl.float32), 0)
    row_s = tl.sum(tl.where(at_top, s, (1.0 + s) * f), 0)
    row_s = tl.where(highest == float("inf"), float("nan"), row_s)  # as log_softmax has it
    row_ed = 0.0
    if ENTROPY:
        moved = f * (sum_ed + tl.maximum(d, FLOOR) * (1.0 + s))
        row_ed = tl.sum(tl.where(at_top, sum_ed, moved), 0)
    row_m = tl.where(ones == 0, 0.0, highest)
    sum_d = 0.0
    if SMOOTHING:
        if weights_ptr is not None:
            others = tl.sum(sum_w, 0)
        else:
            others = (V - ((y >= 0) & (y < V)).to(tl.int32)).to(tl.float64)
        sum_d = tl.sum(sum_wz, 0) - others * row_m.to(tl.float64)
    column = 0
    if PREDICTED:
        column = tl.min(tl.where(at_top, top, 2147483647), 0)
        column = tl.where(ones == 0, 0, column)
    return row_m, ones, row_s, row_ed, sum_d, column


@triton.jit
def token_stats(
    z_y, m_rest, ones, s, sum_ed, sum_d, w_y, w_sum, V,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """Step 5, as `Algebra.token_stats`, in float64: some hundred instructions a row, where
    float32 would need log1p and error terms."""
    z_y, m_r = z_y.to(tl.float64), m_rest.to(tl.float64)
    ones, s = ones.to(tl.float64), s.to(tl.float64)
    none = ones == 0
    m_rest = tl.where(none, NONE, m_r)
    m = tl.maximum(z_y, m_rest)
    scale = tl.where(none, 0.0, tl.exp(m_r - m))
    r = scale * (ones + s)
    t = tl.exp(z_y - m)
    total = r + t
    # A maximum that is not finite leaves nothing to compare: NaN, as log_softmax has it.
    infinite = tl.abs(m) == float("inf")
    top = (z_y == m) & (infinite == 0)
    log_total = log1p(tl.where(top, r, (ones - 1.0) + s + t))
    logprob = tl.where(top, -log_total, (z_y - m) - log_total)
    lse = tl.where(infinite, m, m + log_total)
    entropy = 0.0
    if ENTROPY:
        below = tl.where(none, 0.0, tl.maximum(m_r - m, FLOOR))
        rest = scale * (sum_ed.to(tl.float64) + below * (ones + s))
        own = tl.where(t == 0, 0.0, t * (z_y - m))
        entropy = log_total - (rest + own) / total
    mean_logp = 0.0
    if SMOOTHING:
        mean_logp = (sum_d + (w_sum - w_y) * (m_r - lse) + w_y * logprob) / V
    return lse, logprob, r / total, entropy, mean_logp, m_rest


@triton.jit
def dz_of(
    z, cols, mask, y, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
    temperature_ptr, temperature, weights_ptr, BETA: tl.constexpr, GAMMA: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 6, without the target's column: p (alpha + beta (z - lse)) - gamma w, through the
    softcap."""
    z, slope = shape_logits(
        z, cols, mask, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature
    )
    d = z - lse
    if BETA:
        dz = exp(d) * (alpha + beta * tl.maximum(d, FLOOR))
    else:
        dz = exp(d) * alpha
    if GAMMA:
        if weights_ptr is not None:
            dz -= gamma * at_columns(weights_ptr, cols, mask)
        else:
            dz -= gamma
    if softcap is not None:
        dz *= slope
    return tl.where(cols == y, 0.0, dz)


@triton.jit
def write_dz(
    row_ptr, dz_ptr, y, V, lse, alpha, beta, gamma, own, bias_ptr, scale_ptr, scale, softcap,
    temperature_ptr, temperature, weights_ptr, BETA: tl.constexpr, GAMMA: tl.constexpr,
    TARGET: tl.constexpr, ROUND: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 6 and 7 of a row, from the last column to the first: what a scan has read last may
    still be in L2. `own` is written to the target's column where `TARGET`, 0 where not.

    In place dz lies over the logits themselves or, of 16 bits, over the upper half of their row:
    where rows of logits are L >= V apart, block j writes from byte 2 L + 2 j BLOCK on, blocks that
    are still to be read end at 4 j BLOCK <= 2 L + 2 j BLOCK, and a block is read whole before any
    of it is written.
    """
    lanes = tl.arange(0, BLOCK)
    whole = V // BLOCK
    if whole * BLOCK < V:
        cols = whole * BLOCK + lanes
        mask = cols < V
        z = tl.load(row_ptr + cols, mask=mask, other=0.0)
        dz = dz_of(
            z, cols, mask, y, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
            temperature_ptr, temperature, weights_ptr, BETA, GAMMA,
        )  # fmt: skip
        if TARGET:
            dz = tl.where(cols == y, own, dz)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(dz_ptr + cols, stored(dz, dz_ptr, ROUND), mask=mask)
    for k in range(whole):
        cols = (whole - 1 - k) * BLOCK + lanes
        z = tl.load(row_ptr + cols, eviction_policy="evict_first")
        dz = dz_of(
            z, cols, None, y, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
            temperature_ptr, temperature, weights_ptr, BETA, GAMMA,
        )  # fmt: skip
        if TARGET:
            dz = tl.where(cols == y, own, dz)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(dz_ptr + cols, stored(dz, dz_ptr, ROUND))


@triton.jit
def stored(dz, dz_ptr, ROUND: tl.constexpr):
    """Rounded once, and of the element type that it is stored with."""
    if INTERPRETED or dz_ptr.dtype.element_ty != ROUND:
        dz = round_to(dz, ROUND)
    return dz.to(dz_ptr.dtype.element_ty)


@triton.jit
def zero_row(dz_ptr, V, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], dz_ptr.dtype.element_ty)
    whole = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tl.store(dz_ptr + start + cols, nothing)
    if whole < V:
        tl.store(dz_ptr + whole + cols, nothing, mask=whole + cols < V)
