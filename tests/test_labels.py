"""`next_token_labels` of both backends against a loop that anyone can read."""

from __future__ import annotations

import inspect
import re
from itertools import accumulate, groupby, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.ranks import launch
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


def documents(length, *, segment_ids=None, cu_seqlens=None, position_ids=None) -> list[range]:
    """Of one row: where each packed document is."""
    if segment_ids is not None:
        lengths = [len(list(run)) for _, run in groupby(segment_ids.tolist())]
    elif cu_seqlens is not None:
        inner = [min(offset, length) for offset in cu_seqlens.tolist()]
        lengths = [stop - start for start, stop in pairwise([0, *inner, length])]
    elif position_ids is not None:
        lengths, before = [], None
        for place in position_ids.tolist():
            if before is None or place != before + 1:
                lengths.append(0)
            lengths[-1] += 1
            before = place
    else:
        lengths = [length]
    ends = list(accumulate(lengths, initial=0))
    assert ends[-1] == length
    return [range(start, stop) for start, stop in pairwise(ends)]


def naive(labels, *, shift=1, ignore_index=-100, **packing) -> np.ndarray:
    """The definition, one document at a time, one token at a time."""
    out = np.full_like(labels, ignore_index)
    for row in np.ndindex(labels.shape[:-1]):
        ids = {k: v if k == "cu_seqlens" else v[row] for k, v in packing.items()}
        for document in documents(labels.shape[-1], **ids):
            for token, target in zip(document, document[shift:]):
                out[(*row, token)] = labels[(*row, target)]
    return out


def agree(backend: str, labels: np.ndarray, **options) -> None:
    before = labels.copy()
    got = shifted(backend, labels, **options)
    assert got.dtype == labels.dtype
    assert bits_unequal(got, naive(labels, **options)) == 0
    assert bits_unequal(labels, before) == 0


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
            "say the same thing; got `segment_ids` and `cu_seqlens`",
        ),
        (
            ValueError,
            {"position_ids": np.zeros(4, np.int32), "cu_seqlens": np.array([0, 4], np.int32)},
            "say the same thing; got `cu_seqlens` and `position_ids`",
        ),
        (TypeError, {"position_ids": np.zeros(4, bool)}, "`position_ids` must be integers"),
        (ValueError, {"position_ids": np.zeros((3, 1, 4), np.int32)}, "several axes, pass `seg"),
        (TypeError, {"position_ids": range(4)}, "an array of integers; got range"),
        (TypeError, {"cu_seqlens": [0, 2, 4]}, "`cu_seqlens` must be an array of integers; got li"),
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


def test_a_batch_of_rows_has_no_single_packing(backend):
    """D12: offsets describe one row; a batch takes `segment_ids`."""
    with pytest.raises(ValueError, match="one packed row"):
        shifted(backend, np.zeros((2, 4), np.int32), cu_seqlens=np.array([0, 4], np.int32))
    with pytest.raises(TypeError, match="must be integers"):
        shifted(backend, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"\(\.\.\., tokens\); got \(\)"):
        shifted(backend, np.zeros((), np.int32))


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


# ---------------------------------------------------------------------------------
# Under the transformations of each framework


def variants():
    """Batches of two rows in every packing, and the shifts."""
    labels = np.arange(12, dtype=np.int32).reshape(2, 6)
    ids = np.array([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]], np.int32)
    places = np.array([[0, 1, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4]], np.int32)
    offsets = np.array([[0, 2, 5, 6], [0, 1, 1, 6]], np.int32)
    packings = ({}, {"segment_ids": ids}, {"position_ids": places}, {"cu_seqlens": offsets})
    return [(labels, packing, shift) for packing in packings for shift in (1, 2, 3, 9)]


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


@pytest.mark.jax
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_rows_on_a_mesh_under_jit(kind):
    """A0: tokens over an Auto axis, rows over either kind, without an argument; rows of an Auto
    axis are not gathered."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import next_token_labels

    labels = np.arange(4 * 64, dtype=np.int32).reshape(4, 64)
    ids = np.random.default_rng(6).integers(0, 2, labels.shape).astype(np.int32)
    mesh = mesh_of(kind, data=2, seq=2)
    sharding = jax.NamedSharding(mesh, jax.P("data", "seq" if kind == "Auto" else None))
    with jax.set_mesh(mesh):
        for shift in (1, 3):
            call = jax.jit(lambda y, i, k=shift: next_token_labels(y, segment_ids=i, shift=k))
            compiled = call.lower(*jax.device_put((labels, ids), sharding)).compile()
            got = np.array(compiled(*jax.device_put((labels, ids), sharding)))
            assert bits_unequal(got, naive(labels, segment_ids=ids, shift=shift)) == 0
            assert "all-gather" not in compiled.as_text()


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.parametrize(
    ("dtype", "compiler"),
    [
        ("int64", "aot_eager"),
        ("uint16", "aot_eager"),
        pytest.param("uint32", "inductor", marks=pytest.mark.slow),
    ],
)
def test_one_graph_and_vmap(dtype, compiler):
    """A0: `torch.compile(fullgraph=True)` of every packing, and offsets for each row by vmap."""
    torch = pytest.importorskip("torch")
    from xentlib.torch import next_token_labels

    items = [
        (torch.tensor(y).to(getattr(torch, dtype)), {k: torch.tensor(v) for k, v in ids.items()}, k)
        for y, ids, k in variants()
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

    want = [np.where((x := expected_of(*item)) == -100, 99, x) for item in variants()]
    torch.compiler.reset()
    for function in (mapped, batches):
        compiled = torch.compile(function, fullgraph=True, backend=compiler)
        for call in (function, compiled):
            for got, expected in zip(call(items), want):
                assert got.dtype == items[0][0].dtype
                assert got.is_contiguous()
                assert bits_unequal(got.long().numpy(), expected.astype(np.int64)) == 0
    torch.compiler.reset()


# ---------------------------------------------------------------------------------
# Labels that the loss takes


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
        with pytest.raises(TypeError, match="`labels` must be an array of integers; got list"):
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


# ---------------------------------------------------------------------------------
# A sequence that is spread over ranks

LENGTH = 8
CUTS = {
    1: [(8,)],
    2: [(4, 4), (5, 3), (0, 8), (8, 0)],
    3: [(3, 3, 2), (4, 0, 4), (0, 8, 0), (8, 0, 0)],
    4: [(2, 2, 2, 2), (1, 4, 0, 3), (4, 0, 0, 4), (0, 0, 5, 3)],
}
# One slice ahead and several, the whole row, and beyond it.
SHIFTS = (1, 2, 3, 5, 7, 8, 11)


def every_packing() -> dict[str, np.ndarray]:
    """All 128 ways to cut a row of LENGTH into documents, [128, ...], in each way to say it."""
    begins = np.array([(1, *rest) for rest in product((0, 1), repeat=LENGTH - 1)])
    starts = np.where(begins, np.arange(LENGTH), 0)
    offsets = np.sort(np.where(begins, np.arange(LENGTH), LENGTH))  # empty documents at the end
    return {
        "segment_ids": (begins.cumsum(-1) % 2).astype(np.int8),  # ids come back
        "position_ids": (np.arange(LENGTH) - np.maximum.accumulate(starts, -1)).astype(np.uint16),
        "cu_seqlens": offsets.astype(np.int32),
    }


def calls():
    """Labels and options of whole rows: a document ends at every place, each cut's among them."""
    rng = np.random.default_rng(3)
    row = np.arange(10, 10 + LENGTH, dtype=np.int32)
    every = every_packing()
    yield row, {}
    many = np.arange(128 * LENGTH, dtype=np.int32).reshape(128, LENGTH)
    yield many, {"segment_ids": every["segment_ids"]}
    yield many, {"position_ids": every["position_ids"]}
    for offsets in every["cu_seqlens"][::9]:
        yield row[None], {"cu_seqlens": offsets}
    yield row, {"cu_seqlens": np.array([0, 0, 2, 2, 5], np.int64)}  # padding after 5
    for dtype, other, ignore_index in (("int8", "uint32", -100), ("uint32", "int8", 0)):
        labels = rng.integers(0, np.iinfo(dtype).max, (2, 3, LENGTH), dtype)
        labels[rng.random(labels.shape) < 0.3] = ignore_index
        # 0 or the highest power of two below the maximum: lost where the exchange narrows.
        segments = rng.integers(0, 2, labels.shape).astype(other) * (np.iinfo(other).max // 2 + 1)
        yield labels, {"ignore_index": ignore_index, "segment_ids": segments.astype(other)}
    yield np.zeros((0, LENGTH), np.int32), {}


def part(x, sizes, rank):
    start, stop = list(pairwise(accumulate(sizes, initial=0)))[rank]
    return x[..., start:stop]


def slices(rank, world, cuts):
    """Every call on this rank's slice, and whether its inputs are as they were."""
    import torch

    from xentlib.torch import next_token_labels

    found = []
    for sizes, shift in product(cuts, SHIFTS):
        for labels, options in calls():
            given = {k: torch.tensor(v) if np.ndim(v) else v for k, v in options.items()}
            for name in {"segment_ids", "position_ids"} & given.keys():
                given[name] = part(given[name], sizes, rank)
            mine = part(torch.tensor(labels), sizes, rank)
            before = mine.clone()
            over = torch.distributed.group.WORLD
            out = next_token_labels(mine, shift=shift, sequence_parallel=over, **given)
            found.append((out.numpy(), out.is_contiguous() and bool((mine == before).all())))
    return found


@pytest.mark.torch
@pytest.mark.parametrize("world", CUTS)
def test_slices_of_ranks_are_slices_of_the_row(world):
    """A0: even, uneven, empty; targets are those of the next slices that have them."""
    pytest.importorskip("torch")
    ranks = launch(world, slices, CUTS[world])
    items = [(*both, *call) for both in product(CUTS[world], SHIFTS) for call in calls()]
    for (sizes, shift, labels, options), *results in zip(items, *ranks, strict=True):
        expected = naive(labels, shift=shift, **options)
        for rank, (got, untouched) in enumerate(results):
            mine = part(expected, sizes, rank)
            assert got.dtype == mine.dtype
            assert bits_unequal(got, mine) == 0, (sizes, shift, rank, options)
            assert untouched


def exchanges(rank, world):
    """Messages of two bad calls, the result over a submesh, the collectives of 16 calls; the
    same in one graph of the compiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from xentlib.torch import next_token_labels

    mesh = torch.distributed.init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "cp"))
    labels = torch.arange(3) + 10 * rank
    said = []
    for parallel in (mesh, "cp"):
        with pytest.raises((ValueError, TypeError)) as caught:
            next_token_labels(labels, sequence_parallel=parallel)
        said.append(str(caught.value))
    shifted = next_token_labels(labels, sequence_parallel=mesh["cp"]).tolist()

    def several(y):
        places = {"position_ids": torch.arange(3) + 3 * rank}
        options = [{"shift": shift, **more} for shift in (1, 4) for more in ({}, places)]
        options.append({"shift": 2, "cu_seqlens": torch.tensor([0, 5, 6])})
        return [next_token_labels(y, sequence_parallel=mesh["cp"], **o) for o in options]

    compiled = torch.compile(several, fullgraph=True, backend="aot_eager")(labels)
    assert all(a.equal(b) for a, b in zip(compiled, several(labels), strict=True))
    names = []
    for mine, shift in product((labels, labels[: 3 * rank]), (1, 4)):
        packings = ({}, {"segment_ids": mine}, {"cu_seqlens": torch.tensor([0, 2])})
        for options in (*packings, {"position_ids": mine}):
            with profile(activities=[ProfilerActivity.CPU]) as profiled:
                next_token_labels(mine, shift=shift, sequence_parallel=mesh["cp"], **options)
            events = [e for e in profiled.key_averages() if e.key.startswith("c10d::")]
            names.append([(e.key, e.count) for e in events])
    return said, shifted, names


@pytest.mark.torch
def test_ranks_exchange_their_columns_once():
    """M5: one collective whatever the content, so nothing can hang; bad groups are named."""
    pytest.importorskip("torch")
    for rank, ((mesh, name), shifted, collectives) in enumerate(launch(2, exchanges)):
        assert "`sequence_parallel` must be a one-dimensional DeviceMesh; got 2" in mesh
        assert "`sequence_parallel` must be a ProcessGroup or a one-dimensional" in name
        assert shifted == [[1, 2, 10], [11, 12, -100]][rank]
        assert collectives == [[("c10d::allgather_", 1)]] * 16


def over_axis(mesh, spec, labels, *, options, **how):
    """`next_token_labels` under jit and shard_map, tokens over the axis "seq"; its arguments."""
    import jax

    from xentlib.jax import next_token_labels

    arrays = {k: v for k, v in options.items() if np.ndim(v)}
    rest = {k: v for k, v in options.items() if k not in arrays}
    specs = {k: jax.P() if k == "cu_seqlens" else spec for k in arrays}

    def call(labels, arrays):
        return next_token_labels(labels, sequence_parallel="seq", **arrays, **rest)

    mapped = jax.shard_map(call, mesh=mesh, in_specs=(spec, specs), out_specs=spec, **how)
    return jax.jit(mapped), (labels, arrays)


def mesh_of(kind, **axes):
    import jax

    types = (getattr(jax.sharding.AxisType, kind),) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


@pytest.mark.jax
@pytest.mark.parametrize(
    ("world", "check_vma", "shift"),
    [
        *((4, True, shift) for shift in SHIFTS),
        *((*how, shift) for how in ((1, True), (2, True), (4, False)) for shift in (1, 5)),
    ],
)
def test_slices_of_a_mesh_axis_are_slices_of_the_row(world, check_vma, shift):
    """A0: the calls of the ranks above, and slices without a token; each packing by `vmap`."""
    jax = pytest.importorskip("jax")
    from xentlib.jax import next_token_labels

    mesh, empty = mesh_of("Auto", seq=world), np.zeros((2, 0), np.int32)
    none = [(empty, {"segment_ids": empty}), (empty[0], {"cu_seqlens": np.array([0], np.int32)})]
    every, items = every_packing(), [*calls(), *none]
    specs = [jax.P(*[None] * (labels.ndim - 1), "seq") for labels, _ in items]

    def call(given, labels, offsets):
        found = [
            next_token_labels(y, shift=shift, sequence_parallel="seq", **arrays, **rest)
            for (y, arrays), rest in zip(given, numbers)
        ]
        one = lambda y, ends: next_token_labels(  # noqa: E731
            y, shift=shift, cu_seqlens=ends, sequence_parallel="seq"
        )
        return found, jax.vmap(one)(labels, offsets)

    arrays = [{k: v for k, v in o.items() if np.ndim(v)} for _, o in items]
    numbers = [{k: v for k, v in o.items() if not np.ndim(v)} for _, o in items]
    placed = [
        (spec, {k: jax.P() if k == "cu_seqlens" else spec for k in a})
        for spec, a in zip(specs, arrays)
    ]
    many, rows = np.arange(128 * LENGTH, dtype=np.int32).reshape(128, LENGTH), jax.P(None, "seq")
    function = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(placed, rows, jax.P()),
        out_specs=(specs, rows),
        check_vma=check_vma,
    )
    given = [(labels, a) for (labels, _), a in zip(items, arrays)]
    found, mapped = jax.jit(function)(given, many, every["cu_seqlens"])
    for got, (labels, options) in zip(found, items, strict=True):
        expected = naive(labels, shift=shift, **options)
        assert got.dtype == expected.dtype
        assert bits_unequal(np.array(got), expected) == 0, options
    expected = naive(many, shift=shift, segment_ids=every["segment_ids"])
    assert bits_unequal(np.array(mapped), expected) == 0


@pytest.mark.jax
def test_slices_of_a_mesh_axis_in_64_bits():
    """A0: ids that 32 bits do not hold travel between devices."""
    jax = pytest.importorskip("jax")
    labels = 2**40 + np.arange(LENGTH)
    segments = np.array([0, 0, 0, 1, 1, 1, 1, 1]) << 33
    with jax.enable_x64(True):
        mesh, spec = mesh_of("Auto", seq=4), jax.P("seq")
        for shift in (1, 3):
            options = {"shift": shift, "ignore_index": -(2**50), "segment_ids": segments}
            function, given = over_axis(mesh, spec, labels, options=options)
            assert bits_unequal(np.array(function(*given)), naive(labels, **options)) == 0
            options = {"shift": shift, "cu_seqlens": np.array([0, 3, 8])}
            function, given = over_axis(mesh, spec, labels, options=options)
            assert bits_unequal(np.array(function(*given)), naive(labels, **options)) == 0


@pytest.mark.jax
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("manual", [("data", "seq"), ("seq",)], ids=str)
def test_a_mesh_with_another_axis(manual, kind, check_vma):
    """A0: rows over "data", inside of `shard_map` or left to the compiler."""
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 50, (4, LENGTH)).astype(np.int32)
    ids = rng.integers(0, 2, labels.shape).astype(np.int32)
    mesh, spec = mesh_of(kind, data=2, seq=2), jax.P("data", "seq")
    inner = spec if "data" in manual else jax.P(None, "seq")
    how = {"axis_names": set(manual), "check_vma": check_vma}
    for name, shift in (("segment_ids", 1), ("position_ids", 3), ("segment_ids", 6)):
        options = {name: ids, "shift": shift}
        function, given = over_axis(mesh, inner, labels, options=options, **how)
        placed = jax.device_put(given, jax.NamedSharding(mesh, spec))
        assert bits_unequal(np.array(function(*placed)), naive(labels, **options)) == 0


@pytest.mark.jax
@pytest.mark.parametrize("shift", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("options", ["", "segment_ids", "cu_seqlens", "position_ids"])
def test_a_mesh_axis_exchanges_its_columns_once(options, shift):
    """In the compiled program: `shift` of the 16 columns of a slice, or all of every slice."""
    jax = pytest.importorskip("jax")
    labels = np.zeros((1, 64), np.int32)
    given = {options: labels} if options else {}
    if options == "cu_seqlens":
        given = {options: np.arange(3)}
    mesh, spec = mesh_of("Auto", seq=4), jax.P(None, "seq")
    function, arguments = over_axis(mesh, spec, labels, options={"shift": shift, **given})
    text = function.lower(*arguments).compile().as_text()
    names = "collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter"
    found = re.findall(rf"= s32\[([\d,]+)\]\S* (?:{names})(?:-start)?\(", text)
    columns = (shift if shift <= 16 else 64) * (2 if options.endswith("ids") else 1)
    assert [np.prod([int(n) for n in dims.split(",")]) for dims in found] == [columns]
    assert len(re.findall(rf" (?:{names})(?:-start)?\(", text)) == 1


@pytest.mark.jax
@pytest.mark.parametrize("axis", ["seq", {"seq"}], ids=str)
def test_an_axis_that_is_not_bound_is_named(axis):
    """D12: JAX's own words are of an unbound name and no argument."""
    pytest.importorskip("jax")
    from xentlib.jax import next_token_labels

    message = r"`sequence_parallel` must be the name of a mesh axis inside `shard_map`; got .*'seq'"
    with pytest.raises(ValueError, match=message):
        next_token_labels(np.zeros(4, np.int32), sequence_parallel=axis)
