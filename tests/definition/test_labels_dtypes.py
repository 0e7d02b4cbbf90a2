"""Dtypes of labels: which come back from `next_token_labels`, which the losses take, and what none
of them can hold.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from helpers.labels import agree, shifted
from xentlib.interop import to_jax, to_numpy, to_torch
from xentlib.ulp import bits_unequal


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_dtypes_are_kept(backend, dtype):
    """M11: the labels' own width comes back, ids and -100 alike."""
    agree(backend, np.array([1, 2, -100, 4], dtype))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_unsigned_labels_of_packed_rows(backend, dtype):
    """A0: PyTorch compares, sums and scatters no uint16 or uint32."""
    top = np.iinfo(dtype).max
    labels = np.array([1, top - 1, 3, 4], dtype)
    for ignore_index, shift in product((9, int(top)), (1, 2)):
        options = {"ignore_index": ignore_index, "shift": shift}
        agree(backend, labels, **options)
        agree(backend, labels, **options, segment_ids=np.array([0, 0, top, top], dtype))
        agree(backend, labels, **options, position_ids=np.array([0, 1, 0, 1], dtype))
        agree(backend, labels, **options, cu_seqlens=np.array([0, 2, 4], dtype))


@pytest.mark.parametrize("name", ["labels", "segment_ids", "cu_seqlens", "position_ids"])
def test_uint64_is_refused(backend, name):
    """It has ids that no index can hold."""
    given = {"labels": np.arange(4, dtype=np.int32), name: np.arange(4, dtype=np.uint64)}
    with pytest.raises(TypeError, match=rf"`{name}` must be integers of any dtype but uint64"):
        shifted(backend, **given)


def test_unsigned_labels_cannot_hold_minus_100(backend):
    """M11: -100 in uint8 would be the plausible token 156."""
    labels = np.array([1, 156, 3], np.uint8)
    with pytest.raises(TypeError, match=r"can hold `ignore_index` \(-100\); got uint8"):
        shifted(backend, labels)
    assert shifted(backend, labels, ignore_index=255).tolist() == [156, 3, 255]


def test_masked_labels_stay_masked(backend):
    """A0: a target that was already ignored is not revived."""
    labels = np.array([5, -100, 7, 8], np.int32)
    assert shifted(backend, labels).tolist() == [-100, 7, 8, -100]


# --- labels that the loss takes ------------------------------------------------------------------


def losses_of(backend, labels, compiled=False, **options):
    """Of the three functions: what each token's log-probability is, and a loss. One row of logits
    for each label; NumPy in and out."""
    rng = np.random.default_rng(7)
    hidden = rng.standard_normal((labels.size, 2)).astype(np.float32)
    head = rng.standard_normal((65_500, 2)).astype(np.float32)
    cross = to_torch if backend == "torch" else to_jax
    module = __import__(f"xentlib.{backend}", fromlist=["_"])

    def call(h, w, y):
        return (
            module.chunked_nll(h, w, y, outputs=("logprobs",), **options).loss,
            module.chunked_logprobs(h, w, y, **options).logprobs,
            module.vocab_parallel_logprobs(h @ w.T, y, **options).logprobs,
        )

    if compiled and backend == "torch":
        import torch

        torch.compiler.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    elif compiled:
        import jax

        call = jax.jit(call)
    arrays = [cross(x, copy=True) for x in (hidden, head, labels)]
    return [np.array(to_numpy(x)) for x in call(*arrays)]


# A label, and an `ignore_index` that its dtype makes the same number of, or that is the same.
ALIASES = [
    ("int8", 44, 300),
    ("uint8", 156, -100),
    ("uint16", 65_436, -100),
    ("uint16", 65_436, 65_436),
    ("int32", 0, 2**40),
    ("uint32", 7, 2**32 + 7),
    ("uint32", 7, 2**32 - 1),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("dtype", "label", "ignore_index", "compiled"),
    [*((*case, False) for case in ALIASES), *((*case, True) for case in ALIASES[1:5])],
    ids=str,
)
def test_what_a_dtype_cannot_hold_ignores_nothing(backend, dtype, label, ignore_index, compiled):
    """A0: which tokens count; as if labels were int32 and the others left out by `where`."""
    labels = np.array([label, 1, 2, label], dtype)
    got = losses_of(backend, labels, compiled, ignore_index=ignore_index)
    plain = labels.astype(np.int32)
    want = losses_of(backend, np.where(plain == ignore_index, -100, plain).astype(np.int32))
    for one, other in zip(got, want, strict=True):
        assert bits_unequal(one, other) == 0
    counted = [1, 2] if label == ignore_index else [label, 1, 2, label]
    assert np.count_nonzero(got[1]) == len(counted)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_labels_that_no_one_can_take(backend):
    """One sentence for uint64, for what is no array, and for an `ignore_index` beyond 64 bits."""
    module = __import__(f"xentlib.{backend}", fromlist=["_"])
    cross = to_torch if backend == "torch" else to_jax
    hidden = cross(np.ones((2, 3), np.float32), copy=True)
    head = cross(np.ones((5, 3), np.float32), copy=True)
    labels = np.array([1, 2])
    for function in (
        lambda y, **o: module.chunked_nll(hidden, head, y, **o),
        lambda y, **o: module.chunked_logprobs(hidden, head, y, **o),
        lambda y, **o: module.vocab_parallel_logprobs(hidden, y, **o),
        module.next_token_labels,
    ):
        if backend == "torch":  # JAX keeps no uint64 without 64-bit types; it has NumPy's
            unsigned = cross(labels.astype(np.uint64), copy=True)
        else:
            unsigned = labels.astype(np.uint64)
        with pytest.raises(TypeError, match="`labels` must be integers of any dtype but uint64"):
            function(unsigned)
        with pytest.raises(TypeError, match=r"`labels` must be a.*; got list. Pass"):
            function([1, 2])
        for ignore_index in (2**63, -(2**63) - 1, 2**70):
            with pytest.raises(ValueError, match="`ignore_index` must fit 64 bits; got"):
                function(cross(labels.astype(np.int32), copy=True), ignore_index=ignore_index)


@pytest.mark.jax
def test_jax_does_not_narrow_in_silence():
    """NumPy's 64 bits become 32 without 64-bit types: 2**32 + 1 would be class 1, and an ignored
    2**40 class 0."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import chunked_nll, next_token_labels, vocab_parallel_logprobs

    big, small = np.array([1, 2**40, 2**32 + 1]), np.array([1, 2, 3])
    message = "must fit int32, in which a JAX without 64-bit types keeps int64; got 1099511627776"
    with pytest.raises(ValueError, match="`labels` " + message):
        next_token_labels(big)
    for name in ("segment_ids", "position_ids"):
        with pytest.raises(ValueError, match=f"`{name}` {message}"):
            next_token_labels(small, **{name: big})
    ones = np.ones((3, 4), np.float32)
    for call in (
        lambda y, **o: chunked_nll(ones, ones, y, **o).loss,
        lambda y, **o: vocab_parallel_logprobs(ones, y, **o).logprobs,
        next_token_labels,
    ):
        with pytest.raises(ValueError, match="`ignore_index` " + message):
            call(small, ignore_index=2**40)
    with jax.enable_x64(True):
        got = next_token_labels(big, ignore_index=2**50)
        assert got.tolist() == [2**40, 2**32 + 1, 2**50]
        assert chunked_nll(ones, ones, np.array([1, 2**40, 2]), ignore_index=2**40).num_tokens == 2
