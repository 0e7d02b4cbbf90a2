"""Triton's programs, under its interpreter: the parts that the seam's tests do not see alone, and
the loss in one pass."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conftest import HAS_TORCH
from xentlib.contract import check, failures

if not HAS_TORCH:
    pytest.skip("PyTorch is not installed", allow_module_level=True)

import torch

from xentlib.torch.core import kernels
from xentlib.torch.core.eager import Eager
from xentlib.torch.core.kernels import kernels_for, runnable

if "triton" not in runnable():
    pytest.skip("Triton is not installed, or finds no GPU", allow_module_level=True)

import triton
import triton.language as tl
from triton._C import libtriton

from helpers.in_triton import launches
from helpers.kernel_losses import LOSSES, Terms, drawn, held, loss_of, oracle
from xentlib.math.softmax import BlockStats
from xentlib.torch import chunked_nll
from xentlib.torch.core.algebra import ALGEBRA
from xentlib.torch.triton import elementary, launch
from xentlib.torch.triton import row as of_row
from xentlib.torch.triton.launch import INTERPRETED, Triton, compiled

pytestmark = pytest.mark.torch
rounded_once = pytest.mark.skipif(
    INTERPRETED and not hasattr(libtriton.interpreter, "fma_fp32"),
    reason="the interpreter of triton 3.6 rounds a fused multiply-add twice",
)
U = 2.0**-24


@triton.jit
def unary(x_ptr, out_ptr, N, BLOCK: tl.constexpr, WHAT: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < N)
    if WHAT == "exp":
        y = elementary.exp(x)
    elif WHAT == "tanh":
        y, _ = elementary.tanh_and_slope(x)
    elif WHAT == "slope":
        _, y = elementary.tanh_and_slope(x)
    elif WHAT == "over 3":
        y = elementary.divide(x, 3.0, 1.0 / 3.0)
    elif WHAT == "over 0.3":
        y = elementary.divide(x, 0.3, 1.0 / 0.3)
    else:
        y = elementary.round_to(x, tl.bfloat16)
    tl.store(out_ptr + i, y, mask=i < N)


def computed(what: str, x: np.ndarray) -> np.ndarray:
    given, out = torch.tensor(x), torch.empty(len(x), dtype=torch.float32)
    # Of 2^18 entries in one program, ptxas takes 233 s; the interpreter takes longer for many.
    block = triton.next_power_of_2(len(x)) if INTERPRETED else 1024
    with np.errstate(all="ignore"):
        unary[(-(-len(x) // block),)](given, out, len(x), block, what, **compiled(4))
    return out.cpu().numpy()


def on_host(*tensors: torch.Tensor) -> list[np.ndarray]:
    return [x.cpu().numpy() for x in tensors]


def sech2(x: Any) -> Any:
    return 1 / np.cosh(x) ** 2


@rounded_once
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


@rounded_once
@pytest.mark.parametrize("divisor", [3.0, 0.3])
def test_division_has_the_bits_of_a_division(divisor: float) -> None:
    """Also of what a mask of finfo.min becomes below 1."""
    x = np.random.default_rng(1).standard_normal(1 << 16).astype(np.float32)
    x[:4] = -3.4028235e38, 3.4028235e38, -np.inf, np.inf
    with np.errstate(over="ignore"):
        assert (computed(f"over {divisor:g}", x) == x / np.float32(divisor)).all()


def test_rounding_has_the_bits_of_ml_dtypes() -> None:
    x = np.random.default_rng(2).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    x = x[np.isfinite(x)][: 1 << 15].copy()
    ties = x.view(np.uint32)[::2]
    ties[:] = (ties & 0xFFFF0000) | 0x8000  # half-way between two
    with np.errstate(over="ignore"):
        want = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (computed("bf16", x) == want).all()


# --- the loss in one pass -------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "terms"), LOSSES.values(), ids=LOSSES)
def test_the_loss_in_one_pass(monkeypatch: pytest.MonkeyPatch, options: Any, terms: Terms) -> None:
    """A0, A2 to A5: values and dz of `chunked_nll`, in four blocks of columns and a column."""
    monkeypatch.setattr("xentlib.torch.triton.launch.INTERPRETED_TILE", 128)
    block = drawn(8, options)
    reference = oracle(block, terms)
    values, dz = loss_of(block, terms, torch.float32)
    assert not failures(held(block, terms, reference, (values, dz)))
    for row in (0, 4):
        wrong = values.copy()
        wrong[row] *= 1.00001
        assert failures(held(block, terms, reference, (wrong, dz)))
    assert failures(held(block, terms, reference, (values, 1.001 * dz)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_dz_over_its_own_logits(name: str, dtype: torch.dtype) -> None:
    """A0: rounded once, in the upper half of the row, whatever a block has overwritten."""
    options, terms = LOSSES[name]
    block = drawn(9, options)
    values, exact = loss_of(block, terms, torch.float32)
    rounded = torch.tensor(exact).to(dtype).float().cpu().numpy()
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
    Triton.add_to_weight(acc, kernels.TargetTerms(dz_y, y, order, 100), x)
    here = y < columns
    exact, size = start.double(), start.double().abs()
    for i in torch.nonzero(here)[:, 0]:
        term = dz_y[i].double() * x[i].double()
        exact[y[i]] += term
        size[y[i]] += term.abs()
    assert not failures(check("A6", *on_host(acc, exact, size)))
    assert failures(check("A6", *on_host(start, exact, size)))

    dx = torch.tensor(rng.standard_normal((rows, width)), dtype=torch.float32)
    before = dx.double()
    weight = head.T.contiguous().T if transposed else head
    Triton.add_to_hidden(dx, kernels.TargetTerms(dz_y, y, None, 0), weight)
    term = torch.where(here, dz_y, 0.0).double()[:, None] * head[y.clamp(max=columns - 1)].double()
    exact, size = before + term, before.abs() + term.abs()
    assert not failures(check("A5", *on_host(dx, exact, size)))


# --- who computes ---------------------------------------------------------------------------------


def test_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton on the CPU only where it is asked for, and never in float64; a wrong name, and a
    device that it cannot have, are errors."""
    cpu, chosen = torch.device("cpu"), kernels_for
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("XENTLIB_KERNELS", raising=False)
    assert chosen(cpu, torch.float32) is Eager
    monkeypatch.setenv("XENTLIB_KERNELS", "triton")
    assert chosen(cpu, torch.float32) is Triton
    assert chosen(cpu, torch.float64) is Eager
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        RuntimeError, match=r"`XENTLIB_KERNELS=triton` must find .* got cpu: Triton's"
    ):
        chosen(cpu, torch.float32)
    monkeypatch.setenv("XENTLIB_KERNELS", "pallas")
    with pytest.raises(ValueError, match="must be one of auto, eager, triton; got 'pallas'"):
        chosen(cpu, torch.float32)


@pytest.mark.parametrize(
    ("capability", "hip", "found"),
    [
        ((8, 0), None, Triton),
        ((9, 0), None, Triton),
        ((7, 5), None, Eager),
        ((9, 4), "6.4", Eager),
    ],
)
def test_the_choice_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: Any, hip: Any, found: Any
) -> None:
    """Ampere or newer, and no AMD device. Where they do not compute a warning says so once."""
    monkeypatch.delenv("XENTLIB_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(kernels, "trial", lambda _: "")
    kernels.too_old.cache_clear()
    kernels.warn_of_eager.cache_clear()
    device = torch.device("cuda")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            assert kernels_for(device, torch.float32) is found
            assert kernels_for(device, torch.float64) is Eager
    kernels.too_old.cache_clear()
    reasons = [str(x.message) for x in said]
    assert len(said) == 1 + (found is Eager), reasons
    assert sum("in float64" in x for x in reasons) == 1
    if hip:
        assert any("have not been run on AMD's devices" in x for x in reasons)
        monkeypatch.setenv("XENTLIB_KERNELS", "triton")
        with pytest.raises(RuntimeError, match="AMD's devices"):
            kernels_for(device, torch.float32)


@pytest.mark.parametrize("call", ["top_k", "softcap", "probabilities"])
def test_a_call_that_they_do_not_have_says_so(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Of each way to eager operators, with the reason; none where they were asked for."""
    from xentlib.arguments import Scalars
    from xentlib.torch.losses import classes, teacher

    scalars = Scalars(softcap=30.0) if call == "softcap" else Scalars()
    head: Any = SimpleNamespace(
        hidden=SimpleNamespace(device=torch.device("cuda")),
        ids=torch.zeros(2, 3),
        top_k=2 * (call == "top_k"),
        logit_scale=None,
        scalars=scalars,
    )
    loss = SimpleNamespace(kind="soft_labels")

    def chosen() -> Any:
        kernels.warn_of_eager.cache_clear()
        if call == "probabilities":
            return teacher.kernels_of(head, loss)
        return classes.kernels_of(head)

    monkeypatch.delenv("XENTLIB_KERNELS", raising=False)
    with pytest.warns(UserWarning, match=f"2 to 6 times as long: they have no .*{call}"):
        assert chosen() is Eager
    monkeypatch.setenv("XENTLIB_KERNELS", "eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() is Eager


def test_a_gpu_that_nothing_compiles_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images without a C compiler, or whose home cannot be written, compute with eager operators
    and say so."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "trial", lambda _: "RuntimeError: no C compiler")
    monkeypatch.delenv("XENTLIB_KERNELS", raising=False)
    kernels.warn_of_eager.cache_clear()
    with pytest.warns(UserWarning, match="eager operators take .* no C compiler"):
        assert kernels_for(torch.device("cuda"), torch.float32) is Eager
    monkeypatch.setenv("XENTLIB_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="got cuda: RuntimeError: no C compiler"):
        kernels_for(torch.device("cuda"), torch.float32)


@pytest.mark.cpu  # a GPU would take the null pointers, and fail in all that follows
def test_the_widest_program_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta there is no memory to compute in."""
    launched = launches(monkeypatch)
    assert kernels.trial.__wrapped__(torch.get_default_device()) == ""
    assert launched == ["loss_rows"]
    assert kernels.WIDEST == launch.WIDE * launch.THREADS_A_WARP * launch.ENTRIES
    assert kernels.trial(torch.device("meta")) != ""


@pytest.mark.parametrize("blocks", [1, 5, 40])
def test_blocks_are_added_exactly(blocks: int) -> None:
    """A18: the words of `Algebra.block_sums`, of terms from 2^-80 to 127 that nothing is moved of.
    Catches: a word that is no integer, the lower one left out, a block or a token left out."""
    rng, size = np.random.default_rng(blocks), (blocks, 37)
    ones = rng.integers(0, 3, size)
    s, minus = 127 * 2.0 ** (-80 * rng.random((2, *size)))
    top = np.arange(blocks)[:, None] * 128.0 + np.zeros(size)
    fields = [np.where(ones == 0, 0.0, x) for x in (np.full(size, 3.0), ones, s, -minus)]
    given = [torch.tensor(x, dtype=torch.float32) for x in (*fields, top)]
    largest = torch.full((37,), 3.0)
    for of in (BlockStats(*given), BlockStats(*(x.T.contiguous().T for x in given))):
        sums, first = Triton.algebra.block_sums(largest, of)
        wanted, column = ALGEBRA.block_sums(largest, of)
        for x, y in zip((*sums, first), (*wanted, column), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("by", [0.37, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_gradients_are_scaled_and_rounded_once(dtype: torch.dtype, by: float) -> None:
    """Catches: a tail left out, a factor of 1 that leaves another dtype's memory unwritten."""
    for count in (1, 4096, 4103, 9001):
        x, factor = torch.randn(3, count)[:, : count - 1 or 1], torch.tensor(by)
        for given in (x, x.contiguous()):
            out = torch.full(given.shape, torch.nan, dtype=dtype)
            Triton.scale(given, factor, out)
            assert torch.equal(out, (given * factor).to(dtype))
        own = x.contiguous().clone()
        Triton.scale(own, factor, own)
        assert torch.equal(own, x * factor)


@pytest.mark.cpu
def test_the_order_of_a_tile_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of Triton up to 3.6 have another order of axes. Catches: a sum over the wrong one."""
    monkeypatch.setenv("XENTLIB_KERNELS", "triton")
    logits, labels = torch.randn(3, 700), torch.tensor([5, 699, 0])
    by_axis = []
    for axis in (0, 1):
        monkeypatch.setattr(of_row, "PARTS_AXIS", tl.constexpr(axis))
        leaf = logits.clone().requires_grad_()
        out = chunked_nll(leaf, torch.eye(700), labels, outputs=("entropy", "predicted", "lse"))
        smoothed = chunked_nll(leaf, torch.eye(700), labels, label_smoothing=0.1).loss
        (gradient,) = torch.autograd.grad(out.loss + smoothed, leaf)
        by_axis.append([out.loss, out.entropy, out.predicted, out.lse, smoothed, gradient])
    assert all(torch.equal(x, y) for x, y in zip(*by_axis, strict=True))


@pytest.mark.cpu
def test_labels_are_sorted_for_the_program_that_adds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A11: one that has its label elsewhere too would race with another, which the interpreter does
    not show. Catches: an order of other chunks' tokens, or none."""
    monkeypatch.setenv("XENTLIB_KERNELS", "triton")
    given: list[Any] = []
    monkeypatch.setattr(Triton, "add_to_weight", lambda *x: given.append(x[1]))
    hidden, weight = torch.randn(37, 8), torch.randn(5, 8, requires_grad=True)
    labels = torch.randint(5, (37,))
    labels[::6] = -100
    chunked_nll(hidden, weight, labels, max_chunk_bytes=16 * 5 * 4)
    assert len(given) > 1
    for terms in given:
        order = terms.order_B - terms.first
        assert sorted(order.tolist()) == list(range(len(terms.y_B)))
        keys = [(int(terms.y_B[i]), int(i)) for i in order]
        assert keys == sorted(keys)
