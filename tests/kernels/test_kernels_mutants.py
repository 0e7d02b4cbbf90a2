"""A14 of Triton's programs: each line whose loss would be silent, broken, is seen."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import HAS_TORCH

if not HAS_TORCH:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch

from xentlib.torch.core.kernels import runnable

if "triton" not in runnable():
    pytest.skip("Triton is not installed, or finds no GPU", allow_module_level=True)

import triton
import triton.language as tl

from helpers.kernel_losses import LOSSES, drawn, held, loss_of, oracle
from xentlib.contract import check, failures
from xentlib.torch.triton import programs, row
from xentlib.torch.triton.elementary import INTERPRETED, difference_exp, round_to
from xentlib.torch.triton.launch import Triton
from xentlib.torch.triton.row import (
    block_stats,
    dz_of,
    scan_row,
    stored,
    sum_blocks,
    token_stats,
    words,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not INTERPRETED, reason="programs are replaced in the interpreter alone"),
]


@pytest.fixture(autouse=True)
def four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a column."""
    monkeypatch.setattr("xentlib.torch.triton.launch.INTERPRETED_TILE", 128)


@triton.jit
def not_moved(a, b):
    d, _ = difference_exp(a, b)
    return d, tl.where(d == d, 1.0, d)


@triton.jit
def column_of_tile(z, cols, ENTROPY: tl.constexpr, PREDICTED: tl.constexpr):
    return block_stats(z, cols % 128, ENTROPY, PREDICTED)


@triton.jit
def entropy_of_blocks(
    m_ptr, ones_ptr, s_ptr, sum_ed_ptr, top_ptr, token, token_top, step, step_top, blocks,
    highest, mask, K: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Each relative to its own maximum."""
    ones, upper, lower, _, _, top = sum_blocks(
        m_ptr, ones_ptr, s_ptr, sum_ed_ptr, top_ptr, token, token_top, step, step_top, blocks,
        highest, mask, K, TOKENS,
    )  # fmt: skip
    at = token[None, :] + tl.arange(0, K)[:, None] * step
    ed = tl.load(sum_ed_ptr + at, mask=tl.arange(0, K)[:, None] < blocks, other=0.0)
    more, rest = words(-ed)
    return ones, upper, lower, tl.sum(more, 0), tl.sum(rest, 0), top


@triton.jit
def target_left_in(
    row_ptr, y, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature, weights_ptr,
    blocks_ptr, blocks,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    return scan_row(
        row_ptr, -1, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature,
        weights_ptr, blocks_ptr, blocks, ENTROPY, SMOOTHING, PREDICTED, BLOCK,
    )  # fmt: skip


@triton.jit
def smoothing_dropped(
    z_y, m_rest, ones, s, sum_ed, sum_d, w_y, w_sum, V,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr,
):  # fmt: skip
    return token_stats(z_y, m_rest, ones, s, sum_ed, 0.0 * sum_d, w_y, w_sum, V, ENTROPY, SMOOTHING)


@triton.jit
def rounded_twice(dz, dz_ptr, ROUND: tl.constexpr):
    return stored(round_to(dz, tl.float16), dz_ptr, ROUND)


@triton.jit
def forwards(
    row_ptr, dz_ptr, y, V, lse, alpha, beta, gamma, own, bias_ptr, scale_ptr, scale, softcap,
    temperature_ptr, temperature, weights_ptr, BETA: tl.constexpr, GAMMA: tl.constexpr,
    TARGET: tl.constexpr, ROUND: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        cols = start + lanes
        mask = cols < V
        z = tl.load(row_ptr + cols, mask=mask, other=0.0)
        dz = dz_of(
            z, cols, mask, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
            temperature_ptr, temperature, weights_ptr, BETA, GAMMA,
        )  # fmt: skip
        dz = tl.where(cols == y, 0.0, dz)
        tl.store(dz_ptr + cols, stored(dz, dz_ptr, ROUND), mask=mask)


MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "a sum not moved to the row's maximum": (row, "difference_exp", not_moved, "plain"),
    "an entropy's sum not moved": (programs, "sum_blocks", entropy_of_blocks, "plain"),
    "a column of the tile": (row, "block_stats", column_of_tile, "plain"),
    "the target's column left in": (programs, "scan_row", target_left_in, "plain"),
    "the smoothed sum dropped": (programs, "token_stats", smoothing_dropped, "smoothed"),
}


@pytest.mark.parametrize(("module", "name", "mutant", "loss"), MUTANTS.values(), ids=MUTANTS)
def test_mutants_of_the_sums(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mutant: Any, loss: str
) -> None:
    """A2 to A5."""
    options, terms = LOSSES[loss]
    block = drawn(8, options)
    monkeypatch.setattr(module, name, mutant)
    assert failures(held(block, terms, oracle(block, terms), loss_of(block, terms, torch.float32)))


def test_a_mask_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A0."""
    options, terms = LOSSES["plain"]
    block, of = drawn(8, options), Triton.of
    monkeypatch.setattr(Triton, "of", lambda self, rows: of(self, rows) | {"valid_ptr": None})
    assert failures(held(block, terms, oracle(block, terms), loss_of(block, terms, torch.float32)))


@pytest.mark.parametrize("mutant", ["rounded twice", "forwards over unread logits"])
def test_mutants_of_what_is_written(monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    """A0."""
    options, terms = LOSSES["plain"]
    block = drawn(9, options)
    _, exact = loss_of(block, terms, torch.float32)
    rounded = torch.tensor(exact).bfloat16().float().numpy()
    _, whole = loss_of(block, terms, torch.bfloat16)
    assert not failures(check("A0", whole, rounded))
    if mutant == "rounded twice":
        monkeypatch.setattr(row, "stored", rounded_twice)
    else:
        monkeypatch.setattr(programs, "write_dz", forwards)
    _, wrong = loss_of(block, terms, torch.bfloat16)
    assert failures(check("A0", wrong, rounded))
