"""All tokens, and all rows of d weight, in float32: each row as its products with `PROBES` vectors
of signs. An error e of a row is in each of them |e| times a number of about 1, so that one product
N V H, half as much as d hidden and d weight take, covers every row of the vocabulary.

Shapes: N tokens, M of them valid, V rows of the head that are here, H hidden width, P probes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xentlib.contract import ROW_OF, U
from xentlib.tools.recompute.call import PROBES, Array, Call
from xentlib.ulp import FORMATS

# Tokens of a product that is summed in float32
DEPTH = 1024
# Probabilities are this power of e larger, as their squares else are below float32's least.
SHIFT = 31.0
SMALL = 30.0  # logits whose exponentials, and their squares, float32 has
# Of a unit in the last place of 16 bits, what one rounding counts for: at 0.125 the worst of
# 400,000 products with probes was 6.4 times its bound, and 8 is allowed.
ROUNDED = 0.1875


class Probes(Call):
    """The float32 part of `Recomputed`."""

    random: Any
    of_rows: Any
    low: bool

    def every_row(self, needs_head: bool) -> None:
        """Of each valid token the sum of its probabilities and its label's logit; of each row of d
        weight its products with the probes, and what rounding moves these by.

        The relative error of an entry of dz is alpha + beta |w|, in units of u: beta |w| of the
        products for z, which are below |x| |w|, alpha of lse, exp and the sum over tokens. Errors
        of tokens are independent of each other, so they add up in quadrature.
        """
        kit, xp = self.kit, self.xp
        count, width = self.x.shape
        x_norm, w_norm = self.norms
        hidden_norm = self.hidden_norm
        self.signs = kit.signs(width, self.of_rows)
        self.probes = {"weight": slice(PROBES), "low_out": slice(PROBES, 2 * PROBES)}
        probes = PROBES
        if self.given_low is not None:  # d weight and d B apart
            signs, probes = self.signs, 2 * PROBES
            self.signs = xp.concatenate([signs, signs], 1)
            self.signs[self.hidden_size :, :PROBES] = 0.0
            self.signs[: self.hidden_size, PROBES:] = 0.0
            self.du, self.du_spread, of_uniform = (
                kit.zeros(count, width - self.hidden_size) for _ in range(3)
            )
        self.probes["bias"] = slice(probes, None)
        # A product with signs is about as large as the row's norm: one spread for each gradient.
        groups = ["weight"] + ["low_out"] * (self.given_low is not None)
        groups += ["bias"] * (self.bias is not None)
        self.spreads = {name: k for k, name in enumerate(groups)}
        columns_of = probes + (self.bias is not None)
        self.sums, self.mean_norm, self.mean_logp = (kit.zeros(count) for _ in range(3))
        self.own, own_slope = kit.zeros(count), kit.zeros(count) + 1.0
        self.probed = kit.zeros(self.size, columns_of)
        spread, added = (kit.zeros(self.size, len(groups)) for _ in range(2))
        size = abs(self.scale) * x_norm
        beta, alpha = size / self.temperature, 8.0 + xp.abs(self.lse)
        if self.softcap is not None:
            beta, alpha = beta + 4 * size / self.softcap, alpha + 6
        if self.z_loss:
            slope = xp.abs(self.slope[:, 0])
            share = 2 * self.z_loss * (beta * float(kit.host(w_norm.max())) + xp.abs(self.lse))
            alpha = alpha + share / xp.where(slope > 0, slope, 1.0)
        self.of_logit, self.of_token = beta, alpha
        alpha = alpha + float(np.sqrt(count)) / 2
        if self.low:
            alpha = alpha + ROUNDED * 2.0 ** -FORMATS[self.gemm_dtype][0] / U
        factor = self.factor * self.outer
        by_factor = kit.zeros(count, columns_of)
        squares = kit.zeros(count, len(groups)) + 1.0
        by_slope = errors = by_factor
        if needs_head:
            for part in self.blocks(count, width):
                by_factor[part, :probes] = kit.narrow(kit.single(self.x[part]), self.signs)
            by_factor[:, probes:] = 1.0
            squares[:, 0] = hidden_norm**2
            if self.given_low is not None:
                squares[:, 1] = x_norm**2 - hidden_norm**2
            # float16 ends, so that dz there has an error that does not depend on its size.
            least = 0.0
            if self.gemm_dtype == "float16":
                bits, exponent = FORMATS["float16"]
                least = ROUNDED * 2.0 ** (exponent - bits) / self.power / U
            spread += squares.sum(0) * least**2
            by_factor = by_factor * factor
            by_slope = by_factor * self.slope
            # Of rows that are no longer than the mean; a longer one has so much more.
            mean = float(kit.host(w_norm.mean())) or 1.0
            # Not clip, which has no `min` in NumPy 2.0.
            self.longer = xp.where(w_norm < mean, 1.0, w_norm / mean)
            errors = (factor * self.slope * (alpha + beta * mean)[:, None]) ** 2 * squares
        shifted = kit.single(self.lse - SHIFT)
        small = float(np.exp(-SHIFT))
        # Of small logits the factor of a token is put into what they meet: to take lse from them
        # MKL copies it to all of them first.
        plain = self.bias is None and not self.per_token and self.softcap is None
        plain = plain and not self.smoothing and self.given_low is None
        of_token = kit.zeros(count) + 1.0
        small_logits = plain and self.peak_hidden * self.peak_weight <= SMALL
        if small_logits:
            of_token = xp.exp(SHIFT - self.lse)
            shifted = shifted * 0
            by_slope = by_slope * of_token[:, None]
        of_blocks = errors * of_token[:, None] ** 2
        unit = (float(kit.host(of_blocks.max())) if count and needs_head else 0.0) or 1.0
        outer = None if not self.per_token else kit.single(self.outer[:, 0])
        temperature = kit.single(self.temperature)
        bias = None if self.bias is None else kit.single(self.bias)[:, None]
        both = xp.stack([kit.single(w_norm) * 0 + 1, kit.single(w_norm)])
        weights = both[:1] if self.class_weights is None else kit.single(self.class_weights)[None]
        for part in self.blocks(count, 1, most=8 * DEPTH):
            x, minus = self.x[part], shifted[part]
            columns, owned = self.columns[part], self.owned[part]
            for block in self.blocks(self.size, len(x), 4):
                w, jacobian = self.w[block], None
                direct = bias is None and outer is None and self.softcap is None
                z = kit.product(w, x, minus if direct and not small_logits else None)
                if bias is not None:
                    z += bias[block]
                if self.softcap is not None:
                    z *= self.scale / self.softcap
                    e = xp.exp(-2 * xp.abs(z))
                    jacobian = 4 * e / (1 + e) ** 2
                    z = self.softcap * xp.tanh(z)
                    z /= temperature[part]
                elif outer is not None:
                    z *= outer[part]
                if not direct:
                    z -= minus
                here = owned & (columns >= block.start) & (columns < block.stop)
                at = kit.array(np.flatnonzero(kit.host(here)))
                label = columns[at] - block.start
                places = at + part.start
                self.own[places] = kit.wide(z[label, at]) + kit.wide(minus[at])
                if jacobian is not None:
                    own_slope[places] = kit.wide(jacobian[label, at])
                if self.smoothing:
                    of_class = weights[:, block] if weights.shape[1] > 1 else weights
                    self.mean_logp[part] += kit.wide((of_class @ z)[0])
                p = xp.exp(z, out=z)
                sums, norms = kit.wide(both[:, block] @ p)
                self.sums[part] += sums * of_token[part]
                self.mean_norm[part] += norms * of_token[part]
                if not needs_head:
                    continue
                if jacobian is not None:
                    p *= jacobian
                    if self.uniform:
                        moved = kit.narrow(jacobian, by_factor[part])
                        self.probed[block] -= self.of_class(block) * moved / small
                self.probed[block] += kit.narrow(p, by_slope[part])
                b = None
                if self.given_low is not None:
                    b = w[:, self.hidden_size :]
                    self.du[part] += kit.narrow(p.T, b)
                    if self.uniform:
                        of_class = self.of_class(block) * kit.wide(b)
                        moved = of_class.sum(0)
                        if jacobian is not None:
                            moved = kit.narrow(jacobian.T, of_class)
                        of_uniform[part] += moved
                p *= p
                if b is not None:
                    self.du_spread[part] += kit.narrow(p.T, b * b)
                added[block] += kit.narrow(p, of_blocks[part] / unit)
        sums = (self.sums * small, self.own, self.mean_norm * small)
        self.sums, self.own, self.mean_norm = map(self.ranks.sum, sums)
        # What was summed is SHIFT larger.
        self.mean_logp = self.ranks.sum(self.mean_logp) - SHIFT * self.total
        self.mean_a = (self.of_logit * self.mean_norm)[:, None]
        if needs_head:
            self.probed, added = self.probed * small, added * (unit * small * small)
            spread += added
            if self.given_low is not None:
                by = factor * self.slope
                self.du = by * self.du * small - factor * of_uniform
                self.du_spread = by**2 * self.du_spread * small * small + self.du**2
                self.du_spread += (kit.wide(self.w[:, self.hidden_size :]) ** 2).sum(0) * (
                    (least / alpha[:, None]) ** 2
                )
                self.of_du = alpha + beta * self.peak_weight
            self.add_labels(by_factor, errors, spread, own_slope)

    def of_class(self, rows: slice) -> Array:
        """[rows, 1] of the uniform part of dz, or a number."""
        weights = self.class_weights
        return self.uniform if weights is None else self.uniform * weights[rows][:, None]

    def add_labels(self, by_factor: Array, errors: Array, spread: Array, own_slope: Array) -> None:
        """What the labels' entries have in place of those that were added."""
        kit, xp, weights = self.kit, self.xp, self.class_weights
        at = kit.array(np.flatnonzero(kit.host(self.owned)))
        columns = self.columns[at]
        if self.uniform:
            uniform = self.of_class(slice(None))
            if self.softcap is None:
                self.probed -= uniform * by_factor.sum(0)
            most = 1.0 if weights is None else float(kit.host(xp.abs(weights).max()))
            least = xp.abs(self.slope)
            least = xp.where(least > 0, least, 1.0)
            spread += (errors * (2 * self.uniform * most / least) ** 2).sum(0)
        slope = self.slope[:, 0]
        own = self.extra + slope * xp.expm1(self.logprobs)
        added = own - slope * xp.exp(self.own - self.lse)
        added = added + self.uniform * (1.0 if weights is None else self.of_label)
        kit.add_at(self.probed, columns, ((added * own_slope)[:, None] * by_factor)[at])
        share = own * own_slope / xp.where(slope == 0, 1.0, slope)
        kit.add_at(spread, columns, (share[:, None] ** 2 * errors)[at])
        if self.given_low is not None:
            b = kit.wide(self.w[columns])[:, self.hidden_size :]
            factor = self.factor * self.outer
            self.du[at] += ((added * own_slope)[:, None] * factor)[at] * b
            self.du_spread[at] += (((own * own_slope)[:, None] * factor)[at] * b) ** 2
        own = self.ranks.local
        self.probed = self.ranks.together(self.probed)[own]
        self.spread = self.ranks.together(spread)[own]
        self.longer = self.longer[own]

    def of_tokens(self) -> dict[str, tuple[Any, Any, Any]]:
        """Of what all tokens have: what was returned, what is right, and its bound in u."""
        kit, xp = self.kit, self.xp
        moved = self.of_token + self.of_logit * self.mean_norm
        label = xp.where(self.owned, self.norms[1][self.columns], 0.0)
        own = self.of_token + xp.abs(self.logprobs) + self.of_logit * self.ranks.sum(label)
        right = self.own - self.lse
        held = {
            "lse of all tokens": (xp.log(self.sums), self.lse * 0, moved),
            "log-probability of all tokens": (self.logprobs, right, own),
        }
        return {name: (*map(kit.host, three),) for name, three in held.items()}

    @property
    def loss_of_tokens(self) -> tuple[float, float]:
        """The loss as the sum of the call's own numbers of all tokens, and its scale."""
        nll = -(1 - self.smoothing) * self.of_label * self.logprobs
        if self.smoothing:
            nll = nll - self.smoothing * self.mean_logp / self.vocab_size
        terms = self.factor[:, 0] * (nll + self.z_loss * self.lse * self.lse)
        total, scale = float(self.kit.host(terms.sum())), self.xp.abs(terms).sum()
        # What the float32 sum over the vocabulary moves, of smoothing.
        spread = 0.0
        if self.smoothing:
            moved = self.factor[:, 0] * self.smoothing * (self.of_token + self.of_logit)
            spread = float(self.kit.host(self.xp.sqrt((moved**2).sum())))
        return total, float(self.kit.host(scale)) + spread

    def probe(self, name: str, gradient: Array, upstream: float, lost: float) -> tuple[float, int]:
        """By how many times its bound the worst row of d weight [V, H] is off, and which that is;
        of d bias [V] the same."""
        kit, xp = self.kit, self.xp
        of_bias, places = gradient.ndim == 1, self.probes[name]
        signs = self.signs[: self.hidden_size]
        if name == "low_out":
            signs = self.signs[self.hidden_size :]
        signs = signs[:, places]
        count, width = len(self.valid), 1 if of_bias else gradient.shape[1]
        own = float(np.sqrt(count) + np.sqrt(width)) / 2 * U
        dtype = str(gradient.dtype).removeprefix("torch.")
        if dtype in ROW_OF:
            bits, least = FORMATS[dtype]
            own += ROUNDED * 2.0**-bits
            lost += ROUNDED * 2.0 ** (least - bits) / float(np.sqrt(width))
        worst, row = 0.0, 0
        with kit.precise():
            spread = self.spread[:, self.spreads[name]] ** 0.5
            bound = (spread * self.longer)[:, None] * (U * abs(upstream))
            for some in self.blocks(len(self.probed), width):
                g = gradient[some]
                g = g[:, None] if of_bias else g
                norm = kit.norms(g)[:, None]
                products = kit.wide(g) if of_bias else kit.narrow(kit.single(g), signs)
                gap = xp.abs(products - upstream * self.probed[some][:, places])
                ratio = gap / (bound[some] + own * norm + lost * width)
                ratio = xp.where(gap == 0, 0.0, ratio)
                ratio = xp.where(ratio >= 0, ratio, np.inf)  # NaN is no number
                if dtype == "float16":  # beyond its largest number, of which the samples know
                    ratio = xp.where(norm == np.inf, 0.0, ratio)
                largest = kit.host(xp.amax(ratio, 1))
                if largest.size and largest.max() > worst:
                    worst, row = float(largest.max()), some.start + int(largest.argmax())
        return worst, row

    def low_in(self, gradient: Array, upstream: float) -> tuple[float, int]:
        """The same of d A [R, H], entry by entry."""
        kit, xp, low = self.kit, self.xp, self.given_low
        assert low is not None
        with kit.precise():
            add = self.ranks.together
            value = add((self.du * low.scale).T @ self.low_x)
            errors = (self.of_du**2)[:, None] * self.du_spread * low.scale**2
            count = add(kit.array(np.ones(1) * len(self.valid)))
            bound = xp.sqrt(add(errors.T @ self.low_x**2)) + xp.sqrt(count) / 2 * xp.abs(value)
            dtype = str(gradient.dtype).removeprefix("torch.")
            if dtype in ROW_OF:
                bits, least = FORMATS[dtype]
                bound = bound + ROUNDED * 2.0**-bits / U * xp.abs(value)
                bound = bound + ROUNDED * 2.0 ** (least - bits) / U / abs(upstream)
            gap = xp.abs(kit.wide(gradient) - upstream * value)
            ratio = kit.host(gap / (bound * U * abs(upstream)))
        ratio[kit.host(gap) == 0] = 0.0
        ratio[np.isnan(ratio)] = np.inf
        worst = ratio.max(1)
        return float(worst.max()), int(worst.argmax())
