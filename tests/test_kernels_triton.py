"""Triton's programs, under its interpreter: the parts that the seam's tests do not see alone, and
the loss in one pass."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conftest import HAS_TORCH
from helpers.kernel_blocks import B, Block, V, draw
from xentlib.contract import check, failures
from xentlib.reference import nll_reference

if not HAS_TORCH:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch

from xentlib.torch.core.kernels import Asked, LossTerms, Rows, Shape, runnable

if "triton" not in runnable():
    pytest.skip("Triton is not installed, or finds no GPU", allow_module_level=True)

import triton
import triton.language as tl

from xentlib.torch.triton import elementary
from xentlib.torch.triton.launch import Triton

pytestmark = pytest.mark.torch
U = 2.0**-24


@triton.jit
def unary(x_ptr, out_ptr, N: tl.constexpr, WHAT: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    if WHAT == "exp":
        y = elementary.exp(x)
    elif WHAT == "tanh":
        y, _ = elementary.tanh_and_slope(x)
    elif WHAT == "slope":
        _, y = elementary.tanh_and_slope(x)
    elif WHAT == "over 3":
        y = elementary.divide(x, 3.0, 1.0 / 3.0)
    else:
        y = elementary.round_to(x, tl.bfloat16)
    tl.store(out_ptr + tl.arange(0, N), y)


def computed(what: str, x: np.ndarray) -> np.ndarray:
    given, out = torch.tensor(x), torch.empty(len(x), dtype=torch.float32)
    with np.errstate(all="ignore"):
        unary[(1,)](given, out, len(x), what)
    return out.numpy()


def sech2(x: Any) -> Any:
    return 1 / np.cosh(x) ** 2


@pytest.mark.parametrize(
    ("what", "function", "low", "high", "worst"),
    [
        ("exp", np.exp, -70.0, 0.5, 1.1),
        ("tanh", np.tanh, -12.0, 12.0, 3.0),
        ("tanh", np.tanh, -1e-3, 1e-3, 3.0),
        ("slope", sech2, -30.0, 30.0, 6.0),
    ],
)
def test_functions_are_accurate(
    what: str, function: Any, low: float, high: float, worst: float
) -> None:
    """In units of the last place, and without a bias: one of u in every term of a sum would be one
    of u in the sum."""
    x = np.random.default_rng(0).uniform(low, high, 1 << 18).astype(np.float32)
    exact = function(x.astype(np.float64))
    error = (computed(what, x) - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert np.abs(error).max() <= worst
    assert np.abs(((computed(what, x) - exact) / exact).mean()) <= 0.1 * U


def test_functions_at_their_ends() -> None:
    """NaN stays, whatever its bits are, and infinities have their limits."""
    nans = np.array([0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001], np.int64).astype(np.int32)
    ends = np.array([np.inf, -np.inf, 0.0, -3.4e38], np.float32)
    x = np.concatenate([nans, ends.view(np.int32)]).view(np.float32)
    assert np.isnan(computed("exp", x)[:4]).all()
    assert np.isnan(computed("tanh", x)[:4]).all()
    assert np.isnan(computed("slope", x)[:4]).all()
    assert computed("exp", x)[5:].tolist() == [0.0, 1.0, 0.0]
    assert computed("tanh", x)[4:].tolist() == [1.0, -1.0, 0.0, -1.0]
    assert computed("slope", x)[6] == 1.0
    assert computed("over 3", x)[4:6].tolist() == [np.inf, -np.inf]


def test_division_has_the_bits_of_a_division() -> None:
    x = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    assert (computed("over 3", x) == x / np.float32(3)).all()


def test_rounding_has_the_bits_of_ml_dtypes() -> None:
    x = np.random.default_rng(2).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    x = x[np.isfinite(x)][: 1 << 15]
    with np.errstate(over="ignore"):
        want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (computed("bf16", x) == want).all()


# --- the loss in one pass -------------------------------------------------------------------------


class Terms:
    """What a loss is made of beside its block."""

    def __init__(self, smoothing: float, z_loss: float, *, weights: bool) -> None:
        rng = np.random.default_rng(7)
        self.smoothing, self.z_loss = smoothing, z_loss
        self.token_weights = (0.5 + rng.random(B)).astype(np.float32)
        self.weights = (0.5 + rng.random(V)).astype(np.float32) if weights else None


def loss_of(
    block: Block, terms: Terms, dtype: torch.dtype, *, beside: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Values [7, B], and dz of all columns. 16-bit dz lies over its logits, or `beside` them."""

    def tensor(x: Any) -> Any:
        return None if x is None else torch.tensor(x)

    buffer_BL = torch.full((B, 320), torch.nan)
    z_BV = buffer_BL[:, :V].copy_(tensor(block.product))
    into_BV = None
    if beside:
        into_BV = torch.full((B, V), torch.nan, dtype=dtype)
    elif dtype != torch.float32:
        into_BV = buffer_BL.view(dtype)[:, 320 : 320 + V]
    weights = tensor(terms.weights)
    shape = Shape(V, tensor(block.bias), tensor(block.scale), block.softcap, weights)
    every, labels = slice(0, B), tensor(block.labels)
    temperature, valid = tensor(block.temperature), tensor(block.valid)
    rows = Rows(every, every, z_BV, labels[:, None], temperature, valid, None)
    values, dz_y = torch.full((7, B), torch.nan), torch.full((B,), torch.nan)
    Triton(B, V, torch.float32, torch.device("cpu"), shape).loss(
        rows,
        Asked(entropy=True, smoothing=terms.smoothing > 0, predicted=True),
        LossTerms(
            tensor(terms.token_weights),
            terms.smoothing,
            terms.z_loss,
            None if weights is None else weights.sum(),
            values,
            dz_y,
        ),
        into_BV=into_BV,
        round_to=dtype,
    )
    dz = (z_BV if into_BV is None else into_BV).float()
    assert not dz[torch.arange(B), labels].any()
    dz[torch.arange(B), labels] = dz_y
    return values.numpy(), dz.numpy()


LOSSES = {
    "plain": ({}, Terms(0.0, 0.0, weights=False)),
    "smoothed": ({}, Terms(0.1, 1e-3, weights=False)),
    "class weights": ({}, Terms(0.2, 1e-3, weights=True)),
    "weights alone": ({}, Terms(0.0, 0.0, weights=True)),
    "softcap": ({"softcap": 8.0, "scale": 0.7}, Terms(0.0, 1e-4, weights=False)),
    "everything": (
        {"bias": True, "scale": 1.3, "softcap": 30.0, "temperature": True},
        Terms(0.1, 1e-3, weights=True),
    ),
}


@pytest.mark.parametrize(("options", "terms"), LOSSES.values(), ids=LOSSES)
def test_the_loss_in_one_pass(options: Any, terms: Terms) -> None:
    """A0, A2 to A6: values and dz of `chunked_nll`. Catches: a statistic dropped, the target's
    column left in the sum, a mask ignored, class weights without their sum."""
    block = draw(8, **options)
    block.product[2, 1::2] = -30.0  # the oracle's bound knows no masked class here
    values, dz = loss_of(block, terms, torch.float32)
    known = block.options()
    reference = nll_reference(
        np.eye(B, dtype=np.float32),
        block.product.T,
        block.labels,
        where=block.valid,
        token_weights=terms.token_weights,
        class_weights=terms.weights,
        label_smoothing=terms.smoothing,
        z_loss=terms.z_loss,
        reduction="sum",
        **known,
    )

    def held(values: np.ndarray, dz: np.ndarray) -> list[Any]:
        count = block.valid
        total, z_term, logprob, entropy, lse, correct, predicted = (x[count] for x in values)
        weighted = (total.astype(np.float64) * terms.token_weights[count]).sum()
        z_terms = (z_term.astype(np.float64) * terms.token_weights[count]).sum()
        scale = np.maximum(np.abs(reference.lse[count]), 1.0)
        measured = check("A2", weighted, reference.loss, magnitude=reference.loss_magnitude)
        measured += check("A2", z_terms, reference.z_loss, magnitude=reference.loss_magnitude)
        measured += check("A3", lse, reference.lse[count], magnitude=scale)
        if block.as_given:
            measured += check("A4", logprob, reference.logprobs[count])
        measured += check("A0", correct > 0, reference.correct[count])
        clear = reference.margin[count] > 1e-6
        found = predicted.astype(np.int64)[clear]
        measured += check("A0", found, reference.predicted[count][clear])
        gap = np.abs(entropy - reference.entropy[count])
        assert gap.max() < 1e-5
        return measured + check("A5", dz, reference.d_weight.T, reference.bound_weight.T)

    assert not failures(held(values, dz))
    assert not dz[~block.valid].any()
    assert not values[:, ~block.valid].any()
    for row in (0, 4):
        wrong = values.copy()
        wrong[row] *= 1.00001
        assert failures(held(wrong, dz))
    assert failures(held(values, 1.001 * dz))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_dz_over_its_own_logits(name: str, dtype: torch.dtype) -> None:
    """A0: rounded once, in the upper half of the row, whatever a block has overwritten."""
    options, terms = LOSSES[name]
    block = draw(9, **options)
    values, exact = loss_of(block, terms, torch.float32)
    rounded = torch.tensor(exact).to(dtype).float().numpy()
    for beside in (False, True):
        again, dz = loss_of(block, terms, dtype, beside=beside)
        assert not failures(check("A0", again, values))
        assert not failures(check("A0", dz, rounded))


# --- terms of the targets -------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
def test_terms_of_the_targets(*, transposed: bool) -> None:
    """A5, A6, A11: each label's tokens added once, labels of other ranks left out."""
    rng = np.random.default_rng(10)
    rows, columns, width = 37, 11, 19
    y = torch.tensor(rng.integers(0, columns + 1, rows))  # columns: of another rank
    dz_y = torch.tensor(rng.standard_normal(rows), dtype=torch.float32)
    dz_y[::5] = 0.0
    x = torch.tensor(rng.standard_normal((rows, width)), dtype=torch.bfloat16)
    head = torch.tensor(rng.standard_normal((columns, width)), dtype=torch.bfloat16)
    start = torch.tensor(rng.standard_normal((columns, width)), dtype=torch.float32)
    order = torch.sort(y, stable=True).indices + 100
    acc = start.T.contiguous().T.clone(memory_format=torch.preserve_format)
    acc = acc if transposed else start.clone()
    Triton.add_to_weight(acc, dz_y, x, y, order, 100)
    here = y < columns
    exact, size = start.double(), start.double().abs()
    for i in torch.nonzero(here)[:, 0]:
        term = dz_y[i].double() * x[i].double()
        exact[y[i]] += term
        size[y[i]] += term.abs()
    assert not failures(check("A6", acc.numpy(), exact.numpy(), size.numpy()))
    assert failures(check("A6", start.numpy(), exact.numpy(), size.numpy()))

    dx = torch.tensor(rng.standard_normal((rows, width)), dtype=torch.float32)
    before = dx.double()
    weight = head.T.contiguous().T if transposed else head
    Triton.add_to_hidden(dx, dz_y, weight, y)
    term = torch.where(here, dz_y, 0.0).double()[:, None] * head[y.clamp(max=columns - 1)].double()
    exact, size = before + term, before.abs() + term.abs()
    assert not failures(check("A5", dx.numpy(), exact.numpy(), size.numpy()))
