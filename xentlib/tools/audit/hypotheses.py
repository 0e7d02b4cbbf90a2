"""What a step would return under a reading of its task: the right one, or that of a defect.

A reading is one choice for each of six questions: which label belongs to which token, what the sum
is divided by, over whom it is taken, which logits the head gives, which gradients come from above,
and what number is left over. The right choice of each is its default. The numbers are the float64
oracle's: per token once for each pair of labels and head, and weighted sums of that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from xentlib.reference import divergence_reference, logprobs_reference, nll_reference
from xentlib.tools.audit.problem import IGNORE, Array, Problem
from xentlib.ulp import round_to

BLOCK = 64


class Labelled(NamedTuple):
    """[R, M, B, L] labels, which of them take part, and whether the others are counted still."""

    labels: Array | None = None
    keep: Array | None = None
    counted: bool = False

    @property
    def key(self) -> bytes:
        """Of the labels alone, which is what the oracle is asked about."""
        return b"" if self.labels is None else self.labels.tobytes()


class Reduced(NamedTuple):
    """Over whom a gradient is summed. `own`: "" over all ranks; of this rank's tokens alone, "part"
    of the right sum, "times" the number of ranks, or the "mean" of its own. `rows`: each rank's
    slice of the head's rows is its own. `root`: every rank has what this one has."""

    own: str = ""
    rows: bool = False
    root: int | None = None


class Head(NamedTuple):
    """Options other than the problem's; by how many positions a teacher's logits are late; and what
    is rounded to `dtype`, of the "operands" of the product, the "logits", their "gradient" and the
    "result"."""

    changes: tuple[tuple[str, Any], ...] = ()
    bias: bool = True
    late: int = 0
    dtype: str = ""
    rounded: tuple[str, ...] = ()

    def round(self, x: Array, what: str) -> Array:
        return round_to(x, self.dtype) if self.dtype and what in self.rounded else x


class Upstream(NamedTuple):
    """What multiplies the gradients that arrive: `entropy` those of entropies; `first` gives every
    token the first one's."""

    entropy: float = 1.0
    first: bool = False


class Hypothesis(NamedTuple):
    labels: Labelled = Labelled()
    divisor: str = "tokens"
    reduced: Reduced = Reduced()
    head: Head = Head()
    upstream: Upstream = Upstream()
    scale: float = 1.0


class Numbers(NamedTuple):
    """What a step returns, or would: one entry a rank. None: not there, not looked at."""

    loss: Array | None  # [R]; of `logprobs` the values, [R, outputs, N]
    d_weight: Array  # [R, V, H]
    d_bias: Array | None  # [R, V]
    d_hidden: Array | None = None  # [R, M, B, L, H]


class Oracle:
    """The numbers of any reading of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.each = problem.kind == "logprobs"  # values of every token, and no sum of them
        self.x = problem.hidden.reshape(-1, problem.hidden.shape[-1]).astype(np.float64)
        self.w = problem.weight.astype(np.float64)
        self.units: dict[Any, tuple[Array, Array, Array, Array]] = {}

    def labels_of(self, reading: Hypothesis) -> Array:
        labels = reading.labels.labels
        return self.problem.targets if labels is None else labels

    def numbers(self, reading: Hypothesis) -> Numbers:
        """The step's numbers under a reading, without d hidden."""
        values, dz, x, _ = self._per_token(reading)
        shown, d_weights, d_biases = [], [], []
        for weights in self._weights(reading):
            shown.append(values if self.each else (weights * values).sum())
            weighted = reading.head.round(weights[:, None] * dz, "gradient")
            d_weights.append(reading.head.round(weighted.T @ x, "result"))
            d_biases.append(weighted.sum(axis=0))
        d_weight, d_bias = np.stack(d_weights), np.stack(d_biases)
        if reading.reduced.rows:
            d_weight[:], d_bias[:] = _by_rows(d_weight), _by_rows(d_bias)
        if not reading.head.bias:
            d_bias[:] = 0.0
        s = reading.scale
        there = self.problem.bias is not None
        return Numbers(s * np.stack(shown), s * d_weight, s * d_bias if there else None)

    def d_hidden(self, reading: Hypothesis) -> Array:
        """[R, M, B, L, H], each token's in its own rank."""
        _, unit, _, w = self._per_token(reading)
        dz = self._weights(reading).sum(axis=0)[:, None] * unit
        if not reading.reduced.own:
            dz = dz / self.problem.ranks
        dz = reading.head.round(dz, "gradient")
        gradient: Array = reading.scale * (dz @ w).reshape(self.problem.hidden.shape)
        return gradient

    # --- which token counts how much ------------------------------------------------------------

    def _weights(self, reading: Hypothesis) -> Array:
        """[R, N]: the factor of every token in what each rank has."""
        problem, how = self.problem, reading.reduced
        if self.each:
            return np.ones((1, problem.targets.size))
        valid = self.labels_of(reading) != IGNORE
        keep = reading.labels.keep
        part = valid if keep is None else valid & keep
        counted = valid if reading.labels.counted else part
        if not how.own:
            weights = part * _divided(counted, reading.divisor)
            return np.broadcast_to(weights.reshape(-1), (problem.ranks, weights.size))
        weights = []
        for rank in range(problem.ranks):
            of = rank if how.root is None else how.root
            of_rank = np.zeros(valid.shape, np.bool_)
            of_rank[of] = True
            if how.own == "mean":
                factor = np.zeros(valid.shape)
                factor[of] = _divided(counted[of : of + 1], reading.divisor)[0]
            else:
                factor = _divided(counted, reading.divisor)
                factor = factor * (problem.ranks if how.own == "times" else 1)
            weights.append((part * of_rank * factor).reshape(-1))
        return np.stack(weights)

    # --- the oracle, per token ------------------------------------------------------------------

    def _logits(self, head: Head) -> tuple[Array, Array, Array]:
        """x W^T + b with its operands, rounded where the reading says so."""
        x = head.round(self.x, "operands")
        w = head.round(self.w, "operands")
        z = x @ w.T
        if self.problem.bias is not None and head.bias:
            z = z + self.problem.bias.astype(np.float64)
        return head.round(z, "logits"), x, w

    def _per_token(self, reading: Hypothesis) -> tuple[Array, Array, Array, Array]:
        """Losses [N] of every token and d logits [N, V] for a factor of 1; or log-probabilities and
        entropies [2, N] and d logits for the gradients that arrive. And the operands."""
        distilled = self.problem.teacher is not None  # labels say alone which tokens count
        key = (b"" if distilled else reading.labels.key, reading.head, reading.upstream)
        if key not in self.units:
            z, x, w = self._logits(reading.head)
            labels = self.labels_of(reading).reshape(-1)
            options = {**self.problem.options.of_logits, **dict(reading.head.changes)}
            if self.each:
                g, h = self.problem.d_logprobs.reshape(-1), self.problem.d_entropy.reshape(-1)
                if reading.upstream.first:
                    g, h = np.full_like(g, g[0]), np.full_like(h, h[0])
                h = h * reading.upstream.entropy
                options |= {"d_logprobs": g[:, None], "d_entropy": h[:, None]}
                names = ("logprobs", "entropy")
                *outputs, dz = _by_blocks(logprobs_reference, z, names, labels, **options)
                values = np.stack(outputs)
            elif distilled:
                values, dz = self._divergences(z, reading.head)
            else:
                options = {**self.problem.options.of_loss, **options}
                sums = {"reduction": "sum", "ignore_index": IGNORE, **options}
                names = ("logprobs", "lse")
                logprobs, lse, dz = _by_blocks(nll_reference, z, names, labels, **sums)
                eps = options["label_smoothing"]
                nll = eps * (lse - _squashed(z, options).mean(axis=1)) - (1 - eps) * logprobs
                nll = nll + options["z_loss"] * lse**2
                values = np.where(labels != IGNORE, nll, 0.0)
            self.units[key] = (values, dz, x, w)
        return self.units[key]

    def _divergences(self, z: Array, head: Head) -> tuple[Array, Array]:
        """[N] of the student's logits from the teacher's, and their d logits [N, V]."""
        options = {**self.problem.options.of_logits, **self.problem.options.of_divergence}
        options |= dict(head.changes)
        own = options.pop("teacher_temperature", options["temperature"])
        teacher = np.roll(np.asarray(self.problem.teacher, np.float64), head.late, axis=3)

        def of_logits(eye: Array, weight: Array, other: Array, **options: Any) -> Any:
            return divergence_reference(eye, weight, eye, other.T, reduction="none", **options)

        options["teacher"] = {"temperature": own}
        values, dz = _by_blocks(of_logits, z, ("loss",), teacher.reshape(z.shape), **options)
        return values, dz


def _by_blocks(
    reference: Any, z: Array, names: tuple[str, ...], labels: Array, **options: Any
) -> list[Array]:
    """Outputs of the oracle for given logits, and their gradient: hidden = 1 and weight = z^T, with
    labels or a teacher's logits for each. In blocks, whose products are too small for threads that
    other processes would hold up."""
    blocks = []
    for i in range(0, len(z), BLOCK):
        part = slice(i, i + BLOCK)
        own = {k: x[part, 0] if np.ndim(x) == 2 else x for k, x in options.items()}
        one = reference(np.eye(len(z[part])), z[part].T, labels[part], **own)
        blocks.append([*(getattr(one, name) for name in names), one.d_weight.T])
    return [np.concatenate(column) for column in zip(*blocks)]


def _divided(valid: Array, divisor: str) -> Array:
    """[R, M, B, L]: the factor of a token in the mean, or in the mean of means."""
    ranks, micro_batches = valid.shape[:2]
    groups = {
        "tokens": ((0, 1, 2, 3), 1),
        "micro-batches": ((0, 2, 3), micro_batches),
        "ranks": ((1, 2, 3), ranks),
        "both": ((2, 3), ranks * micro_batches),
        "rows": ((3,), valid.any(axis=3).sum()),
    }
    axes, number = groups[divisor]
    count = np.maximum(valid.sum(axis=axes, keepdims=True), 1)
    factor: Array = 1.0 / (max(int(number), 1) * count)
    return np.broadcast_to(factor, valid.shape)


def _by_rows(x: Array) -> Array:
    """Of [R, V, ...] rank s's slice of the rows from rank s, sliced as `torch.chunk` does."""
    each = -(-x.shape[1] // x.shape[0])
    return np.concatenate([x[s, s * each : (s + 1) * each] for s in range(len(x))])


def _squashed(z: Array, options: dict[str, Any]) -> Array:
    """Logits as the softmax sees them."""
    u = options["logit_scale"] * z
    cap = options["softcap"]
    logits: Array = (cap * np.tanh(u / cap) if cap else u) / options["temperature"]
    return logits
