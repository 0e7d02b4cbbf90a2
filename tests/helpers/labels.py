"""`next_token_labels` for tests: through either backend, a loop that anyone can read, and rows in
every packing.
"""

from __future__ import annotations

from itertools import accumulate, groupby, pairwise, product

import numpy as np

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


def naive(labels, *, shift=1, ignore_index=-100, where=None, **packing) -> np.ndarray:
    """The definition, one document at a time, one token at a time."""
    counts = np.ones(labels.shape, bool) if where is None else where.astype(bool)
    out = np.full_like(labels, ignore_index)
    for row in np.ndindex(labels.shape[:-1]):
        ids = {k: v if k == "cu_seqlens" else v[row] for k, v in packing.items()}
        for document in documents(labels.shape[-1], **ids):
            for token, target in zip(document, document[shift:]):
                if counts[(*row, token)] and counts[(*row, target)]:
                    out[(*row, token)] = labels[(*row, target)]
    return out


def agree(backend: str, labels: np.ndarray, **options) -> None:
    before = labels.copy()
    got = shifted(backend, labels, **options)
    assert got.dtype == labels.dtype
    assert bits_unequal(got, naive(labels, **options)) == 0
    assert bits_unequal(labels, before) == 0


# --- a row that is cut into slices ---------------------------------------------------------------


LENGTH = 8


# One slice ahead and several, the whole row, and beyond it.
SHIFTS = (1, 2, 3, 5, 7, 8, 11)


def zigzag(x, rank: int, world: int):
    """A rank's two pieces of the last dimension; of the places in a row, in either framework."""
    pieces = np.arange(x.shape[-1]).reshape(2 * world, -1)
    return x[..., pieces[[rank, 2 * world - 1 - rank]].ravel()]


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
    for dtype in (bool, np.int64):  # masks of every kind, beside documents
        yield many, {"where": every["segment_ids"][::-1].astype(dtype), "segment_ids": many % 5}
    for offsets in every["cu_seqlens"][::23]:  # an end at each place, in one and not in another
        yield row[None], {"cu_seqlens": offsets}
    yield row, {"cu_seqlens": np.array([0, 0, 2, 2, 5], np.int64)}  # padding after 5
    for dtype, other, ignore_index in (("int8", "uint32", -100), ("uint32", "int8", 0)):
        labels = rng.integers(0, np.iinfo(dtype).max, (2, 3, LENGTH), dtype)
        labels[rng.random(labels.shape) < 0.3] = ignore_index
        # 0 or the highest power of two below the maximum: lost where the exchange narrows.
        segments = rng.integers(0, 2, labels.shape).astype(other) * (np.iinfo(other).max // 2 + 1)
        yield labels, {"ignore_index": ignore_index, "segment_ids": segments.astype(other)}
    yield np.zeros((0, LENGTH), np.int32), {}


def longer_calls():
    """Of rows whose pieces have an odd length on four ranks."""
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 500, (3, 24), np.int32)
    ids, places = (rng.integers(0, most, labels.shape).cumsum(-1) // 2 for most in (2, 3))
    where = rng.random(labels.shape) < 0.8
    yield labels, {"segment_ids": ids, "where": where}
    yield labels, {"position_ids": places}
    yield labels[:1], {"cu_seqlens": np.array([0, 4, 4, 9, 11, 20]), "where": where[:1]}
