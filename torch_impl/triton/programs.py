"""Triton programs: one a row of logits, one a few tokens for what is made of their statistics, one
a block of columns for their sums, one a token for the terms of its target.

Shapes: T rows of a chunk, V columns, H hidden width. A pointer of None leaves its option out of the
compiled program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from xentlib.torch.triton.elementary import round_to, two_diff
from xentlib.torch.triton.row import (
    dz_of,
    predicted_class,
    scan_row,
    shape_logits,
    sum_blocks,
    token_stats,
    value,
    write_dz,
    zero_row,
)

# Numbers of tokens, for which nothing is compiled again.
VARYING = ["ld_tokens", "ld_values", "ld_out", "T", "first"]


@triton.jit
def of_row(row, y_ptr, scale_ptr, temperature_ptr, ld_temperature):
    """The target's column, the logit scale and the temperature; 1 where there is none."""
    scale, temperature = 1.0, 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row * ld_temperature)
    return tl.load(y_ptr + row).to(tl.int32), scale, temperature


@triton.jit(do_not_specialize=VARYING)
def stats_rows(
    z_ptr, ld, y_ptr, valid_ptr, bias_ptr, scale_ptr, softcap, temperature_ptr, ld_temperature,
    weights_ptr, tokens_ptr, ld_tokens, blocks_ptr, ld_blocks, blocks, V,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 2 to 4: the target's logit and sum_d, one row of `tokens` [1 or 2, T] each, and what
    else `BlockStats` has, as `scan_row` writes it, to `blocks` [T, 4 or 5, blocks], whose rows are
    `ld_blocks` apart; 0 for a row that does not count."""
    row = tl.program_id(0).to(tl.int64)
    fields: tl.constexpr = 4 + PREDICTED
    tokens_ptr += row
    blocks_ptr += row * ld_blocks
    counts = True
    if valid_ptr is not None:
        counts = tl.load(valid_ptr + row) != 0
    if counts:
        y, scale, temperature = of_row(row, y_ptr, scale_ptr, temperature_ptr, ld_temperature)
        row_ptr = z_ptr + row * ld
        _, sum_d = scan_row(
            row_ptr, y, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature,
            weights_ptr, blocks_ptr, blocks, ENTROPY, SMOOTHING, PREDICTED, BLOCK,
        )  # fmt: skip
        here = (y >= 0) & (y < V)
        z_y = tl.load(row_ptr + y, mask=here, other=0.0)
        z_y, _ = shape_logits(
            z_y, y, here, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature
        )
        tl.store(tokens_ptr, tl.where(here, z_y, float("-inf")))
        if SMOOTHING:
            tl.store(tokens_ptr + ld_tokens, sum_d.to(tl.float32))
    else:
        zero_row(blocks_ptr, fields * blocks, BLOCK)
        tl.store(tokens_ptr, 0.0)
        if SMOOTHING:
            tl.store(tokens_ptr + ld_tokens, 0.0)


@triton.jit(do_not_specialize=VARYING)
def add_blocks(
    m_ptr, ones_ptr, s_ptr, sum_ed_ptr, top_ptr, step, step_token, step_top, step_token_top,
    blocks, highest_ptr, out_ptr, words_ptr, T,
    K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """`Algebra.block_sums`: counts and first columns into `out` [2, T], and sums into `words`
    [2 or 4, T] of float64."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = t < T
    highest = tl.load(highest_ptr + t, mask=mask, other=0.0)
    token, token_top = t.to(tl.int64) * step_token, t.to(tl.int64) * step_token_top
    ones, upper, lower, upper_ed, lower_ed, first = sum_blocks(
        m_ptr, ones_ptr, s_ptr, sum_ed_ptr, top_ptr, token, token_top, step, step_top, blocks,
        highest, mask, K, TOKENS,
    )  # fmt: skip
    tl.store(out_ptr + t, ones, mask=mask)
    tl.store(words_ptr + t, upper, mask=mask)
    tl.store(words_ptr + T + t, lower, mask=mask)
    if sum_ed_ptr is not None:
        tl.store(words_ptr + 2 * T + t, upper_ed, mask=mask)
        tl.store(words_ptr + 3 * T + t, lower_ed, mask=mask)
    if top_ptr is not None:
        tl.store(out_ptr + T + t, first, mask=mask)


@triton.jit(do_not_specialize=VARYING)
def stats_of_tokens(
    z_y_ptr, m_ptr, ones_ptr, s_ptr, sum_ed_ptr, top_ptr, sum_d_ptr, target_ptr, weight_ptr,
    weights_sum_ptr, out_ptr, T, V,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Step 5: `algebra.TokenStats` into `out` [8, T]."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = t < T
    z_y = tl.load(z_y_ptr + t, mask=mask, other=0.0)
    m = tl.load(m_ptr + t, mask=mask, other=0.0)
    ones = tl.load(ones_ptr + t, mask=mask, other=1.0)
    s = tl.load(s_ptr + t, mask=mask, other=0.0)
    sum_ed, sum_d = s, 0.0
    if sum_ed_ptr is not None:
        sum_ed = tl.load(sum_ed_ptr + t, mask=mask, other=0.0)
    if sum_d_ptr is not None:
        sum_d = tl.load(sum_d_ptr + t, mask=mask, other=0.0).to(tl.float64)
    w_y = tl.full([], 1.0, tl.float64)
    w_sum = tl.full([], 0.0, tl.float64) + V  # a V of 1 is no tensor
    if weight_ptr is not None:
        w_y = tl.load(weight_ptr + t, mask=mask, other=1.0).to(tl.float64)
        w_sum = tl.load(weights_sum_ptr).to(tl.float64)
    lse, logprob, p_y, p_rest, entropy, mean_logp, correct = token_stats(
        z_y, m, ones, s, sum_ed, sum_d, w_y, w_sum, V, sum_ed_ptr is not None,
        sum_d_ptr is not None,
    )  # fmt: skip
    tl.store(out_ptr + t, lse.to(tl.float32), mask=mask)
    tl.store(out_ptr + T + t, logprob.to(tl.float32), mask=mask)
    tl.store(out_ptr + 2 * T + t, p_y.to(tl.float32), mask=mask)
    tl.store(out_ptr + 3 * T + t, p_rest.to(tl.float32), mask=mask)
    tl.store(out_ptr + 5 * T + t, correct, mask=mask)
    if sum_ed_ptr is not None:
        tl.store(out_ptr + 4 * T + t, entropy.to(tl.float32), mask=mask)
    else:
        tl.store(out_ptr + 4 * T + t, tl.zeros_like(s), mask=mask)
    if sum_d_ptr is not None:
        tl.store(out_ptr + 6 * T + t, mean_logp.to(tl.float32), mask=mask)
    if top_ptr is not None:
        y = tl.load(target_ptr + t, mask=mask, other=0)
        top = tl.load(top_ptr + t, mask=mask, other=0.0)
        tl.store(out_ptr + 7 * T + t, predicted_class(z_y, m, ones, y, top), mask=mask)


@triton.jit
def dz_rows(
    z_ptr, ld, dz_ptr, ld_dz, y_ptr, valid_ptr, lse_ptr, alpha_ptr, beta_ptr, gamma_ptr, own_ptr,
    bias_ptr, scale_ptr, softcap, temperature_ptr, ld_temperature, weights_ptr, dz_y_ptr, V,
    TARGET: tl.constexpr, ROUND: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
    ROUND_TARGET: tl.constexpr,
):  # fmt: skip
    """Steps 6 and 7 of `kernels.Coefficients`: dz of a row, and that of its target, 0 where it is
    not of these columns and rounded if `ROUND_TARGET`."""
    row = tl.program_id(0).to(tl.int64)
    counts = True
    if valid_ptr is not None:
        counts = tl.load(valid_ptr + row) != 0
    if counts:
        y, scale, temperature = of_row(row, y_ptr, scale_ptr, temperature_ptr, ld_temperature)
        beta, gamma = 0.0, 0.0
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + row)
        if gamma_ptr is not None:
            gamma = tl.load(gamma_ptr + row)
        row_ptr = z_ptr + row * ld
        here = (y >= 0) & (y < V)
        target = tl.load(own_ptr + row)
        if softcap is not None:
            z_y = tl.load(row_ptr + y, mask=here, other=0.0)
            _, slope = shape_logits(
                z_y, y, here, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature
            )
            target *= slope
        target = tl.where(here, target, 0.0)
        if ROUND_TARGET:
            tl.store(dz_y_ptr + row, round_to(target, ROUND))
        else:
            tl.store(dz_y_ptr + row, target)
        write_dz(
            row_ptr, dz_ptr + row * ld_dz, y, V, tl.load(lse_ptr + row), tl.load(alpha_ptr + row),
            beta, gamma, target, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature,
            weights_ptr, beta_ptr is not None, gamma_ptr is not None, TARGET, ROUND, IN_PLACE,
            BLOCK,
        )  # fmt: skip
    else:
        zero_row(dz_ptr + row * ld_dz, V, BLOCK)
        tl.store(dz_y_ptr + row, 0.0)


@triton.jit(do_not_specialize=VARYING)
def loss_rows(
    z_ptr, ld, dz_ptr, ld_dz, y_ptr, valid_ptr, factor_ptr, bias_ptr, scale_ptr, softcap,
    temperature_ptr, ld_temperature, weights_ptr, weights_sum_ptr, values_ptr, ld_values, dz_y_ptr,
    blocks_ptr, blocks, V, label_smoothing, z_loss,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, PREDICTED: tl.constexpr,
    GRADIENT: tl.constexpr, ROUND: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Steps 2 to 7 of `chunked_nll`: `values` [7, T] (loss, its z-loss part, logprob, entropy, lse,
    correct, predicted), dz of a row, and that of its target; all 0 where a row does not count.
    `blocks` [T, 4 or 5, blocks] is where the program keeps what it reads again."""
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row
    counts = True
    if valid_ptr is not None:
        counts = tl.load(valid_ptr + row) != 0
    if counts:
        y, scale, temperature = of_row(row, y_ptr, scale_ptr, temperature_ptr, ld_temperature)
        row_ptr = z_ptr + row * ld
        # 3. and 4. The rest of the row, then its target
        fields: tl.constexpr = 4 + PREDICTED
        blocks_ptr += row * fields * blocks
        m, sum_d = scan_row(
            row_ptr, y, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature,
            weights_ptr, blocks_ptr, blocks, ENTROPY, SMOOTHING, PREDICTED, BLOCK,
        )  # fmt: skip
        # A thread reads what others have written; of a block each, so that rows do not wait.
        tl.debug_barrier()
        sum_ed_ptr, top_ptr = None, None
        if ENTROPY:
            sum_ed_ptr = blocks_ptr + 3
        if PREDICTED:
            top_ptr = blocks_ptr + 4 * blocks
        one = tl.zeros([1], tl.int64)
        ones, upper, lower, upper_ed, lower_ed, top = sum_blocks(
            blocks_ptr, blocks_ptr + 2, blocks_ptr + 1, sum_ed_ptr, top_ptr, one, one, 4, 1, blocks,
            m + one.to(tl.float32), one == 0, BLOCK // 8, 1,
        )  # fmt: skip
        ones, s = tl.sum(ones, 0), value(tl.sum(upper, 0), tl.sum(lower, 0))
        sum_ed = -value(tl.sum(upper_ed, 0), tl.sum(lower_ed, 0))
        z_y = tl.load(row_ptr + y)
        z_y, slope = shape_logits(
            z_y, y, True, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature
        )
        # 5. Per token
        classes = tl.full([], 0.0, tl.float64) + V  # a V of 1 is no tensor
        w_y, w_sum = 1.0, classes
        if weights_ptr is not None:
            w_y = tl.load(weights_ptr + y).to(tl.float64)
            w_sum = tl.load(weights_sum_ptr).to(tl.float64)
        lse, logprob, _, p_rest, entropy, mean_logp, correct = token_stats(
            z_y, m, ones, s, sum_ed, sum_d, w_y, w_sum, V, ENTROPY, SMOOTHING
        )
        nll = -logprob
        if weights_ptr is not None:
            nll *= w_y
        if SMOOTHING:
            kept = tl.full([], 1.0, tl.float64) - label_smoothing
            nll = kept * nll - label_smoothing * mean_logp
        if z_loss is not None:
            z_term = z_loss * (lse * lse)
            tl.store(values_ptr, (nll + z_term).to(tl.float32))
            tl.store(values_ptr + ld_values, z_term.to(tl.float32))
        else:
            tl.store(values_ptr, nll.to(tl.float32))
            tl.store(values_ptr + ld_values, 0.0)
        tl.store(values_ptr + 2 * ld_values, logprob.to(tl.float32))
        if ENTROPY:
            tl.store(values_ptr + 3 * ld_values, entropy.to(tl.float32))
        else:
            tl.store(values_ptr + 3 * ld_values, 0.0)
        tl.store(values_ptr + 4 * ld_values, lse.to(tl.float32))
        tl.store(values_ptr + 5 * ld_values, correct)
        if PREDICTED:
            predicted = predicted_class(z_y, m, ones, y, tl.min(top, 0))
            tl.store(values_ptr + 6 * ld_values, predicted)
        else:
            tl.store(values_ptr + 6 * ld_values, 0.0)
        if GRADIENT:
            # 6. and 7. As `nll.coefficients`, then dz
            outer = tl.load(factor_ptr + row).to(tl.float64)
            if scale_ptr is not None:
                outer *= scale
            if temperature_ptr is not None:
                outer /= temperature
            extra = tl.full([], 0.0, tl.float64)
            if z_loss is not None:
                extra = z_loss * (2.0 * lse)
            uniform, left, through = 0.0, 0.0, 1.0 + extra
            if SMOOTHING:
                uniform = label_smoothing / classes
                left = label_smoothing - uniform
            if weights_ptr is not None:
                through = w_y - label_smoothing * w_y + uniform * w_sum + extra
                left = uniform * (w_sum - w_y)
            target = (outer * (extra + left - through * p_rest)).to(tl.float32)
            if softcap is not None:
                target *= slope
            tl.store(dz_y_ptr + row, round_to(target, ROUND))
            write_dz(
                row_ptr, dz_ptr + row * ld_dz, y, V, lse.to(tl.float32),
                (outer * through).to(tl.float32), 0.0, (outer * uniform).to(tl.float32), 0.0,
                bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature, weights_ptr,
                False, SMOOTHING, False, ROUND, IN_PLACE, BLOCK,
            )  # fmt: skip
    else:
        for k in range(7):
            tl.store(values_ptr + k * ld_values, 0.0)
        if GRADIENT:
            zero_row(dz_ptr + row * ld_dz, V, BLOCK)
            tl.store(dz_y_ptr + row, 0.0)


@triton.jit(do_not_specialize=VARYING)
def column_sums(
    z_ptr, ld, y_ptr, valid_ptr, lse_ptr, alpha_ptr, beta_ptr, gamma_ptr, bias_ptr, scale_ptr,
    softcap, temperature_ptr, ld_temperature, weights_ptr, out_ptr, T, V,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums [V] over the rows of dz of the rest, not rounded: `ROWS` rows at a time as a tree, their
    sums one after the other with the error of each put back."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < V
    total, error = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, T, ROWS):
        rows = start + tl.arange(0, ROWS)
        counts = rows < T
        y = tl.load(y_ptr + rows, mask=counts, other=-1).to(tl.int32)
        lse = tl.load(lse_ptr + rows, mask=counts, other=0.0)
        alpha = tl.load(alpha_ptr + rows, mask=counts, other=0.0)
        beta, gamma, scale, temperature = 0.0, 0.0, 1.0, 1.0
        if beta_ptr is not None:
            beta = tl.load(beta_ptr + rows, mask=counts, other=0.0)[:, None]
        if gamma_ptr is not None:
            gamma = tl.load(gamma_ptr + rows, mask=counts, other=0.0)[:, None]
        if scale_ptr is not None:
            scale = tl.load(scale_ptr)
        if temperature_ptr is not None:
            temperature = tl.load(temperature_ptr + rows * ld_temperature, mask=counts, other=1.0)
            temperature = temperature[:, None]
        if valid_ptr is not None:
            counts = counts & (tl.load(valid_ptr + rows, mask=counts, other=0) != 0)
        place = z_ptr + rows.to(tl.int64)[:, None] * ld + cols[None, :]
        mask = counts[:, None] & inside[None, :]
        z = tl.load(place, mask=mask, other=0.0)
        dz = dz_of(
            z, cols[None, :], inside[None, :], lse[:, None], alpha[:, None], beta,
            gamma, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature, weights_ptr,
            beta_ptr is not None, gamma_ptr is not None,
        )  # fmt: skip
        part = tl.sum(tl.where(mask & (cols[None, :] != y[:, None]), dz, 0.0), 0)
        # two_diff of a sum: total - (-part)
        total, lost = two_diff(total, -part)
        error += lost
    tl.store(out_ptr + cols, total + error, mask=inside)


@triton.jit
def add_to_hidden(
    dx_ptr, ld_dx, dz_y_ptr, y_ptr, w_ptr, ld_w, step_w, columns, H, BLOCK: tl.constexpr
):  # fmt: skip
    """d hidden of a token += dz of its target times the target's row of the head."""
    row = tl.program_id(0).to(tl.int64)
    dz_y = tl.load(dz_y_ptr + row)
    y = tl.load(y_ptr + row)
    if (dz_y != 0) & (y >= 0) & (y < columns):
        h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = h < H
        place = dx_ptr + row * ld_dx + h
        w = tl.load(w_ptr + y * ld_w + h.to(tl.int64) * step_w, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, tl.fma(w, dz_y, tl.load(place, mask=mask, other=0.0)), mask=mask)


@triton.jit(do_not_specialize=VARYING)
def add_to_weight(
    acc_ptr, ld_acc, step_acc, dz_y_ptr, y_ptr, order_ptr, first, x_ptr, ld_x, T, columns, H,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The target's row of d weight += dz of the target times hidden, over the tokens of a label in
    ascending order (row A11): the program of the first of them adds all."""
    i = tl.program_id(0)
    token = tl.load(order_ptr + i) - first
    y = tl.load(y_ptr + token)
    before = y - 1
    if i > 0:
        before = tl.load(y_ptr + tl.load(order_ptr + i - 1) - first)
    if (before != y) & (y >= 0) & (y < columns):
        h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = h < H
        total, error = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        last = i
        same = y
        while same == y:
            token = tl.load(order_ptr + last) - first
            dz_y = tl.load(dz_y_ptr + token)
            if dz_y != 0:
                x = tl.load(x_ptr + token * ld_x + h, mask=mask, other=0.0).to(tl.float32)
                total, lost = two_diff(total, -dz_y * x)
                error += lost
            last += 1
            same = y - 1
            if last < T:
                same = tl.load(y_ptr + tl.load(order_ptr + last) - first)
        place = acc_ptr + y * ld_acc + h.to(tl.int64) * step_acc
        tl.store(place, tl.load(place, mask=mask, other=0.0) + (total + error), mask=mask)
