"""Steps 2 to 7 of `xentlib.nll` for one row of logits, as Triton functions.

Shapes: V columns, L lanes (BLOCK) of a program. A program owns its row: no atomics, no order that
a scheduler could change (row A11), and no row's bits depend on another row (row A10).
"""

from __future__ import annotations

import triton
import triton.language as tl

from xentlib.math import softmax
from xentlib.torch.triton.elementary import (
    OLD_LAYOUTS,
    difference_exp,
    divide,
    exp,
    log1p,
    stored,
    tanh_and_slope,
)

NONE = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)
# Stands for -inf where a product with 0 must stay 0.
FLOOR = tl.constexpr(-1e4)
LAST = tl.constexpr(2147483647)
BLOCK_COLUMNS = tl.constexpr(softmax.BLOCK_COLUMNS)
# The axis of a tile's parts, of three. Triton gives neighbouring threads to the last axis and then
# to the first one, up to 3.6, or to the second, from 3.7 on: those are to have blocks, as a part
# that threads share takes shuffles, 48 instructions a logit in place of 28.
PARTS_AXIS = tl.constexpr(1 if OLD_LAYOUTS else 0)


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
def block_stats(z, cols, ENTROPY: tl.constexpr, PREDICTED: tl.constexpr):
    """Step 4 of blocks, z [parts, blocks, lanes] or [blocks, parts, lanes], -inf where a column is
    the target or none: `softmax.BlockStats`, [blocks] each."""
    m = tl.max(tl.max(z, PARTS_AXIS), 1)
    m = tl.where(m == NONE, 0.0, m)
    d = z - tl.expand_dims(tl.expand_dims(m, 1), PARTS_AXIS)
    e = exp(d)
    ones = tl.sum(tl.sum((e == 1.0).to(tl.int32), PARTS_AXIS), 1).to(tl.float32)
    s = tl.sum(tl.sum(tl.where(e == 1.0, 0.0, e), PARTS_AXIS), 1)
    ones = tl.where(s == s, ones, s)  # so that a block of NaN is not taken for one of no column
    sum_ed = tl.zeros_like(s)
    if ENTROPY:
        sum_ed = tl.sum(tl.sum(e * tl.maximum(d, FLOOR), PARTS_AXIS), 1)
    top = tl.zeros_like(s)
    if PREDICTED:
        top = tl.min(tl.min(tl.where(d < 0, LAST, cols), PARTS_AXIS), 1).to(tl.float32)
    return m, ones, s, sum_ed, top


@triton.jit
def scan_tile(
    row_ptr, cols, mask, y, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature,
    weights_ptr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    """Logits at `cols` other than `y`, -inf for that and off the mask; and in float64, for
    smoothing, each times its weight, and the weights."""
    z = at_columns(row_ptr, cols, mask)
    z, _ = shape_logits(
        z, cols, mask, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature
    )
    counts = cols != y
    if mask is not None:
        counts = counts & mask
    wz, w = 0.0, 0.0
    if SMOOTHING:
        wz = tl.where(counts, z, 0.0).to(tl.float64)
        if weights_ptr is not None:
            w = tl.where(counts, at_columns(weights_ptr, cols, mask), 0.0).to(tl.float64)
            wz = tl.where(counts, w * z.to(tl.float64), 0.0)
    return tl.where(counts, z, NONE), wz, w


@triton.jit
def scan_row(
    row_ptr, y, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature, weights_ptr,
    blocks_ptr, blocks,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 3 and 4: writes the statistics of the row's blocks without `y`, [blocks, 4] of float32
    (m, s, ones, sum_ed) and behind them [blocks] where `PREDICTED`; returns the largest logit, 0 if
    there is none, and sum_d in float64.

    The sum of d is the difference of two sums of logits: in float32 they would cancel where logits
    have a common offset (1e4 in the contract's grid).
    """
    R: tl.constexpr = BLOCK // BLOCK_COLUMNS
    # A thread reads 128 bits from each part of a block, and 8 threads the block: what they add in
    # registers first takes three shuffles, and five if a warp had a block.
    PARTS: tl.constexpr = row_ptr.dtype.element_ty.primitive_bitwidth // 8
    LANES: tl.constexpr = BLOCK_COLUMNS // PARTS
    of_tile = tl.arange(0, R)
    parts = tl.expand_dims(tl.arange(0, PARTS)[:, None] * LANES, 1 - PARTS_AXIS)
    of_blocks = tl.expand_dims(of_tile[:, None] * BLOCK_COLUMNS, PARTS_AXIS)
    lanes = of_blocks + parts + tl.arange(0, LANES)[None, None, :]
    highest = tl.full([R], NONE, tl.float32)
    sum_wz, sum_w = 0.0, 0.0
    if SMOOTHING:
        sum_wz = tl.zeros([R, LANES], tl.float64)
        if weights_ptr is not None:
            sum_w = tl.zeros([R, LANES], tl.float64)
    whole = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        cols = start + lanes
        z, wz, w = scan_tile(
            row_ptr, cols, None, y, bias_ptr, scale_ptr, scale, softcap, temperature_ptr,
            temperature, weights_ptr, SMOOTHING,
        )  # fmt: skip
        m, ones, s, sum_ed, top = block_stats(z, cols, ENTROPY, PREDICTED)
        if SMOOTHING:
            sum_wz += tl.sum(wz, PARTS_AXIS)
            if weights_ptr is not None:
                sum_w += tl.sum(w, PARTS_AXIS)
        highest = tl.maximum(highest, tl.where(ones == 0, NONE, m))
        at = start // BLOCK_COLUMNS + of_tile
        put_blocks(blocks_ptr, at, blocks, m, ones, s, sum_ed, top, PREDICTED)
    if whole < V:
        cols = whole + lanes
        z, wz, w = scan_tile(
            row_ptr, cols, cols < V, y, bias_ptr, scale_ptr, scale, softcap, temperature_ptr,
            temperature, weights_ptr, SMOOTHING,
        )  # fmt: skip
        m, ones, s, sum_ed, top = block_stats(z, cols, ENTROPY, PREDICTED)
        if SMOOTHING:
            sum_wz += tl.sum(wz, PARTS_AXIS)
            if weights_ptr is not None:
                sum_w += tl.sum(w, PARTS_AXIS)
        highest = tl.maximum(highest, tl.where(ones == 0, NONE, m))
        at = whole // BLOCK_COLUMNS + of_tile
        put_blocks(blocks_ptr, at, blocks, m, ones, s, sum_ed, top, PREDICTED)
    row_m = tl.max(highest, 0)
    row_m = tl.where(row_m == NONE, 0.0, row_m)
    sum_d = 0.0
    if SMOOTHING:
        if weights_ptr is not None:
            others = tl.sum(tl.sum(sum_w, 1), 0)
        else:
            others = (V - ((y >= 0) & (y < V)).to(tl.int32)).to(tl.float64)
        sum_d = tl.sum(tl.sum(sum_wz, 1), 0) - others * row_m.to(tl.float64)
    return row_m, sum_d


@triton.jit
def put_blocks(ptr, at, blocks, m, ones, s, sum_ed, top, PREDICTED: tl.constexpr):
    """One store of four numbers: each has two barriers, as threads change places for it."""
    of_four = tl.arange(0, 2)[None, :, None] + 2 * tl.arange(0, 2)[None, None, :]
    here = at < blocks
    four = tl.join(tl.join(m, s), tl.join(ones, sum_ed))
    tl.store(ptr + 4 * at[:, None, None] + of_four, four, mask=here[:, None, None])
    if PREDICTED:
        tl.store(ptr + 4 * blocks + at, top, mask=here)


@triton.jit
def words(x):
    """As `Algebra.words` in float64: integers of 2^-33 and 2^-73, whose sums are exact."""
    x = x.to(tl.float64) * 8589934592.0
    upper = tl.floor(x)
    return upper, tl.floor((x - upper) * 1099511627776.0)


@triton.jit
def value(upper, lower):
    """The number that two words are of, as float32."""
    return ((lower * 9.094947017729282e-13 + upper) * 1.1641532182693481e-10).to(tl.float32)


@triton.jit
def sum_blocks(
    m_ptr, ones_ptr, s_ptr, sum_ed_ptr, top_ptr, token, token_top, step, step_top, blocks,
    highest, mask, K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """As `Algebra.block_sums`, of tokens at `token` [TOKENS] of each pointer, whose blocks lie
    `step` apart, relative to `highest` [TOKENS]: how many exp(d) are 1, two words each of the sum
    of the others and of -exp(d) d, and the first column with `highest`."""
    upper = tl.zeros([K, TOKENS], tl.float64)
    lower = tl.zeros([K, TOKENS], tl.float64)
    upper_ed = tl.zeros([K, TOKENS], tl.float64)
    lower_ed = tl.zeros([K, TOKENS], tl.float64)
    count = tl.zeros([K, TOKENS], tl.float32)
    first = tl.full([K, TOKENS], float("inf"), tl.float32)
    highest = highest[None, :]
    for start in range(0, blocks, K):
        k = start + tl.arange(0, K)[:, None]
        here = (k < blocks) & mask[None, :]
        at = token[None, :] + k.to(tl.int64) * step
        m = tl.load(m_ptr + at, mask=here, other=0.0)
        ones = tl.load(ones_ptr + at, mask=here, other=0.0)
        s = tl.load(s_ptr + at, mask=here, other=0.0)
        none = ones == 0
        is_lower = tl.where(none, NONE, m) < highest
        d, f = difference_exp(m, highest)
        f = tl.where(none, 0.0, f)
        total = ones + s
        count += tl.where(is_lower, 0.0, ones)
        more, rest = words(tl.where(is_lower, f * total, s))
        upper += more
        lower += rest
        if sum_ed_ptr is not None:
            sum_ed = tl.load(sum_ed_ptr + at, mask=here, other=0.0)
            below = tl.where(none, 0.0, tl.maximum(d, FLOOR))
            more, rest = words(-(f * (sum_ed + below * total)))
            upper_ed += more
            lower_ed += rest
        if top_ptr is not None:
            at = token_top[None, :] + k.to(tl.int64) * step_top
            top = tl.load(top_ptr + at, mask=here, other=0.0)
            first = tl.minimum(first, tl.where(is_lower | none, float("inf"), top))
    return (
        tl.sum(count, 0), tl.sum(upper, 0), tl.sum(lower, 0), tl.sum(upper_ed, 0),
        tl.sum(lower_ed, 0), tl.min(first, 0),
    )  # fmt: skip


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
        of_target = tl.where(t == 0, 0.0, t * (z_y - m))
        entropy = log_total - (rest + of_target) / total
    mean_logp = 0.0
    if SMOOTHING:
        mean_logp = (sum_d + (w_sum - w_y) * (m_r - lse) + w_y * logprob) / V
    # A maximum leaves NaN out.
    correct = tl.where((z_y > m_rest) & (lse == lse), 1.0, 0.0)
    return lse, logprob, t / total, r / total, entropy, mean_logp, correct


@triton.jit
def predicted_class(z_y, m_rest, ones, y, top):
    """The class of the largest logit, the first of several."""
    m_rest = tl.where(ones == 0, NONE, m_rest)
    y = y.to(tl.float32)
    tied = tl.where(z_y == m_rest, tl.minimum(y, top), top)
    return tl.where(z_y > m_rest, y, tied)


@triton.jit
def dz_of(
    z, cols, mask, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
    temperature_ptr, temperature, weights_ptr, BETA: tl.constexpr, GAMMA: tl.constexpr,
):  # fmt: skip
    """Steps 2 and 6 of any column but the target's: p (alpha + beta (z - lse)) - gamma w, through
    the softcap."""
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
    return dz


@triton.jit
def write_dz(
    row_ptr, dz_ptr, y, V, lse, alpha, beta, gamma, target, bias_ptr, scale_ptr, scale, softcap,
    temperature_ptr, temperature, weights_ptr, BETA: tl.constexpr, GAMMA: tl.constexpr,
    TARGET: tl.constexpr, ROUND: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 6 and 7 of a row, from the last column to the first: what a scan has read last may
    still be in L2. `target` is written to the target's column where `TARGET`, 0 where not.

    In place dz lies over the logits themselves or, of 16 bits, over the upper half of their row:
    where rows of logits are L >= V apart, block j writes from byte 2 L + 2 j BLOCK on, blocks that
    are still to be read end at 4 j BLOCK <= 2 L + 2 j BLOCK, and a block is read whole before any
    of it is written.
    """
    lanes = tl.arange(0, BLOCK)
    whole = V // BLOCK
    if not TARGET:
        target = 0.0
    if whole * BLOCK < V:
        cols = whole * BLOCK + lanes
        mask = cols < V
        z = tl.load(row_ptr + cols, mask=mask, other=0.0)
        dz = dz_of(
            z, cols, mask, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
            temperature_ptr, temperature, weights_ptr, BETA, GAMMA,
        )  # fmt: skip
        dz = tl.where(cols == y, target, dz)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(dz_ptr + cols, stored(dz, dz_ptr, ROUND), mask=mask)
    for k in range(whole):
        start = (whole - 1 - k) * BLOCK
        cols = start + lanes
        z = tl.load(row_ptr + cols, eviction_policy="evict_first")
        dz = dz_of(
            z, cols, None, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
            temperature_ptr, temperature, weights_ptr, BETA, GAMMA,
        )  # fmt: skip
        if (y >= start) & (y < start + BLOCK):  # of a program's threads all or none
            dz = tl.where(cols == y, target, dz)
        if IN_PLACE:
            tl.debug_barrier()
        tl.store(dz_ptr + cols, stored(dz, dz_ptr, ROUND))


@triton.jit
def zero_row(dz_ptr, V, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    nothing = tl.zeros([BLOCK], dz_ptr.dtype.element_ty)
    whole = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        tl.store(dz_ptr + start + cols, nothing)
    if whole < V:
        tl.store(dz_ptr + whole + cols, nothing, mask=whole + cols < V)
