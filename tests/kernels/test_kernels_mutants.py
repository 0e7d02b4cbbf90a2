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
from xentlib.torch.triton.elementary import INTERPRETED, round_to
from xentlib.torch.triton.launch import Triton
from xentlib.torch.triton.row import dz_of, scan_row, scan_step, stored, token_stats

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not INTERPRETED, reason="programs are replaced in the interpreter alone"),
]


@pytest.fixture(autouse=True)
def four_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a column."""
    monkeypatch.setattr("xentlib.torch.triton.launch.INTERPRETED_BLOCK", 64)


@triton.jit
def sum_not_moved(z, cols, m, s, sum_ed, top, ENTROPY: tl.constexpr, PREDICTED: tl.constexpr):
    new_m, new_s, sum_ed, top = scan_step(z, cols, m, s, sum_ed, top, ENTROPY, PREDICTED)
    return new_m, tl.where(z > m, s, new_s), sum_ed, top


@triton.jit
def entropy_not_moved(z, cols, m, s, sum_ed, top, ENTROPY: tl.constexpr, PREDICTED: tl.constexpr):
    m, s, new, top = scan_step(z, cols, m, s, sum_ed, top, ENTROPY, PREDICTED)
    return m, s, tl.where(z >= m, sum_ed, new), top


@triton.jit
def target_left_in(
    row_ptr, y, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature, weights_ptr,
    ENTROPY: tl.constexpr, SMOOTHING: tl.constexpr, PREDICTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    return scan_row(
        row_ptr, -1, V, bias_ptr, scale_ptr, scale, softcap, temperature_ptr, temperature,
        weights_ptr, ENTROPY, SMOOTHING, PREDICTED, BLOCK,
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
            z, cols, mask, y, lse, alpha, beta, gamma, bias_ptr, scale_ptr, scale, softcap,
            temperature_ptr, temperature, weights_ptr, BETA, GAMMA,
        )  # fmt: skip
        tl.store(dz_ptr + cols, stored(dz, dz_ptr, ROUND), mask=mask)


MUTANTS: dict[str, tuple[Any, str, Any, str]] = {
    "a sum not moved to its maximum": (row, "scan_step", sum_not_moved, "plain"),
    "an entropy's sum not moved": (row, "scan_step", entropy_not_moved, "plain"),
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
