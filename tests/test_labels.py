"""`next_token_labels` of both backends against a loop that anyone can read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xentlib.interop import to_jax, to_numpy, to_torch
from xentlib.ulp import bits_unequal


def shifted(backend: str, labels: np.ndarray, **options) -> np.ndarray:
    """Through one backend, NumPy in and out; 64-bit integers need JAX's x64."""

    def call(cross, function):
        given = {k: cross(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
        return np.array(to_numpy(function(cross(labels), **given)))

    if backend == "torch":
        from xentlib.torch import next_token_labels

        return call(lambda x: to_torch(x, copy=True), next_token_labels)
    import jax

    from xentlib.jax import next_token_labels

    with jax.enable_x64(True):
        return call(lambda x: to_jax(x, copy=True), next_token_labels)


def naive(labels, *, segment_ids=None, cu_seqlens=None, ignore_index=-100) -> np.ndarray:
    """The definition, one token at a time."""
    out = np.full_like(labels, ignore_index)
    for row in np.ndindex(labels.shape[:-1]):
        for t in range(labels.shape[-1] - 1):
            together = True
            if segment_ids is not None:
                together = segment_ids[(*row, t)] == segment_ids[(*row, t + 1)]
            if cu_seqlens is not None:
                together = t + 1 not in cu_seqlens.tolist()
            if together:
                out[(*row, t)] = labels[(*row, t + 1)]
    return out


def agree(backend: str, labels: np.ndarray, **options) -> None:
    before = labels.copy()
    got = shifted(backend, labels, **options)
    assert got.dtype == labels.dtype
    assert bits_unequal(got, naive(labels, **options)) == 0
    assert bits_unequal(labels, before) == 0


def test_the_shift_by_hand(backend):
    """A0: position t predicts the token at t + 1, the last one nothing."""
    got = shifted(backend, np.array([5, 6, 7, 8], np.int32))
    assert got.tolist() == [6, 7, 8, -100]


def test_documents_do_not_leak(backend):
    """A0: a document of n tokens has n - 1 targets, whichever way the packing is told."""
    labels = np.arange(10, 17, dtype=np.int32)
    expected = [11, 12, -100, 14, -100, 16, -100]
    segments = np.array([0, 0, 0, 4, 4, 1, 1], np.int32)
    offsets = np.array([0, 3, 5, 7], np.int32)
    assert shifted(backend, labels, segment_ids=segments).tolist() == expected
    assert shifted(backend, labels, cu_seqlens=offsets).tolist() == expected
    assert shifted(backend, labels[None], cu_seqlens=offsets).tolist() == [expected]


@pytest.mark.parametrize(
    "offsets",
    [
        [0, 7],
        [0, 0, 3, 3, 3, 5, 7],  # empty documents, one in front
        [0, 3, 5, 7, 7, 7],  # and at the end
        [0, 3, 5],  # trailing padding past the last offset
        [0],
        [0, 1, 2, 3, 4, 5, 6, 7],  # nothing but documents of one token
    ],
    ids=str,
)
def test_offsets(backend, offsets):
    """A0: empty documents and trailing padding move no boundary."""
    labels = np.arange(10, 17, dtype=np.int32)
    agree(backend, labels, cu_seqlens=np.array(offsets, np.int32))
    agree(backend, labels, cu_seqlens=np.array(offsets, np.int64))


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3, 0), (3, 1), (2, 3, 5), (0, 4)], ids=str)
def test_shapes(backend, shape):
    """ANCHORS 4.17: L = 0, L = 1, batch dimensions, none of them a special case for the caller."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 50, shape).astype(np.int32)
    agree(backend, labels)
    agree(backend, labels, segment_ids=rng.integers(0, 2, shape).astype(np.int32))
    if labels.ndim == 1:
        agree(backend, labels, cu_seqlens=np.array([0, labels.size], np.int32))


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_dtypes_are_kept(backend, dtype):
    """ANCHORS 4.11: the labels' own width comes back, ids and -100 alike."""
    agree(backend, np.array([1, 2, -100, 4], dtype))


def test_unsigned_labels_cannot_hold_minus_100(backend):
    """ANCHORS 4.11: -100 in uint8 would be the plausible token 156."""
    labels = np.array([1, 156, 3], np.uint8)
    with pytest.raises(TypeError, match=r"can hold `ignore_index` \(-100\); got uint8"):
        shifted(backend, labels)
    assert shifted(backend, labels, ignore_index=255).tolist() == [156, 3, 255]


def test_masked_labels_stay_masked(backend):
    """A0: a target that was already ignored is not revived."""
    labels = np.array([5, -100, 7, 8], np.int32)
    assert shifted(backend, labels).tolist() == [-100, 7, 8, -100]


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, {"segment_ids": np.zeros(4, np.float32)}, "`segment_ids` must be integers"),
        (ValueError, {"segment_ids": np.zeros(3, np.int32)}, "must have the shape of `labels`"),
        (ValueError, {"cu_seqlens": np.zeros((1, 2), np.int32)}, r"shape \(documents \+ 1,\)"),
        (TypeError, {"cu_seqlens": np.zeros(2, np.float32)}, "`cu_seqlens` must be integers"),
        (TypeError, {"ignore_index": 1.5}, "`ignore_index` must be an integer; got 1.5"),
        (
            ValueError,
            {"segment_ids": np.zeros(4, np.int32), "cu_seqlens": np.array([0, 4], np.int32)},
            "say the same thing; got both",
        ),
    ],
)
def test_bad_arguments_are_refused(backend, error, options, message):
    """STYLE 4: one sentence each, from the one place that both backends ask."""
    with pytest.raises(error, match=message):
        shifted(backend, np.arange(4, dtype=np.int32), **options)


def test_a_batch_of_rows_has_no_single_packing(backend):
    """STYLE 4: offsets describe one row; a batch takes `segment_ids`."""
    with pytest.raises(ValueError, match="one packed row"):
        shifted(backend, np.zeros((2, 4), np.int32), cu_seqlens=np.array([0, 4], np.int32))
    with pytest.raises(TypeError, match="must be integers"):
        shifted(backend, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"\(\.\.\., tokens\); got \(\)"):
        shifted(backend, np.zeros((), np.int32))


@st.composite
def packings(draw):
    """Labels of one row or a batch, with no packing, segments or offsets."""
    kind = draw(st.sampled_from(["plain", "segments", "offsets"]))
    length = draw(st.sampled_from([0, 1, 2, 3, 6]))  # few shapes: JAX compiles each
    rows = () if kind == "offsets" else draw(st.sampled_from([(), (2,)]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = rng.integers(-100, 40, (*rows, length)).astype(np.int32)
    options = {"ignore_index": draw(st.sampled_from([-100, -1, 0]))}
    if kind == "segments":
        options["segment_ids"] = rng.integers(0, 3, labels.shape).astype(np.int32)
    if kind == "offsets":
        inner = np.sort(rng.integers(0, length + 1, 4))
        options["cu_seqlens"] = np.concatenate([[0], inner]).astype(np.int32)
    return labels, options


@settings(max_examples=60, deadline=None)
@given(packing=packings())
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_any_packing_agrees_with_the_loop(name, packing):
    """A0: masks are integers, so they are equal or wrong."""
    pytest.importorskip(name)
    labels, options = packing
    agree(name, labels, **options)
