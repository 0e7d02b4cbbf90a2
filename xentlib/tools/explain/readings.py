"""The log-probabilities of sampled tokens under a reading of how they were computed, in float64.

A reading is one choice for each field of `Reading`; the right one is what the options of the call
say. Shapes: B tokens of a block, V classes, K kept ids. Every number comes with its tolerance, how
far a correct float32 implementation of that reading may be from it:

    e0  = 4 u (|x| |w_v| + |b_v|)                                 of a logit x w_v + b_v, u = 2^-24
    e   = e0 carried through scale, softcap and temperature, and 4 u |z| for each of these
    tol = e_y + E_p[e] + 4 u (|lse| + |log p| + 2)

|x| and |w_v| are Euclidean, and their product is above the running error bound of the oracle,
A = sum |x_h w_vh|. Where a reading rounds logits to 16 bits, e0 is carried by computing z - e0 and
z + e0: it is nothing but where rounding could go either way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from xentlib.contract import U
from xentlib.ulp import round_to, spacing

Array = NDArray[Any]
FEW = 4 * U
# Logits of a block, numbers of the head that are converted at a time: 32 MiB and 128 MiB.
BLOCK, HEAD = 1 << 22, 1 << 24
# In place of a dtype: errors like those of a rounding, which nobody can compute again.
NOISE = ("noise", "hidden")


class Reading(NamedTuple):
    """How log-probabilities were computed.

    Attributes:
        shift: token t was scored against `ids[t + shift]`.
        column: entry t is the log-probability of token t + column.
        head: "weight" or "old_weight".
        bias: whether it was added.
        operands: what was rounded before the product, of "hidden" and "weight", and to what.
        rounded: what the logits were rounded to, and whether once or after each operation.
        result: what the log-probabilities were rounded to.
        logit_scale, softcap, temperature: the numbers that were used.
        classes: rows of the head that took part, and how many rows of zeros beside them.
        kept: whether the softmax was that of the kept ids; or a top-k and a top-p of its own, None
            each where it has none.
    """

    shift: int = 0
    column: int = 0
    head: str = "weight"
    bias: bool = True
    operands: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()
    result: str = ""
    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    classes: tuple[int, int] = (0, 0)
    kept: bool | tuple[int | None, float | None] = True


class Values(NamedTuple):
    """[M] log-probabilities and their tolerances; NaN where a token has no neighbour."""

    logprobs: Array
    tolerance: Array


@dataclass(frozen=True, eq=False)
class Problem:
    """Arrays in the dtypes that they came in, flat, and `right`, the reading that options declare;
    `length` tokens are a row, beyond whose ends nothing is shifted."""

    hidden: Array
    heads: dict[str, Array]
    ids: Array
    right: Reading
    length: int
    bias: Array | None = None
    kept_ids: Array | None = None
    top_k: int | None = None
    top_p: float | None = None

    @property
    def filtered(self) -> bool:
        return any(x is not None for x in (self.kept_ids, self.top_k, self.top_p))

    def values(self, readings: Iterable[Reading], at: Array) -> dict[Reading, Values]:
        """Of the tokens `at`, ascending; each product once, a block of tokens at a time."""
        wanted = list(dict.fromkeys(readings))
        products: dict[Any, dict[Reading, Array]] = defaultdict(dict)
        for r in wanted:
            products[r.head, r.operands][r._replace(column=0)] = np.empty((2, len(at)))
        each = max(1, BLOCK // len(self.heads["weight"]))
        for (head, operands), outputs in products.items():
            for i in range(0, len(at), each):
                part = at[i : i + each]
                z, reach = self._product(head, operands, part)
                for r, out in outputs.items():
                    out[:, i : i + each] = self._per_token(z, reach, r, part)
        of = {r: out for outputs in products.values() for r, out in outputs.items()}
        return {r: Values(*self._columns(of[r._replace(column=0)], r.column, at)) for r in wanted}

    def neighbours(self, at: Array, by: int) -> tuple[Array, Array]:
        """Positions `by` further on, and whether they are in the same row."""
        to = at + by
        inside = (to >= 0) & (to < len(self.ids)) & (to // self.length == at // self.length)
        return np.where(inside, to, at), inside

    def _columns(self, values: Array, column: int, at: Array) -> Array:
        to, inside = self.neighbours(at, column)
        place = np.minimum(np.searchsorted(at, to), len(at) - 1)
        return np.where(inside & (at[place] == to), values[:, place], np.nan)

    def _product(self, head: str, operands: tuple[str, ...], at: Array) -> tuple[Array, Array]:
        """[B, V] logits without bias, and |x| |w_v|."""

        def wide(x: Array, what: str) -> Array:
            if operands == NOISE and what in operands:
                noise = np.random.default_rng(0).random(x.shape) - 0.5
                return x + spacing(x, "bfloat16") * noise
            return round_to(x, operands[0]) if what in operands else x.astype(np.float64)

        x, weight = wide(self.hidden[at], "hidden"), self.heads[head]
        z, reach = np.empty((2, len(at), len(weight)))
        size, each = np.linalg.norm(x, axis=1)[:, None], max(1, HEAD // x.shape[1])
        for i in range(0, len(weight), each):
            w = wide(weight[i : i + each], "weight")
            z[:, i : i + each] = x @ w.T
            reach[:, i : i + each] = size * np.linalg.norm(w, axis=1)
        return z, reach

    def _per_token(self, z: Array, reach: Array, r: Reading, at: Array) -> Array:
        """[2, B]: log-probabilities and tolerances."""
        rows, zeros = r.classes
        z, reach = z[:, :rows], reach[:, :rows]
        if self.bias is not None and r.bias:
            b = self.bias[:rows].astype(np.float64)
            z, reach = z + b, reach + np.abs(b)
        logits = transformed(z, r)
        error = 4 * FEW * np.abs(logits)
        if r.rounded:
            e0 = FEW * reach
            error += transformed(z + e0, r, 1) - transformed(z - e0, r, -1)
        else:
            error += FEW * r.logit_scale / r.temperature * reach
        to, inside = self.neighbours(at, r.shift)
        y, each = self.ids[to], np.arange(len(at))
        there, y = y < rows, np.minimum(y, rows - 1)
        narrow = self.filtered if r.kept is True else bool(r.kept)
        if narrow:
            logits = np.where(self._kept(logits, r, at, y), logits, -np.inf)
        z_y = np.where(there, logits[each, y], -np.inf)
        m = logits.max(axis=1)
        p = np.exp(logits - m[:, None])
        lse = m + np.log(p.sum(axis=1))
        mean_error = (p * error).sum(axis=1) / p.sum(axis=1)
        if zeros and not narrow:
            lse = np.logaddexp(lse, np.log(zeros))
        logprob = np.where(inside, z_y - lse, np.nan)  # -inf where the class does not take part
        sizes = np.abs(lse) + np.nan_to_num(np.abs(logprob), posinf=0.0) + 2
        tolerance = error[each, y] + mean_error + FEW * sizes
        if r.result:
            some = np.where(np.isfinite(logprob), logprob, 0.0)
            ends = (round_to(some + sign * tolerance, r.result) for sign in (1, -1))
            logprob, tolerance = round_to(logprob, r.result), np.subtract(*ends)
        return np.stack([logprob, tolerance])

    def _kept(self, z: Array, r: Reading, at: Array, y: Array) -> Array:
        """[B, V]: the classes of the softmax; all where a row of `kept_ids` has none. Of top-k and
        top-p the sampled class y is one, as rounding decides which is the last."""
        kept = np.ones(z.shape, np.bool_)
        top_k, top_p = r.kept if isinstance(r.kept, tuple) else (self.top_k, self.top_p)
        if self.kept_ids is not None and r.kept is True:
            ids = self.kept_ids[at]
            some = np.zeros((len(at), z.shape[1] + 1), np.bool_)  # the last one is padding's
            ends = (ids < 0) | (ids >= z.shape[1])
            np.put_along_axis(some, np.where(ends, z.shape[1], ids), values=True, axis=1)
            some = some[:, :-1]
            kept &= some | ~some.any(axis=1, keepdims=True)
        if top_k is not None and top_k < z.shape[1]:
            kept &= z >= np.partition(z, -top_k, axis=1)[:, -top_k, None]
        if top_p is not None:
            down = -np.sort(-np.where(kept, z, -np.inf), axis=1)
            p = np.exp(down - down[:, :1])
            above = np.cumsum(p, axis=1) - p  # of the classes before each
            last = (above < top_p * p.sum(axis=1, keepdims=True)).sum(axis=1) - 1
            kept &= z >= down[np.arange(len(at)), last, None]
        if top_k is not None or top_p is not None:
            kept[np.arange(len(at)), y] = True
        return kept


def transformed(z: Array, r: Reading, sign: int = 0) -> Array:
    """Logits as the softmax has them; `sign` moves what is rounded by a few u beforehand."""

    def rounded(x: Array) -> Array:
        return round_to(x + sign * FEW * np.abs(x), r.rounded[0]) if r.rounded else x

    def later(x: Array) -> Array:
        return rounded(x) if "each time" in r.rounded else x

    z = rounded(z)
    if r.logit_scale != 1.0:
        z = later(r.logit_scale * z)
    if r.softcap is not None:
        z = later(r.softcap * later(np.tanh(later(z / r.softcap))))
    return later(z / r.temperature) if r.temperature != 1.0 else z


def runs(number: int, most: int, length: int = 32) -> Array:
    """Up to `most` of so many positions, spread evenly in runs of neighbours."""
    if number <= most:
        return np.arange(number)
    first = np.linspace(0, number // length - 1, max(1, most // length)).astype(np.int64) * length
    return (first[:, None] + np.arange(min(length, most))).reshape(-1)


def rows_before_padding(weight: Array) -> int | None:
    """Rows before those at the end that are all equal, or zero: padding that nothing trains."""
    rows = len(weight) - 1
    while rows and (weight[rows - 1] == weight[-1]).all():
        rows -= 1
    padded = len(weight) - rows > 1 or not weight[-1].any()
    return rows if rows and padded else None
