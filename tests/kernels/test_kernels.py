"""Both steps of a block, of every implementation that this machine can run, held to the contract.

With the identity for hidden states the oracle's logits are the block, and its d weight is dz.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conftest import INSTALLED
from helpers.kernel_blocks import MAKE, B, Block, Made, V, draw
from xentlib.contract import check, failures
from xentlib.reference import logprobs_reference

IMPLEMENTATIONS = [
    pytest.param(backend, name, id=f"{backend}-{name}", marks=getattr(pytest.mark, backend))
    for backend in INSTALLED
    for name in importlib.import_module(f"xentlib.{backend}.core.kernels").runnable()
]
BLOCKS: dict[str, dict[str, Any]] = {
    "plain": {"entropy": False},
    "entropy": {},
    "smoothed": {"smoothing": 0.1},
    "bias, scale": {"bias": True, "scale": 0.7},
    "softcap, temperature": {"softcap": 8.0, "temperature": True},
    "everything": {"bias": True, "scale": 1.3, "softcap": 30.0, "temperature": True,
                   "smoothing": 0.2},
}  # fmt: skip
pytestmark = pytest.mark.parametrize(("backend", "name"), IMPLEMENTATIONS)


def make(backend: str, name: str, block: Block, **how: Any) -> Made:
    runnable = importlib.import_module(f"xentlib.{backend}.core.kernels").runnable()
    return MAKE[backend](runnable[name], block, **how)


@cache
def unrounded(backend: str, name: str) -> Made:
    return make(backend, name, draw(5, **BLOCKS["bias, scale"]))


def whole(made: Made, block: Block) -> np.ndarray:
    """dz of all columns."""
    assert not made.dz[np.arange(B), block.labels].any()
    dz = made.dz.copy()
    dz[np.arange(B), block.labels] = made.dz_y
    return dz


def oracle(block: Block) -> Any:
    d_logprobs, d_entropy, d_lse = block.upstream * block.valid
    # Zeros of the identity must not meet the masked class.
    product = np.maximum(block.product, -1e30)
    found = logprobs_reference(
        np.eye(B, dtype=product.dtype),
        product.T,
        block.labels,
        d_logprobs=d_logprobs,
        d_entropy=d_entropy * block.entropy,
        d_lse=d_lse,
        label_smoothing=block.smoothing,
        **block.options(),
    )
    return found


def held(made: Made, block: Block, reference: Any) -> list[Any]:
    """A3, A4 where the block is the logits, and A5."""
    dz, measured = whole(made, block), []
    if block.as_given:
        # A row that does not count needs no statistics.
        lse, logprob, count = reference.lse, reference.logprobs, block.valid
        scale = np.maximum(np.abs(lse[count]), 1.0)
        measured += check("A3", made.lse[count], lse[count], magnitude=scale)
        measured += check("A4", made.logprob[count], logprob[count])
    return measured + check("A5", dz, reference.d_weight.T, reference.bound_weight.T)


@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
def test_a_block_is_held_to_the_contract(backend: str, name: str, options: Any) -> None:
    """A3, A4, A5. Catches: a softcap without its derivative, an entropy without its gradient, a
    temperature that is applied once, smoothing that misses the target."""
    block = draw(3, **options)
    if not block.as_given:
        block.product[2, 1::2] = -30.0  # the oracle's bound knows no masked class here
    reference, made = oracle(block), make(backend, name, block)
    measured = held(made, block, reference)
    assert not failures(measured)
    assert not made.dz[~block.valid].any()
    assert not made.dz_y[~block.valid].any()
    for wrong in (0 * made.dz, -made.dz, 1.001 * made.dz):
        assert failures(held(made._replace(dz=wrong), block, reference))
    assert failures(held(made._replace(dz_y=1.001 * made.dz_y), block, reference))


@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
def test_dz_alone_has_the_bits_of_dz_after_stats(backend: str, name: str, options: Any) -> None:
    """A10: whether the statistics came from this call, or from an exchange or an earlier walk."""
    block = draw(4, **options)
    first, second = (make(backend, name, block, again=again) for again in (False, True))
    for got, want in zip(second, first, strict=True):
        assert not failures(check("A10", got, want))


@pytest.mark.optimized  # compares the bits of two programs
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dz_is_rounded_once(backend: str, name: str, dtype: str) -> None:
    """A0: to the nearest, ties to even; the sums and the target's dz are not."""
    block = draw(5, **BLOCKS["bias, scale"])
    wide, narrow = unrounded(backend, name), make(backend, name, block, round_to=dtype)
    rounded = wide.dz.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16)
    got, want = (x.astype(np.float32) for x in (narrow.dz, rounded))
    assert not failures(check("A0", got, want))
    assert not failures(check("A0", narrow.dz_y, wide.dz_y))
    assert not failures(check("A0", narrow.sums, wide.sums))


def test_predictions_and_sums(backend: str, name: str) -> None:
    """A0, A6: the first of several largest classes; sums over the rows that count."""
    block = draw(6, entropy=False)
    made = make(backend, name, block)
    predicted = np.nanargmax(block.product, axis=1)
    found = made.predicted.astype(np.int64)[block.valid]
    assert not failures(check("A0", found, predicted[block.valid]))
    rows = np.arange(B)
    largest = np.where(np.arange(V) == block.labels[:, None], -np.inf, block.product).max(axis=1)
    correct = block.product[rows, block.labels] > largest
    assert not failures(check("A0", made.correct[block.valid] > 0, correct[block.valid]))
    exact = made.dz.astype(np.float64)
    assert made.sums is not None
    assert not failures(check("A6", made.sums, exact.sum(0), np.abs(exact).sum(0) * 2))
