"""Softmax statistics with a defect that only bits show: what A14 has of rows A17 and A18.

Each is the algorithm of `xentlib.math.softmax` in NumPy, but for one step. Cut into other parts it
has other bits, and is as accurate as before: no other row rejects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.math.softmax import BLOCK_COLUMNS

Array = npt.NDArray[Any]
SUM, EDGE = "a sum in the order of the parts", "a block that starts at the part's edge"
ROUNDED = "a part's sum that is rounded before it is added"
MAXIMUM = "a maximum of the part in place of that of all"
DEFECTS = (SUM, EDGE, ROUNDED, MAXIMUM)
EXACT = 2.0**45  # of the integers that terms below 128 are added as


def moved(got: Array, logits: Array, labels: Array, sizes: Sequence[int], defect: str) -> Array:
    """[3, N] of a right answer, log-probability, lse and entropy, as that defect moves them where
    columns are cut into parts of these sizes. Parts are whole blocks but for `EDGE`."""
    if defect == EDGE:
        sizes = (sizes[0] - BLOCK_COLUMNS // 3, sizes[1] + BLOCK_COLUMNS // 3, *sizes[2:])
    whole = statistics(logits, labels, (logits.shape[1],), defect)
    wrong: Array = got + (statistics(logits, labels, sizes, defect) - whole)
    return wrong


def statistics(logits: Array, labels: Array, sizes: Sequence[int], defect: str = "") -> Array:
    """[3, N] float32: log-probability, lse and entropy of columns in parts of these sizes."""
    rows, z_NV = np.arange(len(logits)), np.array(logits, np.float32)
    z_y, z_NV[rows, labels] = z_NV[rows, labels], -np.inf
    m, start, parts = z_NV.max(1), 0, []
    for size in filter(None, sizes):
        parts.append(of_part(z_NV[:, start : start + size], m, defect))
        start += size
    if defect in (SUM, ROUNDED):
        s, sum_ed = sum(parts[1:], start=parts[0])
    else:
        s, sum_ed = added(np.concatenate([p.reshape(2, -1, len(m)) for p in parts], axis=1))
    top = np.maximum(m, z_y)
    scale, t = np.exp(m - top), np.exp(z_y - top)
    total = scale * s + t
    own = scale * (sum_ed + (m - top) * s) + t * (z_y - top)
    log_total = np.log(total)
    return np.stack([(z_y - top) - log_total, top + log_total, log_total - own / total])


def of_part(z_NC: Array, m: Array, defect: str) -> Array:
    """Sums of e = exp(z - m) and of e (z - m) over columns: [2, N], or [2, blocks, N] of blocks."""
    if defect == SUM:
        d_NC = z_NC - m[:, None]
        e_NC = np.exp(d_NC)
        return np.stack([e_NC.sum(1), (e_NC * np.maximum(d_NC, -1e4)).sum(1)])
    own = z_NC.max(1) if defect == MAXIMUM else m
    starts = range(0, z_NC.shape[1], BLOCK_COLUMNS)
    blocks = [relative_to(own, z_NC[:, k : k + BLOCK_COLUMNS]) for k in starts]
    terms = np.stack(blocks, axis=1)
    if defect == ROUNDED:
        return added(terms)
    if defect == MAXIMUM:
        s, sum_ed = added(terms)
        return change(s, sum_ed, own, m)
    return terms


def relative_to(m: Array, z_NC: Array) -> Array:
    """[2, N] of a block, whose sums are made relative to its own maximum."""
    own = z_NC.max(1)
    d_NC = np.where(z_NC == -np.inf, np.float32(-1e4), z_NC - own[:, None])
    e_NC = np.exp(d_NC)
    return change(e_NC.sum(1), (e_NC * d_NC).sum(1), own, m)


def change(s: Array, sum_ed: Array, a: Array, b: Array) -> Array:
    """[2, N] sums relative to b in place of a; 0 where a is -inf."""
    below = np.where(a == -np.inf, np.float32(-1e4), a - b)
    scale = np.exp(below)
    return np.stack([scale * s, scale * (sum_ed + below * s)])


def added(terms: Array) -> Array:
    """[2, N] of [2, blocks, N]: exact, rounded once."""
    whole = np.floor(terms.astype(np.float64) * EXACT).astype(np.int64).sum(1)
    total: Array = (whole / EXACT).astype(np.float32)
    return total
