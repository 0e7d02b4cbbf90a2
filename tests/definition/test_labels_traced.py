"""`next_token_labels` under the transformations of each framework."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.labels import naive
from xentlib.ulp import bits_unequal


def variants(shifts=(1, 2, 3, 9)):
    """Batches of two rows in every packing, and the shifts."""
    labels = np.arange(12, dtype=np.int32).reshape(2, 6)
    ids = np.array([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], np.int32)
    places = np.array([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]], np.int32)
    offsets = np.array([[0, 2, 5, 6], [0, 1, 1, 6]], np.int32)
    packings = ({}, {"segment_ids": ids}, {"position_ids": places}, {"cu_seqlens": offsets})
    return [(labels, packing, shift) for packing in packings for shift in shifts]


def expected_of(labels, packing, shift):
    """Row by row, since offsets are of one."""
    rows = [{k: v[row] for k, v in packing.items()} for row in range(2)]
    return np.stack([naive(y, shift=shift, **ids) for y, ids in zip(labels, rows)])


@pytest.mark.jax
def test_jit_and_vmap():
    """A0: traced, and with offsets for each row of a batch by vmap."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import next_token_labels

    # Without 64-bit types a Python number beyond int32 is none; the labels' own dtype has this one.
    for name, ids in variants()[4][1].items():
        tokens = np.arange(12, dtype=np.uint32).reshape(2, 6)
        options = {"ignore_index": 2**32 - 1, name: ids}
        assert (
            bits_unequal(np.array(next_token_labels(tokens, **options)), naive(tokens, **options))
            == 0
        )
    shifts = [shift for *_, shift in variants()]

    def mapped(given):
        for (y, ids), shift in zip(given, shifts, strict=True):
            yield jax.vmap(lambda y, ids, k=shift: next_token_labels(y, shift=k, **ids))(y, ids)

    def batches(given):
        for (y, ids), shift in zip(given, shifts, strict=True):
            if "cu_seqlens" not in ids:
                yield next_token_labels(y, shift=shift, **ids)

    given = [item[:2] for item in variants()]
    for function in (mapped, batches):
        found = jax.jit(lambda given, f=function: list(f(given)))(given)
        for got, item in zip(found, variants()):
            assert bits_unequal(np.array(got), expected_of(*item)) == 0


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("dtype", "compiler", "shifts"),
    [
        pytest.param("int64", "aot_eager", (1, 3, 9), id="int64-aot_eager"),
        pytest.param("uint16", "aot_eager", (2, 9), id="uint16-aot_eager"),
        pytest.param(
            "uint32",
            "inductor",
            (1, 2, 3, 9),
            marks=[pytest.mark.slow, pytest.mark.full],
            id="uint32-inductor",
        ),
    ],
)
def test_one_graph_and_vmap(dtype, compiler, shifts):
    """A0: `torch.compile(fullgraph=True)` of every packing, and offsets for each row by vmap."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import next_token_labels

    items = [
        (torch.tensor(y).to(getattr(torch, dtype)), {k: torch.tensor(v) for k, v in ids.items()}, k)
        for y, ids, k in variants(shifts)
    ]

    def mapped(given):
        def one(y, ids, shift):
            return next_token_labels(y, shift=shift, ignore_index=99, **ids)

        return [torch.func.vmap(one, (0, 0, None))(*item) for item in given]

    def batches(given):
        return [
            next_token_labels(y, shift=shift, ignore_index=99, **ids)
            for y, ids, shift in given
            if "cu_seqlens" not in ids
        ]

    want = [np.where((x := expected_of(*item)) == -100, 99, x) for item in variants(shifts)]
    torch.compiler.reset()
    for function in (mapped, batches):
        compiled = torch.compile(function, fullgraph=True, backend=compiler)
        for call in (function, compiled):
            for got, expected in zip(call(items), want):
                assert got.dtype == items[0][0].dtype
                assert got.is_contiguous()
                assert bits_unequal(got.long().numpy(), expected.astype(np.int64)) == 0
    torch.compiler.reset()
