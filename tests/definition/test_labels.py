"""`next_token_labels` of both backends against a loop that anyone can read."""

from __future__ import annotations

import inspect
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.labels import agree, naive, shifted
from xentlib.ulp import bits_unequal


def test_the_shift_by_hand(backend):
    """A0: position t predicts the token at t + shift, the last ones nothing."""
    tokens = np.array([5, 6, 7, 8], np.int32)
    assert shifted(backend, tokens).tolist() == [6, 7, 8, -100]
    assert shifted(backend, tokens, shift=2).tolist() == [7, 8, -100, -100]
    assert shifted(backend, tokens, shift=3).tolist() == [8, -100, -100, -100]
    assert (
        shifted(backend, np.arange(300), shift=np.uint8(200)).tolist()[99:] == [299] + [-100] * 200
    )
    for shift in (4, 5, 1000, 2**40):
        assert shifted(backend, tokens, shift=shift).tolist() == [-100] * 4


@pytest.mark.slow
def test_documents_do_not_leak(backend):
    """A0: a document of n tokens has n - shift targets, whichever way the packing is told."""
    labels = np.arange(10, 17, dtype=np.int32)
    expected = {
        1: [11, 12, -100, 14, -100, 16, -100],
        2: [12, -100, -100, -100, -100, -100, -100],
        3: [-100] * 7,
    }
    segments = np.array([0, 0, 0, 4, 4, 1, 1], np.int32)
    offsets = np.array([0, 3, 5, 7], np.int32)
    positions = np.array([0, 1, 2, 0, 1, 0, 1], np.int32)
    for shift, want in expected.items():
        assert shifted(backend, labels, shift=shift, segment_ids=segments).tolist() == want
        assert shifted(backend, labels, shift=shift, cu_seqlens=offsets).tolist() == want
        assert shifted(backend, labels[None], shift=shift, cu_seqlens=offsets).tolist() == [want]
        assert shifted(backend, labels, shift=shift, position_ids=positions).tolist() == want


def test_an_id_that_comes_back_is_another_document(backend):
    """A0: t and t + 3 have the same id here, and a document between them."""
    labels = np.arange(10, 17, dtype=np.int32)
    segments = np.array([0, 0, 1, 0, 0, 0, 0], np.int32)
    got = shifted(backend, labels, shift=3, segment_ids=segments)
    assert got.tolist() == [-100, -100, -100, 16, -100, -100, -100]


@pytest.mark.parametrize("dtype", ["bool", "int64", "uint8"])
def test_an_attention_mask_is_where(backend, dtype):
    """A0: a token of the padding, on either side, is no target, and predicts none. As segments a
    mask made the padding on the right a document, and counted 2 tokens more."""
    labels = np.arange(10, 17, dtype=np.int32)
    mask = np.array([0, 1, 1, 1, 0, 0, 0], dtype)
    got = shifted(backend, labels, where=mask)
    assert got.tolist() == [-100, 12, 13, -100, -100, -100, -100]
    # What lies between does not matter.
    gap = shifted(backend, labels, where=np.array([1, 0, 1, 1, 0, 1, 1], dtype), shift=2)
    assert gap.tolist() == [12, -100, -100, 15, -100, -100, -100]
    agree(backend, labels, where=mask, position_ids=np.array([0, 0, 1, 2, 0, 1, 2], np.int32))
    agree(backend, labels, where=mask, cu_seqlens=np.array([0, 2, 7], np.int32))


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0, 1, 2, 0, 0, 1, 2], [3, 1, 3]),  # as padding-free collators restart
        ([2, 3, 4, 2, 2, 3, 4], [3, 1, 3]),  # of models whose first place is 2
        ([1, 1, 1, 0, 1, 2, 3], [1, 1, 1, 4]),  # left padding, filled with 1
        ([0, 0, 0, 0, 1, 2, 3], [1, 1, 1, 4]),  # filled with 0
        ([0, 1, 2, 3, 1, 1, 1], [4, 1, 1, 1]),  # right padding
        ([-1, -1, 0, 1, 2, 3, 4], [1, 6]),  # -1 is followed by 0: the last of the padding, as well
        ([500, 501, 502, 0, 1, 2, 3], [3, 4]),  # the rest of a document that began in another row
        ([0, 1, 2, 7, 8, 9, 10], [3, 4]),
        ([6, 5, 4, 3, 2, 1, 0], [1] * 7),
    ],
    ids=str,
)
def test_places_that_people_pass(backend, positions, lengths):
    """A0: a document begins where a place is not the one before plus one."""
    labels = np.arange(10, 17, dtype=np.int32)
    offsets = np.array(list(accumulate(lengths, initial=0)), np.int32)
    for shift in (1, 2, 3):
        want = naive(labels, shift=shift, cu_seqlens=offsets)
        got = shifted(backend, labels, shift=shift, position_ids=np.array(positions, np.int32))
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32", "int32"])
def test_places_at_the_end_of_their_dtype(backend, dtype):
    """A0: the largest one plus one is no place, and so not the first of the next document."""
    top, bottom = np.iinfo(dtype).max, np.iinfo(dtype).min
    labels = np.arange(10, 15, dtype=np.int32)
    positions = np.array([top - 1, top, bottom, bottom + 1, bottom + 2], dtype)
    got = shifted(backend, labels, position_ids=positions)
    assert got.tolist() == [11, -100, 13, 14, -100]


@pytest.mark.torch
def test_places_of_transformers():
    """A0: documents as its collator packs them and as its attention masks find them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    masking = pytest.importorskip("transformers.masking_utils")
    from xentlib.torch import next_token_labels

    rng = np.random.default_rng(5)
    features = [{"input_ids": rng.integers(0, 90, n).tolist()} for n in (5, 1, 3, 2, 7)]
    starts = [{}]
    known = inspect.signature(transformers.DataCollatorWithFlattening).parameters
    if "position_ids_start" in known:  # not in transformers 5.0
        starts.append({"position_ids_start": 2})
    for start in starts:
        collator = transformers.DataCollatorWithFlattening(**start)
        batch = {k: torch.as_tensor(v) for k, v in collator(features).items()}
        got = next_token_labels(batch["input_ids"], position_ids=batch["position_ids"])
        # Its labels have -100 for the first token of each document, which nothing then predicts.
        assert got.equal(next_token_labels(batch["labels"]))
    labels = torch.tensor(rng.integers(0, 90, (40, 9)))
    positions = torch.tensor(rng.integers(0, 3, (40, 9))) + torch.arange(9) % 4
    found = masking.find_packed_sequence_indices(positions)
    for shift in (1, 2, 4):
        got = next_token_labels(labels, shift=shift, position_ids=positions)
        assert got.equal(next_token_labels(labels, shift=shift, segment_ids=found))


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
    for shift in (1, 2, 6):
        agree(backend, labels, shift=shift, cu_seqlens=np.array(offsets, np.int32))
        agree(backend, labels, shift=shift, cu_seqlens=np.array(offsets, np.int64))


@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3, 0), (3, 1), (2, 3, 5), (0, 4)], ids=str)
def test_shapes(backend, shape):
    """M17: L = 0, L = 1, batch dimensions, none of them a special case for the caller."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 50, shape).astype(np.int32)
    for shift in (1, 2, 7):
        agree(backend, labels, shift=shift)
        ids = rng.integers(0, 2, shape).astype(np.int32)
        agree(backend, labels, shift=shift, segment_ids=ids)
        agree(backend, labels, shift=shift, position_ids=ids)
        if labels.ndim == 1:
            agree(backend, labels, shift=shift, cu_seqlens=np.array([0, labels.size], np.int32))


def test_a_batch_of_rows_has_no_single_packing(backend):
    """D12: offsets describe one row; a batch takes `segment_ids`."""
    with pytest.raises(ValueError, match="one packed row"):
        shifted(backend, np.zeros((2, 4), np.int32), cu_seqlens=np.array([0, 4], np.int32))
    with pytest.raises(TypeError, match="must be integers"):
        shifted(backend, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"\(\.\.\., tokens\); got \(\)"):
        shifted(backend, np.zeros((), np.int32))


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, {"segment_ids": np.zeros(4, np.float32)}, "`segment_ids` must be integers"),
        (ValueError, {"segment_ids": np.zeros(3, np.int32)}, "must have the shape of `labels`"),
        (ValueError, {"cu_seqlens": np.zeros((1, 2), np.int32)}, r"shape \(documents \+ 1,\)"),
        (TypeError, {"cu_seqlens": np.zeros(2, np.float32)}, "`cu_seqlens` must be integers"),
        (ValueError, {"cu_seqlens": np.array([3, 1])}, "of which the first is 0; got 3 first"),
        (TypeError, {"ignore_index": 1.5}, "`ignore_index` must be an integer; got 1.5"),
        (ValueError, {"layout": "zig-zag"}, "one of 'contiguous', 'zigzag'; got 'zig-zag'"),
        (ValueError, {"layout": "zigzag"}, "`layout` must be left out without `sequence_parallel`"),
        (
            ValueError,
            {"segment_ids": np.zeros(4, np.int32), "cu_seqlens": np.array([0, 4], np.int32)},
            "say the same thing; got `segment_ids` and `cu_seqlens`",
        ),
        (
            ValueError,
            {"position_ids": np.zeros(4, np.int32), "cu_seqlens": np.array([0, 4], np.int32)},
            "say the same thing; got `cu_seqlens` and `position_ids`",
        ),
        (TypeError, {"position_ids": np.zeros(4, bool)}, "`position_ids` must be integers"),
        (ValueError, {"position_ids": np.zeros((3, 1, 4), np.int32)}, "several axes, pass `seg"),
        (TypeError, {"position_ids": range(4)}, "(NumPy array|torch.Tensor); got range"),
        (TypeError, {"cu_seqlens": [0, 2, 4]}, "`cu_seqlens` must be .* got list. Pass"),
        (TypeError, {"where": np.ones(4, np.float32)}, "`where` must be integers; got float32"),
        (ValueError, {"where": np.ones((1, 4), bool)}, "`where` must have the shape of `labels`"),
        (ValueError, {"shift": 0}, "`shift` must be at least 1; got 0. Labels that are aligned"),
        (ValueError, {"shift": -1}, "`shift` must be at least 1; got -1"),
        (TypeError, {"shift": True}, "`shift` must be an integer; got True"),
        (TypeError, {"shift": 1.0}, "`shift` must be an integer; got 1.0"),
        (TypeError, {"shift": np.ones(1, np.int32)}, "`shift` must be an integer; got "),
        (ValueError, {"ignore_index": 2**63}, "`ignore_index` must fit 64 bits; got 9223372036854"),
        (TypeError, {"ignore_index": 2**40}, r"hold `ignore_index` \(1099511627776\); got int32"),
    ],
)
def test_bad_arguments_are_refused(backend, error, options, message):
    """D12: one sentence each, from the one place that both backends ask."""
    with pytest.raises(error, match=message):
        shifted(backend, np.arange(4, dtype=np.int32), **options)


# --- any packing ---------------------------------------------------------------------------------


@st.composite
def packed(draw):
    """Labels of one row, the lengths of its documents, and the three ways to say these."""
    length = draw(st.sampled_from([0, 1, 2, 3, 6, 9]))  # few shapes: JAX compiles each
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    labels = rng.integers(-100, 40, length).astype(np.int32)
    offsets = np.sort(np.concatenate([[0, length], rng.integers(0, length + 1, 4)]))
    lengths = np.diff(offsets)
    numbers = np.arange(lengths.size)[lengths > 0]
    ids = np.repeat(np.arange(numbers.size) % 2 * 7, lengths[numbers])  # ids come back
    positions = np.concatenate([np.arange(n) for n in lengths]) + draw(st.sampled_from([0, 2]))
    ways = {"segment_ids": ids, "cu_seqlens": offsets, "position_ids": positions}
    ways = {name: value.astype(np.int32) for name, value in ways.items()}
    options = {"ignore_index": draw(st.sampled_from([-100, -1, 0]))}
    options["shift"] = draw(st.sampled_from([1, 2, 3, 5, 6, 10]))
    return labels, lengths, ways, options


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(packing=packed())
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_any_packing_agrees_with_the_loop(name, packing):
    """A0: masks are integers, so they are equal or wrong."""
    pytest.importorskip(name)
    labels, lengths, ways, options = packing
    expected = np.full_like(labels, options["ignore_index"])
    stop = 0
    for n in lengths:
        start, stop = stop, stop + n
        for t in range(start, stop - options["shift"]):
            expected[t] = labels[t + options["shift"]]
    for way, ids in ways.items():
        got = shifted(name, labels, **options, **{way: ids})
        assert bits_unequal(got, expected) == 0, way
        if options["ignore_index"] == -100:  # shifted once more, they are those of shift + 1
            further = {**options, "shift": options["shift"] + 1}
            want = shifted(name, labels, **further, **{way: ids})
            assert bits_unequal(shifted(name, got, **{way: ids}), want) == 0


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), shift=st.sampled_from([1, 2, 3, 7]))
@pytest.mark.parametrize("name", ["torch", "jax"])
def test_any_ids_agree_with_the_loop(name, seed, shift):
    """A0: rows of a batch have nothing to do with each other, whatever the ids are."""
    pytest.importorskip(name)
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 40, (3, 6)).astype(np.int32)
    agree(name, labels, shift=shift, segment_ids=rng.integers(0, 2, (3, 6)).astype(np.int32))
    positions = np.arange(6) % 4 + rng.integers(0, 2, (3, 6))
    agree(name, labels, shift=shift, position_ids=positions.astype(np.int32))
