"""The problem that is put to a step: tokens, documents, masks, hidden states and a head, as NumPy.

Shapes: R ranks, M micro-batches of each, B rows, L tokens a row, H hidden width, V vocabulary.
Arrays of tokens are [R, M, B, L]. Every count that a mean could wrongly be made of differs: the
micro-batches', the ranks', the rows', those before the shift and those without the mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from xentlib.checks.audit import check_distillation
from xentlib.checks.validators import check_choice, check_flag, check_number

Array = npt.NDArray[Any]

KINDS = ("step", "loss", "logprobs")
IGNORE = -100
# V * H is more than the tokens of four ranks, so that no two weightings of tokens give one
# gradient of the head. Neither V nor H is a multiple of a count of tokens or positions, or divides
# one, so that no sum that is divided by the one looks like one divided by the other.
MICRO_BATCHES, ROWS, LENGTH, HIDDEN, VOCAB = 3, 2, 13, 34, 47
FLAT = 53  # tokens of the functions, which have one row
STD = 2.0  # of the logits: a softcap of 30 moves them by 0.4 %, and no token is certain

# What breaks real runs, and no plain numbers: of a second part, in which factors are not read.
EMPTY_RANK, LARGE, PADDED = "an empty rank", "logits beyond 100", "inf and NaN at padding"
THERE = (
    "an empty micro-batch",
    EMPTY_RANK,
    "a row without a token that counts",
    "tokens with ids 0, 1 and 2",
    LARGE,
    PADDED,
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the step says that it applies; the definitions are those of `chunked_nll`, and of
    `chunked_divergence` with a divergence.

    Attributes:
        bias: whether the head has one.
        temperature: of the logits, with a divergence those of the teacher too.
        documents: whether a row holds several, of which none predicts the next one's first token.
        entropy: of log-probabilities, whether the step returns entropies too; a call tells.
        divergence: "forward_kl", "reverse_kl" or "jsd" of a step that distils; its micro-batches
            have "teacher_logits".
        beta: of "jsd", the teacher's share of the mixture.
        temperature_squared: whether the divergence is multiplied by the temperature squared.
    """

    bias: bool = False
    softcap: float | None = None
    logit_scale: float = 1.0
    temperature: float = 1.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    documents: bool = True
    entropy: bool = True
    divergence: str | None = None
    beta: float | None = None
    temperature_squared: bool = False

    @classmethod
    def of(cls, options: dict[str, Any]) -> Options:
        """Of the keywords of `audit`."""
        for name in options:
            check_choice("options", name, [x for x in cls.__dataclass_fields__ if x != "entropy"])
        return cls(**options)

    def check(self, kind: str) -> None:
        check_choice("kind", kind, KINDS)
        for name in ("bias", "documents"):
            check_flag(name, getattr(self, name))
        for name in ("temperature", "logit_scale", "softcap"):
            value = getattr(self, name)
            if name != "softcap" or value is not None:
                ok = isinstance(value, (int, float)) and 0 < value < np.inf
                check_number(name, value, "a positive number", ok=ok)
        check_distillation(self, kind)
        for name, value in self.of_loss.items():
            ok = isinstance(value, (int, float)) and 0 <= value < 1
            check_number(name, value, "a number from 0 to below 1", ok=ok)
            if kind == "logprobs" and value:
                raise ValueError(
                    f"`{name}` must be 0 with kind='logprobs', which has no loss; got {value!r}. "
                    f"Leave it out."
                )

    @property
    def of_logits(self) -> dict[str, Any]:
        """What is between the product of hidden states and head and the softmax."""
        return {name: getattr(self, name) for name in ("softcap", "logit_scale", "temperature")}

    @property
    def of_loss(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}

    @property
    def of_divergence(self) -> dict[str, Any]:
        beta = {} if self.beta is None else {"beta": self.beta}
        return {"kind": self.divergence, "temperature_squared": self.temperature_squared, **beta}


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What all ranks hold together.

    Attributes:
        ids: tokens; 0 where `attention` is False.
        labels: `ids` with `IGNORE` where the token is no target, not shifted.
        targets: the label of each position, after the shift: next token of the same document.
        segments: number of each token's document.
        attention: False on padding.
        hidden: [R, M, B, L, H] float32.
        weight: [V, H] float32.
        bias: [V] float32 or None.
        upstream: gradient of what follows with respect to a loss function's result.
        d_logprobs: [R, M, B, L] the same of each log-probability.
        d_entropy: [R, M, B, L] the same of each entropy.
        teacher: [R, M, B, L, V] float32 logits of a teacher, or None without a divergence.
    """

    kind: str
    options: Options
    ids: Array
    labels: Array
    targets: Array
    segments: Array
    attention: Array
    hidden: Array
    weight: Array
    bias: Array | None
    upstream: float
    d_logprobs: Array
    d_entropy: Array
    teacher: Array | None = None

    @property
    def ranks(self) -> int:
        return int(self.ids.shape[0])

    @property
    def micro_batches(self) -> int:
        return int(self.ids.shape[1])

    @property
    def count(self) -> int:
        """Valid tokens of all ranks and micro-batches."""
        return int((self.targets != IGNORE).sum())

    @property
    def text(self) -> str:
        ranks = "one rank" if self.ranks == 1 else f"{self.ranks} ranks"
        _, m, b, n = self.ids.shape
        batches = "one batch" if m == 1 else f"{m} micro-batches"
        rows = f"{n} tokens" if b == 1 else f"{b} x {n} tokens"
        return f"{ranks}, {batches} of {rows}, {self.count} tokens that count"

    def micro_batch(self, rank: int | slice, m: int) -> dict[str, Array]:
        """What a step is given: [B, L] arrays, of several ranks one after the other."""

        def rows(x: Array) -> Array:
            cut = x[rank, m]
            return cut if isinstance(rank, int) else cut.reshape(-1, *cut.shape[2:])

        places = np.arange(self.ids.shape[-1]) - _starts(self.segments)
        cut = {
            "hidden": self.hidden,
            "input_ids": self.ids,
            "labels": self.labels,
            "targets": self.targets,
            "loss_mask": self.targets != IGNORE,
            "attention_mask": self.attention,
            "segment_ids": self.segments,
            "position_ids": places,
        }
        if self.teacher is not None:
            cut["teacher_logits"] = self.teacher
        return {name: rows(x) for name, x in cut.items()}


def next_labels(labels: Array, segments: Array | None, by: int = 1) -> Array:
    """`labels` of `by` positions later, of the same document where `segments` are given."""
    shifted = np.full_like(labels, IGNORE)
    shifted[..., :-by] = labels[..., by:]
    if segments is not None:
        same = segments[..., :-by] == segments[..., by:]
        shifted[..., :-by] = np.where(same, shifted[..., :-by], IGNORE)
    return shifted


def build(
    kind: str, options: Options, ranks: int = 1, seed: int = 0, there: tuple[str, ...] = ()
) -> Problem:
    """The same arrays in every process. A function of hidden states, head and labels gets one row
    on one rank, and for log-probabilities no label that is left out. `there`: of `THERE`, a step's
    alone."""
    options.check(kind)
    rng = np.random.default_rng([seed, 21])
    flat = kind != "step"
    shape = (1, 1, 1, FLAT) if flat else (ranks, MICRO_BATCHES, ROWS, LENGTH)
    ids = rng.integers(3, VOCAB, shape)
    segments, attention = np.zeros(shape, np.int64), np.ones(shape, np.bool_)
    masked = np.zeros(shape, np.bool_)
    # From one micro-batch to the next nothing or most of it is left out, and padding is in some
    # rows alone; every second rank has the fewer tokens.
    shares = np.array([[0.0, 0.7, 0.35], [0.65, 0.8, 0.5]])
    for k, (r, m, b) in enumerate(np.ndindex(*shape[:3])):
        row = ids[r, m, b]
        length = row.size
        if options.documents:
            cut = 4 + (5 * k) % (length - 6)
            segments[r, m, b] = (np.arange(length) >= cut) + (np.arange(length) >= cut + 3)
        # The first token is nobody's target, the last two are somebody's; of the others so many,
        # whatever the draw.
        share = shares[r % 2, (m + r // 2) % 3]
        out = 1 + rng.permutation(length - 3)[: round(share * (length - 3))]
        masked[r, m, b, out] = True
        # Not in a last row, whose end is what the last chunk has.
        padding = (3, 0, 0, 0, 2, 0)[k % 6] if kind == "step" else 0
        if padding:
            attention[r, m, b, -padding:] = False
            segments[r, m, b, -padding:] = segments[r, m, b].max() + 1
            row[-padding:] = 0
    if flat:
        masked = rng.random(shape) < 0.35
    _break_tokens(there, ids, masked, attention)
    labels = np.where(masked | ~attention, IGNORE, ids)
    hidden = rng.standard_normal((*shape, HIDDEN)).astype(np.float32)
    if LARGE in there:
        hidden[:, -1, 0] *= np.float32(25.0)
    if PADDED in there:
        hidden[~attention] = np.resize(np.array([np.inf, np.nan], np.float32), HIDDEN)
    weight = rng.standard_normal((VOCAB, HIDDEN)) * (STD / np.sqrt(HIDDEN))
    targets = next_labels(labels, segments)
    if kind == "logprobs":
        targets = rng.integers(3, VOCAB, shape)
    bias = (rng.standard_normal(VOCAB) * STD / 2).astype(np.float32) if options.bias else None
    upstream = float(np.float32(1.7))
    # None near 0: what is 4,000 times too large at one token left no digits to read the others by.
    drawn = rng.standard_normal((2, *shape))
    d_logprobs, d_entropy = (drawn + np.copysign(0.25, drawn)).astype(np.float32)
    d_entropy *= options.entropy
    tokens = ids, labels, targets, segments, attention
    gradients = upstream, d_logprobs, d_entropy
    teacher = None
    if options.divergence is not None:
        teacher = (rng.standard_normal((*shape, VOCAB)) * STD).astype(np.float32)
    weight = weight.astype(np.float32)
    return Problem(kind, options, *tokens, hidden, weight, bias, *gradients, teacher)


def _break_tokens(there: tuple[str, ...], ids: Array, masked: Array, attention: Array) -> None:
    if THERE[0] in there:
        masked[:, 1] = True
    if EMPTY_RANK in there:
        masked[-1] = True
    if THERE[2] in there:
        masked[:, 0, 0] = True
    if THERE[3] in there:
        for k in range(3):
            ids[..., 2 + k :: 4] = np.where(attention, k, ids)[..., 2 + k :: 4]


def _starts(segments: Array) -> Array:
    """The position at which each token's document begins."""
    begins = np.ones(segments.shape, np.bool_)
    begins[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return np.maximum.accumulate(np.where(begins, np.arange(segments.shape[-1]), 0), axis=-1)
