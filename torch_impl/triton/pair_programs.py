"""Triton programs of divergences: steps 3 to 7 of `xentlib.divergence`, one a row of the logits of
student and teacher, which they only read. The formulas are those of `xentlib.math.divergence`.

Shapes: T rows of a chunk, V columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xentlib.math import divergence
from xentlib.torch.triton.elementary import exp, log1p, stored
from xentlib.torch.triton.programs import VARYING, of_row
from xentlib.torch.triton.row import BLOCK_COLUMNS, at_columns, shape_logits, zero_row

LOWEST = tl.constexpr(divergence.FLOOR)
NEAR = tl.constexpr(divergence.NEAR)
FORWARD, REVERSE, JSD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def series(x):
    """phi(x) = exp(x) - 1 - x of small numbers."""
    total = x * 2.48015873015873e-05 + 1.984126984126984e-04
    total = total * x + 1.388888888888889e-03
    total = total * x + 8.333333333333333e-03
    total = total * x + 4.1666666666666664e-02
    total = total * x + 1.6666666666666666e-01
    total = total * x + 0.5
    return total * x * x


@triton.jit
def near0(x):
    """Of x <= 0: exp(x), expm1(x), phi(x) and psi(x) = x exp(x) - expm1(x)."""
    near = tl.where(x < NEAR, NEAR, x)
    rest = x - near
    phi = series(near)
    t, e = near + phi, exp(rest)
    less, grown = e - 1.0, 1.0 + t
    more = less * grown
    psi = (near * t - phi) + grown * (less * (near - 1.0) + e * rest)
    return grown * e, t + more, phi + (more - rest), psi


@triton.jit
def psi_of(x):
    """Of numbers of either sign: psi(x) of x > 0 is exp(x) phi(-x)."""
    above = tl.where(x > 0, x, 0.0)
    _e, _t, _phi, below = near0(x - above)
    _e_a, _t_a, phi_a, _psi_a = near0(-above)
    return below + exp(above) * phi_a


@triton.jit
def ratio_of(z_s, z_t, lse_s, lse_t, delta, left_out, KIND: tl.constexpr, DELTA: tl.constexpr):
    """The larger of p and q, and log(q / p); `left_out` is expm1(-delta)."""
    z_s = tl.where(z_s < LOWEST, LOWEST, z_s)
    z_t = tl.where(z_t < LOWEST, LOWEST, z_t)
    w = exp(tl.maximum(z_s - lse_s, z_t - lse_t))
    x = (z_s - z_t) - (lse_s - lse_t)
    if KIND == REVERSE:
        x = -x
    if DELTA:
        x = x - delta
        w = w + w * tl.where(x > 0, left_out, 0.0)
    return w, x


@triton.jit
def terms_of(w, x, beta, KIND: tl.constexpr, FIRST: tl.constexpr):
    """p and a, and terms of four sums: of p, of the divergence, and of q - p and of a, where they
    are wanted. `FIRST`: those that delta is made of alone."""
    right = x > 0
    e, t, phi, psi = near0(-tl.abs(x))
    sign = tl.where(right, 1.0, tl.where(x < 0, -1.0, x * 0.0))
    more = -sign * (w * t)
    if FIRST:
        p = w - tl.where(more > 0, more, 0.0)
        return p, more, p, more, more, more
    if KIND == JSD:
        less = w * e
        p, q = tl.where(right, less, w), tl.where(right, w, less)
        part = -log1p((tl.where(right, beta, 1.0 - beta) * t).to(tl.float64)).to(tl.float32)
        u, v = part - tl.where(right, x, 0.0), part + tl.where(right, 0.0, x)
        m = beta * p + (1.0 - beta) * q
        a = q * v
        value = m * (beta * psi_of(u) + (1.0 - beta) * psi_of(v))
        return q, a, q, value, more, a
    value = w * tl.where(right, psi, phi)
    if KIND == REVERSE:
        p = w * tl.where(right, e, 1.0)
        a = p * x
        return p, a, p, value, more, a
    p = w - tl.where(more > 0, more, 0.0)
    return p, more, p, value, more, more


@triton.jit
def both_logits(
    s_ptr, t_ptr, cols, mask, s_bias_ptr, s_scale_ptr, s_scale, s_softcap, s_temperature_ptr,
    s_temperature, t_bias_ptr, t_scale_ptr, t_scale, t_softcap, t_temperature_ptr, t_temperature,
):  # fmt: skip
    """Step 2 of both, and the derivative of the student's softcap."""
    z_s, slope = shape_logits(
        at_columns(s_ptr, cols, mask), cols, mask, s_bias_ptr, s_scale_ptr, s_scale, s_softcap,
        s_temperature_ptr, s_temperature,
    )  # fmt: skip
    z_t, _of_t = shape_logits(
        at_columns(t_ptr, cols, mask), cols, mask, t_bias_ptr, t_scale_ptr, t_scale, t_softcap,
        t_temperature_ptr, t_temperature,
    )  # fmt: skip
    return z_s, z_t, slope


@triton.jit(do_not_specialize=VARYING)
def pair_sums(
    s_ptr, ld_s, t_ptr, ld_t, y_ptr, valid_ptr, s_bias_ptr, s_scale_ptr, s_softcap,
    s_temperature_ptr, ld_s_temperature, t_bias_ptr, t_scale_ptr, t_softcap, t_temperature_ptr,
    ld_t_temperature,
    lse_s_ptr, lse_t_ptr, delta_ptr, left_out_ptr, beta, sums_ptr, blocks, T, V,
    KIND: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Step 4: sums [k, blocks, T] of blocks of columns, 0 for a row that does not count."""
    row = tl.program_id(0).to(tl.int64)
    R: tl.constexpr = BLOCK // BLOCK_COLUMNS
    of_tile = tl.arange(0, R)
    step = (row * 0 + blocks) * T  # 64 bits
    lanes = of_tile[:, None] * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    counted = V  # columns
    if valid_ptr is not None:
        counted = tl.where(tl.load(valid_ptr + row) != 0, V, 0)
    _, s_scale, s_temperature = of_row(row, y_ptr, s_scale_ptr, s_temperature_ptr, ld_s_temperature)
    _y, t_scale, t_temperature = of_row(
        row, y_ptr, t_scale_ptr, t_temperature_ptr, ld_t_temperature
    )
    lse_s, lse_t = tl.load(lse_s_ptr + row), tl.load(lse_t_ptr + row)
    delta, left_out = 0.0, 0.0
    if delta_ptr is not None:
        delta, left_out = tl.load(delta_ptr + row), tl.load(left_out_ptr + row)
    for start in range(0, V, BLOCK):
        cols = start + lanes
        mask = cols < counted
        z_s, z_t, _through = both_logits(
            s_ptr + row * ld_s, t_ptr + row * ld_t, cols, mask, s_bias_ptr, s_scale_ptr, s_scale,
            s_softcap, s_temperature_ptr, s_temperature, t_bias_ptr, t_scale_ptr, t_scale,
            t_softcap, t_temperature_ptr, t_temperature,
        )  # fmt: skip
        w, x = ratio_of(z_s, z_t, lse_s, lse_t, delta, left_out, KIND, delta_ptr is not None)
        _p, _a, total, value, excess, slope = terms_of(w, x, beta, KIND, FIRST)
        at = start // BLOCK_COLUMNS + of_tile
        here = at < blocks
        place = sums_ptr + at.to(tl.int64) * T + row
        tl.store(place, tl.sum(tl.where(mask, total, 0.0), 1), mask=here)
        tl.store(place + step, tl.sum(tl.where(mask, value, 0.0), 1), mask=here)
        if not FIRST:
            if KIND == JSD:
                tl.store(place + 2 * step, tl.sum(tl.where(mask, slope, 0.0), 1), mask=here)
            else:
                tl.store(place + 2 * step, tl.sum(tl.where(mask, excess, 0.0), 1), mask=here)
            if KIND == REVERSE:
                tl.store(place + 3 * step, tl.sum(tl.where(mask, slope, 0.0), 1), mask=here)


@triton.jit
def pair_dz_of(
    s_ptr, t_ptr, cols, mask, y, s_bias_ptr, s_scale_ptr, s_scale, s_softcap, s_temperature_ptr,
    s_temperature, t_bias_ptr, t_scale_ptr, t_scale, t_softcap, t_temperature_ptr, t_temperature,
    lse_s, lse_t, delta, left_out, beta, gain, shift, target, lse_y,
    KIND: tl.constexpr, DELTA: tl.constexpr, UNTEMPERED: tl.constexpr,
):  # fmt: skip
    """Steps 2 to 7 without the rounding: gain a + shift p, and `target` more for the target; where
    `UNTEMPERED`, less `target` times the softmax of the logits before their temperature."""
    z_s, z_t, slope = both_logits(
        s_ptr, t_ptr, cols, mask, s_bias_ptr, s_scale_ptr, s_scale, s_softcap, s_temperature_ptr,
        s_temperature, t_bias_ptr, t_scale_ptr, t_scale, t_softcap, t_temperature_ptr,
        t_temperature,
    )  # fmt: skip
    w, x = ratio_of(z_s, z_t, lse_s, lse_t, delta, left_out, KIND, DELTA)
    p, a, _total, _value, _excess, _of_a = terms_of(w, x, beta, KIND, False)
    dz = gain * a + shift * p
    if UNTEMPERED:
        z_0, _of_0 = shape_logits(
            at_columns(s_ptr, cols, mask), cols, mask, s_bias_ptr, s_scale_ptr, s_scale, s_softcap,
            None, 1.0,
        )  # fmt: skip
        dz -= target * exp(z_0 - lse_y)
    dz += tl.where(cols == y, target, 0.0)
    if s_softcap is not None:
        dz *= slope
    return dz


@triton.jit(do_not_specialize=VARYING)
def pair_dz(
    s_ptr, ld_s, t_ptr, ld_t, y_ptr, valid_ptr, s_bias_ptr, s_scale_ptr, s_softcap,
    s_temperature_ptr, ld_s_temperature, t_bias_ptr, t_scale_ptr, t_softcap, t_temperature_ptr,
    ld_t_temperature,
    lse_s_ptr, lse_t_ptr, delta_ptr, left_out_ptr, beta, gain_ptr, shift_ptr, own_ptr, lse_y_ptr,
    dz_ptr, ld_dz, V,
    KIND: tl.constexpr, ROUND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 2 to 7: dz of a row into the student's logits, as `row.write_dz` has it, or into the
    teacher's; 0 for a row that does not count."""
    row = tl.program_id(0).to(tl.int64)
    lanes, dz_ptr = tl.arange(0, BLOCK), dz_ptr + row * ld_dz
    counts = True
    if valid_ptr is not None:
        counts = tl.load(valid_ptr + row) != 0
    if counts:
        y, s_scale, s_temperature = of_row(
            row, y_ptr, s_scale_ptr, s_temperature_ptr, ld_s_temperature
        )
        _y_t, t_scale, t_temperature = of_row(
            row, y_ptr, t_scale_ptr, t_temperature_ptr, ld_t_temperature
        )
        s_ptr, t_ptr = s_ptr + row * ld_s, t_ptr + row * ld_t
        lse_s, lse_t = tl.load(lse_s_ptr + row), tl.load(lse_t_ptr + row)
        gain, shift = tl.load(gain_ptr + row), tl.load(shift_ptr + row)
        delta, left_out, target, lse_y = 0.0, 0.0, 0.0, 0.0
        if delta_ptr is not None:
            delta, left_out = tl.load(delta_ptr + row), tl.load(left_out_ptr + row)
        if own_ptr is not None:
            target = tl.load(own_ptr + row)
        if lse_y_ptr is not None:
            lse_y = tl.load(lse_y_ptr + row)
        for k in range(tl.cdiv(V, BLOCK)):
            cols = (tl.cdiv(V, BLOCK) - 1 - k) * BLOCK + lanes
            mask = cols < V
            dz = pair_dz_of(
                s_ptr, t_ptr, cols, mask, y, s_bias_ptr, s_scale_ptr, s_scale, s_softcap,
                s_temperature_ptr, s_temperature, t_bias_ptr, t_scale_ptr, t_scale, t_softcap,
                t_temperature_ptr, t_temperature, lse_s, lse_t, delta, left_out, beta, gain, shift,
                target, lse_y, KIND, delta_ptr is not None, lse_y_ptr is not None,
            )  # fmt: skip
            tl.debug_barrier()
            tl.store(dz_ptr + cols, stored(dz, dz_ptr, ROUND), mask=mask)
    else:
        zero_row(dz_ptr, V, BLOCK)
