"""The numbers of any reading of one problem, in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xentlib.reference import divergence_reference
from xentlib.tools.audit.hypotheses import (
    DIVERGENCE,
    ENTROPY,
    LABELS,
    SHIFTS,
    SOFTMAX,
    UNIFORM,
    Z_LOSS,
    Head,
    Hypothesis,
    Labelled,
    Numbers,
)
from xentlib.tools.audit.problem import IGNORE, Array, Problem


class Unit(NamedTuple):
    """Of a term whose factor is 1: d logits of every token, and the loss."""

    dz: Array  # [N, V]
    value: Array  # [N]


class Oracle:
    """The numbers of any reading of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.each = problem.kind == "logprobs"  # values of every token, and no sum of them
        x = problem.hidden.reshape(-1, problem.hidden.shape[-1]).astype(np.float64)
        self.x = np.where(np.isfinite(x), x, 0.0)  # which is of padding
        self.w = problem.weight.astype(np.float64)
        self.count = 1.0 if self.each else float(problem.count)
        self.units: dict[Head, dict[str, Unit]] = {}
        self.classes = _classes(problem)
        self.choices: dict[str, Any] = {}  # of readings, by axis, as they are worked out
        self.groups: dict[Any, Array] = {}
        # What readings that differ in their terms alone share: under the ids of their arrays of
        # labels, and with these, so that no other array gets the id.
        self.token_weights: dict[Any, tuple[Labelled, Array]] = {}
        self.label_masks: dict[int, tuple[Labelled, list[tuple[str, Array]]]] = {}
        options = problem.options
        self.declared = [
            LABELS[0] if problem.teacher is None else DIVERGENCE,
            *[UNIFORM] * bool(options.label_smoothing),
            *[Z_LOSS] * bool(options.z_loss),
            *[ENTROPY] * (self.each and options.entropy),
        ]

    def numbers(self, reading: Hypothesis) -> Numbers:
        """The step's numbers under a reading, without d hidden."""
        factors, units = self.factors(reading), self.units_of(reading.head)
        x = reading.head.round(self.x, "operands")
        d_weights, d_biases = [], []
        for r in range(self.problem.ranks):
            dz = reading.head.round(_combined(factors, units, r), "gradient")
            d_weights.append(reading.head.round(self._summed(dz, x, reading.head), "result"))
            d_biases.append(dz.sum(axis=0))
        d_weight, d_bias = np.stack(d_weights), np.stack(d_biases)
        if reading.reduced.rows:
            d_weight[:], d_bias[:] = _by_rows(d_weight), _by_rows(d_bias)
        if reading.head.order == "temperature before the bias":
            d_bias *= self.problem.options.temperature
        if reading.head.order == "scale before the bias":
            d_bias /= self.problem.options.logit_scale
        if not reading.head.bias or reading.lost:
            d_bias[:] = 0.0
        there = self.problem.bias is not None
        if reading.decay:
            b = np.zeros(1) if self.problem.bias is None else self.problem.bias
            d_weight, d_bias = d_weight + reading.decay * self.w, d_bias + reading.decay * b
        if reading.clip != 1.0:
            top = reading.clip * np.abs(d_weight).max()
            d_weight, d_bias = (np.clip(x, -top, top) for x in (d_weight, d_bias))
        s = reading.scale
        shown = self._values(reading, factors, units)
        return Numbers(s * shown, s * d_weight, s * d_bias if there else None)

    def d_hidden(self, reading: Hypothesis) -> Array:
        """[R, M, B, L, H], each token's in its own rank."""
        factors = {
            name: self.of_hidden(x, reading)[None] for name, x in self.factors(reading).items()
        }
        dz = reading.head.round(_combined(factors, self.units_of(reading.head), 0), "gradient")
        w = reading.head.round(self.w, "operands")
        gradient: Array = reading.scale * (dz @ w).reshape(self.problem.hidden.shape)
        return gradient

    def of_hidden(self, factor: Array, reading: Hypothesis) -> Array:
        """[N] of [R, N]: what a token has in its own rank's backward."""
        total: Array = factor.sum(axis=0)
        return total if reading.reduced.own else np.divide(total, self.problem.ranks)

    def _summed(self, dz: Array, x: Array, head: Head) -> Array:
        if "added" not in head.rounded:
            total: Array = dz.T @ x
            return total
        of = np.indices(self.problem.ids.shape)[1].reshape(-1)
        total = np.zeros((dz.shape[1], x.shape[1]))
        for m in range(self.problem.micro_batches):
            total = head.round(total + head.round(dz[of == m].T @ x[of == m], "added"), "added")
        return total

    def _values(
        self, reading: Hypothesis, factors: dict[str, Array], units: dict[str, Unit]
    ) -> Array:
        if not self.each:
            every = [(x * units[name].value).sum(axis=1) for name, x in factors.items()]
            return np.asarray(sum(every))
        labels = self.labels_of(reading).reshape(-1)
        tokens = np.arange(labels.size)
        logprobs = self._softmax(reading.head)[3][tokens, np.maximum(labels, 0)]
        values = np.stack([logprobs, units[ENTROPY].value])
        return np.where(labels == IGNORE, 0.0, values)[None]

    # --- which token counts how much ------------------------------------------------------------

    def labels_of(self, reading: Hypothesis) -> Array:
        labels = reading.labels.labels
        return self.problem.targets if labels is None else labels

    def factors(self, reading: Hypothesis) -> dict[str, Array]:
        """[R, N] of each term that has one."""
        weights, problem = self.weights(reading), self.problem
        labels = self.labels_of(reading).reshape(-1)
        if problem.teacher is not None:
            return {DIVERGENCE: weights}
        by_term, terms, up = {}, reading.terms, reading.upstream
        of_label = terms.label * weights
        if up.same:
            g = problem.d_logprobs.reshape(-1).astype(np.float64)
            of_label = of_label * ((g[0] if up.same == "first" else g.mean()) / g)
        for name, here in self.masks_of(reading):
            by_term[name] = np.where(here, of_label, 0.0)
        if self.each and problem.options.entropy:
            h = problem.d_entropy.reshape(-1).astype(np.float64)
            one = {"": h, "first": h[0], "mean": h.mean()}[up.same]
            by_term[ENTROPY] = up.entropy * weights * (one / h)
        for name, factor in ((UNIFORM, terms.uniform), (Z_LOSS, terms.z_loss)):
            if name in self.declared:
                by_term[name] = factor * weights
                if name in terms.everywhere:
                    there = terms.padding | problem.attention.reshape(-1)
                    by_term[name] = np.where(
                        there, terms.share * weights.max(axis=1, keepdims=True), 0.0
                    )
        if SOFTMAX in terms.everywhere:
            there = (terms.padding | problem.attention.reshape(-1)) & (labels == IGNORE)
            by_term[SOFTMAX] = np.where(there, weights.max(axis=1, keepdims=True), 0.0)
        return by_term

    def masks_of(self, reading: Hypothesis) -> list[tuple[str, Array]]:
        """Of each place that a label may be taken from, [N]: the tokens whose label is."""
        array_id = id(reading.labels.labels)
        if array_id not in self.label_masks:
            masks, labels = [], self.labels_of(reading).reshape(-1)
            left = labels != IGNORE
            for name, classes in self.classes.items():
                here = left & (classes == labels)
                left = left & ~here
                if here.any() or name == self.declared[0]:
                    masks.append((name, here))
            self.label_masks[array_id] = reading.labels, masks
        return self.label_masks[array_id][1]

    def weights(self, reading: Hypothesis) -> Array:
        """[R, N]: the factor of every token in what each rank has."""
        of, divisor = reading.labels, reading.divisor
        if divisor == "clipped" or isinstance(divisor, tuple):  # of a head, or of any numbers
            return self._weights(reading)
        shared = id(of.labels), id(of.keep), of.counted, divisor, reading.reduced
        if shared not in self.token_weights:
            weights = self._weights(reading)
            weights.flags.writeable = False
            self.token_weights[shared] = of, weights
        return self.token_weights[shared][1]

    def _weights(self, reading: Hypothesis) -> Array:
        problem, how = self.problem, reading.reduced
        valid = self.labels_of(reading) != IGNORE
        if self.each:
            return np.asarray(valid.reshape(1, -1), np.float64)
        keep = reading.labels.keep
        part = valid if keep is None else valid & keep
        counted = valid if reading.labels.counted else part
        ranks = range(problem.ranks)
        if not how.own:
            factor = self._divided(counted, reading.divisor, reading)
            weights_of_all = (part * factor).reshape(-1)
            return np.broadcast_to(weights_of_all, (len(ranks), valid.size))
        weights = []
        for rank in ranks:
            of = rank if how.root is None else how.root
            among = np.zeros(valid.shape, np.bool_)
            among[of] = True
            own = counted & (among | (how.own != "mean"))
            factor = self._divided(own, reading.divisor, reading)
            factor = factor * (problem.ranks if how.own == "times" else 1)
            if how.first:
                among[:, 0] = True
                everywhere = self._divided(counted, reading.divisor, reading)
                factor = np.concatenate([everywhere[:, :1], factor[:, 1:]], axis=1)
            weights.append((part * among * factor).reshape(-1))
        return np.stack(weights)

    def _divided(self, valid: Array, divisor: Any, reading: Hypothesis) -> Array:
        """[R, M, B, L]: the factor of a token in the mean, or in the mean of means, times the right
        number of tokens."""
        if isinstance(divisor, tuple):  # a factor for each micro-batch
            return np.broadcast_to(np.array(divisor)[None, :, None, None], valid.shape)
        if divisor == "attended":
            axes = (0, 2, 3)
            kept = self.problem.attention.sum(axis=axes, keepdims=True)
            number = np.maximum(valid.sum(axis=axes, keepdims=True), 1)
            return np.broadcast_to(self.count * kept / kept.sum() / number, valid.shape)
        if divisor == "clipped":
            norms = np.linalg.norm(self.sums(reading.head, valid.reshape(-1)), axis=1)
            return np.broadcast_to(
                (norms.min() / np.maximum(norms, 1e-30))[None, :, None, None], valid.shape
            )
        group = self.group(divisor)
        count = np.bincount(group.reshape(-1), valid.reshape(-1))
        factor: Array = self.count / (max((count > 0).sum(), 1) * np.maximum(count, 1))[group]
        return factor

    def group(self, divisor: Any) -> Array:
        """[R, M, B, L]: the number of the mean that a token is in."""
        if divisor not in self.groups:
            self.groups[divisor] = self._group(divisor)
        return self.groups[divisor]

    def _group(self, divisor: Any) -> Array:
        shape = self.problem.targets.shape
        place = np.indices(shape)
        r, m, b, _ = place
        _, micro_batches, rows, length = shape
        if isinstance(divisor, int):  # chunks of so many tokens, of each micro-batch
            chunk = (b * length + place[3]) // divisor
            return np.asarray((r * micro_batches + m) * (rows * length) + chunk)
        groups = {
            "tokens": 0 * r,
            "micro-batches": m,
            "ranks": r,
            "both": r * micro_batches + m,
            "rows": (r * micro_batches + m) * rows + b,
            "documents": ((r * micro_batches + m) * rows + b) * (1 + self.problem.segments.max())
            + self.problem.segments,
        }
        return np.asarray(groups[divisor])

    def sums(self, head: Head, factor: Array) -> Array:
        """[M, ...]: of each micro-batch the gradient of weight and bias, laid flat."""
        dz = factor[:, None] * sum(self.units_of(head)[name].dz for name in self.declared)
        of, x = np.indices(self.problem.ids.shape)[1].reshape(-1), self.x
        if self.problem.bias is not None:
            x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        each = [dz[of == m].T @ x[of == m] for m in range(self.problem.micro_batches)]
        return np.concatenate([x.reshape(1, -1) for x in each])

    # --- the terms, per token -------------------------------------------------------------------

    def _softmax(self, head: Head) -> tuple[Array, Array, Array, Array]:
        """Logits as the softmax has them, their derivative by the product of hidden states and
        head, the log-sum-exps, and log-probabilities."""
        x, w = head.round(self.x, "operands"), head.round(self.w, "operands")
        options = {**self.problem.options.of_logits, **dict(head.changes)}
        scale, cap, t = (options[name] for name in ("logit_scale", "softcap", "temperature"))
        z, b, early = x @ w.T, np.zeros(1), 1.0
        if self.problem.bias is not None and head.bias:
            b = self.problem.bias.astype(np.float64)
        slope = np.full_like(z, scale / t)
        if head.order == "temperature before the bias":
            z, t = z / t, 1.0
        if head.order == "temperature before the softcap":
            early, t = t, 1.0
        if head.order == "scale before the bias":
            z, scale = z * scale, 1.0
        if head.order == "softcap before the scale":
            t, scale = t / scale, 1.0
        u = head.round(z + b, "logits") * scale / early
        if cap:
            capped = np.tanh(u / cap)
            by_logits = head.order == "softcap of the logits"
            if not head.constant:
                own = u / cap * (1.0 - capped**2) + capped
                slope = slope * (own if by_logits else 1.0 - capped**2)
            u = (u if by_logits else cap) * capped
        u = u / t
        top = u.max(axis=1, keepdims=True)
        lse = top + np.log(np.exp(u - top).sum(axis=1, keepdims=True))
        return u, slope, lse[:, 0], u - lse

    def units_of(self, head: Head) -> dict[str, Unit]:
        if head not in self.units:
            self.units[head] = self._units(head)
        return self.units[head]

    def _units(self, head: Head) -> dict[str, Unit]:
        problem, options = self.problem, self.problem.options
        if problem.teacher is not None:
            return {DIVERGENCE: Unit(*self._divergences(head))}
        u, slope, lse, log_p = self._softmax(head)
        p, (tokens, vocab) = np.exp(log_p), u.shape
        eps = options.label_smoothing
        g, h = np.full(tokens, (1.0 - eps) / self.count), np.zeros(tokens)
        if self.each:
            g, h = (
                -y.reshape(-1).astype(np.float64) for y in (problem.d_logprobs, problem.d_entropy)
            )
        units = {}
        for name, classes in self.classes.items():
            there = classes >= 0
            at = np.arange(tokens)[there], classes[there]
            dz = np.where(there[:, None], p, 0.0)
            dz[at] -= 1.0
            nll = np.where(there, -log_p[np.arange(tokens), np.maximum(classes, 0)], 0.0)
            units[name] = Unit(g[:, None] * slope * dz, g * nll)
        coefficient = (eps or 1.0) / self.count
        uniform = Unit(slope * (p - 1.0 / vocab), lse - u.mean(axis=1))
        units[UNIFORM] = Unit(*(coefficient * y for y in uniform))
        coefficient = (options.z_loss or 1.0) / self.count
        z_loss = Unit(slope * 2.0 * lse[:, None] * p, lse**2)
        units[Z_LOSS] = Unit(*(coefficient * y for y in z_loss))
        units[SOFTMAX] = Unit(slope * p / self.count, lse / self.count)
        entropy = -(p * log_p).sum(axis=1)
        units[ENTROPY] = Unit(h[:, None] * slope * p * (log_p + entropy[:, None]), entropy)
        return units

    def _divergences(self, head: Head) -> tuple[Array, Array]:
        """d logits [N, V] and losses [N]."""
        options = {**self.problem.options.of_logits, **self.problem.options.of_divergence}
        options |= dict(head.changes)
        own = options.pop("teacher_temperature", options["temperature"])
        options["teacher"] = {"temperature": own}
        teacher = np.roll(np.asarray(self.problem.teacher, np.float64), head.late, axis=3)
        x, w = head.round(self.x, "operands"), head.round(self.w, "operands")
        z = x @ w.T
        if self.problem.bias is not None and head.bias:
            z = z + self.problem.bias.astype(np.float64)
        z, teacher = head.round(z, "logits"), teacher.reshape(z.shape)
        blocks = []
        # Of logits: hidden = 1, weight = z^T. In blocks, whose products are too small for threads
        # that other processes would hold up.
        for part in np.array_split(np.arange(len(z)), -(-len(z) // 64)):
            eye = np.eye(len(part))
            one = divergence_reference(
                eye, z[part].T, eye, teacher[part].T, reduction="none", **options
            )
            blocks.append((one.d_weight.T / self.count, one.loss / self.count))
        dz, values = zip(*blocks, strict=True)
        return np.concatenate(dz), np.concatenate(values)


def _classes(problem: Problem) -> dict[str, Array]:
    """[N] of each place of a label: its class, or -1 where there is none."""
    source, first = (problem.targets, 1) if problem.kind == "logprobs" else (problem.ids, 0)
    sources = {name: np.roll(source, first - by, axis=-1) for name, by in SHIFTS.items()}
    row = np.full_like(source, -1)
    row[..., :-1, -1] = source[..., 1:, 0]
    row[:, :-1, -1, -1] = source[:, 1:, 0, 0]
    sources |= {"row": row, "class 0": np.zeros_like(source)}
    return {name: x.reshape(-1) for name, x in sources.items()}


def _combined(factors: dict[str, Array], units: dict[str, Unit], rank: int) -> Array:
    """d logits [N, V] of the sum of all terms."""
    each = [x[rank][:, None] * units[name].dz for name, x in factors.items()]
    return np.asarray(sum(each))


def _by_rows(x: Array) -> Array:
    """Of [R, V, ...] rank s's slice of the rows from rank s, sliced as `torch.chunk` does."""
    each = -(-x.shape[1] // x.shape[0])
    return np.concatenate([x[s, s * each : (s + 1) * each] for s in range(len(x))])
