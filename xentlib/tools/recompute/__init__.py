"""A call of `chunked_nll` computed a second time, on its device, in the arrays of its framework.

Some tokens and some rows of d weight are in float64, entry by entry, with the running error bounds
of `xentlib.reference`; all tokens and all rows in float32, as `probes.py` says.

Shapes: N tokens, M of them valid, K compared, V rows of the head that are here, R of them compared,
H hidden width, T tokens of a chunk.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from xentlib.contract import ROW_OF
from xentlib.tools.harness.problems import Problem
from xentlib.tools.recompute.call import Array, Kit, LowRank, Ranks, Returned
from xentlib.tools.recompute.probes import Probes
from xentlib.ulp import FORMATS

TOKENS = 64  # at a time, of those that are compared


class Sample(NamedTuple):
    """Some rows of a gradient, of an upstream gradient of 1, on the host."""

    value: Any
    bound: Any
    magnitude: Any


class Recomputed(Probes):
    """See the head of this file. `problem` has arrays of the framework; nothing of it is kept."""

    def __init__(
        self,
        kit: Kit,
        problem: Problem,
        gemm_dtype: str,
        returned: Returned,
        *,
        tokens: int | None = None,
        rows: int | None = None,
        random: tuple[Any, Any],
        ranks: Ranks | None = None,
        needs_head: bool = True,
        low: LowRank | None = None,
    ) -> None:
        """`tokens`, `rows`: how many are compared entry by entry, None for all."""
        self.kit, self.xp, self.gemm_dtype = kit, kit.xp, gemm_dtype
        self.low = gemm_dtype in ROW_OF
        self.ranks, self.given_low = ranks or Ranks(), low
        # What is drawn of rows is the same on all ranks, whatever tokens they have.
        self.random, self.of_rows = random
        with kit.precise():
            self.read(problem, returned, **problem.options)
            if self.finite:
                self.every_row(needs_head)
                self.some_tokens(tokens)
                if needs_head:
                    self.some_rows(rows)
        del self.x, self.w

    def logits(self, z: Array, a: Array, part: Any) -> tuple[Array, Array, Array | None, Any]:
        """Step 2 of products `z` and their error `a`, in units of u, as the oracle has them; the
        derivative of the softcap, and its error."""
        xp = self.xp
        if not self.per_token and self.softcap is None and self.bias is None:
            return z, a, None, 0.0
        z = z * self.scale
        a = abs(self.scale) * a + (xp.abs(z) if self.scale != 1 else 0.0)
        jacobian, error = None, 0.0
        if self.softcap is not None:
            inner = xp.abs(z / self.softcap)
            t = xp.tanh(z / self.softcap)
            e = xp.exp(-2 * inner)
            jacobian = 4 * e / (1 + e) ** 2
            error = jacobian * (2 * xp.abs(t) * (a / self.softcap + inner) + 6)
            a = jacobian * a + 3 * self.softcap * xp.abs(t)
            z = self.softcap * t
        temperature = self.temperature[part][:, None]
        z = z / temperature
        if self.per_token:
            a = a / temperature + xp.abs(z)
        return z, xp.where(xp.isfinite(z), a, 0.0), jacobian, error

    def dz(self, z: Array, a: Array, s: Any, part: Any) -> tuple[Array, Array, Array]:
        """dz, as the products take it, and its error bound in units of u. `s`: per token and with
        an axis more lse, logprob, p_rest, mean_a; `own`, where the label's entries are; and the
        derivative of the softcap."""
        xp = self.xp
        p = xp.exp(z - s.lse)
        slope, factor, outer = self.slope[part], self.factor[part], self.outer[part]
        steps = a + s.mean_a + xp.abs(s.lse) + 2
        steps = steps + xp.where(p > 0, xp.abs(z - s.lse), 0.0)
        rest = xp.where(s.own, s.p_rest, p)
        error = xp.abs(slope) * (p * steps + 2 * rest)
        slope_error = 2 * self.z_loss * (s.mean_a + xp.abs(s.lse))
        if s.weights is not None:
            slope_error = slope_error + 3 * xp.abs(slope)
        of_class = self.uniform * (1.0 if s.weights is None else s.weights)
        error = error + p * slope_error + 2 * of_class
        dz = xp.where(s.own, self.extra[part][:, None] - slope * s.p_rest, p * slope - of_class)
        dz = factor * dz
        error = xp.abs(outer * factor) * error
        if s.jacobian is not None:
            error = error * s.jacobian + xp.abs(outer * dz) * s.jacobian_error
            dz = dz * s.jacobian
        dz = dz * outer
        taken = self.rounded(dz * self.power) / self.power if self.low else dz
        return dz, taken, error + xp.abs(dz)

    def rounded(self, x: Array) -> Array:
        """Once to the products' dtype, by Veltkamp's splitting; float16 ends at 2^-24."""
        bits, least = FORMATS[self.gemm_dtype]
        c = x * (2.0 ** (52 - bits) + 1.0)
        r = c - (c - x)
        if self.gemm_dtype == "float16":
            shift = 1.5 * 2.0 ** (52 + least - bits)
            r = self.xp.where(self.xp.abs(x) < 2.0**least, (x + shift) - shift, r)
        return r

    def some_tokens(self, tokens: int | None) -> None:
        """Log-probabilities and d hidden of K tokens."""
        kit, xp = self.kit, self.xp
        among = np.arange(len(self.valid))
        if tokens is not None and tokens < len(among):
            among = np.sort(self.random.choice(among, tokens, replace=False))
        self.among, self.places = among, self.valid[among]
        among = kit.array(among)
        columns = self.blocks(self.size, self.w.shape[1], 16)
        compared: list[list[Any]] = [[], [], [], [], []]
        for some in self.blocks(len(self.places), 1, most=8 * TOKENS):
            part = among[some]
            x = kit.wide(self.x[part])
            size = kit.single(self.sizes(part))
            z, a = kit.zeros(len(x), self.size), kit.zeros(len(x), self.size)
            for block in columns:
                w = kit.wide(self.w[block])
                z[:, block] = x @ w.T
                a[:, block] = kit.wide(size @ xp.abs(kit.single(self.w[block])).T)
            if self.bias is not None:
                z = z + self.bias
                a = a + xp.abs(xp.where(xp.isfinite(self.bias), self.bias, 0.0))
            z, a, jacobian, jacobian_error = self.logits(z, a, part)
            at, label, owned = kit.array(np.arange(len(x))), self.columns[part], self.owned[part]
            z_y = self.ranks.sum(xp.where(owned, z[at, label], 0.0))
            m = self.ranks.largest(xp.amax(z, 1))
            e = xp.exp(z - m[:, None])
            e_y = xp.exp(z_y - m)
            e[at, label] = xp.where(owned, 0.0, e[at, label])
            r = self.ranks.sum(e.sum(1))
            total = r + e_y
            log_total = xp.where(z_y == m, xp.log1p(r), xp.log(total))
            lse = m + log_total
            logprob = xp.where(z_y == m, -log_total, (z_y - m) - log_total)
            p = e / total[:, None]
            p[at, label] = xp.where(owned, e_y / total, p[at, label])
            own = p < 0  # nowhere yet
            own[at, label] = owned
            mean_a = self.ranks.sum((p * a).sum(1))
            a_y = self.ranks.sum(xp.where(owned, a[at, label], 0.0))
            moved = a_y + mean_a + xp.abs(logprob) + xp.abs(log_total) + 2
            s = SimpleNamespace(
                lse=lse[:, None],
                p_rest=(r / total)[:, None],
                mean_a=mean_a[:, None],
                own=own,
                weights=self.class_weights,
                jacobian=jacobian,
                jacobian_error=jacobian_error,
            )
            del e, p
            _, dz, error = self.dz(z, a, s, part)
            d_x = [kit.zeros(*x.shape) for _ in range(3)]
            error, terms = kit.single(error), kit.single(xp.abs(dz))
            for block in columns:
                w = kit.wide(self.w[block])
                size = xp.abs(kit.single(self.w[block]))
                d_x[0] += dz[:, block] @ w
                d_x[1] += kit.wide(error[:, block] @ size)
                if self.low:
                    d_x[2] += kit.wide(terms[:, block] @ size)
            d_x = [self.narrowed(y, part, absolute=k > 0) for k, y in enumerate(d_x)]
            d_x = [self.ranks.hidden(y) for y in d_x]
            for into, y in zip(compared, (logprob, moved, *d_x), strict=True):
                into.append(kit.host(y))
        width = self.hidden_size
        if not compared[0]:
            compared = [[np.zeros(0)]] * 2 + [[np.zeros((0, width))]] * 3
        logprob, moved, *d_hidden = (np.concatenate(x) for x in compared)
        self.sampled_logprobs = Sample(logprob, moved, np.abs(logprob) + moved)
        self.d_hidden = Sample(*d_hidden)
        self.logits_logprobs = kit.host(self.logprobs[among])

    def some_rows(self, rows: int | None) -> None:
        """R rows of d weight and d bias, from the call's own lse: the labels of the compared tokens
        among them."""
        kit, xp = self.kit, self.xp
        chosen = np.arange(self.size)
        if rows is not None and rows < self.size:
            chosen = self.of_rows.choice(self.size, rows, replace=False)
            if not self.ranks.others:
                columns, owned = (kit.host(x)[self.among] for x in (self.columns, self.owned))
                chosen = np.union1d(chosen, self.of_rows.permutation(columns[owned])[:rows])
        first, last, _ = self.ranks.local.indices(self.size)
        here = (chosen >= first) & (chosen < last)
        self.rows = chosen[here] - first  # of the gradient
        width, wide = self.x.shape[1], [[], [], []]  # type: ignore[var-annotated]
        bias: list[list[Any]] = [[], [], []]
        for some in self.blocks(len(chosen), width):
            of = kit.array(chosen[some])
            w = kit.wide(self.w[of])
            w_size = kit.single(xp.abs(w))
            sums = [kit.zeros(len(w), width) for _ in wide]
            bias_sums = [kit.zeros(len(w)) for _ in bias]
            for part in self.blocks(len(self.valid), 8 * len(w)):
                x = kit.wide(self.x[part])
                size = self.sizes(part)
                z, a = x @ w.T, kit.wide(kit.single(size) @ w_size.T)
                if self.bias is not None:
                    b = self.bias[of]
                    z, a = z + b, a + xp.abs(xp.where(xp.isfinite(b), b, 0.0))
                z, a, jacobian, jacobian_error = self.logits(z, a, part)
                own = self.owned[part][:, None] & (self.columns[part][:, None] == of)
                s = SimpleNamespace(
                    lse=self.lse[part][:, None],
                    p_rest=-xp.expm1(self.logprobs[part][:, None]),
                    mean_a=self.mean_a[part],
                    own=own,
                    weights=None if self.class_weights is None else self.class_weights[of],
                    jacobian=jacobian,
                    jacobian_error=jacobian_error,
                )
                exact, dz, error = self.dz(z, a, s, part)
                sums[0] += dz.T @ x
                sums[1] += error.T @ size
                sums[2] += xp.abs(dz).T @ size
                for k, y in enumerate((exact, error, xp.abs(exact))):
                    bias_sums[k] = bias_sums[k] + y.sum(0)
            for into, y in zip((*wide, *bias), (*sums, *bias_sums), strict=True):
                into.append(kit.host(self.ranks.together(y)))
        every = [np.concatenate(x)[here] for x in wide]
        self.d_weight = Sample(*(x[:, : self.hidden_size] for x in every))
        self.d_low_out = Sample(*(x[:, self.hidden_size :] for x in every))
        self.d_bias = Sample(*(np.concatenate(x)[here] for x in bias))
