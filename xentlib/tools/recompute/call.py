"""What a call of `chunked_nll` is made of, in the arrays of its framework, where they are.

Shapes: N tokens, M of them valid, V rows of the head that are here, H hidden width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from xentlib.contract import ROW_OF
from xentlib.reference.nll import divided_by
from xentlib.tools.harness.problems import Problem
from xentlib.ulp import bits_unequal, dtype_named, round_to

Array = Any  # of NumPy, or a tensor
# Of a CPU what its caches hold, and less than the 4 MiB from which NumPy asks for huge pages, which
# are new ones each time: a product took half as long again.
CHUNK_BYTES = {"cpu": 4_000_000}
CHUNK_ON_DEVICE = 512 << 20
# As `xentlib.reference.gradients` has it
FP16_EXPONENT = 11
# An error of a row that is orthogonal to one of them is not to the next.
PROBES = 4


class Kit:
    """What frameworks spell in ways of their own; this one is NumPy's."""

    xp: Any = np
    device = "cpu"

    def wide(self, x: Any) -> Array:
        return np.asarray(x).astype(np.float64, copy=False)

    def single(self, x: Any) -> Array:
        return np.asarray(x).astype(np.float32, copy=False)

    def whole(self, x: Any) -> Array:
        return np.asarray(x).astype(np.int64, copy=False)

    def operand(self, x: Any, dtype: str) -> Array:
        """As the products take it: rounded once to their dtype."""
        if dtype not in ROW_OF or x.dtype.name == dtype:
            return x
        return round_to(x, dtype).astype(dtype_named(dtype))

    def product(self, w: Array, x: Array, minus: Array | None) -> Array:
        """w x.T, less a number for each row of x, in float32, of operands as they are."""
        product: Array = self.single(w) @ self.single(x).T
        return product if minus is None else product - minus

    def narrow(self, x: Array, y: Array) -> Array:
        """x y in float32, of a y of few columns."""
        product: Array = self.wide(x @ self.single(y))
        return product

    def norms(self, x: Array) -> Array:
        return self.wide(np.linalg.norm(self.single(x), axis=1))

    def add_at(self, x: Array, rows: Array, added: Array) -> None:
        np.add.at(x, rows, added)

    def array(self, x: Any) -> Array:
        """Of NumPy's."""
        return x

    def host(self, x: Any) -> Any:
        return np.asarray(x)

    def zeros(self, *shape: int) -> Array:
        return np.zeros(shape)

    def signs(self, rows: int, random: Any) -> Array:
        return self.array(random.choice([-1.0, 1.0], (rows, PROBES)))

    def not_zero(self, x: Array) -> int:
        """How many entries are not +0."""
        return bits_unequal(x, np.zeros_like(x))

    def precise(self) -> AbstractContextManager[Any]:
        return np.errstate(all="ignore")


class Ranks:
    """Who has what of a call; of this one nobody has anything.

    `start` is the class of the first of `size` rows that are recomputed here, out of `vocab_size`;
    `local`, of these, those whose gradient is here.
    """

    start, size, vocab_size = 0, 0, 0  # 0: as many as there are
    local = slice(None)
    others = False  # whether other ranks have tokens of their own
    whole_a = True  # whether d A of a low-rank part is of the tokens that are summed

    def sum(self, x: Array) -> Array:
        """Over those that have the others' rows."""
        return x

    def largest(self, x: Array) -> Array:
        return x

    def agreed(self, x: Array) -> Array:
        """The largest of all whose collectives are to meet."""
        return x

    def hidden(self, d_hidden: Array) -> Array:
        """d hidden of all rows, where the call returns that."""
        return d_hidden

    def together(self, x: Array) -> Array:
        """Of d weight, of the tokens of all ranks."""
        return x

    def gathered(self, x: Array) -> Array:
        """The rows that are recomputed, of those that are here."""
        return x if x is None or not self.size else x[: self.size]


class Returned(NamedTuple):
    """What the call has returned: [], [], [N] and [N]."""

    loss: Array
    num_tokens: Array
    logprobs: Array
    lse: Array


class LowRank(NamedTuple):
    """Of a head's low-rank part: A [R, H], B [V, R], the mask of the hidden states that A has, [N,
    H] or None, and the factor."""

    a: Array
    b: Array
    keep: Array | None
    scale: float


class Call:
    """The arguments of a call, per valid token or row; 1 for an upstream gradient."""

    kit: Kit
    xp: Any
    gemm_dtype: str
    ranks: Ranks
    given_low: LowRank | None

    def read(
        self,
        problem: Problem,
        returned: Returned,
        *,
        ignore_index: int = -100,
        logit_scale: Any = 1.0,
        softcap: float | None = None,
        temperature: Any = 1.0,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        denominator: Any = None,
        weight_layout: str = "VH",
        compute_dtype: str = "",
    ) -> None:
        kit, xp = self.kit, self.xp
        w = problem.weight.T if weight_layout == "HV" else problem.weight
        self.w = self.ranks.gathered(kit.operand(w, self.gemm_dtype))
        self.size = len(self.w)
        self.vocab_size = self.ranks.vocab_size or self.size
        every = kit.whole(problem.labels)
        valid = every != ignore_index
        if problem.where is not None:
            valid = valid & problem.where
        self.valid = np.flatnonzero(kit.host(valid))
        self.invalid = np.flatnonzero(~kit.host(valid))
        self.count = len(problem.labels)
        at = kit.array(self.valid)
        self.x = kit.operand(problem.hidden[at], self.gemm_dtype)
        labels = every[at] - self.ranks.start
        self.owned = (labels >= 0) & (labels < self.size)
        self.columns = xp.where(self.owned, labels, 0)
        self.lse, self.logprobs = (kit.wide(x[at]) for x in (returned.lse, returned.logprobs))
        self.loss, self.num_tokens = kit.host(returned.loss), kit.host(returned.num_tokens)
        bias = self.ranks.gathered(problem.bias)
        self.bias = None if bias is None else kit.wide(bias)
        ones = kit.array(np.ones(len(self.valid)))
        self.weights = ones
        if problem.token_weights is not None:
            self.weights = kit.wide(problem.token_weights[at])
        self.scale = float(kit.host(logit_scale))
        given: Any = temperature if np.ndim(temperature) else float(kit.host(temperature))
        per_token = np.ndim(temperature) > 0
        self.temperature = kit.wide(given[at]) if per_token else given * ones
        self.per_token = per_token or self.scale != 1.0 or given != 1.0
        self.outer = (self.scale / self.temperature)[:, None]
        self.softcap, self.smoothing, self.z_loss = softcap, label_smoothing, float(z_loss)
        if softcap is not None:
            self.softcap = float(kit.host(softcap))
        self.class_weights, self.of_label = None, ones
        self.total = float(self.vocab_size)
        if problem.class_weights is not None:
            of_class = kit.wide(problem.class_weights)
            self.total = float(kit.host(of_class.sum()))
            self.of_label = of_class[every[at]]
            self.class_weights = of_class[self.ranks.start : self.ranks.start + self.size]
        weight_sum = float(kit.host((self.weights * self.of_label).sum()))
        divisor = None if denominator is None else kit.host(denominator)
        self.divisor = divided_by(len(self.valid), weight_sum, reduction, divisor)
        self.factor = (self.weights / self.divisor)[:, None]
        self.uniform = label_smoothing / self.vocab_size
        self.slope = (1 - label_smoothing) * self.of_label + self.uniform * self.total
        self.slope = (self.slope + 2 * self.z_loss * self.lse)[:, None]
        self.extra = 2 * self.z_loss * self.lse + self.uniform * (self.total - self.of_label)
        self.hidden_size = self.x.shape[1]
        self.norms = kit.norms(self.x), kit.norms(self.w)
        self.hidden_norm = self.norms[0]
        if self.given_low is not None:
            self.widen(self.given_low, at)
        peaks = (float(kit.host(x.max())) if len(x) else 0.0 for x in self.norms)
        self.peak_hidden, self.peak_weight = peaks
        bad = not np.isfinite([self.peak_hidden, self.peak_weight]).all()
        bad = self.ranks.agreed(kit.array(np.array([float(bad)])))
        self.finite = not float(kit.host(bad)[0])
        largest = float(kit.host(xp.abs(self.factor).max())) if len(self.valid) else 1.0
        self.power = 1.0
        if self.gemm_dtype == "float16" and largest:
            self.power = float(np.ldexp(1.0, FP16_EXPONENT - int(np.frexp(largest)[1])))

    def widen(self, low: LowRank, at: Array) -> None:
        """A low-rank part is more columns: u = s x A.T of the hidden states, B of the head."""
        kit, xp = self.kit, self.xp
        self.a = kit.wide(low.a) * low.scale
        self.keep = None if low.keep is None else low.keep[at]
        x = kit.wide(self.x)
        x = x if self.keep is None else xp.where(self.keep, x, 0.0)
        self.low_x, b = x, self.ranks.gathered(low.b)
        self.low_size = xp.abs(x) @ xp.abs(self.a).T  # what its errors are in units of
        self.x = xp.concatenate([kit.wide(self.x), x @ self.a.T], 1)
        self.w = xp.concatenate([kit.single(self.w), kit.single(b)], 1)
        squares = self.norms[0] ** 2 + (self.low_size**2).sum(1)
        self.norms = xp.sqrt(squares), kit.norms(self.w)

    def sizes(self, part: Any) -> Array:
        """[T, H] of hidden states, what their products' errors are in units of."""
        x = self.xp.abs(self.kit.wide(self.x[part]))
        if self.given_low is None:
            return x
        return self.xp.concatenate([x[:, : self.hidden_size], self.low_size[part]], 1)

    def narrowed(self, x: Array, part: Any, *, absolute: bool) -> Array:
        """d hidden of what `widen` made, or its error."""
        if self.given_low is None:
            return x
        of_low = x[:, self.hidden_size :] @ (self.xp.abs(self.a) if absolute else self.a)
        if self.keep is not None:
            of_low = self.xp.where(self.keep[part], of_low, 0.0)
        return x[:, : self.hidden_size] + of_low

    def blocks(self, count: int, row: int, item: int = 8, most: int = 0) -> list[slice]:
        """Of `count` rows of so many numbers."""
        most = most or CHUNK_BYTES.get(self.kit.device, CHUNK_ON_DEVICE)
        size = max(1, most // (item * max(1, row)))
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]
