"""`segment_sum` and `segment_mean` of both backends against exact sums."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest

from helpers.segments import (
    NAMES,
    SEGMENTS,
    SHAPE,
    computed,
    crossing,
    drawn,
    function_of,
    truth,
    x64,
)
from xentlib.checks.segments import check_segments
from xentlib.checks.validators import ArraySpec
from xentlib.interop import to_numpy
from xentlib.segments import MOST_TOKENS, SHORT_WORD_BITS, WORD_BITS
from xentlib.ulp import bits_unequal

KINDS = ("normal", "logprobs", "all sizes", "cancelling", "far below")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_results_are_exact_sums_rounded_once(backend, name, kind):
    """A0: so both backends have the same bits; gradients too."""
    values, ids, upstream, where = drawn(kind)
    got = computed(backend, name, values, ids, SEGMENTS, upstream, where)
    want = truth(name, values, ids, SEGMENTS, upstream, where)
    assert [bits_unequal(*both) for both in zip(got, want, strict=True)] == [0, 0]


def mutants(values, ids, upstream, where):
    """What each of these errors would have returned."""
    every = np.ones_like(where)
    yield "mask", "segment_sum", truth("segment_sum", values, ids, SEGMENTS, upstream, every)
    yield "undivided", "segment_mean", truth("segment_sum", values, ids, SEGMENTS, upstream, where)
    moved = np.where(ids >= 0, (ids + 1) % SEGMENTS, -1)
    yield "moved", "segment_sum", truth("segment_sum", values, moved, SEGMENTS, upstream, where)
    wrapped = np.where(ids < 0, SEGMENTS - 1, ids)  # padding that an index counts from the end
    yield "wrapped", "segment_sum", truth("segment_sum", values, wrapped, SEGMENTS, upstream, where)
    count = np.maximum(np.bincount(ids[ids >= 0], minlength=SEGMENTS), 1)  # with masked tokens
    out, gradient = truth("segment_sum", values, ids, SEGMENTS, upstream, where)
    gradient = gradient / count[np.maximum(ids, 0)].astype(np.float32)
    yield "count", "segment_mean", (out / count.astype(np.float32), gradient)


@pytest.mark.parametrize("k", range(5))
def test_wrong_results_are_found(k):
    """What the test above compares has other bits in each of them, in values and in gradients."""
    case = drawn("logprobs")
    _, name, wrong = list(mutants(*case))[k]
    right = truth(name, *case[:2], SEGMENTS, *case[2:])
    assert all(bits_unequal(*both) for both in zip(wrong, right, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_segment_s_bits_are_its_own(backend, name):
    """A10: in any order, packed into other rows, whatever the other segments hold."""
    values, ids, *_ = drawn("all sizes")
    want = computed(backend, name, values, ids, SEGMENTS)
    rng = np.random.default_rng(2)
    for _ in range(4):
        order = rng.permutation(values.size)
        moved = [x.reshape(-1)[order].reshape(SHAPE) for x in (values, ids)]
        assert bits_unequal(computed(backend, name, *moved, SEGMENTS), want) == 0
        others = np.where(ids == 5, values, 1e30 * rng.standard_normal(SHAPE)).astype(np.float32)
        got = computed(backend, name, others, ids, SEGMENTS)
        assert bits_unequal(got[5:6], want[5:6]) == 0
    alone = values[ids == 5]
    got = computed(backend, name, alone, np.zeros(alone.shape, np.int32), 1)
    assert bits_unequal(got, want[5:6]) == 0
    plain = [np.add.reduce(rng.permutation(alone), dtype=np.float32) for _ in range(9)]
    assert len({x.tobytes() for x in plain}) > 1, "float32 sums would have passed"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_taken_out_reaches_nothing(backend, name):
    """A0, M4: NaN and inf in padding and where the mask is false; their gradients are +0."""
    values, ids, upstream, where = drawn("normal")
    want = computed(backend, name, values, ids, SEGMENTS, upstream, where)
    out = (ids < 0) | ~where
    bad = np.where(out, np.resize([np.nan, np.inf, -np.inf], SHAPE), values).astype(np.float32)
    got = computed(backend, name, bad, ids, SEGMENTS, upstream, where)
    assert [bits_unequal(*both) for both in zip(got, want, strict=True)] == [0, 0]
    assert bits_unequal(got[1][out], np.zeros(out.sum(), np.float32)) == 0
    assert bits_unequal(got[0][3], np.float32(0)) == 0, "of a segment without tokens"
    # An id that is too large is no error of a token that is taken out.
    ids = np.where(~where, SEGMENTS + 5, ids)
    got = computed(backend, name, bad, ids, SEGMENTS, upstream, where)
    assert [bits_unequal(*both) for both in zip(got, want, strict=True)] == [0, 0]


def test_what_is_not_finite_stays_in_its_segment(backend):
    values = np.array([1, np.inf, 2, np.inf, -np.inf, np.nan, 3e38, 3e38, -3e38], np.float32)
    ids = np.array([0, 1, 1, 2, 2, 3, 4, 4, 4], np.int32)
    want = np.array([1, np.inf, np.nan, np.nan, 3e38], np.float32)
    got = computed(backend, "segment_sum", values, ids, 5)
    assert bits_unequal(np.isnan(got), np.isnan(want)) == 0
    assert bits_unequal(np.nan_to_num(got), np.nan_to_num(want)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_and_the_largest(backend, name):
    """A0: of normal numbers; each power of two that a unit may be, or nearly."""
    power = 2.0 ** np.array([-126, -125, -118, -117, -116, -60, 0, 60, 126, 127])
    values = np.stack([power, power * (0.5 + 2.0**-23), -power * 0.5], -1).astype(np.float32)
    values[power < 2.0**-124] *= np.float32([1, 0, 0])  # the others would be subnormal
    ids = np.repeat(np.arange(10, dtype=np.int32), 3).reshape(values.shape)
    want, _ = truth(name, values, ids, 10, np.ones(10, np.float32))
    want[np.abs(want) < 2.0**-126] = 0  # as flushed
    got = computed(backend, name, values, ids, 10)
    got[np.abs(got) < 2.0**-126] = 0
    assert bits_unequal(got, want) == 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in NAMES for dtype in ("bfloat16", "float16")]
    + [("segment_sum", "float64")],
)
def test_dtypes(backend, name, dtype):
    """A0: 16-bit values are summed as float32 ones are, and their gradients have their dtype."""
    kind = getattr(ml_dtypes, dtype) if dtype == "bfloat16" else getattr(np, dtype)
    values, ids, upstream, where = drawn("normal")
    values = values.astype(kind)
    if dtype == "float64":
        upstream = upstream.astype(kind)
    with x64(backend):
        got = computed(backend, name, values, ids, SEGMENTS, upstream, where)
    want = truth(name, values, ids, SEGMENTS, upstream, where)
    assert [bits_unequal(*both) for both in zip(got, want, strict=True)] == [0, 0]


def test_the_error_bound(backend):
    """Of values over 76 powers of ten, that are cut off: u |sum| + n 2^-55 m."""
    rng = np.random.default_rng(4)
    values = (rng.standard_normal(SHAPE) * 10.0 ** rng.uniform(-38, 37, SHAPE)).astype(np.float32)
    ids = (np.arange(values.size) % SEGMENTS).astype(np.int32).reshape(SHAPE)
    got = computed(backend, "segment_sum", values, ids, SEGMENTS)
    for s in range(SEGMENTS):
        own = values[ids == s].astype(np.float64)
        exact = math.fsum(own)
        bound = 2.0**-24 * abs(exact) * 1.001 + own.size * 2.0**-55 * np.abs(own).max()
        assert abs(float(got[s]) - exact) <= bound


def test_words_do_not_overflow(backend):
    """Of 2^20 values of one segment, all of one sign or cancelled by a few that are large, and by
    arithmetic of the most that there may be; nor does the remainder of a long division."""
    rng = np.random.default_rng(6)
    small = rng.uniform(0.004, 0.0078, 2**20)
    small[: int(small.sum())] = -1
    for x in (-rng.uniform(1.5, 2, 2**20), small):
        values, ids = x.astype(np.float32), np.zeros(x.shape, np.int8)
        want = np.float32([math.fsum(values)])
        assert bits_unequal(computed(backend, "segment_sum", values, ids, 1), want) == 0
        mean = want / np.float32(2**20)
        assert bits_unequal(computed(backend, "segment_mean", values, ids, 1), mean) == 0
    for widths, holds in ((SHORT_WORD_BITS[4], 31), (SHORT_WORD_BITS[8], 63), (WORD_BITS[8], 53)):
        assert MOST_TOKENS * (2 ** widths[0] - 1) < 2**holds
        assert (MOST_TOKENS - 1) * 2 ** widths[0] + 2 ** widths[0] - 1 < 2**holds
        assert len(set(widths)) == 1
    assert sum(WORD_BITS[4]) == sum(SHORT_WORD_BITS[4]) == 56
    few, ids = (ArraySpec((2**12, 2**12), x) for x in ("float32", "int32"))
    with pytest.raises(ValueError, match="`values` must have at most 16777215 tokens"):
        check_segments(few, ids, 3, None)


@pytest.mark.parametrize("name", NAMES)
def test_shapes(backend, name):
    """M17: no token, no segment, one token without dimensions."""
    none, ids = np.zeros((0, 3), np.float32), np.zeros((0, 3), np.int32)
    assert bits_unequal(computed(backend, name, none, ids, 2), np.zeros(2, np.float32)) == 0
    assert computed(backend, name, none, ids, 0).shape == (0,)
    one = computed(backend, name, np.array(2.5, np.float32), np.array(1, np.int32), 3)
    assert one.tolist() == [0.0, 2.5, 0.0]


def test_ids_that_begin_anew_in_each_row(backend):
    """As the docstring has them numbered; `ids - 1` would merge sequences of different rows, and
    offsets without the mask would give a row's padding to the row above."""
    segment_sum = function_of(backend, "segment_sum")
    text = " ".join(segment_sum.__doc__.split())
    assert "segment_ids - 1" not in text
    line = re.search(r"`(where\(ids > 0, [^`]*)`", text)[1]
    ids = np.array([[1, 1, 2, 3, 3], [1, 2, 2, 0, 0], [0, 1, 1, 1, 0]], np.int32)
    values = (2.0 ** np.arange(15)).astype(np.float32).reshape(ids.shape)
    library = __import__("torch" if backend == "torch" else "jax.numpy", fromlist=["_"])
    names = {"ids": crossing(backend)(ids), "rows": 3, "most": 3}
    numbered = eval(line, {"where": library.where, "arange": library.arange, **names})
    got = computed(backend, "segment_sum", values, np.array(to_numpy(numbered)), 9)
    want = [[values[row][ids[row] == k].sum() for k in (1, 2, 3)] for row in range(3)]
    assert bits_unequal(got.reshape(3, 3), np.float32(want)) == 0


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "int64"])
def test_dtypes_of_ids(backend, dtype):
    """More segments than int8 has numbers."""
    ids = np.array([0, 100, 100, 1], dtype)
    with x64(backend):
        got = computed(backend, "segment_sum", np.float32([1, 2, 3, 4]), ids, 300)
    assert got[[0, 1, 100]].tolist() == [1, 4, 5]
    assert got.shape == (300,)
